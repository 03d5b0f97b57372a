"""Operators with some gradients replaced by zeros, and bounds of what gradients are summed from."""

import copy
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
from gradient_models import CASES, CLASSES, build, loss, one_by_one
from torch import Tensor, nn

from fedpriv.gradients import DenseGradients, GradientOperator, per_example_gradients, rules
from fedpriv.gradients.dense import FactoredGradients, dense_gradients
from fedpriv.gradients.factors import Factor, Outer, Stacked, Tied
from fedpriv.gradients.numerics import LARGEST_SIDE, lengths, of_sums, row_norms
from tests.cases import in_one_test
from tests.noise import stream

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention, mapped over examples

EXAMPLES = 5
BAD = {1: torch.nan, 4: torch.inf}
KEEP = torch.tensor([index not in BAD for index in range(EXAMPLES)])
MAKE: dict[str, Callable[..., GradientOperator]] = {
    "dense": lambda *batch: dense_gradients(*batch, "a test"),
    "written": per_example_gradients,
    "sums": lambda *batch: per_example_gradients(*batch, chunk_bytes=1),
}
WRITE_OUT = {"dense": rules._write_out, "written": rules._write_out, "sums": lambda *_: False}

# Whole models that are dense are all alike.
FORMS = [("conv", "dense"), ("embedding", "dense"), *((name, form) for name in CASES for form in ("written", "sums"))]

# Labels that are class 0 with a loss that is not finite.
LABELS = {index: CLASSES * (index + 1) for index in BAD}


def spoiled(outputs: Tensor, targets: Tensor) -> Tensor:
    """The usual losses, but not finite where the labels say so."""
    factors = torch.ones_like(targets, dtype=outputs.dtype)
    for index, value in BAD.items():
        factors[targets == LABELS[index]] = value
    return loss(outputs, targets % CLASSES) * factors


def make(form: str, name: str, dtype: torch.dtype, *, clean: bool) -> tuple[GradientOperator, dict[str, Tensor]]:
    """The gradients of a model, those of some examples not finite unless ``clean``, and the rows, those zero."""
    model, x, y = build(name, EXAMPLES, dtype)
    for index in BAD:
        y[index] = 0
    rows = one_by_one(copy.deepcopy(model), x, y)
    for value in rows.values():
        value[~KEEP] = 0
    if not clean:
        for index, value in BAD.items():
            y[index] = LABELS[index]
            if x.is_floating_point():
                x[index].view(-1)[0] = value
    with patch.object(rules, "_write_out", WRITE_OUT[form]):
        return MAKE[form](model, loss if clean else spoiled, x, y), rows


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_nothing_is_left_of_what_is_not_finite(name: str, form: str) -> None:
    """The oracle: autograd, one example at a time, with zeros instead."""
    made, rows = make(form, name, torch.float64, clean=False)
    finite = torch.isfinite(made.magnitudes())
    assert torch.equal(finite, KEEP)
    masked = made.masked(finite)
    dense = DenseGradients(rows)
    vector = dense.draw(stream(1))
    weights = torch.linspace(1, 2, EXAMPLES, dtype=torch.float64)
    shares = {name: value.square() for name, value in vector.items()}
    assert bool((masked.magnitudes() >= masked.norms() * (1 - 1e-12)).all())
    for some, expected in (
        (masked, dense),
        (masked.part(1, 5), dense.part(1, 5)),
    ):
        answers = [
            [
                *(operator.gram(), operator.grams(operator.examples, precise=False), operator.norms()),
                *(operator.absolute_sums(), operator.weighted_norms(shares), operator.dot(vector)),
                *operator.combine(weights[: operator.examples]).values(),
                *operator.rows(0, operator.examples).values(),
            ]
            for operator in (some, expected)
        ]
        for left, right in zip(*answers, strict=True):
            assert torch.allclose(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_magnitudes_bound_the_norms(name: str, form: str) -> None:
    """Of single parameters, too; what is kept as a sum is bounded by position."""
    made, _ = make(form, name, torch.float64, clean=True)
    for block in (None, *((key,) for key in made.shapes)):
        assert bool((made.magnitudes(block) >= made.norms(block) * (1 - 1e-12)).all())
    assert isinstance(made, FactoredGradients)
    for key in made.shapes:
        factor = made.factor(key)
        parts = _parts(factor)
        sums = [_positions(part) for part in parts if isinstance(part, Outer)]
        assert bool((made.roundings((key,)) > 0).all()) is bool(sums)
        if sums:
            together = torch.stack(sums, dim=1).norm(dim=1)
            assert bool((factor.magnitudes() >= together * (1 - 1e-12)).all())


def _parts(factor: Factor) -> Sequence[Factor]:
    if isinstance(factor, Tied):
        return [factor._multiplied]
    return factor._parts if isinstance(factor, Stacked) else [factor]


def _positions(factor: Outer) -> Tensor:
    """The sums over the positions of the products of the norms of both sides, (B,)."""
    inputs = factor._inputs[0 : factor.examples]
    return (inputs.norm(dim=2) * factor._errors.norm(dim=2)).sum(dim=1)


@in_one_test("bias", [True, False])
@in_one_test("positions", [1, 2, 70])
@in_one_test("value", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_a_number_that_is_multiplied_by_zero_counts(value: float, positions: int, bias: bool) -> None:
    """Input 0 of example 0 is not finite, and the errors of example 0 are 0; of example 1 it is the other way round."""
    x, errors = torch.ones(3, positions, 2), torch.ones(3, positions, 4)
    x[0, 0, 1], errors[0] = value, 0
    x[1], errors[1, -1, 2] = 0, value
    for write_out in (False, True):
        with patch.object(rules, "_write_out", lambda *_, answer=write_out: answer):
            made = per_example_gradients(nn.Linear(2, 4, bias), Inner(errors), x, torch.arange(3))
            brief = per_example_gradients(nn.Linear(2, 4, bias), Inner(errors), x, torch.arange(3), often=False)
        if value != 1e38 or not (write_out or positions == 1):  # written out, nothing is left of a number times 0
            assert torch.isfinite(brief.magnitudes()).tolist() == [False, False, True]
        assert torch.isfinite(made.magnitudes()).tolist() == [False, False, True]
        masked = made.masked(torch.isfinite(made.magnitudes()))
        assert masked.norms().tolist() == [0, 0, float(made.norms()[2])]
        total = masked.combine(torch.ones(3))
        assert torch.equal(total["weight"], torch.full((4, 2), float(positions)))


class Inner:
    """The loss whose gradient with respect to the outputs of example i is ``errors[i]``."""

    def __init__(self, errors: Tensor) -> None:
        self._errors = errors

    def __call__(self, outputs: Tensor, examples: Tensor) -> Tensor:
        return torch.where(self._errors[examples] == 0, 0, outputs * self._errors[examples]).flatten(1).sum(dim=1)


@in_one_test("positions", [2, 16, 64, 65, 1000])
def test_roundings_bound_what_is_combined(positions: int) -> None:
    """All terms but one in the same direction, which the last one takes back: the sum loses what is left."""
    generator = torch.Generator().manual_seed(2)
    x = 1 + 1e-3 * torch.randn(1, positions, 8, generator=generator)
    errors = 1 + 1e-3 * torch.randn(1, positions, 6, generator=generator)
    errors[0, -1] -= errors[0].sum(dim=0)
    with patch.object(rules, "_write_out", lambda *_: False):
        made = per_example_gradients(nn.Linear(8, 6, bias=False), Inner(errors), x, torch.arange(1), chunk_bytes=1)
    exact = errors[0].double().T @ x[0].double()
    for weight in (1.0, 0.37):
        combined = made.combine(torch.tensor([weight]))["weight"].double()
        off = float((combined - float(torch.tensor(weight)) * exact).norm())
        # Beside that its numbers are float32.
        assert off <= weight * float(made.roundings()) + 1e-7 * float(combined.norm())
    assert abs(float(made.norms()) - float(exact.norm())) <= float(made.roundings()) + 1e-6 * float(exact.norm())
    strict = of_sums(positions, torch.float32) * float(made.magnitudes())
    assert float(made.roundings()) < (1.2 * strict if positions <= 64 else 0.1 * strict)


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("length", [1, 5, 5000])
def test_lengths_of_numbers_of_any_size(length: int, dtype: torch.dtype) -> None:
    """Against the same numbers at a size that can be squared."""
    limits = torch.finfo(dtype)
    rows = torch.randn(1, length, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    exponents = range(-36, 36, 4) if dtype == torch.float32 else range(-300, 300, 25)
    many = torch.cat([rows * 10.0**exponent for exponent in exponents])
    expected = row_norms(rows.double()) * torch.tensor([10.0**exponent for exponent in exponents], dtype=torch.float64)
    # Numbers below the smallest normal one have lost digits themselves.
    normal = expected > limits.tiny / limits.eps
    assert torch.allclose(
        lengths(many).double()[normal], expected[normal], rtol=1e-5 if dtype == torch.float32 else 1e-12
    )
    many[0], many[1, 0], many[2, -1] = 0, torch.nan, -torch.inf
    found = lengths(many)
    assert float(found[0]) == 0
    assert torch.isfinite(found).tolist() == [True, False, False, *[True] * (len(many) - 3)]


def test_sides_beyond_their_limits_count_as_infinite() -> None:
    for dtype in (torch.float32, torch.float64):
        most = LARGEST_SIDE[dtype]
        x = torch.tensor([[most / 2], [most * 2], [1.0], [0.0]], dtype=dtype)
        errors = torch.tensor([[1 / most], [1 / most], [1.0], [1.0]], dtype=dtype)
        made = per_example_gradients(nn.Linear(1, 1).to(dtype), Inner(errors), x, torch.arange(4))
        assert torch.isfinite(made.magnitudes()).tolist() == [True, False, True, True]
