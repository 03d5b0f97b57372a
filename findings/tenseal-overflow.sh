#!/usr/bin/env bash
# tenseal 0.3.18: one large number in an encrypted vector turns all its numbers into noise, without an error.
#
# Guess: CKKS computes with approximate numbers, so a large value costs relative precision, or its own entry overflows.
# Seen: with the tutorial's parameters (moduli of 60, 40, 40 and 60 bits, scale 2^40) weights beside a million are right to
# 1e-6 after two multiplications. Beside ten million, as a count or a running variance may be, they become numbers above
# 100,000, all of them. Before the second multiplication they are right.
. "$(dirname "$0")/packages.bash"
packages tenseal==0.3.18 numpy==2.4.6
python -W ignore - <<'END'
import numpy as np
import tenseal

context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 40, 60])
context.global_scale = 2**40
WEIGHTS = [0.5, -0.25, 0.125]
for large, right in ((1e6, True), (1e7, False)):
    plain = np.array([*WEIGHTS, large])
    for multiplications in range(3):
        encrypted = tenseal.ckks_vector(context, plain)
        for _ in range(multiplications):
            encrypted = encrypted * 0.5
        found = np.array(encrypted.decrypt())[:3] * 2**multiplications
        error = np.abs(found - WEIGHTS).max()
        print(f"beside {large:,.0f}, after {multiplications} multiplications: the weights are off by {error:.1e}")
        assert error > 100_000 if multiplications == 2 and not right else error < 1e-5
END
