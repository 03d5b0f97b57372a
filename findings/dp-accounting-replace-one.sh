#!/usr/bin/env bash
# dp-accounting 0.6.0: under REPLACE_ONE, GaussianDpEvent(1) means other noise in the PLD accountant than in the RDP one.
#
# Guess: two accountants of one library, asked about one event and one adjacency, agree up to the looseness of RDP.
# Seen: epsilon at delta = 1e-5 is 9.997 by PLD and 4.729 by RDP, the looser method. PLD takes the noise multiplier per
# record, so that replacing one moves the sum by 2; RDP takes it per change. What PLD says of a multiplier of 1 under
# REPLACE_ONE is what it says of 0.5 under ADD_OR_REMOVE_ONE.
. "$(dirname "$0")/packages.bash"
packages dp-accounting==0.6.0
python - <<'END'
from dp_accounting import GaussianDpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

REPLACE, REMOVE = NeighboringRelation.REPLACE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE


def epsilon(accountant, multiplier):
    return accountant.compose(GaussianDpEvent(multiplier)).get_epsilon(1e-5)


pld = epsilon(PLDAccountant(REPLACE), 1.0)
rdp = epsilon(RdpAccountant(neighboring_relation=REPLACE), 1.0)
half = epsilon(PLDAccountant(REMOVE), 0.5)
once = epsilon(PLDAccountant(REMOVE), 1.0)
print(f"replace one, multiplier 1: PLD {pld:.3f}, RDP {rdp:.3f}")
print(f"add or remove one, PLD: multiplier 0.5 {half:.3f}, multiplier 1 {once:.3f}")
assert abs(pld - half) < 1e-9 and round(pld, 3) == 9.997
assert once < rdp < pld and round(rdp, 3) == 4.729
END
