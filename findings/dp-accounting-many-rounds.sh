#!/usr/bin/env bash
# dp-accounting 0.6.0: after 10^5 rounds of little loss, the PLD accountant says three times the true epsilon, RDP less.
#
# Guess: privacy loss distributions are the tight accounting, and RDP the loose one.
# Seen: noise multiplier 100, sampling rate 0.001, 10^5 rounds, delta 1e-6: PLD says 0.0298, RDP 0.0109, and PLD on a
# grid of 1e-6 in place of 1e-4 0.0097, which is an upper bound as well. Each round's loss is rounded up to the grid; it
# is smaller than the grid, and the roundings add up. A search for noise by PLD asks for three times as much as it
# needs.
. "$(dirname "$0")/packages.bash"
packages dp-accounting==0.6.0
python -W ignore - <<'END'
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

rounds = PoissonSampledDpEvent(0.001, GaussianDpEvent(100.0)), 100_000
pld = PLDAccountant().compose(*rounds).get_epsilon(1e-6)
fine = PLDAccountant(value_discretization_interval=1e-6).compose(*rounds).get_epsilon(1e-6)
rdp = RdpAccountant().compose(*rounds).get_epsilon(1e-6)
print(f"PLD {pld:.4f}, PLD on a finer grid {fine:.4f}, RDP {rdp:.4f}")
assert abs(pld - 0.0298) < 5e-5 and abs(fine - 0.00967) < 1e-5 and abs(rdp - 0.0109) < 5e-5
END
