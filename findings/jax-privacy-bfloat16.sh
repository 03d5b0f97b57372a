#!/usr/bin/env bash
# jax-privacy 2.0.0, jax 0.10.2: noise on gradients in bfloat16 takes 128 values and ends at 2.9 standard deviations.
#
# Guess: normal noise, rounded to bfloat16: of a million numbers 2,700 are beyond 3.
# Seen: gaussian_privatizer draws noise in the gradients' own type, and jax.random.normal in bfloat16 transforms uniform
# numbers of 7 bits. So 128 values come, none beyond 2.890625, and their mean is -0.012. An example that moves the sum
# by the clipping norm makes sums possible that were impossible without it: no finite epsilon holds, whatever is
# accounted for. With dtype=jnp.float32 the noise is drawn in 32 bits. torch.randn in bfloat16 rounds numbers of
# float32.
. "$(dirname "$0")/packages.bash"
packages jax-privacy==2.0.0 jax==0.10.2
python -W ignore - <<'END'
import jax.numpy as jnp
import numpy as np
from jax_privacy.noise_addition import gaussian_privatizer


def noise(kind, **drawn_in):
    gradients = {"weight": jnp.zeros(1_000_000, kind)}
    privatizer = gaussian_privatizer(stddev=1.0, prng_key=0, **drawn_in)
    noisy, _ = privatizer.update(gradients, privatizer.init(gradients))
    return np.asarray(noisy["weight"].astype(jnp.float32))


for kind, drawn_in, ends in (
    (jnp.float32, {}, False),
    (jnp.bfloat16, {}, True),
    (jnp.bfloat16, {"dtype": jnp.float32}, False),
):
    found = noise(kind, **drawn_in)
    values, beyond, largest = len(np.unique(found)), int((abs(found) > 3).sum()), abs(found).max()
    print(f"{kind.__name__}, {drawn_in}: {values} values, {beyond} beyond 3, largest {largest:.4f}, mean {found.mean():.4f}")
    assert (values == 128 and largest == 2.890625 and found.mean() < -0.01) if ends else 2500 < beyond < 2900
END
