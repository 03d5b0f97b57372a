"""Every kind of layer with a rule, in products of its settings, types and memory, against autograd one by one."""

import copy
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from gradient_models import CASES, CLASSES, build, loss, one_by_one
from test_gradients_operator import TOLERANCE, assert_products
from torch import Tensor, nn

from fedpriv.gradients import DEFAULT_CHUNK_BYTES, per_example_gradients
from fedpriv.gradients.dense import dense_gradients
from tests.cases import in_one_test

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention, mapped over examples

EXAMPLES = 3
DTYPES = [torch.float32, torch.float64]
# One bound that everything fits into, and one that nothing does.
CHUNKS = [DEFAULT_CHUNK_BYTES, 1]


def check(layer: Callable[[], nn.Module], x: Tensor, kind: str) -> None:
    """The layer and a Linear layer after it: in float32 with much memory, and in float64 with none."""
    with torch.random.fork_rng():
        torch.manual_seed(91)
        first = layer()
        model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES))
        model(x)
        y = torch.randint(CLASSES, (len(x),))
    expected = one_by_one(copy.deepcopy(model), x, y)
    for dtype, chunk_bytes in zip(DTYPES, CHUNKS, strict=True):
        values = x.to(dtype) if x.is_floating_point() else x
        made = per_example_gradients(model.to(dtype), loss, values, y, chunk_bytes=chunk_bytes)
        assert made.routes["0"] == f"ghost: {kind}"
        assert_products(made, expected, TOLERANCE[dtype])


def normal(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, generator=torch.Generator().manual_seed(92))


@in_one_test("shape", [(7,), (1, 7), (2, 7), (40, 7), (2, 4, 7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [1, 6])
def test_linear(shape: tuple[int, ...], bias: bool, out: int) -> None:
    check(lambda: nn.Linear(7, out, bias=bias), normal(*shape), "Linear")


def convolutions() -> Iterator[dict[str, object]]:
    for groups, stride, padding, dilation, kernel in product((1, 2, 4), (1, 2), (0, 1, "same"), (1, 2), (1, 3)):
        if padding != "same" or stride == 1:
            yield {
                "groups": groups,
                "stride": stride,
                "padding": padding,
                "dilation": dilation,
                "kernel_size": kernel,
                "bias": (groups + stride + dilation) % 2 == 0,
            }


# Every third: of each setting all values, and of each two settings all pairs.
@pytest.mark.parametrize(
    "settings", list(convolutions())[1::3], ids=lambda settings: "-".join(map(str, settings.values()))
)
def test_conv2d(settings: dict[str, object]) -> None:
    check(lambda: nn.Conv2d(4, 8, **settings), normal(4, 7, 5), "Conv2d")  # type: ignore[arg-type]


# Others than for test_conv2d.
@pytest.mark.parametrize(
    "settings", list(convolutions())[::3], ids=lambda settings: "-".join(map(str, settings.values()))
)
def test_conv1d(settings: dict[str, object]) -> None:
    check(lambda: nn.Conv1d(4, 4, **settings), normal(4, 9), "Conv1d")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@in_one_test("padding", [(1, 0), (2, 1)])
def test_conv2d_padding(mode: str, padding: tuple[int, int]) -> None:
    check(lambda: nn.Conv2d(2, 3, (2, 3), padding=padding, padding_mode=mode), normal(2, 6, 5), "Conv2d")


@in_one_test("words", [2, 6])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 4)])
@pytest.mark.parametrize("padding", [None, 0])
def test_embedding(words: int, shape: tuple[int, ...], padding: int | None) -> None:
    """With few words, and with many, of which some are looked up several times by one example."""
    x = torch.randint(words, (EXAMPLES, *shape), generator=torch.Generator().manual_seed(93))
    check(lambda: nn.Embedding(words, 3, padding_idx=padding), x, "Embedding")


@in_one_test(("shape", "normalised"), [((6,), (6,)), ((4, 6), (6,)), ((4, 6), (4, 6)), ((2, 4, 5), (4, 5))])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(shape: tuple[int, ...], normalised: tuple[int, ...], bias: bool) -> None:
    check(lambda: nn.LayerNorm(normalised, bias=bias), normal(*shape), "LayerNorm")


@in_one_test("groups", [1, 2, 6])
@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 4, 5)])
def test_group_norm(groups: int, shape: tuple[int, ...]) -> None:
    if groups == 6 and len(shape) == 1:
        # Groups of one number are constant: torch refuses them in training.
        with pytest.raises(ValueError, match="more than 1 value"):
            check(lambda: nn.GroupNorm(groups, 6), normal(*shape), "GroupNorm")
        return
    check(lambda: nn.GroupNorm(groups, 6), normal(*shape), "GroupNorm")


@in_one_test("operator", ["dense", "chosen"])
@pytest.mark.parametrize("name", CASES)
def test_autocast(name: str, operator: str) -> None:
    """Under bfloat16 autocast: float32 numbers, those of autograd under the same autocast, one example at a time.

    bfloat16 rounds each number by up to 2^-9 of it, and a gradient passes a handful of such roundings, which the two
    ways make in different places: batched or not, and the ghost's products are not rounded at all. Allowed are 2^-6 of
    a gradient's norm; found are up to 2^-7.3 (autograd itself is up to 2^-7.3 off its own float64 values). Language
    models pass more of them (autograd itself is up to 2^-5.7 off), and are allowed 2^-5.
    """
    allowed = 2**-5 if "language" in name else 2**-6
    model, x, y = build(name, EXAMPLES + 2, torch.float32)
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    with torch.autocast("cpu", torch.bfloat16):
        made = (
            per_example_gradients(model, loss, x, y)
            if operator == "chosen"
            else dense_gradients(model, loss, x, y, "a test")
        )
        values = [loss(model(one), label).sum() for one, label in zip(x.split(1), y.split(1), strict=True)]
        rows = [torch.autograd.grad(v, [*trained.values()], allow_unused=True, materialize_grads=True) for v in values]
        inside = made.gram()
    expected = torch.stack([torch.cat([value.flatten() for value in row]) for row in rows]).double()
    written = torch.cat([value.reshape(len(value), -1) for value in made.rows(0, len(x)).values()], dim=1)
    assert written.dtype == made.dtype == torch.float32
    assert inside.dtype == torch.float64
    assert ((written.double() - expected).norm(dim=1) <= allowed * expected.norm(dim=1)).all()
    # The operator's own products are float32's, inside autocast and outside.
    assert_products(made, {key: value.double() for key, value in made.rows(0, len(x)).items()}, 1e-5)
    assert torch.equal(inside, made.gram())


def test_autocast_is_on_while_the_model_runs() -> None:
    """Otherwise the test above would compare float32 with itself."""
    model, x, y = build("mlp", EXAMPLES, torch.float32)
    exact = per_example_gradients(model, loss, x, y).gram()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = per_example_gradients(model, loss, x, y).gram()
    assert float((exact - rounded).abs().max() / exact.max()) > 1e-4
