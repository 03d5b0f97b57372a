#!/usr/bin/env bash
# torch 2.15.0: manual_seed takes 64 bits, and the generator of the CPU keeps 32 of them.
#
# Guess: two seeds from the range that manual_seed takes give two streams.
# Seen: 1, 1 + 2^32 and 1 + 2^63 give the same numbers; initial_seed() returns the whole seed, as if all of it counted.
# Of 200,000 seeds hashed from (client, round), to give each its own noise, several share a stream: about one pair is
# expected among 93,000. Whoever must not find the noise has to try 4e9 seeds at most. numpy's default_rng keeps all
# bits.
. "$(dirname "$0")/packages.bash"
packages torch==2.15.0 numpy==2.4.6
python - <<'END'
import hashlib

import numpy as np
import torch


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    assert generator.initial_seed() == seed
    return torch.randn(1000, generator=generator)


for seed in (1, 1 + 2**32, 1 + 2**63):
    print(f"seed {seed}: {drawn(seed)[:3].tolist()}")
    assert torch.equal(drawn(seed), drawn(1))
    assert seed == 1 or np.random.default_rng(seed).random() != np.random.default_rng(1).random()
places, pairs = {}, []
for number in range(200_000):
    client, turn = divmod(number, 200)
    seed = int.from_bytes(hashlib.sha256(f"{client} {turn}".encode()).digest()[:8])
    other = places.setdefault(seed % 2**32, (client, turn, seed))
    if other[2] != seed:
        pairs.append((other, (client, turn, seed)))
print(f"{len(pairs)} pairs of (client, round) share their noise, the first: {pairs[0][0][:2]} and {pairs[0][1][:2]}")
assert all(torch.equal(drawn(one[2]), drawn(other[2])) for one, other in pairs)
END
