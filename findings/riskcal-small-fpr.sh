#!/usr/bin/env bash
# riskcal 1.5.1: at small false positive rates the bound on a test's true positive rate is below what guessing reaches.
#
# Guess: 1 - get_beta(alpha=a) of the accountant bounds the true positive rate of every test with false positive rate a;
# it is never below a, which a coin reaches.
# Seen: of one step with noise multiplier 1, in full batches, it is 0.0924 at 0.01, as the exact formula says, and 1.4 %
# too low at 1e-6. At 1e-8 it is 1.2e-11, where a test reaches 2.0e-6, and a coin 1e-8. Nothing warns.
. "$(dirname "$0")/packages.bash"
packages riskcal==1.5.1 numpy==2.4.6 scipy==1.17.1
python -W ignore - <<'END'
import numpy as np
from riskcal.accountants.ctd import CTDAccountant
from scipy.stats import norm

accountant = CTDAccountant()
accountant.history = [(1.0, 1.0, 1)]
rates = np.array([1e-2, 1e-4, 1e-6, 1e-8])
bounds = 1 - accountant.get_beta(alpha=rates)
exact = norm.sf(norm.isf(rates) - 1)
for rate, bound, true in zip(rates, bounds, exact, strict=True):
    print(f"false positive rate {rate:g}: bound {bound:.3g}, a test reaches {true:.3g}")
assert abs(bounds[0] / exact[0] - 1) < 1e-4
assert 0.98 < bounds[2] / exact[2] < 0.99
assert bounds[3] < rates[3] / 100
END
