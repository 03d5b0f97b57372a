#!/usr/bin/env bash
# opacus 1.6.0: the accountants "rdp" and "prv" return a negative epsilon where delta is large.
#
# Guess: epsilon is never below 0.
# Seen: sigma 1, rate 0.01, 1,000 steps: at delta 0.5 rdp returns -0.527 and prv -0.674. The right answer is 0. Code that
# searches for noise by comparing epsilons, or that multiplies one, goes on with it.
. "$(dirname "$0")/packages.bash"
packages opacus==1.6.0 torch==2.15.0 torchvision==0.29.2
python - <<'END'
from opacus.accountants import create_accountant

for name in ("rdp", "prv"):
    accountant = create_accountant(name)
    for _ in range(1000):
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    epsilon = accountant.get_epsilon(0.5)
    print(f"{name}: epsilon {epsilon:.3f} at delta 0.5")
    assert epsilon < -0.5
END
