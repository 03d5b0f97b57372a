#!/usr/bin/env bash
# numpy 2.4.6: Poisson samples with large means have too large a variance, and from 1e16 on only even numbers come.
#
# Guess: the sampler takes means up to about 9e18, so its law is Poisson up to there.
# Seen: the variance is 1.00 of the mean at 1e12, 1.04 at 1e15 and 1.41 at 1e16, where no odd number is drawn: the
# rejection sampler computes in float64. Nothing warns. Skellam noise is the difference of two such samples.
. "$(dirname "$0")/packages.bash"
packages numpy==2.4.6
python - <<'END'
import numpy as np

SAMPLES = 200_000
generator = np.random.default_rng(0)
ratios = {}
for mean in (1e12, 1e15, 1e16):
    drawn = generator.poisson(mean, SAMPLES)
    ratios[mean] = (drawn - int(mean)).astype(float).var() / mean
    print(f"mean {mean:.0e}: variance {ratios[mean]:.3f} of it, {np.mean(drawn % 2):.0%} odd")
# The ratio's standard error is sqrt(2 / 200,000) = 0.003.
assert abs(ratios[1e12] - 1) < 0.015 and ratios[1e15] > 1.02 and ratios[1e16] > 1.3
assert not np.any(drawn % 2)
END
