"""Norms of first layers against matrix norms of autograd's Jacobian, all sign vectors, and the torus."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor, nn

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import torch_stream
from fedpriv.core.world import build_world
from fedpriv.robustness.build import first_layer as of_world
from fedpriv.robustness.build import uniform_spread
from fedpriv.robustness.noise import RobustnessNoise
from fedpriv.robustness.norms import FirstLayer, dual_bound, estimated_norm, gram, layer_norms, sign_ascent
from tests.cases import in_one_test
from tests.robustness.smoothed_networks import first_layer, jacobian, seeded

LAYERS: dict[str, tuple[nn.Module, tuple[int, int, int]]] = {
    "3x3": (seeded(nn.Conv2d, 1, 4, 3, padding=1), (1, 6, 5)),
    "stride": (seeded(nn.Conv2d, 2, 4, 5, stride=2, padding=2), (2, 7, 7)),
    "groups": (seeded(nn.Conv2d, 2, 4, 3, groups=2), (2, 6, 6)),
    "dilated, reflected": (seeded(nn.Conv2d, 1, 3, 3, dilation=2, padding=2, padding_mode="reflect"), (1, 7, 6)),
    "no bias": (seeded(nn.Conv2d, 1, 2, 2, bias=False), (1, 5, 5)),
}


def around(layer: nn.Module, shape: tuple[int, int, int], std: float = 0.3) -> FirstLayer:
    channels = shape[0]
    return first_layer(nn.Sequential(RobustnessNoise(layer), nn.ReLU()), shape, (0.2,) * channels, (std,) * channels)


def matrix(first: FirstLayer, deviations: Tensor) -> Tensor:
    """A, (K, d), by autograd."""
    return jacobian(first, first.layer.layer) / deviations.double().flatten()[:, None]


@in_one_test("name", LAYERS)
def test_s2_is_the_spectral_norm(name: str) -> None:
    layer, shape = LAYERS[name]
    first = around(layer, shape)
    deviations = 0.5 + torch.rand(uniform_spread(first).shape, generator=torch_stream(1, "deviations"))
    wanted = float(torch.linalg.matrix_norm(matrix(first, deviations), 2))
    found = layer_norms(first, deviations)
    assert wanted <= found.l2 <= wanted * (1 + 1e-8)
    assert estimated_norm(first, deviations, "l2") <= found.l2 * (1 + 1e-5)
    assert estimated_norm(first, deviations, "l2") >= 0.9 * found.l2
    # At least every single column, at most all of A.
    assert float(matrix(first, deviations).norm(dim=0).max()) <= found.linf
    assert found.linf_least <= found.linf <= float(matrix(first, deviations).abs().sum(dim=1).norm()) * (1 + 1e-8)


def test_the_first_linear_layer_of_an_mlp() -> None:
    layer = seeded(nn.Linear, 12, 5)
    first = first_layer(nn.Sequential(nn.Flatten(), RobustnessNoise(layer), nn.ReLU()), (1, 3, 4), (0.1,), (0.25,))
    wanted = layer.weight.detach().double() / 0.25  # type: ignore[union-attr, operator]
    found = layer_norms(first, torch.ones(5))
    assert found.l2 == pytest.approx(float(torch.linalg.matrix_norm(wanted, 2)), rel=1e-8)


@pytest.mark.parametrize("place", ["hidden", "input"])
def test_the_worlds_first_layer_divides_by_the_data_sets_deviation(place: str) -> None:
    """Sizes are of pixels before they are normalised: forgetting that is a factor of 3.2 on MNIST."""
    settings = {"model": {"name": "lenet"}, "robustness": {"noise": 0.25, "place": place}, "engine": {"device": "cpu"}}
    world = build_world(Experiment.model_validate(settings))
    assert world.dataset.std != (1.0,) and world.forward_noise is not None
    first, deviations = of_world(world.dataset, world.model), world.forward_noise.first.layer.deviations
    assert deviations is not None
    layer = copy.deepcopy(world.forward_noise.first.layer.layer).double() if place == "hidden" else nn.Identity()

    def value(pixels: Tensor) -> Tensor:
        return layer((pixels - world.dataset.mean[0]) / world.dataset.std[0])

    columns = torch.autograd.functional.jacobian(value, torch.zeros(1, *first.shape, dtype=torch.float64))
    scaled = columns.reshape(deviations.numel(), -1) / deviations.double().flatten()[:, None]
    wanted = float(torch.linalg.matrix_norm(scaled, 2))
    assert layer_norms(first, deviations).l2 == pytest.approx(wanted, rel=1e-6)
    # What the settings promise, up to what a quick estimate of the norm misses: a margin of 1 is 0.25 pixels.
    assert 1 / wanted == pytest.approx(0.25, rel=0.02)


# ---- the largest change of a pixel -----------------------------------------------------------------------------------


def largest_over_signs(product: Tensor) -> float:
    """S_infinity: a convex function is largest in a corner."""
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(product))), dtype=torch.float64)
    return math.sqrt(float(((signs @ product) * signs).sum(dim=1).max()))


@pytest.mark.parametrize("name", ["signed", "low pass", "diagonal", "long rows", "blind"])
def test_s_infinity_against_all_signs(name: str) -> None:
    pixels = 12
    stream = torch_stream(3, "weights")
    weights = {
        "signed": torch.randn(20, pixels, generator=stream),
        "low pass": torch.rand(20, pixels, generator=stream),
        "diagonal": torch.diag(torch.rand(pixels, generator=stream)),
        "long rows": torch.randn(2, pixels, generator=stream),
        "blind": torch.randn(20, pixels, generator=stream) * (torch.arange(pixels) > 3),
    }[name]
    layer = nn.Linear(pixels, len(weights), bias=False)
    with torch.no_grad():
        layer.weight.copy_(weights)
    first = first_layer(nn.Sequential(nn.Flatten(), RobustnessNoise(layer)), (1, 3, 4))
    found, square = layer_norms(first, torch.ones(len(weights))), gram(first, torch.ones(len(weights))).matrix
    truth = largest_over_signs(square)
    # The best dual weights, by another optimiser, are within sqrt(pi / 2); ours need not be.
    best = optimize.minimize(
        lambda logs: dual_bound(square, torch.from_numpy(np.exp(logs))),
        np.log(square.abs().sum(dim=1).clamp(min=1e-6).numpy()),
        method="Nelder-Mead",
        options={"maxiter": 1500},
    ).fun
    assert found.linf_least <= truth <= found.linf
    assert truth <= best <= truth * math.sqrt(math.pi / 2) * 1.01
    if name in ("low pass", "diagonal"):
        assert found.linf == pytest.approx(truth, rel=1e-8)
    ascended = sign_ascent(lambda signs: signs @ square, torch.ones(1, pixels, dtype=torch.float64))
    assert ascended <= truth + 1e-9
    assert estimated_norm(first, torch.ones(len(weights)), "linf") <= truth * (1 + 1e-5)


def test_every_dual_weight_is_sound() -> None:
    stream = torch_stream(5, "weights")
    layer = torch.randn(15, 9, generator=stream, dtype=torch.float64)
    square = layer.T @ layer
    for _ in range(20):
        weights = torch.rand(9, generator=stream, dtype=torch.float64) + 1e-3
        assert dual_bound(square, weights) >= largest_over_signs(square)


def test_noise_on_the_image_is_exact() -> None:
    network = RobustnessNoise(nn.Flatten(), "input")
    network.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    first = first_layer(network, (2, 3, 3), (0.1, 0.2), (0.5, 0.25))
    deviations = 0.3 + torch.rand(2, 3, 3, generator=torch_stream(1, "d"))
    found = layer_norms(first, deviations)
    diagonal = torch.tensor([2.0, 4.0])[:, None, None].double() / deviations.double()
    assert found.l2 == pytest.approx(float(diagonal.max()), rel=1e-8)
    assert found.linf == pytest.approx(float(diagonal.norm()), rel=1e-8)
    assert estimated_norm(first, deviations, "linf") == found.linf


@in_one_test(("padding", "stride"), [(0, 1), (1, 1), (2, 1), (2, 2)])
def test_a_padded_convolution_is_part_of_one_on_a_torus(padding: int, stride: int) -> None:
    """An upper bound that needs no eigenvalues of G: the largest norm over the frequencies of a torus."""
    kernel, side = 5, 9
    layer = seeded(nn.Conv2d, 2, 3, kernel, padding=padding, stride=stride)
    first = first_layer(nn.Sequential(RobustnessNoise(layer)), (2, side, side), (0.0, 0.0), (1.0, 1.0))
    found = layer_norms(first, torch.ones(uniform_spread(first).shape)).l2
    spectrum = torch.fft.fft2(layer.weight.detach().double(), s=(side + kernel - 1,) * 2)  # type: ignore[union-attr, operator]
    torus = float(torch.linalg.matrix_norm(spectrum.permute(2, 3, 0, 1), 2).max())
    assert found <= torus * (1 + 1e-8)
    if stride == 1:
        assert found >= 0.7 * torus


def test_what_cannot_be_bounded_is_refused() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noisy = RobustnessNoise(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            value: Tensor = self.noisy.layer.float()(x.flatten(1).float())
            return self.noisy(x.flatten(1).float()) if value.dtype == torch.float32 else value

    first = first_layer(Single(), (1, 2, 2))
    with pytest.raises(ValueError, match=r"gives torch\.float32 for float64"):
        layer_norms(first, torch.ones(4))
    zero = nn.Sequential(nn.Flatten(), RobustnessNoise(nn.Linear(4, 4)))
    zero[1].layer.weight.data.zero_()
    with pytest.raises(ValueError, match="the network does not see the image"):
        layer_norms(first_layer(zero, (1, 2, 2)), torch.ones(4))


@in_one_test("deviation", [0.0, math.inf, math.nan])
def test_noise_that_float32_cannot_hold_proves_nothing(deviation: float) -> None:
    first = around(*LAYERS["3x3"])
    deviations = uniform_spread(first)
    deviations[0, 0, 0] = deviation
    with pytest.raises(InputError, match="the noise is not above 0 and finite"):
        layer_norms(first, deviations)
