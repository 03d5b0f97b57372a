"""Smooth kinks: softplus by the formula, in every way a network calls ReLU, and ReLU itself outside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedpriv.attacks.reconstruction.posterior import SmoothKinks
from tests.cases import in_one_test

CALLS = {
    "layer": nn.ReLU(),
    "layer in place": nn.ReLU(inplace=True),
    "functional": F.relu,
    "torch": torch.relu,
    "method": Tensor.relu,
    "keyword": lambda x: F.relu(input=x),
}


@in_one_test("call", CALLS.values())
def test_softplus_of_each_example(call: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
        * torch.tensor([1e-3, 1.0, 5.0, 1e3])[:, None, None]
    )
    slope = 4.0 / x.square().mean(dim=(1, 2), keepdim=True).sqrt()
    with SmoothKinks(4.0):
        torch.testing.assert_close(call(x.clone()), (1 + (slope * x).exp()).log() / slope)
    torch.testing.assert_close(call(x.clone()), x.clamp(min=0))


def test_within_vmap_and_at_zero() -> None:
    x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(2))
    with SmoothKinks(8.0):
        torch.testing.assert_close(vmap(torch.relu)(x), torch.stack([torch.relu(row) for row in x]))
        assert bool(torch.isfinite(torch.relu(torch.zeros(2, 3))).all())
