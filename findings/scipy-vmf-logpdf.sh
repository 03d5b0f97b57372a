#!/usr/bin/env bash
# scipy 1.17.1, numpy 2.4.6: vonmises_fisher.logpdf is infinite from 759 dimensions on at kappa = 50.
#
# Guess: a logarithm of a density is finite there; it is computed with logarithms.
# Seen: at the mean direction 1483.1 in 758 dimensions, inf in 759 and above: the Bessel function underflows before its
# logarithm is taken. mpmath says 1485.5 in 759 dimensions.
. "$(dirname "$0")/packages.bash"
packages scipy==1.17.1 numpy==2.4.6 mpmath==1.4.1
python - <<'END'
import warnings

import mpmath
import numpy as np
from scipy.stats import vonmises_fisher

warnings.simplefilter("ignore")  # of dividing by zero
mpmath.mp.dps = 50


def exact(dimensions, kappa):
    order = mpmath.mpf(dimensions) / 2 - 1
    bessel = mpmath.log(mpmath.besseli(order, kappa))
    return float(order * mpmath.log(kappa) - (order + 1) * mpmath.log(2 * mpmath.pi) - bessel + kappa)


for dimensions, fails in ((3, False), (758, False), (759, True), (2000, True)):
    mean = np.eye(dimensions)[0]
    printed = vonmises_fisher(mean, 50.0).logpdf(mean)
    right = exact(dimensions, 50)
    print(f"{dimensions} dimensions: logpdf {printed:.6g}, mpmath {right:.6g}")
    assert np.isinf(printed) if fails else abs(printed - right) < 1e-6
END
