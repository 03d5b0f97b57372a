"""The batched engine against plain autograd, one victim at a time."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attack_victims import OwnHead, example_gradients, lenet, mlp, observe, observe_digits, parameters_of
from torch import Tensor, nn
from torch.func import functional_call

from attacks.observation import Observation
from attacks.reconstruction import AttackRefused
from attacks.reconstruction.distances import angle, squared_distance
from attacks.reconstruction.engine import CHUNK, Matcher, Network, chunks
from attacks.reconstruction.uploads import prepare_victims
from fedpriv.config import MechanismConfig
from fedpriv.mechanisms import build_mechanism

MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lenet,
    "mlp": lambda: mlp("tanh"),
    "own": OwnHead,
    "without hidden layer": lambda: mlp(hidden=()),
}
MECHANISMS = [
    {"name": "none"},
    {"name": "gaussian", "sigma": 1e-3, "clip_norm": 0.5},
    {"name": "vmf", "kappa": 200.0},
    {"name": "vmf", "kappa": 200.0, "blocks": "layer"},
]


def dummies(rows: int, examples: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(rows, examples, 1, 8, 8, generator=generator).double()
    return images, torch.randn(rows, examples, classes, generator=generator).double().softmax(dim=2)


def soft_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)  # torch's own for label probabilities


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("each", [True, False])
def test_gradients(name: str, examples: int, shared: bool, each: bool) -> None:
    model = MODELS[name]().double()
    images, labels = dummies(4, examples)
    sets = [parameters_of(model)] * 4
    if not shared:
        generator = torch.Generator().manual_seed(1)
        sets = [
            {key: value + 0.3 * torch.randn(value.shape, generator=generator) for key, value in sets[0].items()}
            for _ in range(4)
        ]
    parameters = sets[0] if shared else {key: torch.stack([one[key] for one in sets]) for key in sets[0]}
    found = Network(model).gradients(parameters, images, labels, shared=shared, each=each)
    for row in range(4):
        leaves = {key: value.clone().requires_grad_() for key, value in sets[row].items()}
        groups = [[k] for k in range(examples)] if each else [list(range(examples))]
        for number, group in enumerate(groups):
            loss = soft_loss(functional_call(model, leaves, (images[row, group],)), labels[row, group])
            wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            for key, value in wanted.items():
                given = found[key][row, number] if each else found[key][row]
                torch.testing.assert_close(given, value, rtol=1e-9, atol=1e-12)


def one_mismatch(model: nn.Module, observation: Observation, images: Tensor, labels: Tensor, kind: str) -> Tensor:
    """The objective of one victim, written out: expected upload of the dummies against what was heard."""
    leaves = {key: value.clone().requires_grad_() for key, value in observation.parameters.items()}
    config = MechanismConfig.model_validate(observation.settings.mechanism)
    mechanism = build_mechanism(config)
    sent = []
    for k in range(len(images)):
        loss = soft_loss(functional_call(model, leaves, (images[k : k + 1],)), labels[k : k + 1])
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        sent.append(mechanism.expected(dict(zip(leaves, gradients, strict=True))))
    expected = {key: sum(one[key] for one in sent) / len(sent) for key in leaves}
    heard = observation.upload
    if kind == "squared":
        return sum((expected[key] - heard[key]).square().sum() for key in leaves)
    names = list(leaves)
    layered = config.name == "vmf" and config.blocks == "layer"
    blocks = [[name] for name in names] if layered else [names]
    cosines = []
    for block in blocks:
        one = torch.cat([expected[key].flatten() for key in block])
        other = torch.cat([heard[key].flatten() for key in block])
        cosines.append(torch.dot(one, other) / one.norm() / other.norm())
    return 1 - torch.stack(cosines).mean()


@pytest.mark.parametrize("kind", ["squared", "angle"])
@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("name", ["lenet", "mlp"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_mismatch_and_its_derivatives_one_victim_at_a_time(kind: str, examples: int, name: str, rounds: int) -> None:
    """One batch with every mechanism in it, and parameters of one or two rounds."""
    models = [MODELS[name]().double() for _ in range(rounds)]
    if rounds == 2:
        models[1] = lenet(seed=8).double() if name == "lenet" else mlp("tanh", seed=8).double()
    generator = torch.Generator().manual_seed(3)
    heard = []
    for number, mechanism in enumerate(MECHANISMS * 2):
        pictures = torch.rand(examples, 1, 8, 8, generator=generator)
        truth = torch.randint(10, (examples,), generator=generator)
        model = models[number % rounds]
        heard.append(
            observe(model, pictures, truth, client=number, round_number=number % rounds + 1, mechanism=mechanism)
        )
    network = Network(models[0])
    victims = prepare_victims(heard, network.names, network.device)
    distance = squared_distance if kind == "squared" else angle
    matcher = Matcher(network, victims, distance, directional=kind == "angle")
    images, labels = dummies(len(heard), examples)
    images, labels = images.requires_grad_(), labels.requires_grad_()
    losses = matcher(images, labels)
    found = torch.autograd.grad(losses.sum(), (images, labels))
    for row, observation in enumerate(heard):
        one_image = images[row].detach().clone().requires_grad_()
        one_label = labels[row].detach().clone().requires_grad_()
        loss = one_mismatch(models[0], observation, one_image, one_label, kind)
        wanted = torch.autograd.grad(loss, (one_image, one_label))
        assert losses[row].item() == pytest.approx(loss.item(), rel=1e-9)
        for given, value in zip(found, wanted, strict=True):
            torch.testing.assert_close(given[row], value, rtol=1e-7, atol=1e-11)
    index = torch.tensor([5, 0, 2])
    torch.testing.assert_close(matcher.select(index)(images[index], labels[index]), losses[index])


class Normalised(nn.Module):
    """BatchNorm and dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(64, 20)
            self.norm = nn.BatchNorm1d(20)
            self.drop = nn.Dropout(0.5)
            self.last = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.sigmoid(self.norm(self.first(x.flatten(1))))))


def test_batch_statistics_are_those_of_the_batch_and_dropout_is_off() -> None:
    model = Normalised().double().train()
    images, labels = dummies(2, 4)
    found = Network(model).gradients(parameters_of(model), images, labels, shared=True, each=False)
    model.drop.eval()
    for row in range(2):
        loss = soft_loss(model(images[row]), labels[row])
        wanted = torch.autograd.grad(loss, list(model.parameters()))
        for value, given in zip(wanted, found.values(), strict=True):
            torch.testing.assert_close(given[row], value, rtol=1e-8, atol=1e-12)


def test_the_callers_network_stays_as_it_is() -> None:
    model = Normalised().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Network(model).logits(parameters_of(model), torch.rand(3, 1, 8, 8))
    assert model.training
    assert model.drop.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


class Stubborn(nn.Module):
    """Looks at a number of its input, which cannot be done for many inputs at once."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1) if x.sum().item() > 0 else -x.flatten(1))


def test_networks_that_cannot_be_batched_are_refused() -> None:
    images, labels = dummies(2, 1)
    model = Stubborn().double()
    with pytest.raises(AttackRefused, match="this network"):
        Network(model).gradients(parameters_of(model), images, labels, shared=True, each=False)


@pytest.mark.parametrize("count", [1, 7, 200])
def test_chunks_cover_every_row_once_and_are_bounded(count: int) -> None:
    big = mlp(hidden=(4096, 1024))
    heard, _, _ = observe_digits(big, 1)
    network = Network(big)
    victims = prepare_victims(heard, network.names, network.device) * count
    parts = list(chunks(network, victims, 64))
    assert [row for part in parts for row in part] == list(range(count))
    assert all(len(part) == 1 or len(part) * network.size <= CHUNK for part in parts)
    assert (len(parts) > 1) == (count > 1 and count * network.size > CHUNK)


def test_oracle_of_the_helper() -> None:
    """The helper's per-example gradients average to the batch's gradient."""
    model = lenet().double()
    images, _ = dummies(1, 4)
    labels = torch.tensor([1, 2, 3, 3])
    rows = example_gradients(model, images[0], labels)
    wanted = torch.autograd.grad(F.cross_entropy(model(images[0]), labels), list(model.parameters()))
    for value, given in zip(wanted, rows.values(), strict=True):
        torch.testing.assert_close(given.mean(dim=0), value)
