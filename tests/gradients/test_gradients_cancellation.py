"""Gradients whose positions nearly cancel: a length that is lost in rounding would leave an example unclipped.

The oracle is the same operator in float64.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedpriv.gradients import GradientOperator, per_example_gradients
from fedpriv.mechanisms.gaussian import GaussianMechanism
from tests.noise import stream

EXAMPLES, POSITIONS, WIDTH = 4, 2, 64
# Two positions differ by about 1e-4 of their size, so float32 gradients themselves are right to about 1e-3.
DIFFERENCE, TOLERANCE = 1e-4, 2e-3


def _of_linear(dtype: torch.dtype) -> GradientOperator:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(EXAMPLES, 1, WIDTH, generator=generator)
    other = first * (1 + DIFFERENCE * torch.randn(first.shape, generator=generator))
    errors = 1e5 * torch.randn(EXAMPLES, WIDTH, generator=generator)
    layer = nn.Linear(WIDTH, WIDTH, bias=False).to(dtype)

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return ((outputs[:, 0] - outputs[:, 1]) * errors.to(dtype)).sum(dim=1)

    return per_example_gradients(layer, loss, torch.cat([first, other], dim=1).to(dtype), torch.zeros(EXAMPLES))


def _of_embedding(dtype: torch.dtype) -> GradientOperator:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(5, (EXAMPLES, 1), generator=generator).expand(-1, POSITIONS)
    first = 1e5 * torch.randn(EXAMPLES, 1, WIDTH, generator=generator)
    errors = torch.cat([first, -first * (1 + DIFFERENCE)], dim=1).to(dtype)
    layer = nn.Embedding(5, WIDTH).to(dtype)
    return per_example_gradients(
        layer, lambda outputs, _: (outputs * errors).sum(dim=(1, 2)), words, torch.zeros(EXAMPLES)
    )


@pytest.mark.parametrize("make", [_of_linear, _of_embedding])
def test_lengths_survive(make: Callable[[torch.dtype], GradientOperator]) -> None:
    single, double = make(torch.float32), make(torch.float64)
    torch.testing.assert_close(single.norms().double(), double.norms(), rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(single.gram().diagonal().sqrt(), double.norms(), rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("make", [_of_linear, _of_embedding])
def test_they_are_clipped(make: Callable[[torch.dtype], GradientOperator]) -> None:
    gradients = make(torch.float32)
    assert bool((gradients.norms() > 10).all())
    released = GaussianMechanism(0.0, 1.0).release(gradients, 1, stream())
    assert float(torch.linalg.vector_norm(released["weight"])) <= EXAMPLES * (1 + TOLERANCE)
