"""The same numbers on a CUDA device as on the CPU, and everything that is returned on the device."""

import copy

import pytest
import torch
from gradient_models import CASES, build, loss

from fedpriv.gradients import GradientOperator, Vector, per_example_gradients
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.noise import stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
EXAMPLES = 5
# torch's own weight_norm in float64 was 4e-8 off the CPU's on an H200.
ROUNDED = {"weight-norm": 1e-6}


def on(device: str, name: str, chunk_bytes: int) -> GradientOperator:
    model, x, y = build(name, EXAMPLES, torch.float64)
    model = copy.deepcopy(model).to(device)
    return per_example_gradients(model, loss, x.to(device), y.to(device), chunk_bytes=chunk_bytes)


def assert_same(there: Vector, here: Vector, rtol: float = 1e-9) -> None:
    assert list(there) == list(here)
    for name, value in there.items():
        assert value.device.type == "cuda"
        assert torch.allclose(value.cpu(), here[name], rtol=rtol, atol=rtol / 100), name


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 28])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_cpu(name: str, chunk_bytes: int) -> None:
    there, here = on("cuda", name, chunk_bytes), on("cpu", name, chunk_bytes)
    vector = here.draw(stream(1))
    shares = {key: value.square() for key, value in vector.items()}
    moved, moved_shares = ({key: value.cuda() for key, value in each.items()} for each in (vector, shares))
    weights = torch.linspace(-1, 1, EXAMPLES, dtype=torch.float64)
    numbers = [
        (there.norms(), here.norms()),
        (there.absolute_sums(), here.absolute_sums()),
        (there.weighted_norms(moved_shares), here.weighted_norms(shares)),
        (there.dot(moved), here.dot(vector)),
        (there.gram(), here.gram()),
    ]
    rtol = ROUNDED.get(name, 1e-9)
    for left, right in numbers:
        assert torch.allclose(left.cpu(), right, rtol=rtol, atol=rtol / 100)
    assert_same(there.rows(1, 4), here.rows(1, 4), rtol)
    assert_same(there.combine(weights.cuda()), here.combine(weights), rtol)


@pytest.mark.parametrize("blocks", ["whole", "layer", "size:1", "size:7"])
@pytest.mark.parametrize("name", ["mlp", "conv", "embedding", "own-layer"])
def test_releases_are_on_the_device(name: str, blocks: str) -> None:
    """The noise is the same on both devices but for rounding."""
    mechanism = VmfMechanism(20.0, blocks)
    there, here = (mechanism.release(on(device, name, 1 << 28), EXAMPLES, stream(2)) for device in ("cuda", "cpu"))
    assert_same(there, here)
    assert all(value.device.type == "cuda" and bool(torch.isfinite(value).all()) for value in there.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    model, x, y = build("conv", EXAMPLES, torch.float32)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    exact = per_example_gradients(model, loss, x, y).rows(0, EXAMPLES)
    with torch.autocast("cuda", dtype):
        made = per_example_gradients(model, loss, x, y)
        rounded = made.rows(0, EXAMPLES)
    assert made.dtype == torch.float32
    for name, value in exact.items():
        assert (rounded[name] - value).norm() <= 2**-5 * value.norm()
