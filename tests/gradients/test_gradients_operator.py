"""Both operators against plain autograd, one example at a time, in float64: products of layers, types and operators."""

import copy

import pytest
import torch
from gradient_models import CASES, build, loss, one_by_one
from torch import Tensor, nn

from fedpriv.gradients import DEFAULT_CHUNK_BYTES, Block, DenseGradients, GradientOperator, per_example_gradients
from fedpriv.gradients.dense import Loss, dense_gradients
from tests.cases import in_one_test
from tests.noise import stream

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention, mapped over examples

EXAMPLES = 5
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def apply(
    operator: str, model: nn.Module, function: Loss, x: Tensor, y: Tensor, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> GradientOperator:
    if operator == "dense":
        return dense_gradients(model, function, x, y, "a test", chunk_bytes)
    return per_example_gradients(model, function, x, y, chunk_bytes=chunk_bytes)


def make(
    operator: str, name: str, examples: int, dtype: torch.dtype, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> tuple[GradientOperator, dict[str, Tensor]]:
    model, x, y = build(name, examples, dtype)
    return apply(operator, model, loss, x, y, chunk_bytes), one_by_one(copy.deepcopy(model), x, y)


def matrix(rows: dict[str, Tensor], names: tuple[str, ...] | None = None) -> Tensor:
    return torch.cat([rows[name].reshape(len(rows[name]), -1) for name in (names or tuple(rows))], dim=1)


def assert_rows(operator: GradientOperator, rows: dict[str, Tensor], block: Block | None, room: Tensor) -> None:
    """Some of the gradients written out."""
    for start, stop in ((0, operator.examples), (operator.examples // 2, operator.examples), (0, 0)):
        written = operator.rows(start, stop, block)
        assert tuple(written) == (block or tuple(rows))
        for name, value in written.items():
            assert value.shape == (stop - start, *operator.shapes[name])
            assert value.dtype == operator.dtype
            assert not value.numel() or (value.double() - rows[name][start:stop]).abs().max() <= room


def assert_products(operator: GradientOperator, rows: dict[str, Tensor], tolerance: float) -> None:
    """All calls, for the whole gradient and for some blocks, relative to the sizes of what is multiplied."""
    names = tuple(rows)
    generator = torch.Generator().manual_seed(3)
    assert {name: tuple(shape) for name, shape in operator.shapes.items()} == {
        name: tuple(value.shape[1:]) for name, value in rows.items()
    }
    assert list(operator.shapes) == list(rows)
    weights = torch.randn(operator.examples, generator=generator, dtype=torch.float64).to(operator.dtype)
    noise = stream(3)
    vector = operator.draw(noise)
    # A quarter of the weights is zero.
    shares = {name: value.clamp(min=-0.67) + 0.67 for name, value in operator.draw(noise).items()}
    for block in (None, *((name,) for name in names), names[::-2]):
        columns = matrix(rows, block)
        norms = columns.norm(dim=1)
        kept = block or names
        flat = torch.cat([vector[name].flatten() for name in kept]).double()
        room = tolerance * (norms.max() + 1e-30)
        assert operator.dimension(block) == columns.shape[1]
        assert (operator.norms(block).double() - norms).abs().max() <= room
        gram = operator.gram(block)
        assert gram.dtype == torch.float64
        assert (gram - columns @ columns.T).abs().max() <= room * norms.max()
        quick = operator.grams(1, block, precise=False)[0]
        assert quick.dtype == torch.float64
        assert (quick - columns @ columns.T).abs().max() <= room * norms.max()
        assert (operator.absolute_sums(block).double() - columns.abs().sum(dim=1)).abs().max() <= (
            room * columns.shape[1] ** 0.5
        )
        metric = matrix({name: value[None] for name, value in shares.items()}, block)[0].double()
        weighted = (columns.square() @ metric).sqrt()
        assert (operator.weighted_norms(shares, block).double() - weighted).abs().max() <= room
        assert_rows(operator, rows, block, room)
        assert (operator.dot(vector, block).double() - columns @ flat).abs().max() <= room * flat.norm()
        assert_groups(operator, columns, block, room)
        combined = operator.combine(weights, block)
        assert tuple(combined) == kept
        assert all(value.dtype == operator.dtype for value in combined.values())
        assert all(combined[name].shape == operator.shapes[name] for name in kept)
        flat_combined = torch.cat([combined[name].flatten() for name in kept]).double()
        assert (flat_combined - weights.double() @ columns).abs().max() <= room * weights.abs().sum()
        added = {name: value.clone() for name, value in vector.items()}
        operator.add_combination(added, 0.5, weights, block)
        flat_added = torch.cat([added[name].flatten() for name in kept]).double()
        assert (flat_added - 0.5 * flat - weights.double() @ columns).abs().max() <= room * weights.abs().sum() + (
            tolerance * flat.abs().max()
        )
        assert all(torch.equal(added[name], vector[name]) for name in names if name not in kept)


def assert_groups(operator: GradientOperator, columns: Tensor, block: Block | None, room: float) -> None:
    """Products within every number of groups that divides the batch."""
    examples, generator = operator.examples, torch.Generator().manual_seed(4)
    for groups in (number for number in range(1, examples + 1) if examples % number == 0):
        some = columns.view(groups, examples // groups, -1)
        numbers = torch.randn(groups, columns.shape[1], generator=generator, dtype=torch.float64)
        laid = numbers.to(operator.dtype)
        vectors, (quick, dots) = operator.vector(laid, block), operator.products(laid, block)
        for grams in (operator.grams(groups, block), quick):
            assert grams.dtype == torch.float64
            assert (grams - some @ some.mT).abs().max() <= room * some.norm(dim=2).max()
        assert all(value.shape == (groups, *operator.shapes[name]) for name, value in vectors.items())
        expected = (some @ numbers[..., None])[..., 0]
        for made in (operator.dots(vectors, block), dots):
            assert (made.double() - expected).abs().max() <= room * numbers.norm(dim=1).max()


@in_one_test(("operator", "dtype"), [("dense", torch.float32), ("chosen", torch.float64)])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_autograd(name: str, operator: str, dtype: torch.dtype) -> None:
    assert_products(*make(operator, name, EXAMPLES, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("examples", [1, 2, 70])
@in_one_test("name", ["linear", "sequence", "conv", "conv-groups", "embedding", "group-norm", "own-layer"])
def test_batch_sizes(name: str, examples: int) -> None:
    assert_products(*make("chosen", name, examples, torch.float64), TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
@in_one_test(
    ("operator", "chunk_bytes", "dtype"),
    [("chosen", 1000, torch.float32), ("dense", 1, torch.float64)],
)
def test_small_pieces(name: str, operator: str, chunk_bytes: int, dtype: torch.dtype) -> None:
    """With no room, or little, gradients are not written out, and what is computed on the way is cut small."""
    assert_products(*make(operator, name, EXAMPLES, dtype, chunk_bytes), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "chunk_bytes"),
    [
        (name, (1, DEFAULT_CHUNK_BYTES)[place % 2])
        for place, (name, case) in enumerate(CASES.items())
        if case[2] is not None
    ],
)
def test_parts_of_a_batch(name: str, chunk_bytes: int) -> None:
    whole, rows = make("chosen", name, EXAMPLES, torch.float64, chunk_bytes)
    for start, stop in ((0, 1), (1, EXAMPLES)):
        part = whole.part(start, stop)
        assert part.examples == stop - start
        assert_products(part, {key: value[start:stop] for key, value in rows.items()}, TOLERANCE[torch.float64])
    # A part of a part counts from the part's first.
    twice = whole.part(1, EXAMPLES).part(1, EXAMPLES - 1)
    assert_products(twice, {key: value[2:] for key, value in rows.items()}, TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
def test_takes_the_layers_apart(name: str) -> None:
    model, x, y = build(name, EXAMPLES, torch.float32)
    routes = per_example_gradients(model, loss, x, y).routes
    expected = CASES[name][2]
    assert routes == expected if expected else all(route.startswith("ghost: ") for route in routes.values())


@in_one_test(
    ("name", "reason"),
    [
        ("changes-input", "the input of a layer is changed in place"),
    ],
)
def test_says_why_the_model_is_dense(name: str, reason: str) -> None:
    model, x, y = build(name, EXAMPLES, torch.float32)
    assert per_example_gradients(model, loss, x, y).routes == {"": f"dense: {reason}"}


@in_one_test("name", ["sequence-first", "sequence", "embedding", "layer-norm-positions"])
def test_an_axis_as_long_as_the_batch_is_not_mistaken_for_it(name: str) -> None:
    """Eight examples of eight positions: which axis is the batch is seen with one example more."""
    examples = 4 if name == "layer-norm-positions" else 8
    operator, rows = make("chosen", name, examples, torch.float64)
    assert not any("dense" in route for route in operator.routes.values())
    assert_products(operator, rows, TOLERANCE[torch.float64])


@pytest.mark.parametrize("operator", ["dense", "chosen"])
def test_zero_gradients(operator: str) -> None:
    """A dead example has exactly zero gradients, and no NaN appears beside it."""
    model, x, y = build("mlp", EXAMPLES, torch.float32)
    flags = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])

    def flagged(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets % 5) * (targets < 5)

    targets = y + 5 * (1 - flags).long()
    made = apply(operator, model, flagged, x, targets)
    assert torch.equal(made.norms() > 0, flags > 0)
    assert torch.isfinite(made.gram()).all()
    assert float(made.gram()[1].abs().max()) == 0


@pytest.mark.parametrize("operator", ["dense", "chosen"])
def test_nan_stays_with_its_example(operator: str) -> None:
    model, x, y = build("conv", EXAMPLES, torch.float32)
    x[2, 0, 0, 0] = float("nan")
    made = apply(operator, model, loss, x, y)
    assert torch.isnan(made.norms()).tolist() == [False, False, True, False, False]


def test_empty_batch() -> None:
    model, x, y = build("conv", EXAMPLES, torch.float32)
    made = per_example_gradients(model, loss, x[:0], y[:0])
    assert made.examples == 0
    assert made.norms().shape == (0,)
    assert made.gram().shape == (0, 0)
    assert made.dot(made.draw(stream())).shape == (0,)
    assert all(float(value.abs().sum()) == 0 for value in made.combine(torch.zeros(0)).values())


def test_draw_is_a_normal_vector_of_the_stream() -> None:
    model, x, y = build("conv", EXAMPLES, torch.float32)
    made = per_example_gradients(model, loss, x, y)
    first, again = (made.draw(stream(4)) for _ in range(2))
    other = made.draw(stream(5))
    names = list(first)
    assert names == list(made.shapes)
    assert all(torch.equal(first[name], again[name]) for name in names)
    assert not any(torch.equal(first[name], other[name]) for name in names)
    assert list(made.draw(stream(), block=("2.out.bias",))) == ["2.out.bias"]
    large = DenseGradients({"a": torch.zeros(1, 100_000)}).draw(stream(6))["a"]
    # Mean and variance of 1e5 normal numbers, each within 5 standard errors: false alarm 1e-6.
    assert abs(float(large.mean())) < 5 / 100_000**0.5
    assert abs(float(large.var()) - 1) < 5 * (2 / 100_000) ** 0.5


@in_one_test("rows", [1, 63, 128, 130, 200])
@in_one_test("coordinates", [1, 7, 5000])
def test_inner_products_are_those_of_float64(rows: int, coordinates: int) -> None:
    """Whatever the sizes of the pieces in which they are computed."""
    values = torch.randn(rows, coordinates, generator=torch.Generator().manual_seed(rows))
    products = DenseGradients({"a": values}).gram()
    assert torch.allclose(products, values.double() @ values.double().T, rtol=0, atol=1e-13 * coordinates)


def test_rows_in_any_order_in_memory() -> None:
    """Gradients whose numbers lie channels last are used as they are, and answer as the others do."""
    generator = torch.Generator().manual_seed(1)
    last = torch.randn(5, 3, 4, 4, 2, generator=generator).movedim(-1, 2)
    assert_products(DenseGradients({"a": last}), {"a": last.double()}, TOLERANCE[torch.float32])


@in_one_test(
    ("rows", "message"),
    [
        ({}, "at least one parameter"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}, "several kinds"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, dtype=torch.float64)}, "several kinds"),
        ({"a": torch.zeros(2, 3, dtype=torch.int64)}, "torch.int64; allowed: torch.float32, torch.float64"),
    ],
)
def test_dense_refuses(rows: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DenseGradients(rows)
