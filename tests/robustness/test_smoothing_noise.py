"""The noise layer: its law, that it is fresh, when it is silent; shares; and what a network has to be like."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import nn
from torch.nn import functional

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import torch_stream
from fedpriv.core.world import build_world
from fedpriv.gradients import find_route, per_example_gradients
from fedpriv.gradients.calls import dropout_layers
from fedpriv.robustness.build import (
    build_smoothing,
    bypass,
    certified_rows,
    informative_spread,
    mixes,
    public_rows,
    row_spread,
    shares_spread,
    uniform_spread,
    vulnerable_spread,
    with_noise,
)
from fedpriv.robustness.noise import Place, RobustnessNoise, noise_layers
from fedpriv.robustness.settings import RobustnessConfig
from tests.cases import in_one_test
from tests.robustness.smoothed_networks import Bent, Skip, first_layer, jacobian, seeded

SHAPE = (1, 4, 4)


def network(seed: int = 0) -> nn.Sequential:
    conv = seeded(nn.Conv2d, 1, 3, 3, padding=1, seed=seed)
    return nn.Sequential(RobustnessNoise(conv), nn.ReLU(), nn.Flatten(), seeded(nn.Linear, 48, 3, seed=seed))


def fixed(model: nn.Module, deviations: torch.Tensor) -> RobustnessNoise:
    """The noise layer, with noise of given deviations, whatever the weights are."""
    layer = noise_layers(model)[0]
    layer.deviations = deviations
    return layer


# ---- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["hidden", "input"])
def test_the_covariance_is_sigma(place: str) -> None:
    """Sums of squares, plain and of pairs, over 20,000 draws; all tests together alarm falsely once in 10,000 times."""
    inner = seeded(nn.Linear, 6, 6)
    model = nn.Sequential(RobustnessNoise(inner if place == "hidden" else nn.Identity(), place))  # type: ignore[arg-type]
    deviations = torch.tensor([0.2, 0.5, 1.0, 1.5, 2.0, 3.0])
    x = torch.ones(20_000, 6)
    model.eval()
    with fixed(model, deviations).drawing(torch_stream(1, "noise")), torch.no_grad():
        noise = (model(x) - (inner(x) if place == "hidden" else x)) / deviations
    draws, tests = len(x), 6 + 15 + 6
    level = 1e-4 / tests
    low, high = stats.chi2.ppf([level / 2, 1 - level / 2], draws)
    squares = noise.double().square().sum(dim=0)
    assert bool(((squares > low) & (squares < high)).all())
    products = (noise.double().T @ noise.double() / math.sqrt(draws))[~torch.eye(6, dtype=torch.bool)]
    assert float(products.abs().max()) < stats.norm.isf(level / 2)
    assert float((noise.double().sum(dim=0) / math.sqrt(draws)).abs().max()) < stats.norm.isf(level / 2)


def test_noise_is_fresh_for_each_example_and_pass() -> None:
    model = network()
    layer = fixed(model.eval(), torch.ones(3, 4, 4))
    x = torch.zeros(5, *SHAPE)
    with layer.drawing(torch_stream(1, "noise")), torch.no_grad():
        passes = torch.cat([model(x), model(x)])
    assert len(passes.unique(dim=0)) == 10


def test_it_draws_while_training_and_is_silent_in_evaluation() -> None:
    model, x = network(), torch.rand(2, *SHAPE)
    bare = nn.Sequential(model[0].layer, *list(model)[1:])  # type: ignore[arg-type, union-attr]
    assert torch.equal(model(x), bare(x)) and dropout_layers(model) == ()
    layer = fixed(model, torch.ones(3, 4, 4))
    assert dropout_layers(model) == ("0",)
    assert torch.equal(model.eval()(x), bare(x))
    model.train()
    assert not torch.equal(model(x), bare(x))
    model.eval()
    with layer.drawing(torch_stream(1, "noise")):
        noisy = model(x)
    with layer.drawing(torch_stream(1, "noise")):
        assert torch.equal(model(x), noisy)
    assert torch.equal(model(x), bare(x)) and not torch.equal(noisy, bare(x))
    assert [name for name, _ in model.named_buffers()] == []  # buffers are uploaded


def test_the_scale_follows_the_weights() -> None:
    """However large W becomes, a margin of 1 is sigma pixels."""
    model = network()
    first = first_layer(model, SHAPE, (0.1,), (0.4,))
    config = RobustnessConfig(noise=0.25, redistribution="rows")
    smoothing = build_smoothing(config, first, lambda _: pytest.fail("no public image is needed"))
    before = first.layer.deviations
    with torch.no_grad():
        model[0].layer.weight.mul_(10)  # type: ignore[union-attr, operator]
    with smoothing.drawing(1):
        after = first.layer.deviations
    assert before is not None and after is not None
    assert torch.allclose(after, 10 * before, rtol=1e-5)
    largest = torch.linalg.matrix_norm(jacobian(first, model[0].layer) / after.double().flatten()[:, None], 2)  # type: ignore[arg-type]
    assert 1 / float(largest) == pytest.approx(0.25, rel=0.01)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["ghost", "dense"])
def test_gradients_are_autograds_with_the_same_noise(route: str) -> None:
    model = network().train()
    if route == "dense":
        model.append(_Doubled())
    layer = fixed(model, 0.1 + torch.rand(3, 4, 4, generator=torch_stream(1, "d")))
    x, y = torch.rand(6, *SHAPE, generator=torch_stream(1, "x")), torch.arange(6) % 3
    x[1], y[1] = x[0], y[0]

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, labels, reduction="none")

    way = find_route(model, loss, x, y)
    with layer.drawing(torch_stream(7, "noise")):
        found = per_example_gradients(model, loss, x, y, route=way)
        assert any(way.startswith(route) for way in found.routes.values())
        rows = found.rows(0, 6)
    assert not torch.allclose(rows["3.weight"][0], rows["3.weight"][1])  # the same image, other noise
    with layer.drawing(torch_stream(7, "noise")):
        losses = loss(model(x), y)
    for position, one in enumerate(losses):
        wanted = torch.autograd.grad(one, list(model.parameters()), retain_graph=True)
        for name, gradient in zip(rows, wanted, strict=True):
            assert torch.allclose(rows[name][position], gradient, atol=1e-6)


class _Doubled(nn.Module):
    """A layer with a parameter of its own and no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bc,->bc", x, self.scale)


# ---- shares ----------------------------------------------------------------------------------------------------------


def test_shares_sum_to_one_and_a_tenth_is_even() -> None:
    sensitivity = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    for beta in (0.5, 1.0, 2.0):
        shares = shares_spread(sensitivity, beta).square() / 4
        assert float(shares.sum()) == pytest.approx(1)
        assert shares.tolist() == pytest.approx((0.9 * sensitivity**beta / (sensitivity**beta).sum() + 0.025).tolist())
    assert shares_spread(torch.zeros(3), 1.0).tolist() == [1, 1, 1]
    with pytest.raises(InputError, match="NaN or infinite"):
        shares_spread(torch.tensor([1.0, math.nan]), 1.0)


@pytest.mark.parametrize("place", ["hidden", "input"])
def test_vulnerable_shares_are_equation_nine(place: str) -> None:
    inner = network()
    on_image = RobustnessNoise(nn.Sequential(nn.Flatten(), seeded(nn.Linear, 16, 3)), "input")
    model = inner if place == "hidden" else on_image
    first = first_layer(model, SHAPE, (0.1,), (0.4,))
    images, labels = torch.rand(5, *SHAPE, generator=torch_stream(1, "x")), torch.tensor([0, 1, 2, 0, 1])
    pixels = images.clone().requires_grad_()
    if place == "hidden":
        z = inner[0].layer(first.normalise(images)).detach().requires_grad_()  # type: ignore[union-attr, operator]
        of, logits = z, nn.Sequential(*list(inner)[1:])(z)
    else:
        of, logits = pixels, model(first.normalise(pixels))
    slopes = [
        torch.autograd.grad(functional.cross_entropy(logits[k : k + 1], labels[k : k + 1]), of, retain_graph=True)[0][k]
        for k in range(5)
    ]
    wanted = shares_spread(torch.stack(slopes).double().mean(dim=0).abs(), 2.0)
    found = vulnerable_spread(first, images, labels, 2.0)
    scale = 1.0 if place == "hidden" else 1 / 0.4  # on the image shares are of pixels, noise of what the network gets
    assert torch.allclose(found, scale * wanted, rtol=1e-4)


def test_rows_make_the_rows_of_a_even() -> None:
    model = nn.Sequential(nn.Flatten(), RobustnessNoise(seeded(nn.Linear, 16, 9)))
    first = first_layer(model, SHAPE, (0.0,), (0.5,))
    lengths = jacobian(first, nn.Sequential(nn.Flatten(), model[1].layer)).norm(dim=1)  # type: ignore[arg-type]
    assert torch.allclose(row_spread(first, 1.0), shares_spread(lengths**2, 1.0), rtol=1e-6)


def test_informative_shares_fill_water() -> None:
    """Against a general optimiser: precisions of a given sum that most reduce the images' uncertainty."""
    model = RobustnessNoise(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "input")
    first = first_layer(model, (1, 2, 2), (0.0,), (0.5,))
    deviations = torch.tensor([0.0, 0.1, 0.3, 0.5]).view(1, 2, 2)
    images = torch.stack([0.5 + deviations, 0.5 - deviations])
    sigma = 0.4
    precisions = (informative_spread(first, images, sigma) * 0.5).double().reciprocal().square().flatten()
    budget = 4 / sigma**2
    assert float(precisions.sum()) == pytest.approx(budget, rel=1e-9)
    filled = precisions.numpy() - 0.1 * budget / 4
    variances = deviations.flatten().double().numpy() ** 2
    best = optimize.minimize(
        lambda t: -np.log1p(variances * t).sum(),
        np.full(4, 0.225 * budget),
        bounds=[(0, None)] * 4,
        constraints={"type": "eq", "fun": lambda t: t.sum() - 0.9 * budget},
        options={"ftol": 1e-14},
    ).x
    assert filled == pytest.approx(best, abs=2e-3 * budget)
    with pytest.raises(InputError, match="all the same"):
        informative_spread(first, torch.zeros(3, 1, 2, 2), sigma)


def test_even_shares_on_the_image_are_even_in_pixels() -> None:
    model = RobustnessNoise(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)), "input")
    first = first_layer(model, (2, 2, 2), (0.0, 0.0), (0.5, 0.25))
    assert uniform_spread(first).amax(dim=(1, 2)).tolist() == [2, 4]


# ---- which images ----------------------------------------------------------------------------------------------------


def test_public_and_certified_images_are_disjoint() -> None:
    public, certified = public_rows(3, 100, 40), certified_rows(3, 100, 60, 40)
    assert sorted([*public.tolist(), *certified.tolist()]) == list(range(100))
    assert set(certified_rows(3, 100, 10, 0).tolist()) <= set(certified.tolist())
    assert public_rows(4, 100, 40).tolist() != public.tolist()


def test_too_few_test_images_are_refused() -> None:
    for wanted in (100, 101):
        with pytest.raises(InputError, match=rf"robustness\.public_examples = {wanted}: there are 100 test images"):
            public_rows(3, 100, wanted)
    assert len(public_rows(3, 100, 99)) == 99
    with pytest.raises(InputError, match="allowed is from 1 to 60; there are 100 test images, 40 of them public"):
        certified_rows(3, 100, 61, 40)
    with pytest.raises(InputError, match="allowed is from 1 to 100"):
        certified_rows(3, 100, 0, 0)


# ---- what goes past the noise ----------------------------------------------------------------------------------------


@in_one_test(
    ("model", "why"),
    [
        (Skip("input"), "goes past"),
        (Skip("mean"), "goes past"),
        (Skip("sign"), "goes past"),
        (Skip("value only"), "goes past"),
        (Skip("gradient only"), "goes past"),
        (Skip("twice"), "called 2 times"),
        (Bent("relu"), "not affine"),
        (Bent("square"), "not affine"),
        (Bent("scaled"), "not affine"),
        (nn.Sequential(nn.Flatten(), nn.ReLU(), RobustnessNoise(nn.Linear(16, 3))), "not affine"),
        (nn.Sequential(nn.Flatten(), RobustnessNoise(nn.Linear(16, 4)), RobustnessNoise(nn.Linear(4, 3))), "it has 2"),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "it has 0"),
    ],
)
def test_networks_whose_noise_proves_nothing_are_told(model: nn.Module, why: str) -> None:
    reason = bypass(model.eval(), SHAPE, torch_stream(1, "trial"))
    assert reason is not None and why in reason and "\n" not in reason


@in_one_test("how", ["none", "linear before", "batch norm after"])
def test_sound_networks_pass(how: str) -> None:
    before = [nn.Linear(16, 16)] if how == "linear before" else []
    after = [nn.BatchNorm1d(4)] if how == "batch norm after" else []
    model = nn.Sequential(nn.Flatten(), *before, RobustnessNoise(nn.Linear(16, 4)), *after, nn.ReLU(), nn.Linear(4, 3))
    assert bypass(model.eval(), SHAPE, torch_stream(1, "trial")) is None


@in_one_test("name", ["lenet", "mlp", "convnet", "resnet", "strided"])
@in_one_test("place", ["hidden", "input"])
def test_all_our_networks_take_noise(name: str, place: str) -> None:
    settings = {"model": {"name": name}, "robustness": {"noise": 0.5, "place": place}, "engine": {"device": "cpu"}}
    world = build_world(Experiment.model_validate(settings))
    (layer,) = noise_layers(world.model)
    assert layer.place == place and layer.deviations is not None
    assert world.initial.buffers == {}


def test_own_networks_without_a_noise_layer_get_one_where_it_is_sound() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
    made = with_noise(copy.deepcopy(plain), "hidden", SHAPE, 1)
    assert made.training and isinstance(made[1], RobustnessNoise)  # type: ignore[index]
    assert isinstance(with_noise(plain, "input", SHAPE, 1), RobustnessNoise)
    with pytest.raises(
        InputError, match=r"robustness.place = 'hidden': something .* goes past .* or use place = 'input'"
    ):
        with_noise(Skip("input"), "hidden", SHAPE, 1)
    with pytest.raises(InputError, match="no Conv or Linear layer"):
        with_noise(nn.Flatten(), "hidden", SHAPE, 1)
    alone = with_noise(nn.Linear(4, 3), "hidden", (1, 1, 4), 1)
    assert isinstance(alone, RobustnessNoise)


class Centred(nn.Module):
    """Subtracts the mean of the batch, of what it is given or behind its first layer."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.first, self.last = where, seeded(nn.Linear, 16, 4), seeded(nn.Linear, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        hidden = self.first(x - x.mean(dim=0) if self.where == "before" else x)
        return self.last(torch.relu(hidden - hidden.mean(dim=0) if self.where == "behind" else hidden))


@in_one_test("place", ["hidden", "input"])
@in_one_test("where", ["before", "behind"])
def test_networks_whose_votes_depend_on_one_another_are_refused(where: str, place: Place) -> None:
    with pytest.raises(InputError, match="depends on the others of its batch"):
        with_noise(Centred(where), place, SHAPE, 1)
    with_noise(Centred("nowhere"), place, SHAPE, 1)


class Gated(nn.Module):
    """Subtracts the mean of the batch behind its first layer, from images whose pixel has this sign only."""

    def __init__(self, sign: int, pixel: int) -> None:
        super().__init__()
        self.sign, self.pixel = sign, pixel
        self.first, self.last = seeded(nn.Linear, 16, 4), seeded(nn.Linear, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        hidden = self.first(x)
        open_ones = (self.sign * x[:, self.pixel] > 0)[:, None]
        return self.last(hidden - open_ones * hidden.mean(dim=0))


@in_one_test("sign", [1, -1])
@in_one_test("pixel", range(4))
def test_images_that_meet_for_some_of_them_only_are_found(sign: int, pixel: int) -> None:
    """With either sign, so that whichever image is tried first, half of these networks leave it alone."""
    images = torch.randn(6, 16, generator=torch_stream(3, "trial"))[:3, pixel]
    assert mixes(Gated(sign, pixel).eval(), SHAPE, torch_stream(3, "trial")) == bool((sign * images > 0).any())


def test_a_network_may_draw_random_numbers_of_its_own_behind_the_image() -> None:
    class Always(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(x, self.p)

    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), Always(0.5))
    with_noise(network, "input", SHAPE, 1)


class Picky(nn.Module):
    """Raises where somebody looks at it closely."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.noisy = how, RobustnessNoise(nn.Linear(16, 3))

    def __deepcopy__(self, memo: object) -> "Picky":
        raise RuntimeError("only one of me")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "range" and bool((x < 0).any()):
            raise ValueError("colours are not negative")
        return self.noisy(x.flatten(1))


def test_what_own_networks_raise_is_one_line() -> None:
    with pytest.raises(InputError, match="cannot be tried on random images: ValueError: colours are not negative"):
        with_noise(Picky("range"), "hidden", SHAPE, 1)
    with pytest.raises(InputError, match="cannot be copied, as its norm needs: RuntimeError: only one of me"):
        first_layer(Picky("copy"), SHAPE).exact()


def test_the_estimate_of_a_copy_is_of_the_copy() -> None:
    """Engines and attacks copy networks; noise is scaled to the weights at hand."""
    model = network()
    smoothing = build_smoothing(
        RobustnessConfig(noise=0.5), first_layer(model, SHAPE), lambda _: pytest.fail("not needed")
    )
    before = smoothing.first.layer.deviations
    other, copied = copy.deepcopy((model, smoothing))
    with torch.no_grad():
        other[0].layer.weight.mul_(10)  # type: ignore[union-attr, operator]
    after = copied.fitted().first.layer.deviations
    assert before is not None and after is not None
    assert torch.allclose(after, 10 * before, rtol=1e-5)
    assert smoothing.fitted().first.layer.deviations is not None
    assert torch.equal(smoothing.first.layer.deviations, before)  # type: ignore[arg-type]
