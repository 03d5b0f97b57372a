"""The posterior's likelihoods against scipy's densities, its gradient against autograd, whitening against algebra."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attack_victims import digits, example_gradients, lenet, mlp, normalise, observe, settings
from scipy import stats
from torch import Tensor

from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.first_layer.closed_form import read_starts
from fedpriv.attacks.reconstruction.matching import Matcher
from fedpriv.attacks.reconstruction.posterior import Whitening, can_be_gated, misfit, open_labels
from fedpriv.attacks.reconstruction.priors import fit_prior, generic_prior
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import UploadModel, Victim, prepare_victims
from fedpriv.core.randomness import NoiseStream
from fedpriv.gradients import DenseGradients, Vector
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.machinery.base import BlockMechanism
from fedpriv.mechanisms.machinery.law import Noise
from fedpriv.mechanisms.machinery.redistribution import layer_shares
from tests.cases import in_one_test
from tests.noise import stream

MECHANISMS: dict[str, dict[str, Any]] = {
    "gaussian": {"name": "gaussian", "sigma": 0.3, "clip_norm": 0.05},
    "gaussian, clipped far above": {"name": "gaussian", "sigma": 0.3, "clip_norm": 1e3},
    "gaussian by layer": {"name": "gaussian", "sigma": 0.3, "clip_norm": 0.05, "clipping": "layer"},
    "laplace": {"name": "laplace", "scale": 0.2, "clip_norm": 2.0},
    "vmf": {"name": "vmf", "kappa": 300.0},
    "vmf by layer": {"name": "vmf", "kappa": 30.0, "blocks": "layer"},
    "vmf in pieces": {"name": "vmf", "kappa": 20.0, "blocks": "size:500"},
    "hgm": {"name": "hgm", "sigma": 0.3, "clip_norm": 0.05},
}


def heard_digits(model: torch.nn.Module, mechanism: dict[str, Any], count: int, batch: int = 1) -> list[Observation]:
    """Observations in float64, of ``count`` clients."""
    images, labels = digits()
    if mechanism["name"] != "hgm":
        return [
            observe(model, images[k * batch : (k + 1) * batch], labels[k * batch : (k + 1) * batch], client=k,
                    mechanism=mechanism) for k in range(count)
        ]  # fmt: skip
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    shares = layer_shares(parameters)
    built = mechanism_settings(mechanism).mechanism(shares)
    heard = []
    for k in range(count):
        rows = slice(k * batch, (k + 1) * batch)
        gradients = example_gradients(model, normalise(images[rows]).double(), labels[rows])
        mean = {name: value.mean(dim=0) for name, value in gradients.items()}
        public = settings(mechanism=mechanism, batch_size=batch)
        heard.append(Observation(1, k, parameters, built.expected(mean), public, shares))
    return heard


def evaluate(model: torch.nn.Module, heard: list[Observation], images: Tensor, labels: Tensor) -> Tensor:
    network = Network(model)
    victims = prepare_victims(heard, network.names, network.device)
    return Matcher(network, victims, misfit)(images, F.one_hot(labels, 10).double())


def literal(model: torch.nn.Module, observation: Observation, x: Tensor, y: Tensor) -> Tensor:
    """Minus the log-likelihood of an upload given images (B, 1, 8, 8), as the textbook's density has it."""
    settings = observation.settings.mechanism
    rows = []
    for k in range(len(x)):
        loss = F.cross_entropy(model(x[k : k + 1]), y[k : k + 1])
        rows.append(torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    heard = torch.cat([value.flatten() for value in observation.upload.values()])
    if settings["name"] == "vmf":
        flat = torch.cat([value.flatten() for value in rows[0]])
        sizes = {"layer": [value.numel() for value in rows[0]], "size:500": 500}
        pieces = sizes.get(settings.get("blocks", "whole"), len(flat))
        pairs = zip(flat.split(pieces), heard.split(pieces), strict=True)
        return torch.stack([-settings["kappa"] * F.normalize(one, dim=0) @ other for one, other in pairs]).sum()
    roots = torch.ones_like(heard)
    if observation.redistribution is not None:
        shares = torch.cat([value.flatten() for value in observation.redistribution.shares.values()])
        roots = (len(heard) * shares).sqrt()
    expected = torch.stack([clipped(row, settings, roots) for row in rows]).mean(dim=0)
    noise = settings.get("sigma", settings.get("scale")) * settings["clip_norm"] / len(x) * roots
    scaled = (heard - expected) / noise
    return scaled.abs().sum() if settings["name"] == "laplace" else scaled.square().sum() / 2


def clipped(gradient: Sequence[Tensor], settings: Mapping[str, Any], roots: Tensor) -> Tensor:
    """One example's gradient as its mechanism clips it, flat."""
    flat = torch.cat([value.flatten() for value in gradient])
    bound = float(settings["clip_norm"])
    if settings["name"] == "laplace":
        return flat * (bound / flat.abs().sum()).clamp(max=1)
    if settings.get("clipping") == "layer":
        limit = bound / math.sqrt(len(gradient))
        return torch.cat([(value * (limit / value.norm()).clamp(max=1)).flatten() for value in gradient])
    factor: Tensor = (bound / (flat / roots).norm()).clamp(max=1)
    return flat * factor


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("make", [lenet, mlp])
def test_values_and_gradients_against_the_literal_formula(make: Any, batch: int, mechanism: dict[str, Any]) -> None:
    """Up to a constant of the upload; for a sum of von Mises-Fisher draws there is no literal formula."""
    if mechanism["name"] == "vmf" and batch > 1:
        pytest.skip("no closed density")
    model = make().double()
    heard = heard_digits(model, mechanism, 2, batch)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 2, batch, 1, 8, 8, generator=generator).double().requires_grad_()
    y = torch.randint(10, (2, batch), generator=generator)
    found = [evaluate(model, heard, x[number], y) for number in range(2)]
    wanted = [torch.stack([literal(model, heard[k], x[number, k], y[k]) for k in range(2)]) for number in range(2)]
    torch.testing.assert_close(found[1] - found[0], wanted[1] - wanted[0], rtol=1e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(found[0].sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad(wanted[0].sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8 * float(expected.abs().max()))


@in_one_test("name", ["gaussian", "laplace", "vmf"])
def test_densities_are_scipys(name: str) -> None:
    """Differences between two images' log-likelihoods, for softmax regression, 650 parameters."""
    model = mlp(hidden=()).double()
    mechanism = MECHANISMS[name]
    (observation,) = heard_digits(model, mechanism, 1)
    network = Network(model)
    (victim,) = prepare_victims([observation], network.names, network.device)
    heard = np.concatenate([value.flatten().numpy() for value in observation.upload.values()])
    generator = torch.Generator().manual_seed(1)
    values, densities = [], []
    for _ in range(3):
        x, y = torch.randn(1, 1, 1, 8, 8, generator=generator).double(), torch.tensor([[4]])
        values.append(evaluate(model, [observation], x, y).item())
        rows = example_gradients(model, x[0], y[0])
        sent = victim.model.expected(rows)
        mean = np.concatenate([value[0].flatten().numpy() for value in sent.values()])
        if name == "gaussian":
            densities.append(stats.norm(mean, mechanism["sigma"] * mechanism["clip_norm"]).logpdf(heard).sum())
        elif name == "laplace":
            densities.append(stats.laplace(mean, mechanism["scale"] * mechanism["clip_norm"]).logpdf(heard).sum())
        else:
            direction = mean / np.linalg.norm(mean)
            densities.append(stats.vonmises_fisher(direction, mechanism["kappa"]).logpdf(heard / np.linalg.norm(heard)))
    assert np.diff(values) == pytest.approx(-np.diff(densities), rel=1e-6)


@in_one_test("kappa", [5.0, 200.0, 1e4])
def test_variance_of_a_sum_of_draws(kappa: float) -> None:
    """Four draws around one direction, 4,000 sums: the variance across it, within 5 standard errors (1 in 10^6)."""
    dimension, count, draws = 50, 4000, 4
    direction = np.eye(dimension)[0]
    y = stats.vonmises_fisher(direction, kappa).rvs(count * draws, random_state=7).reshape(count, draws, dimension)
    across = (y.mean(axis=1)[:, 1:] ** 2).mean()
    public = settings(mechanism={"name": "vmf", "kappa": kappa}, batch_size=draws)
    (variance,) = UploadModel.of(public).noise([dimension]).variances
    assert across == pytest.approx(variance, rel=5 * math.sqrt(2 / (count * (dimension - 1))))


@in_one_test("momentum", [0.0, 0.9])
@in_one_test("unit", ["example", "update"])
def test_noise_of_local_steps(unit: str, momentum: float) -> None:
    """Local SGD on pure noise, 3 steps, in gradient space; 20,000 coordinates, within 5 standard errors."""
    sigma, bound, batch, rate, steps, size = 0.7, 0.4, 5, 0.2, 3, 20_000
    mechanism = {"name": "gaussian", "sigma": sigma, "clip_norm": bound, "unit": unit}
    public = settings(
        mechanism=mechanism, batch_size=batch, algorithm="fedavg", local_steps=steps, learning_rate=rate,
        momentum=momentum,
    )  # fmt: skip
    model = UploadModel.of(public)
    generator = torch.Generator().manual_seed(0)
    parameter = torch.zeros(size, requires_grad=True)
    if unit == "update":
        change = sigma * bound * torch.randn(size, generator=generator)
    else:
        sgd = torch.optim.SGD([parameter], lr=rate, momentum=momentum)
        for _ in range(steps):
            parameter.grad = sigma * bound / batch * torch.randn(size, generator=generator)
            sgd.step()
        change = parameter.detach()
    seen = model.gradient({"weight": change})["weight"].square().mean().item()
    (variance,) = model.noise([size]).variances
    assert seen == pytest.approx(variance, rel=5 * math.sqrt(2 / size))


@pytest.mark.parametrize("fitted", [True, False])
def test_whitening(fitted: bool) -> None:
    """S S against the covariance written out; there and back; the energy is the coordinates' squared length."""
    images, _ = digits()
    mean, std = torch.full((1, 1, 1), 0.3, dtype=torch.float64), torch.full((1, 1, 1), 0.35, dtype=torch.float64)
    prior = fit_prior(((images - mean) / std)[:500]) if fitted else generic_prior((1, 8, 8), mean, std)
    prior = prior.to(mean)
    whitening = Whitening(prior, (1, 8, 8))
    eye = torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8)
    root = (whitening.images(eye) - whitening.images(torch.zeros_like(eye))).flatten(1)
    outside = torch.eye(64, dtype=torch.float64) - prior.basis @ prior.basis.mT
    covariance = prior.basis @ torch.diag(prior.variances) @ prior.basis.mT + prior.rest * outside
    torch.testing.assert_close(root @ root.mT, covariance)
    generator = torch.Generator().manual_seed(2)
    some = torch.randn(3, 2, 1, 8, 8, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(whitening.images(whitening.coordinates(some)), some)
    torch.testing.assert_close(whitening.coordinates(some).square().flatten(2).sum(dim=2), prior.energy(some))


@dataclass(frozen=True)
class Halving(BlockMechanism):
    """A mechanism of somebody else: half of each gradient, and normal noise; it says no more than its own law."""

    name = "halving"
    deviation: float

    def _release(self, gradients: Any, batch_size: int, noise: NoiseStream) -> Vector:
        mean = gradients.combine(torch.full((gradients.examples,), 0.5 / batch_size, dtype=gradients.dtype))
        drawn = gradients.draw(noise)
        return {name: value + self.deviation / batch_size * drawn[name] for name, value in mean.items()}

    def norm_bound(self, examples: int, batch_size: int, tensors: Sequence[int], tail: float) -> float:
        return math.inf

    def noise(self, tensors: Sequence[int], examples: int, divisor: float) -> Noise:
        return Noise((sum(tensors),), ((self.deviation / divisor) ** 2,))

    def weight(self, squared: Tensor, dimension: int, blocks: int) -> Tensor:
        return torch.full_like(squared, 0.5)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_mechanism_that_no_attack_knows(batch: int) -> None:
    """Its likelihood is that of the literal formula; the closed form, the labels and the units are read through it."""
    deviation, images, labels = 1e-3, *digits()
    network = Network(mlp("relu", hidden=(32,)).double())
    x, y = normalise(images[:batch]).double(), labels[:batch]
    gradients = example_gradients(network.model.requires_grad_(), x, y)
    heard = Halving(deviation).release(DenseGradients(gradients), batch, stream(0))
    parameters = {name: value.detach() for name, value in network.model.named_parameters()}
    model = UploadModel(Halving(deviation), "example", 1.0, 1, batch, batch=batch)
    victim = Victim(1, 0, parameters, heard, model, "")
    scene = Scene.of(network, settings(batch_size=batch), torch.float64, images[800:])
    dummies = torch.stack([torch.zeros_like(x), x])
    found = Matcher(network, [victim] * 2, misfit)(dummies, F.one_hot(y, 10).double().expand(2, -1, -1))
    rows = [example_gradients(network.model, one, y) for one in dummies]
    wanted = [
        sum((heard[name] - row[name].mean(dim=0) / 2).square().sum() for name in heard) / (2 * (deviation / batch) ** 2)
        for row in rows
    ]
    torch.testing.assert_close(found[1] - found[0], wanted[1] - wanted[0])
    assert can_be_gated(scene, victim)
    assert len(open_labels(scene, [victim])[0]) >= 1
    if batch == 1:
        assert float((read_starts(scene, [victim])[0].images - x).square().mean()) < 0.05
