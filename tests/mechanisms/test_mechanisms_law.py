"""A mechanism's law of itself against its own releases, drawn."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from tests.cases import in_one_test
from tests.noise import stream

SIZES = {"a": 400, "b": 100}
DRAWS, EXAMPLES, DIVISOR = 60, 3, 5
MECHANISMS: dict[str, dict[str, Any]] = {
    "gaussian": {"name": "gaussian", "sigma": 0.5, "clip_norm": 0.8},
    "gaussian by layer": {"name": "gaussian", "sigma": 0.5, "clip_norm": 0.8, "clipping": "layer"},
    "laplace": {"name": "laplace", "scale": 0.5, "clip_norm": 0.8},
    "hgm": {"name": "hgm", "sigma": 0.5, "clip_norm": 0.8},
    "vmf": {"name": "vmf", "kappa": 300.0},
    "vmf by layer": {"name": "vmf", "kappa": 300.0, "blocks": "layer"},
    "vmf in pieces": {"name": "vmf", "kappa": 300.0, "blocks": "size:250"},
    "vmf, uniform": {"name": "vmf", "kappa": 0.0},
    "none": {"name": "none"},
}


def built(name: str) -> Any:
    raw = {key: torch.linspace(0.2, 2.0, size) for key, size in SIZES.items()}
    total = sum(float(value.sum()) for value in raw.values())
    shares = Redistribution({key: value / total for key, value in raw.items()})
    return mechanism_settings(MECHANISMS[name]).mechanism(shares)


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_and_expectation_are_those_of_releases(name: str) -> None:
    """Three alike examples, 60 releases: the mean of all 500 coordinates, and their variance.

    Both within 5 standard errors, that is a false alarm in a million; vmf's variance along its mean is left out.
    """
    mechanism = built(name)
    one = {key: torch.eye(size)[3].double() for key, size in SIZES.items()}
    batch = DenseGradients({key: value.expand(EXAMPLES, -1) for key, value in one.items()})
    noise = stream(11)
    drawn = [mechanism.standardise(mechanism.release(batch, DIVISOR, noise)) for _ in range(DRAWS)]
    released = torch.stack([torch.cat(list(each.values())) for each in drawn])
    expected = mechanism.standardise(mechanism.expected(one))
    mean = EXAMPLES / DIVISOR * torch.cat(list(expected.values()))
    law = mechanism.noise(list(SIZES.values()), EXAMPLES, DIVISOR)
    assert sum(law.sizes) == sum(SIZES.values())
    variances = torch.cat([torch.full((size,), v) for size, v in zip(law.sizes, law.variances, strict=True)])
    squares = (released - mean).square() / variances.clamp(min=1e-20)
    across = torch.ones(len(mean), dtype=torch.bool)
    if name.startswith("vmf"):
        across[[3, 403]] = False
    if name == "none":
        assert float(squares.max()) < 1
        return
    # The fourth moment of Laplace noise is 6 times the squared variance, that of normal noise 3 times.
    spread = math.sqrt((5 if name == "laplace" else 2) / (DRAWS * int(across.sum())))
    assert float(squares[:, across].mean()) == pytest.approx(1, abs=5 * spread)
    off = DRAWS * (released.mean(dim=0) - mean).square() / variances
    assert float(off.mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(mean)))


@in_one_test("name", MECHANISMS)
def test_blocks_scales_and_weights_give_the_expectation(name: str) -> None:
    """Where a mechanism says that the factors of its blocks are all there is to it."""
    mechanism, names = built(name), tuple(SIZES)
    generator = torch.Generator().manual_seed(12)
    gradient = {key: torch.randn(size, generator=generator).double() for key, size in SIZES.items()}
    scales = mechanism.scales(names)
    assert (scales is None) == (name in ("laplace", "hgm", "vmf in pieces"))
    if scales is None:
        return
    blocks = mechanism.blocks_of(names)
    assert len(blocks) == (2 if name.endswith("by layer") else 1)
    assert len(mechanism.directions(names)) == (2 if name == "vmf by layer" else 1)
    found: dict[str, Tensor] = {}
    for block in blocks:
        flat = torch.cat([gradient[key] * scales[key] for key in block])
        found |= {key: mechanism.weight(flat @ flat, len(flat), len(blocks)) * gradient[key] for key in block}
    torch.testing.assert_close(found, mechanism.expected(gradient))
