"""Parts of attacks: each does what it says, all combine, and what is kept has the loss that is reported."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_victims import (
    MEAN,
    STD,
    Biasless,
    OwnHead,
    digits,
    errors,
    lenet,
    mlp,
    normalise,
    observe,
    observe_digits,
    parameters_of,
)
from torch import Tensor, nn

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.methods.custom import CustomSettings
from fedpriv.attacks.methods.dlg import DlgSettings, IdlgSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, run_attack
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.priors import fit_prior
from fedpriv.attacks.reconstruction.recipes import (
    PRIORS,
    SCHEDULES,
    SIGNS,
    STARTS,
    MatchProblem,
    Recipe,
    annealed,
    warmed,
)
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import prepare_victims
from fedpriv.attacks.reconstruction.variables import coordinates_of
from fedpriv.core.registry import ATTACKS
from tests.cases import in_one_test

OPTIMISERS = ("lbfgs", "adam", "signed-adam", "soft-signed-adam")
VARIABLES = ("pixels", "decorrelated")
PLAIN = ("squared-distance", "cosine")  # the likelihood has tests of its own
PUBLIC = digits()[0][800:]


def plain_loss(model: nn.Module, heard: Observation, images: Tensor, label: Tensor, config: CustomSettings) -> float:
    """Objective plus priors as one would write them for a single image on [0, 1], by autograd."""
    x = normalise(images).double()
    gradients = torch.autograd.grad(F.cross_entropy(model(x), label), list(model.parameters()))
    one = torch.cat([value.flatten() for value in gradients])
    other = torch.cat([value.flatten() for value in heard.upload.values()])
    apart = (one - other).square().sum() if config.objective == "squared-distance" else 1 - F.cosine_similarity(
        one, other, dim=0
    )  # fmt: skip
    variation = (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
    middle = normalise(PUBLIC)[torch.arange(len(PUBLIC)) % 5 != 4].mean(dim=0)  # the prior holds out a fifth
    return float(apart + config.tv * variation + config.public_mean * (x - middle).square().mean())


@pytest.mark.parametrize(
    ("objective", "optimiser", "variables", "start"), list(itertools.product(PLAIN, OPTIMISERS, VARIABLES, STARTS))[::3]
)
def test_all_parts_combine(objective: str, optimiser: str, variables: str, start: str) -> None:
    """The loss falls below that of the start, and the reported loss is that of the reported images."""
    model = mlp("tanh").double()
    heard, _, labels = observe_digits(model, 2, mechanism={"name": "none"})
    noisy, _, _ = observe_digits(model, 2)
    heard = [noisy[0], heard[1]]
    config = CustomSettings(
        objective=objective, optimiser=optimiser, variables=variables, start=start, iterations=15, tv=1e-3,
        public_mean=1e-3, learning_rate=0.02,
    )  # fmt: skip
    found = run_attack(AttackJob("custom", heard, model, config, 0, public_images=PUBLIC))
    for one, observation, label in zip(found, heard, labels, strict=True):
        assert one.loss is not None
        assert one.labels.tolist() == label.tolist()
        plain = plain_loss(model, observation, one.images, label, config)
        assert one.loss == pytest.approx(plain, rel=1e-3, abs=2e-6)
        short = config.model_copy(update={"iterations": 1})
        (first,) = run_attack(AttackJob("custom", [observation], model, short, 0, public_images=PUBLIC))
        assert first.loss is not None
        assert one.loss < first.loss or (start == "closed-form" and one.loss == pytest.approx(first.loss, rel=1e-3))


@pytest.mark.parametrize(("optimiser", "variables", "start"), list(itertools.product(OPTIMISERS, VARIABLES, STARTS)))
def test_parts_combine_for_networks_in_single_precision(optimiser: str, variables: str, start: str) -> None:
    model = mlp("tanh")
    heard, _, labels = observe_digits(model, 1)
    config = CustomSettings(optimiser=optimiser, variables=variables, start=start, iterations=3, learning_rate=0.02)
    (found,) = run_attack(AttackJob("custom", heard, model, config, 0, public_images=PUBLIC))
    assert found.loss is not None
    assert found.labels.tolist() == labels[0].tolist()


@in_one_test("optimiser", OPTIMISERS)
def test_the_likelihood_of_normal_noise_is_a_squared_distance(optimiser: str) -> None:
    """Of one example: |expected - heard|^2 over twice the variance, less the same of nothing; clipping included."""
    sigma, bound = 0.05, 0.5
    model = mlp("tanh").double()
    noise = {"name": "gaussian", "sigma": sigma, "clip_norm": bound}
    (heard,), _, label = observe_digits(model, 1, mechanism=noise)
    config = CustomSettings(objective="likelihood", optimiser=optimiser, iterations=15, tv=0.0)
    (found,) = run_attack(AttackJob("custom", [heard], model, config, 0))
    x = normalise(found.images).double()
    gradients = torch.autograd.grad(F.cross_entropy(model(x), label[0]), list(model.parameters()))
    one = torch.cat([value.flatten() for value in gradients])
    one = one * (bound / one.norm()).clamp(max=1.0)
    other = torch.cat([value.flatten() for value in heard.upload.values()])
    plain = ((one - other).square().sum() - other.square().sum()) / (2 * (sigma * bound) ** 2)
    assert found.labels.tolist() == label[0].tolist()
    assert found.loss == pytest.approx(float(plain), rel=1e-4)


@pytest.mark.parametrize("prior", sorted(PRIORS.keys() - {"denoiser"}))  # that one needs a file
def test_a_heavy_prior_decides(prior: str) -> None:
    """With next to all the weight on it, images end where the prior alone has its least value."""
    model = mlp("tanh")
    heard, truth, _ = observe_digits(model, 2)
    weights = {"tv": 0.0, "public_mean": 0.0, "gaussian": 0.0, "opponents": 0.0, prior: 1e4}
    optimiser = "adam" if prior in ("tv", "opponents") else "lbfgs"
    steps = 400 if prior == "gaussian" else 250
    config = CustomSettings(optimiser=optimiser, box=False, iterations=steps, learning_rate=0.05, **weights)
    found = run_attack(AttackJob("custom", heard, model, config, 0, public_images=PUBLIC))
    mean = PUBLIC[torch.arange(len(PUBLIC)) % 5 != 4].mean(dim=0)
    fitted = fit_prior(normalise(PUBLIC))
    for one in found:
        if prior in ("tv", "opponents"):
            assert float(one.images.std()) < 0.02  # no edges at all
        elif prior == "public_mean":
            assert float((one.images - mean).abs().max()) < 0.05
        else:
            assert float(fitted.energy(normalise(one.images))) < 0.05 * float(fitted.energy(normalise(truth[0])))
    assert float(errors([one.images for one in found], truth).min()) > 0.02


@in_one_test("channels", [1, 2, 3, 5])
def test_priors_take_any_number_of_channels(channels: int) -> None:
    """Peers' total variation and patterns assume three."""
    network = Network(nn.Sequential(nn.Flatten(), nn.Linear(channels * 56, 4)))
    mean, std = torch.full((channels, 1, 1), 0.4), torch.full((channels, 1, 1), 0.3)
    generator = torch.Generator().manual_seed(0)
    public = torch.rand(60, channels, 8, 7, generator=generator)
    scene = Scene(network, (channels, 8, 7), 4, mean, std, public)
    images = torch.randn(3, 2, channels, 8, 7, generator=generator)
    for prior in (PRIORS[name] for name in PRIORS.keys() - {"denoiser"}):
        values = prior(scene, images)
        assert values.shape == (3,)
        assert bool((values > 0).all())
        swapped = prior(scene, images.flip(1))  # the examples of a batch count alike
        torch.testing.assert_close(values, swapped)


def test_the_box_is_kept_and_only_where_it_is_asked_for() -> None:
    model = mlp("tanh")
    heard, _, _ = observe_digits(model, 1, mechanism={"name": "gaussian", "sigma": 0.1, "clip_norm": 1.0})
    network = Network(model)
    rows = prepare_victims(heard, network.names, network.device)
    scene = Scene.of(network, heard[0].settings, torch.float32, None)
    numbers = 3 * torch.randn(1, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for optimiser, variables, box in itertools.product(OPTIMISERS, VARIABLES, (False, True)):
        recipe = Recipe("cosine", optimiser, variables=variables, box=box)
        run = ATTACKS["custom"].runs()[0]
        config = CustomSettings(optimiser=optimiser, variables=variables, box=box, iterations=5, tv=0.0)
        images = run(scene, rows, numbers, torch.zeros(1, 1, 10), config, lambda done, losses: True).images.detach()
        inside = bool(torch.allclose(images, scene.box(images).to(images), atol=1e-6))
        assert inside == box, (recipe, float(images.abs().max()))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 7)])
def test_decorrelated_variables_can_be_had_of_images(shape: tuple[int, int, int]) -> None:
    coordinates = coordinates_of(shape)
    images = torch.randn(4, 2, *shape, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(coordinates.images(coordinates.of(images)), images)


@in_one_test("steps", [8, 100, 37])
def test_the_schedule_in_steps_is_that_of_torch(steps: int) -> None:
    adam = torch.optim.Adam([torch.zeros(1)], lr=1.0)
    milestones = [int(share * steps) for share in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, milestones=milestones, gamma=0.1)
    for done in range(steps):
        assert SCHEDULES["steps"](done, steps) == pytest.approx(adam.param_groups[0]["lr"])
        adam.step()
        schedule.step()
    assert SCHEDULES["cosine"](0, steps) == 1.0
    assert SCHEDULES["cosine"](steps, steps) == pytest.approx(0.0, abs=1e-12)
    assert {SCHEDULES["constant"](done, steps) for done in range(steps)} == {1.0}


@in_one_test(("start", "end", "steps"), [(0.05, 1e-3, 10), (0.0, 1e-4, 3), (1e-2, 0.0, 7), (1e-5, 1e-2, 5)])
def test_weights_fall_with_the_square_of_the_steps_left(start: float, end: float, steps: int) -> None:
    weights = [annealed(start, end, done, steps) for done in range(steps + 1)]
    assert weights == pytest.approx([max(end, start * ((steps - done) / steps) ** 2) for done in range(steps + 1)])
    assert (weights[0], weights[-1]) == (max(start, end), end)


def test_the_rate_rises_to_the_schedule_and_stays() -> None:
    assert [warmed(done, 4) for done in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmed(0, 0) == 1.0


@in_one_test("share", [1.0, 0.5, 1e-3])
def test_soft_signs_are_gradients_cut(share: float) -> None:
    gradients = torch.tensor([0.0, 1e-9, -1e9, 0.3], dtype=torch.float64)
    wanted = [math.tanh(share * value) / share for value in gradients.tolist()]
    assert SIGNS["soft-signed-adam"](gradients, share).tolist() == pytest.approx(wanted)
    assert SIGNS["signed-adam"](gradients, share).tolist() == [0.0, 1.0, -1.0, 1.0]
    assert SIGNS["adam"](gradients, share) is gradients


def test_starts_are_where_they_say() -> None:
    """Uniform over the pixels' range, around the public mean, and at the image of the closed form."""
    model = mlp("tanh")
    heard, truth, _ = observe_digits(model, 2)
    network = Network(model)
    first, second = prepare_victims(heard, network.names, network.device)
    scene = Scene.of(network, heard[0].settings, torch.float32, PUBLIC)
    rows = [first] * 40 + [second] * 40
    numbers = torch.randn(80, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    uniform = STARTS["uniform"](scene, rows, numbers) * STD + MEAN
    # 5,120 draws: a Kolmogorov-Smirnov distance above 0.03 has a probability below 1e-3.
    sorted_values = uniform.flatten().sort().values
    assert float((sorted_values - torch.linspace(0, 1, len(sorted_values))).abs().max()) < 0.03
    around = STARTS["public-mean"](scene, rows, numbers)
    torch.testing.assert_close(around.mean(dim=(0, 1)), scene.prior.mean.view(1, 8, 8), atol=0.06, rtol=0)
    problem = MatchProblem(Recipe("cosine", "adam", start="closed-form"), scene, rows, CustomSettings())
    read = problem.start("closed-form", rows, numbers) * STD + MEAN
    torch.testing.assert_close(read[[0, 40]], truth, atol=1e-5, rtol=0)
    assert float((read[1:40] - truth[0]).flatten(1).std(dim=1).min()) > 0.01  # other restarts start elsewhere
    patterned = STARTS["patterned"](scene, rows, numbers)
    for down, across in itertools.product((0, 4), (0, 4)):
        assert torch.equal(patterned[..., down : down + 4, across : across + 4], numbers[..., :4, :4])


def test_a_start_that_cannot_be_had_is_one_line() -> None:
    model = lenet()
    heard, _, _ = observe_digits(model, 2)
    result = attack_each(AttackJob("custom", heard, model, CustomSettings(start="closed-form", iterations=2), 0))
    assert set(result.failures) == {0, 1}
    assert "first layer multiplies the image itself" in result.failures[0]
    assert "\n" not in result.failures[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp sigmoid": mlp,
    "mlp relu": lambda: mlp("relu", (64, 32)),
    "lenet": lenet,
    "lenet default": lambda: lenet("default"),
    "own head": lambda: OwnHead(activation=torch.tanh),
    "no bias": lambda: Biasless(torch.tanh),
}


@pytest.mark.parametrize("name", MODELS)
def test_idlg_names_every_label_of_single_examples(name: str) -> None:
    """All of 60, whatever the images come to."""
    model = MODELS[name]()
    heard, _, labels = observe_digits(model, 60, first=200)
    found = run_attack(AttackJob("idlg", heard, model, IdlgSettings(iterations=1, restarts=1), 0))
    assert [one.labels.tolist() for one in found] == labels.tolist()
    assert all(one.note == "" for one in found)


@pytest.mark.parametrize("make", [mlp, lenet])
def test_idlg_is_dlg_that_knows_the_labels(make: Any) -> None:
    """From the same starts, to the last digit; and labels that are known are not read again."""
    model = make().double()
    heard, _, labels = observe_digits(model, 3)
    told = [replace(one, labels=(int(label),)) for one, label in zip(heard, labels, strict=True)]
    network = Network(model)
    scene = Scene.of(network, heard[0].settings, torch.float64, None)
    numbers = torch.randn(3, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    logits = torch.zeros(3, 1, 10).double()
    rows, known = (prepare_victims(one, network.names, network.device) for one in (heard, told))

    def run(name: str, victims: Any, config: DlgSettings) -> Any:
        return ATTACKS[name].runs()[0](scene, victims, numbers, logits, config, lambda done, losses: True)

    one, other = run("idlg", rows, IdlgSettings(iterations=30)), run("dlg", known, DlgSettings(iterations=30))
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.labels, other.labels)
    wrong = [replace(victim, labels=(victim.labels + 1) % 10) for victim in known]
    assert run("idlg", wrong, IdlgSettings(iterations=1)).labels.tolist() == [[(int(k) + 1) % 10] for k in labels]


def test_the_best_of_restarts_is_chosen_by_its_own_loss() -> None:
    """Never by the truth, which an adversary does not have. Of uploads that are noise alone the chosen restart is the
    nearest in one of six; of all six victims by chance in 1 of 46,656 such tests.
    """
    model = lenet()
    images, labels = digits()
    noise = {"name": "vmf", "kappa": 0.0}
    heard = [observe(model, images[[k]], labels[[k]], client=k, mechanism=noise) for k in range(6)]
    config = CustomSettings(iterations=20, restarts=6)
    found = run_attack(AttackJob("custom", heard, model, config, 0))
    nearest = 0
    for k, one in enumerate(found):
        assert one.loss == min(loss for loss in one.losses if loss is not None)
        apart = [float((attempt.images - images[[k]]).square().mean()) for attempt in one.attempts]
        nearest += apart[one.chosen] == min(apart)
    assert nearest < len(found)


def test_attacks_leave_the_model_alone() -> None:
    model = mlp()
    before = parameters_of(model)
    heard, _, _ = observe_digits(model, 1)
    for name in ("dlg", "idlg", "iga", "closed_form", "custom"):
        config = ATTACKS[name]()
        short = config.model_copy(update={"iterations": 2, "restarts": 1}) if name != "closed_form" else config
        run_attack(AttackJob(name, heard, model, short, 0))
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


class Failing(nn.Module):
    """A network that fails in its forward pass."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.last, self.error = nn.Linear(16, 3), error

    def forward(self, images: Tensor) -> Tensor:
        raise self.error


@in_one_test(
    ("error", "raised"),
    [
        (RuntimeError("no rule for this operator"), AttackRefused),
        (ValueError("no rule for this operator"), AttackRefused),
        (NotImplementedError("no rule for this operator"), AttackRefused),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), RuntimeError),
        (KeyError("a bug of the network"), KeyError),
    ],
)
def test_a_network_without_gradients_refuses_the_attack_with_its_reason(
    error: Exception, raised: type[Exception]
) -> None:
    """What has other causes, such as memory that is lacking, is raised as it is."""
    network = Network(Failing(error))
    images, labels = torch.zeros(1, 1, 1, 4, 4), torch.full((1, 1, 3), 1 / 3)
    with pytest.raises(raised) as caught:
        network.gradients(dict(network.model.named_parameters()), images, labels, shared=True, each=False)
    assert type(caught.value) is raised
    if raised is AttackRefused:
        assert str(caught.value).endswith("through this network fail: no rule for this operator")
        assert caught.value.__cause__ is not None
