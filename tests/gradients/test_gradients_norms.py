"""Norms of long float32 rows against float64: a bound that is enforced by them must hold."""

import pytest
import torch

from fedpriv.gradients import DenseGradients
from fedpriv.gradients.numerics import PIECE, row_norms
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.cases import in_one_test
from tests.noise import stream

# Of rows of one piece, whose sum torch makes, and of their combination.
TOLERANCE = 5e-6


def rows(examples: int, length: int) -> torch.Tensor:
    return torch.randn(examples, length, generator=torch.Generator().manual_seed(71))


@pytest.mark.parametrize("order", [1, 2])
@in_one_test("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, PIECE * PIECE // 4 + 5])
def test_row_norms(length: int, order: int) -> None:
    some = rows(3, length)
    expected = torch.linalg.vector_norm(some.double(), ord=order, dim=1)
    assert row_norms(some, order).dtype == torch.float32
    torch.testing.assert_close(row_norms(some, order).double(), expected, rtol=TOLERANCE, atol=0)
    # Rows with gaps between them, and not finite ones.
    torch.testing.assert_close(row_norms(some[::2], order).double(), expected[::2], rtol=TOLERANCE, atol=0)
    if length:
        some[1, length // 2] = torch.nan
        assert torch.isnan(row_norms(some, order)).tolist() == [False, True, False]


def test_inner_products_in_their_own_type() -> None:
    """Also in halves, and in several pieces; and of short examples beside long ones, whose squares are 0."""
    for examples, length in ((13, 1 << 13), (16, (1 << 15) + 3), (3, 40)):
        some = rows(examples, length)
        some[1] *= 1e-25
        quick = DenseGradients({"a": some}).grams(1, precise=False)[0]
        expected = some.double() @ some.double().T
        torch.testing.assert_close(quick, expected, rtol=0, atol=1e-5 * length)


def test_norms_of_an_operator() -> None:
    """Of one long parameter, as a whole update has."""
    some, weights = rows(2, 3_000_000), torch.rand(3_000_000, generator=torch.Generator().manual_seed(72))
    operator, precise = DenseGradients({"a": some}), some.double()
    torch.testing.assert_close(operator.norms().double(), precise.norm(dim=1), rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(operator.absolute_sums().double(), precise.abs().sum(dim=1), rtol=TOLERANCE, atol=0)
    weighted = (precise.square() @ weights.double()).sqrt()
    torch.testing.assert_close(operator.weighted_norms({"a": weights}).double(), weighted, rtol=TOLERANCE, atol=0)


def test_clipping_keeps_its_bound() -> None:
    operator = DenseGradients({"a": rows(1, 3_000_000)})
    released = GaussianMechanism(sigma=0.0, clip_norm=1.0).release(operator, 1, stream())
    assert float(released["a"].double().norm()) == pytest.approx(1, rel=TOLERANCE)


@in_one_test("blocks", ["whole", "layer", "size:3000000"])
def test_a_directional_draw_keeps_its_length(blocks: str) -> None:
    operator = DenseGradients({"a": rows(1, 3_000_000)})
    released = VmfMechanism(kappa=100.0, blocks=blocks).release(operator, 1, stream(73))
    assert float(released["a"].double().norm()) == pytest.approx(1, rel=TOLERANCE)
