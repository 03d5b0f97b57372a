"""The batched engine against plain autograd, one victim at a time."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attack_networks import DIGITS
from attack_victims import digits, example_gradients, lenet, observe, observe_digits, parameters_of
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackRefused, matching
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network, ghost_obstacle
from fedpriv.attacks.reconstruction.matching import (
    Compared,
    Matcher,
    angle,
    chunks,
    row_bytes,
    squared_distance,
)
from fedpriv.attacks.reconstruction.upload_model import prepare_victims
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.machinery.redistribution import Redistribution, layer_shares, uniform_shares
from tests.cases import in_one_test

MECHANISMS = [
    {"name": "none"},
    {"name": "gaussian", "sigma": 1e-3, "clip_norm": 0.5},
    {"name": "vmf", "kappa": 200.0},
    {"name": "vmf", "kappa": 200.0, "blocks": "layer"},
    {"name": "gaussian", "sigma": 1e-3, "clip_norm": 0.5, "clipping": "layer"},
    {"name": "laplace", "scale": 1e-3, "clip_norm": 5.0},
    {"name": "gaussian", "sigma": 1e-3, "clip_norm": 0.5, "unit": "update"},
    {"name": "vmf", "kappa": 200.0, "unit": "update", "clip_norm": 0.1},
]


def dummies(rows: int, examples: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(rows, examples, 1, 8, 8, generator=generator).double()
    return images, torch.randn(rows, examples, classes, generator=generator).double().softmax(dim=2)


def soft_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)  # torch's own for label probabilities


@in_one_test("name", DIGITS)
@in_one_test("examples", [1, 3])
@in_one_test("shared", [True, False])
@pytest.mark.parametrize("each", [True, False])
def test_gradients(name: str, examples: int, shared: bool, each: bool) -> None:
    model = DIGITS[name]().double()
    images, labels = dummies(4, examples)
    sets = [parameters_of(model)] * 4
    if not shared:
        generator = torch.Generator().manual_seed(1)
        sets = [
            {key: value + 0.3 * torch.randn(value.shape, generator=generator) for key, value in sets[0].items()}
            for _ in range(4)
        ]
    parameters = sets[0] if shared else {key: torch.stack([one[key] for one in sets]) for key in sets[0]}
    network = Network(model)
    found = network.gradients(parameters, images, labels, shared=shared, each=each)
    for key, value in network.gradients(parameters, images, labels, shared=shared, each=each, of=[*found][-1:]).items():
        torch.testing.assert_close(value, found[key], rtol=1e-9, atol=1e-12)  # which is compared below
    for row in range(4):
        leaves = {key: value.clone().requires_grad_() for key, value in sets[row].items()}
        groups = [[k] for k in range(examples)] if each else [list(range(examples))]
        for number, group in enumerate(groups):
            loss = soft_loss(functional_call(model, leaves, (images[row, group],)), labels[row, group])
            wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            for key, value in wanted.items():
                given = found[key][row, number] if each else found[key][row]
                torch.testing.assert_close(given, value, rtol=1e-9, atol=1e-12)


def plain_expected(model: nn.Module, observation: Observation, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The expected upload of one victim's dummies, written out with plain autograd; standardised."""
    leaves = {key: value.clone().requires_grad_() for key, value in observation.parameters.items()}
    config = mechanism_settings(observation.settings.mechanism)
    mechanism = config.mechanism(observation.redistribution)
    gradients = []
    for k in range(len(images)):
        loss = soft_loss(functional_call(model, leaves, (images[k : k + 1],)), labels[k : k + 1])
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        gradients.append(dict(zip(leaves, found, strict=True)))
    if config.unit == "example":
        gradients = [mechanism.expected(gradient) for gradient in gradients]
    mean = {key: sum(one[key] for one in gradients) / len(gradients) for key in leaves}
    return mechanism.standardise(mean if config.unit == "example" else mechanism.expected(mean))


def one_mismatch(model: nn.Module, observation: Observation, images: Tensor, labels: Tensor, kind: str) -> Tensor:
    """The objective of one victim, written out: expected upload of the dummies against what was heard."""
    expected = plain_expected(model, observation, images, labels)
    config = mechanism_settings(observation.settings.mechanism)
    heard = config.mechanism(observation.redistribution).standardise(observation.upload)
    if kind == "squared":
        return sum((expected[key] - heard[key]).square().sum() for key in expected)
    if kind == "L1":
        return sum((expected[key] - heard[key]).abs().sum() for key in expected)
    names = list(expected)
    layered = config.name == "vmf" and config.blocks == "layer"
    blocks = [[name] for name in names] if layered else [names]
    cosines = []
    for block in blocks:
        one = torch.cat([expected[key].flatten() for key in block])
        other = torch.cat([heard[key].flatten() for key in block])
        cosines.append(torch.dot(one, other) / one.norm() / other.norm())
    return 1 - torch.stack(cosines).mean()


def absolute_distance(comparison: Compared) -> Tensor:
    """An objective that no inner product tells: it asks for the uploads themselves."""
    expected, heard = comparison.expected(), comparison.upload()
    return torch.stack([(expected[key] - heard[key]).abs().flatten(1).sum(dim=1) for key in expected]).sum(dim=0)


OBJECTIVES = {"squared": squared_distance, "angle": angle, "L1": absolute_distance}


# Each objective with each network, which have examples and rounds in turn.
@pytest.mark.parametrize(
    ("kind", "name", "examples", "rounds"),
    [
        (kind, name, 1 + (row + column) % 2, 1 + (row + column) // 2 % 2)
        for row, kind in enumerate(OBJECTIVES)
        for column, name in enumerate(("lenet", "mlp", "own"))
    ],
)
def test_mismatch_and_its_derivatives_one_victim_at_a_time(kind: str, examples: int, name: str, rounds: int) -> None:
    """One batch with every mechanism in it, two restarts of some victims, and parameters of one or two rounds.

    The networks lenet and mlp go by the ghost route, own by vmap.
    """
    models = [DIGITS[name]().double() for _ in range(rounds)]
    generator = torch.Generator().manual_seed(3)
    if rounds == 2:
        with torch.no_grad():
            for value in models[1].parameters():
                value.add_(torch.randn(value.shape, generator=generator).double(), alpha=0.2)
    heard = []
    for number, mechanism in enumerate(MECHANISMS * 2):
        pictures = torch.rand(examples, 1, 8, 8, generator=generator)
        truth = torch.randint(10, (examples,), generator=generator)
        which = number % rounds
        heard.append(observe(models[which], pictures, truth, client=number, round_number=which, mechanism=mechanism))
    network = Network(models[0])
    assert bool(ghost_obstacle(network, torch.Size((1, 8, 8)), 10)) == (name == "own")
    victims = prepare_victims(heard, network.names, network.device)
    owners = [number for number in range(len(heard)) for _ in range(1 + number % 2)]
    matcher = Matcher(network, [victims[owner] for owner in owners], OBJECTIVES[kind])
    images, labels = dummies(len(owners), examples)
    images, labels = images.requires_grad_(), labels.requires_grad_()
    losses = matcher(images, labels)
    found = torch.autograd.grad(losses.sum(), (images, labels))
    for row, owner in enumerate(owners):
        one_image = images[row].detach().clone().requires_grad_()
        one_label = labels[row].detach().clone().requires_grad_()
        loss = one_mismatch(models[0], heard[owner], one_image, one_label, kind)
        wanted = torch.autograd.grad(loss, (one_image, one_label))
        assert losses[row].item() == pytest.approx(loss.item(), rel=1e-9)
        for given, value in zip(found, wanted, strict=True):
            torch.testing.assert_close(given[row], value, rtol=1e-7, atol=1e-11)
    index = torch.tensor([5, 0, 2, 11])
    chosen = matcher.select(index)
    torch.testing.assert_close(chosen(images[index], labels[index]), losses[index])
    again = torch.tensor([3, 1])
    torch.testing.assert_close(chosen.select(again)(images[index[again]], labels[index[again]]), losses[index[again]])


@in_one_test("shares", ["uniform", "layer", "uneven"])
@in_one_test("kind", OBJECTIVES)
@pytest.mark.parametrize("examples", [1, 2])
def test_noise_of_other_sizes_in_other_coordinates(shares: str, kind: str, examples: int) -> None:
    """Through hgm: with shares that are even within each tensor by inner products, with others written out."""
    model = DIGITS["mlp"]().double()
    parameters = parameters_of(model)
    generator = torch.Generator().manual_seed(2)
    if shares == "uneven":
        drawn = {key: torch.rand(value.shape, generator=generator).double() for key, value in parameters.items()}
        total = sum(value.sum() for value in drawn.values())
        redistribution = Redistribution({key: value / total for key, value in drawn.items()})
    else:
        redistribution = {"uniform": uniform_shares, "layer": layer_shares}[shares](parameters)
    public = {"name": "hgm", "sigma": 1e-3, "clip_norm": 0.5}
    pictures, truth = digits()
    plain = observe(model, pictures[:examples], truth[:examples])
    known = replace(plain.settings, mechanism=public)
    heard = Observation(1, 0, plain.parameters, plain.upload, known, redistribution)
    network = Network(model)
    (victim,) = prepare_victims([heard], network.names, network.device)
    assert (victim.model.mechanism.scales(network.names) is None) == (shares == "uneven")
    images, labels = (value.requires_grad_() for value in dummies(2, examples))
    losses = Matcher(network, [victim, victim], OBJECTIVES[kind])(images, labels)
    found = torch.autograd.grad(losses.sum(), (images, labels))
    for row in range(2):
        one_image, one_label = (value[row].detach().clone().requires_grad_() for value in (images, labels))
        loss = one_mismatch(model, heard, one_image, one_label, kind)
        assert losses[row].item() == pytest.approx(loss.item(), rel=1e-9)
        for given, value in zip(found, torch.autograd.grad(loss, (one_image, one_label)), strict=True):
            torch.testing.assert_close(given[row], value, rtol=1e-7, atol=1e-11)


@in_one_test("name", ["lenet", "mlp"])
@in_one_test("precision", ["float32", "float64"])
def test_precision(name: str, precision: str) -> None:
    """In float64 the squared distance at the solution is tiny, in float32 it is rounding; results keep their type."""
    model = DIGITS[name]()
    pictures, truth = digits()
    heard = [observe(model, pictures[[0]], truth[[0]])]
    network = Network(model)
    victims = prepare_victims(heard, network.names, network.device)
    images = ((pictures[[0]] - 0.3) / 0.35)[None].requires_grad_()
    labels = F.one_hot(truth[[0]], 10).float()[None]
    length = sum(float(value.square().sum()) for value in heard[0].upload.values())
    (loss,) = Matcher(network, victims, squared_distance, precision)(images, labels) / length
    (gradient,) = torch.autograd.grad(loss, images)
    assert gradient.dtype == torch.float32
    assert loss.dtype == torch.float64
    limits = {"float64": (0, 1e-11), "float32": (0, 1e-5)}
    assert limits[precision][0] <= abs(loss.item()) < limits[precision][1]


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


@in_one_test("each", [True, False])
@in_one_test("shared", [True, False])
def test_networks_that_cannot_be_batched_are_run_one_batch_after_the_other(each: bool, shared: bool) -> None:
    images, labels = dummies(3, 2)
    model = Stubborn().double()
    own = parameters_of(model)
    rows = [{name: (1 if shared else row + 1) * value for name, value in own.items()} for row in range(3)]
    given = own if shared else {name: torch.stack([row[name] for row in rows]) for name in own}
    found = Network(model).gradients(given, images, labels, shared=shared, each=each)
    assert Network(model).gradients(given, images, labels, shared=shared, each=each, of=["last.bias"]).keys() == {
        "last.bias"
    }
    for row, parameters in enumerate(rows):
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        units = [slice(k, k + 1) for k in range(2)] if each else [slice(None)]
        for place, unit in enumerate(units):
            loss = F.cross_entropy(functional_call(model, leaves, (images[row, unit],)), labels[row, unit])
            for name, value in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                made = found[name][row, place] if each else found[name][row]
                torch.testing.assert_close(made, value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("count", [1, 7, 200])
@pytest.mark.parametrize("name", ["lenet", "own"])
def test_chunks_cover_every_row_once_and_are_bounded(count: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = DIGITS[name]()
    network = Network(model)
    victims = prepare_victims(observe_digits(model, 1)[0], network.names, network.device) * count
    each = row_bytes(network, victims[0], (1, 8, 8), 10)
    monkeypatch.setattr(matching, "CPU_BYTES", 20 * each)
    parts = list(chunks(network, victims, (1, 8, 8), 10))
    assert [row for part in parts for row in part] == list(range(count))
    assert all(len(part) <= 20 for part in parts)
    assert len(parts) == -(-count // 20)


@pytest.mark.parametrize("name", ["lenet", "own"])
def test_rows_that_need_more_memory_are_told_to(name: str) -> None:
    """Examples by themselves, gradients that are written out, larger batches."""
    model = DIGITS[name]()
    network = Network(model)
    pictures, truth = digits()

    def needed(examples: int, mechanism: dict[str, object], written: bool = False) -> int:
        heard = [observe(model, pictures[:examples], truth[:examples], mechanism=mechanism)]
        (victim,) = prepare_victims(heard, network.names, network.device)
        return row_bytes(network, victim, (1, 8, 8), 10, written=written)

    one, clipped = needed(4, {"name": "none"}), needed(4, {"name": "gaussian", "sigma": 1.0})
    assert needed(1, {"name": "none"}) < one <= clipped
    assert clipped < needed(4, {"name": "laplace", "scale": 1.0}) + (name == "own")
    assert one < needed(4, {"name": "none"}, written=True) + (name == "own")


def test_what_fits_in_no_chunk_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lenet()
    network = Network(model)
    victims = prepare_victims(observe_digits(model, 2)[0], network.names, network.device)
    monkeypatch.setattr(matching, "_device_bytes", lambda _: 10_000)
    with pytest.raises(
        AttackRefused, match=r"^one dummy batch of 1 image\(s\) .* needs about 0.0 GiB; cpu has 0.0 GiB$"
    ):
        list(chunks(network, victims, (1, 8, 8), 10))


def test_a_single_image_is_one_chunk_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 224 pixels the trial takes longer than many steps."""
    model = lenet()
    network = Network(model)
    victims = prepare_victims(observe_digits(model, 1)[0], network.names, network.device)
    monkeypatch.setattr(matching, "ghost_obstacle", lambda *_: pytest.fail("tried"))
    assert list(chunks(network, victims[:1], (1, 8, 8), 10)) == [range(1)]


def test_oracle_of_the_helper() -> None:
    """The helper's per-example gradients average to the batch's gradient."""
    model = lenet().double()
    images, _ = dummies(1, 4)
    labels = torch.tensor([1, 2, 3, 3])
    rows = example_gradients(model, images[0], labels)
    wanted = torch.autograd.grad(F.cross_entropy(model(images[0]), labels), list(model.parameters()))
    for value, given in zip(wanted, rows.values(), strict=True):
        torch.testing.assert_close(given.mean(dim=0), value)
