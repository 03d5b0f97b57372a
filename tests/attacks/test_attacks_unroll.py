"""FedAvg unrolled on dummies: against the client's own code, finite differences, and what several steps hide."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attack_victims import NONE, digits, lenet, mlp, normalise, parameters_of, settings
from torch import Tensor, nn

from fedpriv.attacks.methods.dlg import DlgSettings, IdlgSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.labels import Passes, find_output_layer, infer_labels, with_passes
from fedpriv.attacks.reconstruction.matching import Matcher, angle, squared_distance
from fedpriv.attacks.reconstruction.recipes import (
    APART,
    MatchProblem,
    _Descent,
    _Linearised,
    _solved,
    _Variation,
    run_recipe,
)
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import LocalTraining, prepare_victims, unrolled_update
from fedpriv.attacks.settings import Recipe
from fedpriv.clients.training import local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.world import State, World, build_world
from fedpriv.gradients import Vector
from fedpriv.models import MODEL
from fedpriv.server.rules.mean import mean_upload
from fedpriv.server.tap import observe
from fedpriv.server.uploads import Upload
from tests.cases import in_one_test

CPU = torch.device("cpu")
OPTIMIZERS = [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)]
CLIP = {"name": "gaussian", "sigma": 1e-9, "clip_norm": 0.7}


def world(
    optimizer: str,
    momentum: float,
    *,
    model: str = "lenet",
    batch: int = 2,
    epochs: int = 1,
    examples: int = 6,
    mechanism: dict[str, object] = NONE,  # type: ignore[assignment]
    weighting: str = "uniform",
) -> World:
    tree = {
        "seed": 4,
        "data": {"name": "digits", "train_examples": 3 * examples},
        "model": MODEL.read_keys({"name": model, "hidden": [12], "activation": "tanh"}),
        "federation": {"clients": 3, "algorithm": "fedavg", "rounds": 1, "weighting": weighting},
        "training": {
            "batch_size": batch,
            "learning_rate": 0.05,
            "optimizer": optimizer,
            "momentum": momentum,
            "local_epochs": epochs,
        },
        "mechanism": mechanism,
        "adversary": {"threat_model": "honest-but-curious-server"},
        "engine": {"name": "inline", "device": "cpu", "precision": "float64"},
    }
    return build_world(Experiment.model_validate(tree))


def first_epoch(built: World, client: int) -> tuple[Tensor, Tensor]:
    """A client's images (B, C, H, W) and labels (B,) in the order in which its first epoch takes them."""
    plan = built.plans[client]
    steps = list(plan.steps(1))[: plan.sampling.steps_per_epoch]
    batches = [built.examples(client, plan.batch(step)) for step in steps]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, 10).double()


def heard(built: World, client: int) -> Observation:
    upload = Upload(client, built.plans[client].sampling.examples, local_upload(built, client, built.initial, 1))
    (observation,) = observe(built, 1, built.initial, [upload])
    return observation


@in_one_test(("optimizer", "momentum"), OPTIMIZERS)
@in_one_test("model", ["lenet", "mlp"])
@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_the_expected_update_is_what_the_client_sends(optimizer: str, momentum: float, model: str, batch: int) -> None:
    built = world(optimizer, momentum, model=model, batch=batch)
    observation = heard(built, 1)
    network = Network(built.model)
    (victim,) = prepare_victims([observation], network.names, CPU)
    x, y = first_epoch(built, 1)
    training = LocalTraining(optimizer, 0.05, momentum, 6 // batch, batch)  # type: ignore[arg-type]
    update = unrolled_update(network, victim.parameters, x[None], one_hot(y)[None], training)
    for name, value in observation.upload.items():
        torch.testing.assert_close(update[name][0], value, rtol=1e-8, atol=1e-12)
    if victim.model.training is None:
        assert (optimizer, batch) == ("sgd", 6)
        return
    assert victim.model.training == training
    sent = victim.model.trained(network, victim.parameters, x[None], one_hot(y)[None])
    for name, value in victim.gradient.items():
        torch.testing.assert_close(sent[name][0], value, rtol=1e-8, atol=1e-10)
    loss = Matcher(network, [victim], squared_distance)(x[None], one_hot(y)[None])
    length = sum(float(value.square().sum()) for value in victim.gradient.values())
    assert float(loss) < 1e-14 * length  # a small difference of large numbers
    wrong = Matcher(network, [victim], squared_distance)(x.flip(0)[None] + 0.1, one_hot(y)[None])
    assert float(wrong) > 1e-6 * length


def test_an_update_points_downhill() -> None:
    """Peers do not model the sign of an update, which turns label inference upside down."""
    built = world("sgd", 0.0, batch=1)
    x, y = first_epoch(built, 0)
    network = Network(built.model)
    gradient = network.gradients(
        built.initial.parameters, x[None], one_hot(y)[None], shared=True, each=False
    )  # (1, *shape)
    update = unrolled_update(
        network, built.initial.parameters, x[None], one_hot(y)[None], LocalTraining("sgd", 1e-5, 0.0, 6, 1)
    )
    for name, value in gradient.items():
        torch.testing.assert_close(update[name], -6e-5 * value, rtol=1e-2, atol=1e-9)


@in_one_test(("optimizer", "momentum"), OPTIMIZERS)
def test_several_epochs_take_the_same_batches_again(optimizer: str, momentum: float) -> None:
    """Against torch's own optimiser."""
    model = mlp("tanh").double()
    images, labels = digits()
    x, y = normalise(images[:4]).double(), labels[:4]
    before = parameters_of(model)
    update = unrolled_update(
        Network(model),
        before,
        x[None],
        one_hot(y)[None],
        LocalTraining(optimizer, 0.05, momentum, 6, 2),  # type: ignore[arg-type]
    )
    torch_optimizer = (
        torch.optim.Adam(model.parameters(), lr=0.05)
        if optimizer == "adam"
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    )
    for batch in ([0, 1], [2, 3]) * 3:
        torch_optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        torch_optimizer.step()
    for name, value in parameters_of(model).items():
        torch.testing.assert_close(update[name][0], value - before[name], rtol=1e-8, atol=1e-12)


@in_one_test(
    ("steps", "size", "examples", "expected"),
    [
        (4, 1, 4, [[0], [1], [2], [3]]),
        (4, 2, 4, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (4, 4, 10, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]),
        (2, 8, 3, [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_batches(steps: int, size: int, examples: int, expected: list[list[int]]) -> None:
    assert LocalTraining("sgd", 0.1, 0.0, steps, size).batches(examples) == expected


@in_one_test(("optimizer", "momentum"), OPTIMIZERS)
@in_one_test("objective", [angle, squared_distance])
@pytest.mark.parametrize("soft", [False, True])
def test_gradients_against_finite_differences(optimizer: str, momentum: float, objective: object, soft: bool) -> None:
    built = world(optimizer, momentum, model="mlp", batch=2)
    (victim,) = prepare_victims([heard(built, 1)], Network(built.model).names, CPU)
    matcher = Matcher(Network(built.model), [victim, victim], objective)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(2, 6, 1, 8, 8, generator=generator, dtype=torch.float64).requires_grad_()
    logits = torch.randn(2, 6, 10, generator=generator, dtype=torch.float64).requires_grad_(soft)

    def loss(images: Tensor, logits: Tensor) -> Tensor:
        return matcher(images, logits.softmax(dim=2))

    assert torch.autograd.gradcheck(loss, (images, logits), fast_mode=True, eps=1e-6, atol=1e-6, rtol=1e-3)


def test_adam_with_gradients_that_are_exactly_zero_has_finite_derivatives() -> None:
    """A dead ReLU's gradient is zero, where the root of the second moment has no derivative."""
    model = mlp("relu").double()
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("bias")).fill_(-1e3)
    images = torch.randn(1, 2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images.requires_grad_()
    update = unrolled_update(
        Network(model),
        parameters_of(model),
        images,
        one_hot(torch.tensor([[1, 2]])),
        LocalTraining("adam", 0.01, 0.0, 3, 1),
    )
    total = torch.stack([value.square().sum() for value in update.values()]).sum()
    (gradient,) = torch.autograd.grad(total, images)
    assert bool(torch.isfinite(gradient).all())


@in_one_test(
    ("optimizer", "momentum", "unit"),
    # Not Adam with noise in its steps: it divides by numbers that are as small as any noise.
    [("sgd", 0.0, "example"), ("sgd", 0.9, "example"), *((*one, "update") for one in OPTIMIZERS)],
)
def test_clipping_in_every_step_or_of_the_update_is_modelled(optimizer: str, momentum: float, unit: str) -> None:
    built = world(optimizer, momentum, batch=2, mechanism={**CLIP, "unit": unit})
    observation = heard(built, 2)
    network = Network(built.model)
    (victim,) = prepare_victims([observation], network.names, CPU)
    x, y = first_epoch(built, 2)
    sent = victim.model.trained(network, victim.parameters, x[None], one_hot(y)[None])
    for name, value in victim.gradient.items():
        close = (sent[name][0] - value).abs() <= 1e-6
        assert bool(close.all())


@in_one_test(("optimizer", "momentum"), OPTIMIZERS)
def test_a_sum_of_clients_is_the_mean_of_their_updates(optimizer: str, momentum: float) -> None:
    built = world(optimizer, momentum, batch=2)
    updates = [local_upload(built, client, built.initial, 1) for client in range(3)]
    uploads = [Upload(client, 6, update) for client, update in enumerate(updates)]
    mean = mean_upload(uploads, "uniform")
    batches = [first_epoch(built, client) for client in range(3)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    training = LocalTraining(optimizer, 0.05, momentum, 3, 2, clients=3)  # type: ignore[arg-type]
    update = unrolled_update(Network(built.model), built.initial.parameters, x[None], one_hot(y)[None], training)
    for name, value in mean.parameters.items():
        torch.testing.assert_close(update[name][0], value, rtol=1e-8, atol=1e-12)


def test_rows_do_not_depend_on_each_other() -> None:
    built = world("sgd", 0.9, batch=2)
    network = Network(built.model)
    victims = prepare_victims([heard(built, client) for client in range(3)], network.names, CPU)
    images = torch.randn(3, 6, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.full((3, 6, 10), 0.1, dtype=torch.float64)
    together = Matcher(network, victims, angle)(images, labels)
    alone = [Matcher(network, [victims[k]], angle)(images[[k]], labels[[k]]) for k in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=0)


def trained(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer) -> Vector:
    before = parameters_of(model)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    after = parameters_of(model)
    State(before, {}).load_into(model)
    return {name: value - before[name] for name, value in after.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "least"), [("sgd", 0.95), ("momentum", 0.95), ("adam", 0.8)])
def test_labels_of_several_steps_are_inferred(optimizer: str, least: float) -> None:
    """Six clients with 4 digits and 4 local steps; the observation holds no labels."""
    images, labels = digits()
    model = lenet(init="default")
    momentum = 0.9 if optimizer == "momentum" else 0.0
    rate = 0.001 if optimizer == "adam" else 0.02
    observations, truth = [], []
    for client in range(6):
        x, y = normalise(images[4 * client : 4 * client + 4]), labels[4 * client : 4 * client + 4]
        torch_optimizer = (
            torch.optim.Adam(model.parameters(), lr=rate)
            if optimizer == "adam"
            else torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        )
        upload = trained(model, [(x[[k]], y[[k]]) for k in range(4)], torch_optimizer)
        public = settings(
            algorithm="fedavg",
            learning_rate=rate,
            optimizer="adam" if optimizer == "adam" else "sgd",
            momentum=momentum,
            batch_size=1,
            local_steps=4,
            client_examples=4,
        )
        observations.append(Observation(1, client, parameters_of(model), upload, public))
        truth.append(y.tolist())
        assert observations[-1].labels is None
    network = Network(model)
    victims = prepare_victims(observations, network.names, CPU)
    layer = find_output_layer(network, victims[0].parameters, (1, 8, 8), 10)
    assert layer is not None
    found = [infer_labels(network, victim, layer, (1, 8, 8), 10) for victim in victims]
    right = 0
    for guess, true in zip(found, truth, strict=True):
        assert guess is not None
        left = list(true)
        for label in guess.tolist():
            if label in left:
                left.remove(label)
                right += 1
    assert right / 24 >= least


def test_dlg_recovers_the_image_of_one_example_after_many_steps_with_momentum() -> None:
    """One image, five steps: the update is far from a multiple of a gradient, and unrolled it is matched exactly."""
    images, labels = digits()
    model = mlp("sigmoid")
    x, y = normalise(images[:1]), labels[:1]
    upload = trained(model, [(x, y)] * 5, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    public = settings(
        algorithm="fedavg", learning_rate=0.05, momentum=0.9, batch_size=1, local_steps=5, client_examples=1
    )
    observation = Observation(1, 0, parameters_of(model), upload, public)
    (found,) = run_attack(AttackJob("dlg", [observation], model, DlgSettings(iterations=100, restarts=2), seed=1))
    assert float((found.images - images[:1]).square().mean()) < 1e-4
    assert found.labels.tolist() == y.tolist()
    assert "5 local steps" in found.note


def all_epochs(built: World, client: int) -> tuple[Tensor, Tensor, Tensor]:
    """A client's images and labels as its first epoch takes them, and the numbers (steps, b) in each step."""
    plan = built.plans[client]
    batches = torch.stack([torch.from_numpy(plan.batch(step)) for step in plan.steps(1)])
    order = batches[: plan.sampling.steps_per_epoch].flatten()
    images, labels = built.examples(client, order.numpy())
    return images, labels, order.argsort()[batches]


@in_one_test(("optimizer", "momentum"), OPTIMIZERS)
def test_epochs_in_orders_of_their_own_are_the_clients(optimizer: str, momentum: float) -> None:
    built = world(optimizer, momentum, model="mlp", batch=2, epochs=3)
    observation = heard(built, 0)
    images, labels, orders = all_epochs(built, 0)
    (victim,) = prepare_victims([observation], Network(built.model).names, CPU)
    assert victim.model.training is not None and victim.model.training.passes(6) == 3
    network, given = Network(built.model), (images[None], one_hot(labels)[None])
    right = victim.model.trained(network, victim.parameters, *given, orders=orders[None])
    in_turn = victim.model.trained(network, victim.parameters, *given)
    for name, value in victim.gradient.items():
        torch.testing.assert_close(right[name][0], value, rtol=1e-6, atol=1e-9)
        assert not torch.allclose(in_turn[name][0], value, rtol=1e-6, atol=1e-9)


def test_labels_of_each_step_are_found_before_images() -> None:
    built = world("sgd", 0.0, batch=2, epochs=2, examples=4)
    (victim,) = prepare_victims([heard(built, 0)], Network(built.model).names, CPU)
    scene = Scene.of(Network(built.model), heard(built, 0).settings, torch.float64)
    (found,) = with_passes(scene, [victim])
    _, labels, orders = all_epochs(built, 0)
    assert found.orders is not None and found.labels is not None
    assert found.labels[found.orders].sort(dim=1).values.tolist() == labels[orders].sort(dim=1).values.tolist()
    assert found.orders.view(2, 4).sort(dim=1).values.tolist() == [[0, 1, 2, 3]] * 2


def test_rows_of_a_client_try_all_pairings_of_equal_labels() -> None:
    """Against all ways of giving the places of a label to its examples, told apart by the steps of each example."""
    labels = torch.tensor([1, 1, 2, 1, 2, 3])
    orders = torch.tensor([[0, 1, 2], [3, 4, 5], [1, 2, 5], [0, 3, 4], [3, 4, 0], [1, 2, 5]])
    ways = set()
    alike = [way for way in itertools.permutations(range(6)) if labels[torch.tensor(way)].equal(labels)]
    for permuted in itertools.product(alike, repeat=2):
        ways.add(steps_of_examples(labels, orders, (range(6), *permuted)))
    found = Passes(labels, orders).pairings(100)
    assert torch.equal(found[0].orders, orders)
    seen = [steps_of_examples(each.labels, each.orders, [range(6)] * 3) for each in found]
    assert len(seen) == len(set(seen)) == len(ways)
    assert set(seen) == ways
    assert len(Passes(labels, orders).pairings(2)) == 2


def steps_of_examples(labels: Tensor, orders: Tensor, renamed: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Each example's label and steps, ascending, if ``renamed`` says who takes whose place in each pass."""
    steps: list[list[int]] = [[label] for label in labels.tolist()]
    for step, batch in enumerate(orders.tolist()):
        for example in batch:
            steps[renamed[step // 2][example]].append(step)
    return tuple(sorted(map(tuple, steps)))


def test_curvature_of_several_passes_is_the_jacobians() -> None:
    """Along chosen coordinates exactly; the estimate for the others is a mean of 20 squares, each with a deviation of
    32 %; the seed is fixed, so there is no false alarm.
    """
    built = world("sgd", 0.0, model="logistic", batch=2, epochs=2, examples=4)
    observation = heard(built, 0)
    network = Network(built.model)
    (victim,) = prepare_victims([observation], network.names, CPU)
    images, labels, _ = all_epochs(built, 0)
    victim = replace(victim, labels=labels)
    scene = Scene.of(network, observation.settings, torch.float64)
    (known,) = with_passes(scene, [victim])  # which numbers the examples anew
    assert known.labels is not None
    given = one_hot(known.labels)[None]
    matcher = Matcher(network, [known], squared_distance, "float64")
    problem = MatchProblem(Recipe("squared-distance", "lbfgs"), scene, [victim], IdlgSettings())
    logits = torch.zeros(1, 4, 10).double()

    def sent(x: Tensor) -> Tensor:
        (update,) = matcher.updates(x, given)
        return torch.cat([value.flatten() for value in update.values()])

    (exact,) = torch.autograd.functional.jacobian(sent, images[None], vectorize=True).movedim(1, 0)
    places = torch.tensor([0, 70, 199])
    along = problem.jacobian(0, images, logits[0], places)
    torch.testing.assert_close(along.double(), exact.flatten(1)[:, places].T, rtol=1e-4, atol=1e-6)
    assert problem.unrolled
    near = problem.linearised(0, images, logits[0])
    jacobian, change = exact.flatten(1), torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).double()
    single = jacobian.float()
    torch.testing.assert_close(near.push(change), single @ change.flatten().float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(near.pull(near.sent).flatten().float(), single.T @ near.sent, rtol=1e-4, atol=1e-6)
    estimated, squares = near.squares().flatten(), jacobian.square().sum(dim=0)
    ratios = (estimated / squares)[squares > 0]
    assert float(ratios.mean()) == pytest.approx(1, abs=0.05)
    assert float(ratios.std()) < 0.4
    _solves(problem, replace(near, rest=near.sent.detach()), jacobian)


def test_restarts_that_are_behind_end_after_each_quarter() -> None:
    """Of 100 steps 20 are those of L-BFGS, at most; 4 restarts, then 2, then the one with the lowest loss."""
    built = world("sgd", 0.0, model="logistic", batch=2, epochs=1, examples=4)
    (victim,) = prepare_victims([heard(built, 0)], Network(built.model).names, CPU)
    scene = Scene.of(Network(built.model), heard(built, 0).settings, torch.float64)
    recipe, numbers = IdlgSettings.made_of[0], torch.randn(4, 4, *scene.shape)
    logits = torch.zeros(4, 4, scene.classes)
    ended = run_recipe(recipe, scene, [victim] * 4, numbers, logits, IdlgSettings(iterations=100), lambda *_: True)
    assert int((ended.iterations >= 80).sum()) == 1
    assert int((ended.iterations <= 40).sum()) == 2
    assert int(ended.losses.argmin()) == int(ended.iterations.argmax())


def test_rows_with_another_pairing_than_the_best_start_anew_with_its() -> None:
    """The starts of images of one label differ by APART of what each has alone; a row that has ended stays."""
    built = world("sgd", 0.0, model="logistic", batch=2, epochs=2, examples=4)
    network = Network(built.model)
    (victim,) = prepare_victims([heard(built, 0)], network.names, CPU)
    scene = Scene.of(network, heard(built, 0).settings, torch.float64)
    rows = [replace(victim, labels=torch.tensor([1, 1, 1, 2]))] * 3
    problem = MatchProblem(Recipe("squared-distance", "lbfgs"), scene, rows, IdlgSettings())
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(3, 4, *scene.shape, generator=generator, dtype=torch.float64)
    logits = torch.zeros(3, 4, scene.classes).double()
    start = problem.alike(numbers, logits)
    same = problem.labels.final(logits)[0] == 1
    first, *others = same.nonzero().flatten().tolist()
    expected = numbers.clone()
    expected[:, others] = (1 - APART**2) ** 0.5 * numbers[:, [first]] + APART * numbers[:, others]
    torch.testing.assert_close(start, expected)
    descent = _Descent(problem, start, logits, torch.ones(3))
    pairings = [problem.pairing(row) for row in range(3)]
    assert pairings[0] != pairings[1]
    before = descent.values()
    descent.pair_alike([[1, 0]], [1e-5], 3, 10)
    assert [descent.problem.pairing(row) for row in range(3)] == [pairings[1], pairings[1], pairings[2]]
    after = descent.values()
    assert after[0] < before[0]
    assert torch.equal(after[1:], before[1:])


def test_a_row_takes_a_pair_of_images_from_another_row_where_that_leads_lower() -> None:
    """The first row holds two images of one label exchanged, the other row images of labels of their own wrong."""
    built = world("sgd", 0.0, model="logistic", batch=3, epochs=2)
    observation = heard(built, 0)
    images, labels, orders = all_epochs(built, 0)
    network = Network(built.model)
    (victim,) = prepare_victims([observation], network.names, CPU)
    row = replace(victim, labels=labels, orders=orders)
    scene = Scene.of(network, observation.settings, torch.float64)
    problem = MatchProblem(Recipe("squared-distance", "lbfgs", labels=()), scene, [row] * 2, IdlgSettings())
    alike = [pair for pair in itertools.combinations(range(6), 2) if labels[pair[0]] == labels[pair[1]]]
    shared = [{step for step, batch in enumerate(orders.tolist()) if number in batch} for number in range(6)]
    pair = next(each for each in alike if shared[each[0]] != shared[each[1]])
    for each in itertools.combinations(range(6), 2):
        assert problem.together(0, torch.tensor(each)) == (shared[each[0]] == shared[each[1]])
    exchanged, others = images.clone(), images.clone()
    exchanged[list(pair)] = images[list(pair[::-1])]
    unique = [number for number, label in enumerate(labels) if int((labels == label).sum()) == 1]
    others[unique] = images.mean(dim=0)
    logits = torch.zeros(2, 6, scene.classes).double()
    descent = _Descent(problem, torch.stack([exchanged, others]), logits, torch.ones(2))
    descent.cross([0], 1e-9)
    assert torch.equal(descent.variables[0], exchanged)
    descent.cross([0, 1], 1e-9)
    torch.testing.assert_close(descent.variables[0], images, rtol=0, atol=0.05)


def _solves(problem: MatchProblem, near: _Linearised, jacobian: Tensor) -> None:
    """Conjugate gradients against a dense solution of the normal equations, with the variation's own matrix."""
    variation = _Variation.at(problem, near.leaf.detach(), 1.0)
    shape, count = near.leaf.shape, near.leaf.numel()
    prior = torch.stack([variation.slope(row.view(shape)).flatten() for row in torch.eye(count).double()])
    torch.testing.assert_close(prior, prior.T)
    flat = near.leaf.detach().flatten()
    torch.testing.assert_close(flat @ prior @ flat, variation.energy(flat.view(shape)))
    right = jacobian.T @ near.rest.double() - prior @ flat
    expected = torch.linalg.solve(jacobian.T @ jacobian + prior, right)
    places = torch.tensor([0, 70, 199])
    known = jacobian[:, places].T @ jacobian[:, places]
    found = _solved(near, variation, 1.0, places, known, 60).flatten()
    assert float((found - expected).norm()) < 1e-3 * float(expected.norm())
