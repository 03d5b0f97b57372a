"""What asked.jsonl says was released: counted as often as it was asked for, and never rewritten afterwards."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.core.asked_log import check_unchanged, questions, replay, rounds_by_client
from fedpriv.core.budget import Budget
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.finished import finished_world
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import State, World, build_world
from tests.integration.small import experiment

GAUSSIAN = {"name": "gaussian", "sigma": 0.3}


def moved(state: State) -> State:
    return State({name: value + 1 for name, value in state.parameters.items()}, state.buffers)


def written(world: World, path: Path, sent: list[tuple[int, State, tuple[int, ...]]]) -> RunFolder:
    folder = RunFolder.create(path, world.experiment)
    for number, state, clients in sent:
        for line in questions(world, number, [(state, clients)]):
            folder.append_asked(line)
    return folder


def test_a_round_counts_as_often_as_something_else_was_asked_in_it(tmp_path: Path) -> None:
    world = build_world(experiment(mechanism=GAUSSIAN))
    start, other = world.initial, moved(world.initial)
    lines = written(
        world,
        tmp_path / "run",
        [(1, start, (0, 1)), (1, start, (0, 1)), (2, start, (0,)), (2, other, (0, 1)), (3, other, (1,))],
    ).asked()
    assert rounds_by_client(lines) == {0: (1, 2, 2), 1: (1, 2, 3)}


@pytest.mark.parametrize("sampling", ["shuffled", "fixed"])
def test_the_budget_counts_what_the_ledger_counts_or_more(sampling: str, tmp_path: Path) -> None:
    world = build_world(experiment(mechanism=GAUSSIAN, training={"sampling": sampling}))
    start, other = world.initial, moved(world.initial)
    lines = written(
        world, tmp_path / "run", [(1, start, (0, 1)), (2, start, (0, 1)), (2, other, (0,)), (3, start, (0, 1))]
    ).asked()
    budget = Budget(world.experiment, world.plans)
    replay(budget, lines)
    proven = [plan.guarantee(rounds_by_client(lines)[plan.client]).epsilon for plan in world.plans[:2]]
    assert proven[0] is not None
    assert proven[1] is not None
    assert proven[0] > proven[1]
    assert budget.worst_epsilon is not None
    assert budget.worst_epsilon >= proven[1]


def test_calibrated_noise_and_every_kind_of_client_are_written_down(tmp_path: Path) -> None:
    """Clients with other amounts of data have other noise."""
    world = build_world(
        experiment(
            mechanism={"name": "gaussian", "target_epsilon": 8.0},
            training={"sampling": "fixed"},
            data={"partition": "dirichlet"},
        )
    )
    (line,) = questions(world, 1, [(world.initial, (0, 1, 2, 3)), (world.initial, ())])
    for client, kind in zip(line.clients, line.kinds, strict=True):
        said = line.releases[kind]
        assert said.mechanism["sigma"] == world.plans[client].config.sigma
        assert said.sampling["examples"] == len(world.partitions[client])
    assert len(line.releases) == 4


def run(path: Path, **sections: dict[str, object]) -> Experiment:
    settings = experiment(**sections)
    start_run(settings, path, "", Silent())
    return settings


def edit(path: Path, old: str, new: str) -> None:
    file = path / "config.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("sigma = 0.3", "sigma = 30.0", r"in round 1 client 0 released with mechanism sigma = 0.3, .* sigma = 30.0"),
        ("clip_norm = 1.0", "clip_norm = 2.0", "mechanism clip_norm = 1.0"),
        ('name = "gaussian"\n', 'name = "laplace"\nscale = 1.0\n', "mechanism name = gaussian"),
        ('name = "gaussian"\n', 'name = "none"\n', "mechanism name = gaussian"),
        ('\nsampling = "fixed"', '\nsampling = "shuffled"', "sampling kind = fixed"),
        ("batch_size = 4", "batch_size = 8", "sampling batch_size = 4"),
        ("seed = 3", "seed = 4", "was changed where it decides"),
        ('partition = "iid"', 'partition = "dirichlet"', "sampling examples"),
        ('activation = "tanh"', 'activation = "relu"', "was changed where it decides"),
        ("learning_rate = 0.5", "learning_rate = 0.6", "was changed where it decides"),
    ],
)
def test_an_edited_run_is_not_resumed(old: str, new: str, reason: str, tmp_path: Path) -> None:
    """Nothing that was written changes, and the printed epsilon stays that of what was released."""
    path = tmp_path / "run"
    run(path, mechanism=GAUSSIAN, training={"sampling": "fixed"})
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "config.toml"}
    edit(path, old, new)
    with pytest.raises(InputError, match=reason):
        resume_run(path, Silent())
    assert {file: file.read_bytes() for file in before} == before


def test_more_rounds_that_would_change_calibrated_noise_are_refused(tmp_path: Path) -> None:
    """10 rounds made 300: recalibrated, 7.997 would be printed where 10.31 is true."""
    path = tmp_path / "run"
    run(path, mechanism={"name": "gaussian", "target_epsilon": 8.0}, federation={"rounds": 2})
    edit(path, "rounds = 2", "rounds = 300")
    with pytest.raises(
        InputError, match=r"client 0 released with mechanism sigma = .*, and now it would with sigma = "
    ):
        resume_run(path, Silent())


def test_more_rounds_with_the_same_noise_go_on_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, mechanism=GAUSSIAN, federation={"rounds": 2}, training={"sampling": "fixed"})
    edit(path, "rounds = 2", "rounds = 5")
    ledger = resume_run(path, Silent()).ledger
    assert ledger.participations == 5
    whole = run(tmp_path / "whole", mechanism=GAUSSIAN, federation={"rounds": 5}, training={"sampling": "fixed"})
    assert whole.federation.rounds == 5
    name = "checkpoint/server.safetensors"
    assert (path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_that_does_not_say_what_was_released_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, mechanism=GAUSSIAN)
    (path / "asked.jsonl").write_text('{"round": 1, "clients": [0, 1, 2, 3]}\n')
    with pytest.raises(InputError, match="did not write down what clients release"):
        resume_run(path, Silent())


NETWORK = """
from torch import nn
def network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, classes))
"""


def own_data(path: Path, brighter: int = 0) -> None:
    images = np.random.default_rng(3).integers(0, 255, (20, 3, 3), dtype=np.uint8)
    images[3, 1, 1] += brighter
    labels = np.arange(20) % 2
    np.savez(path, x_train=images[:16], y_train=labels[:16], x_test=images[16:], y_test=labels[16:])


def reproducible(base: Path) -> None:
    edit(base / "run", 'noise = "secret"', 'noise = "reproducible"')


def another_key(base: Path) -> None:
    (base / "run" / "secret.key").write_text("00" * 32)


def other_data(base: Path) -> None:
    own_data(base / "data.npz", brighter=1)


def other_network(base: Path) -> None:
    (base / "mine_for_released.py").write_text(NETWORK.replace("Tanh", "ReLU"))


def same_network_from_other_code(base: Path) -> None:
    (base / "mine_for_released.py").write_text(f"{NETWORK}\n")


CHANGES = {
    reproducible: "config.toml was changed where it decides",
    another_key: "secret.key was replaced after round 1 was asked for",
    other_data: "the data were changed after round 1",
    other_network: "the network's code, or what it is built with, was changed after round 1",
    same_network_from_other_code: "the network's code, or what it is built with, was changed after round 1",
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that has a secret, on data and a network of one's own."""
    own_data(tmp_path / "data.npz")
    (tmp_path / "mine_for_released.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_for_released", raising=False)
    settings = experiment(
        mechanism=GAUSSIAN,
        data={"name": "npz", "path": str(tmp_path / "data.npz")},
        model={"name": "mine_for_released:network"},
        federation={"clients": 2, "rounds": 2},
    )
    start_run(settings.model_copy(update={"noise": "secret"}), tmp_path / "run", "", Silent())
    return tmp_path


def forget() -> None:
    """What a process of its own would not know."""
    sys.modules.pop("mine_for_released", None)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_run_on_something_else_is_not_resumed(change: Callable[[Path], None], base: Path) -> None:
    """What was asked for again would be answered a second time, and counted once."""
    change(base)
    forget()
    with pytest.raises(InputError, match=CHANGES[change]):
        resume_run(base / "run", Silent())


@pytest.mark.parametrize("change", [other_data, another_key], ids=lambda change: change.__name__)
def test_a_run_on_something_else_is_not_looked_at_again(change: Callable[[Path], None], base: Path) -> None:
    folder = RunFolder.open(base / "run")
    forget()
    finished_world(folder, folder.experiment())
    change(base)
    forget()
    with pytest.raises(InputError, match=CHANGES[change]):
        finished_world(folder, folder.experiment())
    (base / "run" / "secret.key").unlink()  # whoever was given the folder without it cannot compare
    finished_world(folder, folder.experiment())


def test_a_run_on_the_same_is_resumed(base: Path) -> None:
    asked = (base / "run" / "asked.jsonl").read_bytes()
    (base / "run" / "checkpoint" / "server.safetensors").unlink()
    forget()
    resume_run(base / "run", Silent())
    assert (base / "run" / "asked.jsonl").read_bytes() == asked


def test_digests_of_secret_and_data_are_keyed(base: Path) -> None:
    """Whoever reads asked.jsonl and has a guess of the data cannot check it."""
    lines = RunFolder.open(base / "run").asked()
    world = build_world(RunFolder.open(base / "run").experiment())
    assert len({line.origin for line in lines}) == 1
    assert lines[0].origin.data not in (world.dataset.digest.hex(), world.secret.derived("data").key.hex())
    assert (base / "run" / "secret.key").read_text().strip() not in (base / "run" / "asked.jsonl").read_text()


DAMAGE: dict[str, tuple[dict[str, object], str]] = {
    "a round before the first": ({"round": 0}, "line 2 is damaged: round"),
    "a negative client": ({"clients": [-1, 1]}, "line 2 is damaged: clients.0"),
    "a client twice": ({"clients": [1, 1]}, "line 2 is damaged: .*clients"),
    "a client that is not there": ({"clients": [0, 7]}, "asked.jsonl names client 7, and this run has 2"),
    "a kind that is not there": ({"kinds": [5, 5]}, "line 2 is damaged: .*kinds"),
    "a negative kind": ({"kinds": [-1, 0]}, "line 2 is damaged: .*kinds"),
    "kinds of fewer clients": ({"kinds": [0]}, "line 2 is damaged: .*kinds"),
    "a release without a mechanism": ({"releases": [{}]}, "line 2 is damaged: releases.0.mechanism"),
    "a release of text": ({"releases": [{"mechanism": "x", "sampling": "y"}]}, "damaged: releases.0.mechanism"),
    "an origin of numbers": ({"origin": {"settings": 7}}, "line 2 is damaged: origin.settings"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("mechanism", [GAUSSIAN, {"name": "none"}], ids=["gaussian", "none"])
def test_a_damaged_record_of_questions_is_told_in_one_line(
    mechanism: dict[str, object], damage: str, tmp_path: Path
) -> None:
    world = build_world(experiment(mechanism=mechanism, federation={"clients": 2}))
    folder = written(world, tmp_path / "run", [(1, world.initial, (0, 1)), (2, world.initial, (0, 1))])
    file = folder.path / "asked.jsonl"
    *first, last = file.read_text().splitlines()
    changed, reason = DAMAGE[damage]
    file.write_text("\n".join([*first, json.dumps({**json.loads(last), **changed}), ""]))
    with pytest.raises(InputError, match=reason):
        check_unchanged(world, folder)


def test_questions_without_a_mechanism_need_no_digest(tmp_path: Path) -> None:
    world = build_world(experiment())
    (line,) = questions(world, 1, [(world.initial, (0, 1))])
    assert line.sent == ""
    check_unchanged(world, written(world, tmp_path / "run", [(1, world.initial, (0, 1))]))


def test_the_digest_is_of_bits_and_names() -> None:
    state = State({"a": torch.zeros(2, 3), "b": torch.ones(2)}, {"c": torch.ones(1)})
    others = [
        State({"a": torch.zeros(3, 2), "b": torch.ones(2)}, {"c": torch.ones(1)}),
        State({"a": torch.zeros(2, 3).double(), "b": torch.ones(2)}, {"c": torch.ones(1)}),
        State({"a": -torch.zeros(2, 3), "b": torch.ones(2)}, {"c": torch.ones(1)}),
        State({"a": torch.zeros(2, 3), "b": torch.ones(2)}, {"d": torch.ones(1)}),
        State({"a": torch.zeros(2, 3), "b": torch.ones(2) * (1 + 1e-7)}, {"c": torch.ones(1)}),
    ]
    assert len({one.digest() for one in (state, *others)}) == 6
    assert state.digest() == State({"a": torch.zeros(2, 3), "b": torch.ones(2)}, {"c": torch.ones(1)}).digest()


@pytest.mark.parametrize("sampling", ["shuffled", "fixed"])
def test_runs_with_a_secret_differ_and_resume_to_the_same_bytes(sampling: str, tmp_path: Path) -> None:
    """The secret is for the owner's eyes; without it nothing is resumed. Batches are hidden where that is relied on."""
    sections = {"mechanism": GAUSSIAN, "training": {"sampling": sampling}}
    settings = experiment(**sections).model_copy(update={"noise": "secret"})
    name = "checkpoint/server.safetensors"
    for folder in ("a", "b"):
        start_run(settings, tmp_path / folder, "", Silent())
    assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "b" / name).read_bytes()
    key = tmp_path / "a" / "secret.key"
    assert key.stat().st_mode & 0o777 == 0o600
    told = b"".join(file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file() and file != key)
    assert key.read_bytes().strip() not in told
    assert bytes.fromhex(key.read_text()) not in told
    folder = RunFolder.open(tmp_path / "a")
    worlds = [build_world(settings, secret) for secret in (folder.secret(settings), Secret.drawn())]
    batches = [world.plans[0].batch(0).tolist() for world in worlds]
    assert (batches[0] == batches[1]) == (sampling == "shuffled")

    finished = (tmp_path / "a" / name).read_bytes()
    (tmp_path / "a" / name).unlink()
    resume_run(tmp_path / "a", Silent())
    assert (tmp_path / "a" / name).read_bytes() == finished
    assert len(folder.asked()) == settings.federation.rounds
    key.unlink()
    with pytest.raises(InputError, match=r"secret\.key is not there, or damaged"):
        resume_run(tmp_path / "a", Silent())
