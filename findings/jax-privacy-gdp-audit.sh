#!/usr/bin/env bash
# jax-privacy 2.0.0: the audit by Gaussian differential privacy finds a large epsilon where nothing leaks.
#
# Guess: epsilon_from_gdp(significance=0.05, delta) is, like the class's other methods, exceeded by the truth in 95 % of
# audits; of scores that do not depend on membership it says 0 or little.
# Seen: with the scores of 50 canaries in and of 50 out from one normal law, it says 8.9 at delta = 1e-5 in the median of
# 50 audits, and 14.3 of 20 canaries; the true epsilon is 0. epsilon_one_run says at most 0.21. The fewer canaries, the
# more epsilon: where the upper bounds of both error rates add up to more than 1, the absolute value of the normal
# quantiles' difference is taken, so that a wide interval counts as a leak.
. "$(dirname "$0")/packages.bash"
packages jax-privacy==2.0.0 numpy==2.4.6
python -W ignore - <<'END'
import numpy as np
from jax_privacy.auditing import CanaryScoreAuditor

stream = np.random.default_rng(0)


def audits(canaries, method, times=50):
    scores = [stream.normal(size=(2, canaries)) for _ in range(times)]
    return np.array([getattr(CanaryScoreAuditor(*each), method)(0.05, 1e-5) for each in scores])


for canaries in (20, 50, 500):
    found = audits(canaries, "epsilon_from_gdp", 50 if canaries < 500 else 5)
    print(f"{canaries} canaries: {found.min():.2f} to {found.max():.2f}, median {np.median(found):.2f}")
other = audits(50, "epsilon_one_run")
print(f"50 canaries, epsilon_one_run: {other.min():.2f} to {other.max():.2f}")
found = audits(50, "epsilon_from_gdp")
assert np.median(found) > 8 and other.max() < 0.5
END
