"""Seeded mutations of sound inputs: what a damaged disk, a wrong writer or an enemy might hand to a reader."""

import copy
import random
from typing import Any

__all__ = ["mutated_bytes", "mutated_tree"]

DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]

STRANGE: tuple[Any, ...] = (
    *(True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**40),
    *(0.0, -0.0, 0.5, 1e-308, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *("", "a", "none", "size:0", "x" * 3000, "\x00", "../../../etc/passwd", "\u202e", "1e5", "¹", "F32", "\U0001f600"),
    *([], [[]], [1, "a"], [-1], [2**64], [float("nan")], {}, {"a": 1}, {"": {}}, DEEP),
)
FRAGMENTS = (
    b"",
    b"\x00",
    b"\xff" * 9,
    b"{",
    b"}" * 40,
    b"[" * 500,
    b'"',
    b"\n[data]\n",
    b"nan",
    b"1e999",
    b"-",
    b"9" * 5000,
)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` after one to four changes: bits, bytes, pieces removed, doubled, moved or put in; or cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(out) + 1)
        stop = min(len(out), start + rng.choice((1, 2, 8, 64, len(out))))
        match rng.randrange(7):
            case 0 if start < len(out):
                out[start] ^= 1 << rng.randrange(8)
            case 1 if start < len(out):
                out[start] = rng.randrange(256)
            case 2:
                del out[start:stop]
            case 3:
                out[start:start] = out[start:stop]
            case 4:
                out[start:start] = rng.choice(FRAGMENTS)
            case 5:
                del out[start:]
            case _:
                head = min(len(out), 8)
                out[:head] = rng.randbytes(head)
    return bytes(out)


def mutated_tree(rng: random.Random, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of nested dictionaries and lists in which one to three values or keys are strange."""
    out = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        node: Any = out
        while True:
            places = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not places:
                break
            place = rng.choice(places)
            child = node[place]
            if isinstance(child, dict | list) and rng.random() < 0.8:
                node = child
                continue
            _change(rng, node, place)
            break
    return out


def _change(rng: random.Random, node: Any, place: Any) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        del node[place]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice(("", "x", "noise", "name", str(place) + "s", "é"))] = node.pop(place)
    else:
        node[place] = copy.deepcopy(rng.choice(STRANGE))
