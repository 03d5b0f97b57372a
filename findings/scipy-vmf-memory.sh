#!/usr/bin/env bash
# scipy 1.17.1, numpy 2.4.6: one directional sample in d dimensions takes memory of d x d numbers, and cubic time.
#
# Guess: a sample of vonmises_fisher costs as much as d normal numbers.
# Seen: rvs(1) in 1,000 dimensions (8 kB) has a peak of 33 MB, in 500 of 8 MB: each call decomposes a d x d matrix to
# turn the sample to the mean direction, which a reflection does with 2 d numbers. For the gradient of a network with
# 62,006 parameters that matrix has 31 GB.
. "$(dirname "$0")/packages.bash"
packages scipy==1.17.1 numpy==2.4.6
python - <<'END'
import tracemalloc

import numpy as np
from scipy.stats import vonmises_fisher

for dimensions in (500, 1000):
    mean = np.ones(dimensions) / np.sqrt(dimensions)
    law = vonmises_fisher(mean, 100.0, seed=np.random.default_rng(0))
    tracemalloc.start()
    sample = law.rvs(1)[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{dimensions} dimensions: {sample.nbytes / 1e3:.0f} kB, peak {peak / 1e6:.1f} MB")
    assert peak > 4 * 8 * dimensions**2
    # The same turn by a reflection, in a few vectors.
    start = np.eye(dimensions)[0]
    axis = (start - mean) / np.linalg.norm(start - mean)
    turned = start - 2 * axis * (axis @ start)
    assert np.allclose(turned, mean)
END
