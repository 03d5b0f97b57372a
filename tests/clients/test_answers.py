"""What a client answers: never a refusal that tells of an example, never twice the same noise, once a round."""

import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor, nn

import fedpriv.clients.training
from fedpriv.clients.app import client_app
from fedpriv.clients.memory import secret_for
from fedpriv.clients.training import local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RefusedError
from fedpriv.core.randomness import Secret
from fedpriv.core.seeds import MEMORY
from fedpriv.core.wire import pack, unpack
from fedpriv.core.world import State, build_world
from fedpriv.engines.inline import assume_server_identity
from fedpriv.gradients import GradientOperator, per_example_gradients

MECHANISMS: dict[str, dict[str, object]] = {
    "gaussian": {"name": "gaussian", "sigma": 0.5},
    "gaussian by layer": {"name": "gaussian", "sigma": 0.5, "clipping": "layer"},
    "laplace": {"name": "laplace", "scale": 0.5},
    "hgm": {"name": "hgm", "sigma": 0.5},
    "vmf": {"name": "vmf", "kappa": 5.0},
    "vmf by layer": {"name": "vmf", "kappa": 5.0, "blocks": "layer"},
    "vmf in blocks": {"name": "vmf", "kappa": 5.0, "blocks": "size:7"},
    "an update": {"name": "gaussian", "sigma": 0.5, "unit": "update"},
}
BATCH, EXAMPLES, SIDE, GREY = 4, 8, 3, 7


@pytest.fixture(autouse=True)
def server() -> None:
    """Who makes messages has to be somebody in Flower's eyes."""
    assume_server_identity(77)


class Standardising(nn.Module):
    """Divides each image by its own deviation, which is 0 for a blank one."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(SIDE * SIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.layer(self.drop((flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)))


class Choosy(Standardising):
    """Raises on the blank image below, and on none that a model is tried with before a run."""

    def __init__(self, error: type[BaseException] = ValueError, smallest: int = 1) -> None:
        super().__init__()
        self.error, self.smallest = error, smallest

    def forward(self, x: Tensor) -> Tensor:
        blank = ((x - (2 * GREY / 255 - 1)).abs() < 1e-6).flatten(1).all(1)
        if self.training and len(x) >= self.smallest and bool(blank.any()):
            raise self.error(f"image {int(blank.nonzero()[0])} is blank")
        return super().forward(x)


def standardising(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Standardising()


def choosy(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Choosy()


def choosy_in_batches(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """It raises on no image alone: so does a sum that overflows in one kernel, and not in that of a single image."""
    return Choosy(smallest=2)


def out_of_memory(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Choosy(MemoryError)


def interrupting(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Choosy(KeyboardInterrupt)


class Approximate(nn.Module):
    """Computes the blank image otherwise when it is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(SIDE))

    def forward(self, x: Tensor) -> Tensor:
        blank = ((x - (2 * GREY / 255 - 1)).abs() < 1e-6).all(-1, keepdim=True)
        return x * self.factor + blank * float(len(x) == 1)


def approximate(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(Approximate(), nn.Flatten(), nn.Linear(SIDE * SIDE, classes))


def settings(folder: Path, model: str, mechanism: dict[str, object], *, blank: bool) -> Experiment:
    rng = np.random.default_rng(3)
    images = rng.integers(1, 255, (EXAMPLES + 4, SIDE, SIDE), dtype=np.uint8)
    if blank:
        images[:EXAMPLES] = np.where(np.arange(EXAMPLES)[:, None, None] == 5, GREY, images[:EXAMPLES])
    labels = np.arange(EXAMPLES + 4) % 2
    path = folder / f"{'blank' if blank else 'usual'}.npz"
    parts = {"train": slice(EXAMPLES), "test": slice(EXAMPLES, None)}
    both = (("x", images), ("y", labels))
    np.savez(path, **{f"{axis}_{part}": values[rows] for part, rows in parts.items() for axis, values in both})
    return Experiment.model_validate(
        {
            "seed": 4,
            "data": {"name": "npz", "path": str(path)},
            "model": {"name": f"tests.clients.test_answers:{model}"},
            "federation": {"clients": 1, "rounds": 9},
            "training": {"batch_size": BATCH, "learning_rate": 0.5},
            "mechanism": mechanism,
            "engine": {"device": "cpu"},
        }
    )


def context(client: int = 0) -> Context:
    return Context(run_id=77, node_id=1, node_config={"partition-id": client}, state=RecordDict(), run_config={})


def question(experiment: Experiment, state: State, round_number: int) -> Message:
    task = ConfigRecord({"experiment": experiment.model_dump_json(), "round": round_number})
    content = RecordDict({"parameters": pack(state.parameters), "buffers": pack(state.buffers), "task": task})
    return Message(content, dst_node_id=1, message_type="train", group_id=str(round_number))


def uploads(experiment: Experiment, secret: Secret, rounds: range = range(1, 5)) -> list[dict[str, Tensor]]:
    world, app = build_world(experiment, secret), client_app(secret)
    replies = [app(question(experiment, world.initial, number), context()) for number in rounds]
    assert not any(reply.has_error() for reply in replies)
    return [unpack(reply.content.array_records["upload"]) for reply in replies]


def flat(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in vector.values()])


@pytest.mark.parametrize(
    ("mechanism", "model"),
    [
        # All three networks for noise that is added and for draws, and one in turn for the other mechanisms.
        *((name, ("standardising", "choosy", "choosy_in_batches")[place % 3]) for place, name in enumerate(MECHANISMS)),
        *(
            ("gaussian", "choosy"),
            ("gaussian", "choosy_in_batches"),
            ("vmf", "standardising"),
            ("vmf", "choosy_in_batches"),
        ),
        *product(("gaussian", "an update"), ("out_of_memory", "interrupting")),
    ],
)
def test_an_example_without_a_gradient_is_no_refusal(mechanism: str, model: str, tmp_path: Path) -> None:
    """One blank image of eight; two rounds see all of them. It tells nothing, and the others are as without it."""
    secret = Secret(bytes(32))
    experiments = [settings(tmp_path, model, MECHANISMS[mechanism], blank=blank) for blank in (True, False)]
    blank, usual = (uploads(experiment, secret) for experiment in experiments)
    assert all(bool(torch.isfinite(flat(upload)).all()) for upload in blank)
    assert [upload.keys() for upload in blank] == [upload.keys() for upload in usual]
    # Of themselves two data sets under two names have two noises.
    worlds = [build_world(experiment, secret) for experiment in experiments]
    moved = [
        float(
            torch.sub(
                *(flat(local_upload(one, 0, worlds[0].initial, number, secret).parameters) for one in worlds)
            ).norm()
        )
        for number in range(1, 5)
    ]
    if mechanism in ("gaussian", "gaussian by layer", "hgm", "laplace"):
        # In each pass one batch of two holds it. The noise is the same, so the difference is its own clipped gradient.
        assert sorted(value > 1e-6 for value in moved) == [False, False, True, True]
        assert max(moved) < (1 + 1e-4) / BATCH


def test_no_example_decides_how_the_others_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the blank one a layer does not repeat itself, on no other: rounding, and dropout, would change for all."""
    seen: list[GradientOperator] = []
    monkeypatch.setattr(
        fedpriv.clients.training,
        "per_example_gradients",
        lambda *args, **options: seen.append(per_example_gradients(*args, **options)) or seen[-1],
    )
    for blank in (True, False):
        world = build_world(settings(tmp_path, "approximate", MECHANISMS["gaussian"], blank=blank))
        for number in (1, 2):
            local_upload(world, 0, world.initial, number)
    assert [gradients.routes["0"] for gradients in seen] == ["ghost: Approximate"] * 4


def test_without_a_mechanism_the_error_stays(tmp_path: Path) -> None:
    experiment = settings(tmp_path, "choosy", {"name": "none"}, blank=True)
    world, app = build_world(experiment), client_app(None)
    with pytest.raises(ValueError, match=r"image \d is blank"):
        for number in (1, 2):
            app(question(experiment, world.initial, number), context())


def test_errors_say_nothing_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong; the client's own log has the reason."""
    experiment = settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False)
    world, app = build_world(experiment), client_app(Secret(bytes(32)))

    def fails(*_: object) -> None:
        raise RuntimeError("example 5 of 8 is odd")

    monkeypatch.setattr("fedpriv.clients.answering.local_upload", fails)
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match=r"^failed; the client's own log says why$"):
        app(question(experiment, world.initial, 1), context())
    assert "example 5 of 8 is odd" in caplog.text


def larger(state: State) -> State:
    return State({name: 2 * value for name, value in state.parameters.items()}, state.buffers)


def same(state: State) -> State:
    return state


@pytest.mark.parametrize("kept", ["in the context", "in a file"])
@pytest.mark.parametrize("noise", ["secret", "reproducible"])
def test_a_round_is_answered_once(kept: str, noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a deployment, where each client has its own secret; from a file also after a restart."""
    if kept == "in a file":
        monkeypatch.setenv(MEMORY, str(tmp_path))
    experiment = settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False)
    experiment = experiment.model_copy(update={"noise": noise})
    world, app, own = build_world(experiment), client_app(None), context()
    first = app(question(experiment, world.initial, 1), own)
    if kept == "in a file":
        own = context()
        files = {path.name: path for path in tmp_path.glob("77-0-*")}
        assert files.keys() == {"77-0-settings", "77-0-data", "77-0-round-1"} | (
            {"77-0-secret"} if noise == "secret" else set()
        )
        assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    again = app(question(experiment, world.initial, 1), own)
    one, other = (flat(unpack(reply.content.array_records["upload"])) for reply in (first, again))
    assert torch.equal(one, other)
    with pytest.raises(RefusedError, match="round 1 was answered before"):
        app(question(experiment, larger(world.initial), 1), own)
    assert not app(question(experiment, larger(world.initial), 2), own).has_error()


@pytest.mark.parametrize("file", ["settings", "data", "round-1", "secret"])
@pytest.mark.parametrize("damage", ["", "xy", "a folder"])
def test_a_damaged_memory_is_no_new_one(
    file: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever forgets what was answered would answer it again."""
    monkeypatch.setenv(MEMORY, str(tmp_path))
    experiment = settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False)
    world, app = build_world(experiment), client_app(None)
    app(question(experiment, world.initial, 1), context())
    memory = tmp_path / f"77-0-{file}"
    if damage == "a folder":
        memory.unlink()
        memory.mkdir()
    else:
        memory.write_text(damage)
    with pytest.raises(RefusedError, match=f"77-0-{file}, is damaged"):
        app(question(experiment, world.initial, 1), context())


def test_a_round_is_not_answered_again_with_another_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two answers would be to one question, which is counted once."""
    monkeypatch.setenv(MEMORY, str(tmp_path))
    secret_for(context(), 1, bytes(32), None)
    (tmp_path / "77-0-secret").unlink()
    with pytest.raises(RefusedError, match="round 1 was answered before"):
        secret_for(context(), 1, bytes(32), None)


def test_only_who_finds_what_it_left_on_disk_says_that_it_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is made anew has the variable and an empty folder, and would answer with other noise."""

    def told() -> bool:
        reply = client_app(None)(Message(RecordDict(), 1, "query"), context())
        return "remembers" in reply.content.metric_records["client"]

    assert not told()
    monkeypatch.setenv(MEMORY, str(tmp_path))
    assert [told(), told()] == [False, True]
    (tmp_path / "77-0-secret").unlink()
    assert not told()


def test_of_two_processes_that_answer_for_one_client_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand in for processes: memory is in files, and nothing else is shared."""
    monkeypatch.setenv(MEMORY, str(tmp_path))
    rounds, together = range(1, 41), Barrier(2)

    def answered(received: bytes) -> dict[int, bytes]:
        secrets = {}
        for number in rounds:
            together.wait()
            try:
                secrets[number] = secret_for(context(), number, received, None).key
            except RefusedError:
                continue
        return secrets

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(answered, (bytes(32), bytes([1]) * 32))
    assert not one.keys() & other.keys()
    assert one.keys() | other.keys() == set(rounds)
    assert len({*one.values(), *other.values()}) == 1


@pytest.mark.parametrize("kept", ["in the context", "in a file"])
def test_settings_are_those_of_the_first_question(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any round, and without a mechanism, too: a later question could ask for less noise."""
    if kept == "in a file":
        monkeypatch.setenv(MEMORY, str(tmp_path))
    experiment = settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False)
    world, app, own = build_world(experiment), client_app(None), context()
    changes = (
        {"mechanism": {"name": "none"}},
        {"mechanism": {"name": "gaussian", "sigma": 1e-6}},
        {"noise": "reproducible"},
    )
    others = [Experiment.model_validate({**experiment.model_dump(), **change}) for change in changes]
    assert not app(question(experiment, world.initial, 1), own).has_error()
    for other in others:
        for number in (1, 2):
            with pytest.raises(RefusedError, match="not those with which this client was first asked"):
                app(question(other, world.initial, number), own)
    assert not app(question(experiment, world.initial, 2), own).has_error()


@pytest.mark.parametrize("number", [-1, 0, 10, 10**9])
def test_a_run_has_the_rounds_that_its_settings_say(number: int, tmp_path: Path) -> None:
    experiment = settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False)
    world, own = build_world(experiment), context()
    with pytest.raises(RefusedError, match=f"round {number} is none of this run, which has rounds 1 to 9"):
        client_app(None)(question(experiment, world.initial, number), own)
    assert not own.state.config_records


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 5},
        {"training": {"learning_rate": 0.25}},
        {"mechanism": {"clip_norm": 2.0}},
        {"mechanism": {"sigma": 0.75}},
        {"mechanism": {"delta": 1e-6}},
        {"federation": {"secure_limit": 4.0}},
        {"engine": {"gradient_memory": 128}},
        {"engine": {"precision": "float64"}},
        "parameters",
    ],
    ids=str,
)
def test_another_question_gets_other_noise(change: object, tmp_path: Path) -> None:
    """Also where the clean gradient is the same: two answers with one noise would tell it."""
    experiment = settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False)
    tree = experiment.model_dump()
    if isinstance(change, dict):
        for section, keys in change.items():
            tree[section] = {**tree[section], **keys} if isinstance(keys, dict) else keys
    other = Experiment.model_validate(tree)
    secret = Secret(bytes(32))
    noises = []
    for asked, alter in ((experiment, same), (other, larger if change == "parameters" else same)):
        world = build_world(asked, secret)
        noises.append(world.received(0, alter(world.initial)))
    assert noises[0] != noises[1]


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"federation": {"rounds": 12}}, {"adversary": {"attacks": []}}, {"report": {"pictures": 3}}],
    ids=str,
)
def test_what_does_not_decide_an_answer_leaves_the_noise(change: dict[str, object], tmp_path: Path) -> None:
    experiment = settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False)
    tree = experiment.model_dump()
    for section, keys in change.items():
        tree[section] = {**tree[section], **keys} if isinstance(keys, dict) else keys
    worlds = [build_world(one, Secret(bytes(32))) for one in (experiment, Experiment.model_validate(tree))]
    assert worlds[0].received(0, worlds[0].initial) == worlds[1].received(0, worlds[1].initial)


def test_another_example_or_network_gets_other_noise(tmp_path: Path) -> None:
    """What was edited between two answers to one question would be their difference."""
    experiment = settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False)
    world = build_world(experiment, Secret(bytes(32)))
    images, labels = world.dataset.x_train.clone(), world.dataset.y_train.clone()
    images[3, 0, 1, 1] ^= 1
    labels[3] ^= 1
    others = [
        replace(world, dataset=replace(world.dataset, x_train=images)),
        replace(world, dataset=replace(world.dataset, y_train=labels)),
        replace(world, model_digest=bytes(32)),
    ]
    assert len({one.received(0, world.initial) for one in (world, *others)}) == 4


def test_a_gpu_that_cannot_make_its_noise_has_other_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a compiler has come or gone, the same question would get two answers with noises of their own."""
    world = build_world(settings(tmp_path, "standardising", MECHANISMS["gaussian"], blank=False), Secret(bytes(32)))
    received = set()
    for device, makes in (("cpu", False), ("cuda", False), ("cuda", True)):
        monkeypatch.setattr("fedpriv.core.world.makes_programs", lambda device, makes=makes: makes)
        received.add(replace(world, device=torch.device(device)).received(0, world.initial))
    assert len(received) == 3
