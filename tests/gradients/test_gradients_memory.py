"""The bound on memory, on what tensors take while gradients are made and asked."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tensor_memory import TensorMemory
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.gradients import DenseGradients, GradientOperator, per_example_gradients
from fedpriv.gradients.dense import dense_gradients
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from tests.noise import stream

MIB = 1 << 20
EXAMPLES = 24
SIDE = 16  # of images, in pixels
loss = partial(functional.cross_entropy, reduction="none")


def model_and_batch(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(81)
    y = torch.randint(10, (EXAMPLES,), generator=generator)
    if name == "sequence":
        model = nn.Sequential(nn.Linear(32, 300), nn.Tanh(), nn.Linear(300, 40), nn.Flatten(), nn.Linear(1600, 10))
        return model, torch.randn(EXAMPLES, 40, 32, generator=generator), y
    if name == "words":
        model = nn.Sequential(nn.Embedding(500, 64), nn.LayerNorm(64), nn.Flatten(), nn.Linear(64 * 80, 10))
        return model, torch.randint(500, (EXAMPLES, 80), generator=generator), y
    if name == "recurrent":
        model = nn.Sequential(nn.Conv1d(16, 16, 3), nn.ConvTranspose1d(16, 40, 3), nn.Flatten(), nn.Linear(40 * 32, 10))
        return model, torch.randn(EXAMPLES, 16, 32, generator=generator), y
    hidden = {"hidden": (256, 256)} if name == "mlp" else {}
    model = build_model(model_settings({"name": name, **hidden}), (3, SIDE, SIDE), 10, 1)
    return model, torch.randn(EXAMPLES, 3, SIDE, SIDE, generator=generator), y


def calls(operator: GradientOperator) -> dict[str, Callable[[], object]]:
    vector = operator.draw(stream(82))
    shares = {name: value.square() for name, value in vector.items()}
    weights = torch.ones(operator.examples)
    return {
        "gram": operator.gram,
        "norms": operator.norms,
        "absolute_sums": operator.absolute_sums,
        "weighted_norms": lambda: operator.weighted_norms(shares),
        "dot": lambda: operator.dot(vector),
        "combine": lambda: operator.combine(weights),
        "add_combination": lambda: operator.add_combination(vector, 0.5, weights),
        "rows": lambda: operator.rows(3, 8),
    }


MODELS = ["lenet", "convnet", "resnet", "mlp", "sequence", "words", "recurrent"]


@pytest.mark.parametrize(("operator", "chunk_bytes"), [("chosen", 4 * MIB), ("dense", 8 * MIB)])
@pytest.mark.parametrize("name", MODELS)
def test_calls_keep_to_the_bound(name: str, operator: str, chunk_bytes: int) -> None:
    """What a call takes beyond what it returns: here one example never takes more than the bound."""
    model, x, y = model_and_batch(name)
    with TensorMemory() as memory:
        made = (
            per_example_gradients(model, loss, x, y, chunk_bytes=chunk_bytes)
            if operator == "chosen"
            else dense_gradients(model, loss, x, y, "a test", chunk_bytes)
        )
        for call, ask in calls(made).items():
            before = memory.peak = memory.live
            answer = ask()
            taken = memory.peak - max(before, memory.live)
            assert taken <= chunk_bytes, f"{call} takes {taken / MIB:.1f} MiB"
            del answer


@pytest.mark.parametrize("name", MODELS)
def test_making_them_keeps_to_the_bound(name: str) -> None:
    """What is kept and what is taken on the way, beyond what the operator with no room at all needs."""
    peaks, kept = [], []
    for chunk_bytes in (1, 4 * MIB, 64 * MIB):
        model, x, y = model_and_batch(name)
        with TensorMemory() as memory:
            made = per_example_gradients(model, loss, x, y, chunk_bytes=chunk_bytes)
            peaks.append(memory.peak)
            kept.append(memory.live)
            del made
    for peak, held, chunk_bytes in zip(peaks[1:], kept[1:], (4 * MIB, 64 * MIB), strict=True):
        assert peak <= peaks[0] + chunk_bytes
        assert held <= kept[0] + chunk_bytes // 2


@pytest.mark.parametrize("name", ["lenet", "words", "recurrent"])
def test_dense_gradients_take_their_result_and_the_bound(name: str) -> None:
    model, x, y = model_and_batch(name)
    result = EXAMPLES * sum(value.nbytes for value in model.parameters())
    for chunk_bytes in (6 * MIB, 24 * MIB):
        with TensorMemory() as memory:
            made = dense_gradients(model, loss, x, y, "a test", chunk_bytes)
            assert memory.peak <= result + chunk_bytes
            assert result <= memory.live <= result + MIB
            del made


@pytest.mark.parametrize("name", ["convnet", "words"])
def test_the_bound_binds(name: str) -> None:
    """With much room a call takes more than twice what it takes with little: the bound is what keeps it down."""
    model, x, y = model_and_batch(name)
    taken = []
    for chunk_bytes in (MIB, 1 << 30):
        with TensorMemory() as memory:
            made = dense_gradients(model, loss, x, y, "a test", chunk_bytes)
            shares = {name: torch.ones(shape) for name, shape in made.shapes.items()}
            before = memory.peak = memory.live
            made.weighted_norms(shares)
            taken.append(memory.peak - before)
    assert taken[1] > 2 * taken[0]


def test_the_measure_sees_what_is_alive() -> None:
    with TensorMemory() as memory:
        first = torch.zeros(1000)
        second = first * 2
        assert memory.live == 8000
        second += first.view(10, 100).sum()
        del first
        assert memory.live == 4000
        assert memory.peak <= 8000 + 512
        graph = (second.requires_grad_() * 3).exp().sum()
        assert memory.live > 8000
        del graph
    assert memory.live == 4000
    assert memory.largest == 4000


def test_given_gradients_keep_to_the_bound() -> None:
    made = DenseGradients({"a": torch.ones(16, 300_000)}, chunk_bytes=4 * MIB)
    with TensorMemory() as memory:
        made.gram()
        made.weighted_norms({"a": torch.ones(300_000)})
    assert memory.peak <= 4 * MIB + 300_000 * 4
