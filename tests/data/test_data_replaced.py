"""Files that are replaced while a process goes on: data, weights and code are those on the disk, or it says so."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from pyarrow import parquet

from fedpriv.clients import answering as clients
from fedpriv.clients.app import client_app
from fedpriv.core.config import DataConfig, Experiment
from fedpriv.core.errors import InputError, RefusedError, RunFailedError
from fedpriv.core.files import content_digest
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.lab import run as running
from fedpriv.core.progress import Silent
from fedpriv.core.records import RoundRecord
from fedpriv.core.runs import RunFolder
from fedpriv.core.wire import pack
from fedpriv.core.world import build_world
from fedpriv.data import datasets
from fedpriv.data.datasets import load_dataset
from fedpriv.data.sets.npz import OwnArrays
from fedpriv.data.source import Place
from fedpriv.models.machinery.settings import model_settings


def archive(path: Path, level: int) -> None:
    """20 images of one grey level, stored as they are, so that every archive has the same size."""
    labels, images = np.arange(20) % 2, np.full((20, 4, 4), level, np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images[:8], y_test=labels[:8])


def table(path: Path, level: int) -> None:
    path.write_text("grey,label\n" + "".join(f"{level},{'ab'[row % 2]}\n" for row in range(20)))


def hub_table(path: Path, level: int) -> None:
    rows = pa.table({"grey": [level] * 20, "label": ["a", "b"] * 10})
    parquet.write_table(rows, path, compression="none")


def texts(path: Path, level: int) -> None:
    path.write_text("text\n" + f"grey {level}\n" * 20)


def rewritten(write: Callable[[Path, int], None], path: Path, level: int) -> None:
    """Replace a file's content in its place, with the size and the time of modification that it had."""
    before = path.stat()
    write(path, level)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns)


COLUMNS = {"label": "label", "columns": [{"name": "grey", "low": 0, "high": 100}], "classes": ["a", "b"]}
KINDS: dict[str, tuple[Callable[[Path, int], None], str, dict[str, object]]] = {
    "npz": (archive, "own.npz", {"name": "npz", "path": "own.npz"}),
    "csv": (table, "own.csv", {"name": "csv", "path": "own.csv", "table": COLUMNS}),
    "test rows": (
        table,
        "test.csv",
        {"name": "csv", "path": "train.csv", "table": {**COLUMNS, "test_path": "test.csv"}},
    ),
    "hub": (hub_table, "own.parquet", {"name": "hub", "path": "own.parquet", "table": COLUMNS}),
    "text": (texts, "own.csv", {"name": "text", "path": "own.csv"}),
    "in the folder": (archive, "mnist.npz", {"name": "mnist", "root": "."}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_replaced_is_read_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where neither its size nor its time of modification tells."""
    monkeypatch.chdir(tmp_path)
    write, name, settings = KINDS[kind]
    config = DataConfig.model_validate(settings)
    table(tmp_path / "train.csv", 50)
    if kind == "in the folder":  # ten classes
        monkeypatch.setattr("fedpriv.data.sets.mnist.Mnist.classes", 2)
        monkeypatch.setattr("fedpriv.data.sets.mnist.Mnist.class_names", ("0", "1"))
    write(Path(name), 10)
    first = load_dataset(config, 1)
    rewritten(write, Path(name), 90)
    second = load_dataset(config, 1)
    datasets._complete.cache_clear()  # as a new process has it
    assert second.digest == load_dataset(config, 1).digest != first.digest


@pytest.mark.parametrize("changed", ["module", "what it reads"])
def test_an_object_is_read_as_its_module_is_now(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"changing_{changed.partition(' ')[0]}"
    monkeypatch.syspath_prepend(tmp_path)
    config = DataConfig.model_validate({"name": f"{name}:data", "table": COLUMNS})
    found = []
    for level in (10, 100):  # files of other sizes, as Python's own cache of modules needs them
        path = tmp_path / (f"{level}.parquet" if changed == "module" else "own.parquet")
        hub_table(path, level)
        (tmp_path / f"{name}.py").write_text(
            "import datasets\nfrom pyarrow import parquet\n\n"
            f"def data():\n    return datasets.Dataset(parquet.read_table({str(path)!r}))\n"
        )
        found.append(load_dataset(config, 1).digest)
    assert found[0] != found[1]


def test_a_relative_path_is_another_file_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = []
    for level in (10, 90):
        (tmp_path / str(level)).mkdir()
        monkeypatch.chdir(tmp_path / str(level))
        archive(Path("own.npz"), level)
        levels += load_dataset(DataConfig(name="npz", path="own.npz"), 1).x_train.unique().tolist()
    assert levels == [10, 90]


def test_a_file_that_stays_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive(tmp_path / "own.npz", 10)
    config, read = DataConfig(name="npz", path=str(tmp_path / "own.npz")), OwnArrays.read
    reads: list[Place] = []
    monkeypatch.setattr(OwnArrays, "read", lambda place: reads.append(place) or read(place))
    assert load_dataset(config, 1) is load_dataset(config, 1)
    assert len(reads) == 1


def test_data_whose_files_nobody_names_are_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another package: no file of its is known to be the same."""
    archive(tmp_path / "own.npz", 10)
    monkeypatch.setattr(OwnArrays, "files", lambda place: None)
    config = DataConfig(name="npz", path=str(tmp_path / "own.npz"))
    assert load_dataset(config, 1) is not load_dataset(config, 1)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "own.npz", OwnArrays.read
    archive(path, 10)

    def meanwhile(place: Place) -> object:
        found = read(place)
        archive(path, 90)
        return found

    monkeypatch.setattr(OwnArrays, "read", meanwhile)
    with pytest.raises(InputError, match=r"own file, .*own\.npz: was changed while it was read; start again"):
        load_dataset(DataConfig(name="npz", path=str(path)), 1)


def test_a_digest_is_of_what_a_file_holds_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was at rest is hashed once; one of the last seconds each time: its time of change may not move."""
    path = tmp_path / "file"
    path.write_bytes(b"one")
    status, now = path.stat(), path.stat().st_ctime_ns
    monkeypatch.setattr("fedpriv.core.files.time.time_ns", lambda: now + 1)
    one = content_digest(path)
    path.write_bytes(b"two")
    monkeypatch.setattr("fedpriv.core.files.os.fstat", lambda _: status)  # a clock that is too coarse
    two = content_digest(path)
    assert one != two
    monkeypatch.setattr("fedpriv.core.files.time.time_ns", lambda: now + 10**10)
    assert content_digest(path) == two
    path.unlink()
    path.write_bytes(b"six")
    assert content_digest(path) == two  # known by what the system says of it
    with pytest.raises(OSError, match="no regular file"):
        content_digest(tmp_path)


# ---- runs -----------------------------------------------------------------------------------------------------------


def settings(path: Path, network: str = "logistic", **sections: object) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "replaced",
            "noise": "reproducible",
            "data": {"name": "npz", "path": str(path)},
            "model": {"name": network},
            "federation": {"clients": 2, "rounds": 2},
            "training": {"batch_size": 4},
            "adversary": {"attacks": []},
            "engine": {"name": "inline", "device": "cpu"},
            **sections,
        }
    )


GAUSSIAN = {"name": "gaussian", "sigma": 0.5}


def trained(folder: Path) -> bytes:
    return (folder / "checkpoint" / "server.safetensors").read_bytes()


@pytest.mark.parametrize("mechanism", [{"name": "none"}, GAUSSIAN], ids=["none", "gaussian"])
def test_a_second_run_of_one_process_trains_on_the_file_as_it_is(mechanism: dict[str, object], tmp_path: Path) -> None:
    """The oracle: the same data under another name, which no cache knows."""
    own, other = tmp_path / "own.npz", tmp_path / "other.npz"
    archive(own, 10)
    start_run(settings(own, mechanism=mechanism), tmp_path / "one", "", Silent())
    rewritten(archive, own, 90)
    archive(other, 90)
    start_run(settings(own, mechanism=mechanism), tmp_path / "two", "", Silent())
    start_run(settings(other, mechanism=mechanism), tmp_path / "fresh", "", Silent())
    if mechanism["name"] == "none":  # noise depends on the settings, the path included
        assert trained(tmp_path / "two") == trained(tmp_path / "fresh")
    assert trained(tmp_path / "one") != trained(tmp_path / "two")
    asked = [(tmp_path / name / "asked.jsonl").read_text() for name in ("one", "two")]
    assert (asked[0] == asked[1]) == (mechanism["name"] == "none")


def test_a_run_does_not_go_on_with_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced between the server's look at it and the clients': nothing is answered."""
    own, run_engine = tmp_path / "own.npz", running.run_engine
    archive(own, 10)

    def replacing(*arguments: object) -> None:
        rewritten(archive, own, 90)
        run_engine(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "run_engine", replacing)
    with pytest.raises(RunFailedError, match="changed after the run had begun"):
        start_run(settings(own), tmp_path / "run", "", Silent())
    assert [record.round for record in RunFolder.open(tmp_path / "run").rounds()] == [0]


def test_rounds_that_follow_are_of_the_data_that_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced after the first round: all of the run has one version, what would be without a mechanism included."""
    own, append = tmp_path / "own.npz", RunFolder.append_round
    archive(own, 10)
    start_run(settings(own, mechanism=GAUSSIAN), tmp_path / "whole", "", Silent())

    def replacing(self: RunFolder, record: RoundRecord) -> None:
        append(self, record)
        if record.round == 1:
            archive(own, 90)

    monkeypatch.setattr(RunFolder, "append_round", replacing)
    world = build_world(settings(own, mechanism=GAUSSIAN))
    start_run(settings(own, mechanism=GAUSSIAN), tmp_path / "run", "", Silent())
    for name in ("checkpoint/server.safetensors", "asked.jsonl", "ledger.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert world.unprotected.dataset is world.dataset
    assert not world.unprotected.plans[0].config.protects


def test_a_client_of_a_deployment_goes_on_with_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever round it is asked for; after a restart, too."""
    own = tmp_path / "own.npz"
    archive(own, 10)
    experiment = settings(own, mechanism=GAUSSIAN, noise="secret")
    initial = build_world(experiment).initial
    context = Context(run_id=7, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={})

    def asked(number: int) -> Message:
        task = ConfigRecord({"experiment": experiment.model_dump_json(), "round": number})
        content = {"parameters": pack(initial.parameters), "buffers": pack(initial.buffers), "task": task}
        question = Message(RecordDict(content), dst_node_id=1, message_type="train", group_id=str(number))
        return client_app(None)(question, context)

    assert not asked(1).has_error()
    rewritten(archive, own, 90)
    clients._world.cache_clear()
    with pytest.raises(RefusedError, match="not those with which this client was first asked"):
        asked(2)
    rewritten(archive, own, 10)
    clients._world.cache_clear()
    assert not asked(2).has_error()


# ---- code and weights -----------------------------------------------------------------------------------------------

NETWORK = """
from torch import nn
def network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, classes))
"""


def test_code_that_was_edited_is_not_taken_for_what_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of the file would stand beside results of what was imported before it was edited."""
    module, own = tmp_path / "mine_for_replaced.py", tmp_path / "own.npz"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a time of modification says whether its code is used
    archive(own, 10)
    module.write_text(NETWORK)
    experiment = settings(own, "mine_for_replaced:network")
    first = build_world(experiment)
    assert build_world(experiment) is first
    module.write_text(NETWORK.replace("Tanh", "ReLU"))
    for build in (lambda: build_world(experiment), lambda: start_run(experiment, tmp_path / "run", "", Silent())):
        with pytest.raises(InputError, match=r"mine_for_replaced\.py was changed after this process had imported it"):
            build()
    assert not (tmp_path / "run").exists()
    importlib.reload(sys.modules["mine_for_replaced"])
    assert "ReLU" in str(build_world(experiment).model)
    assert "Tanh" in str(first.model)
    monkeypatch.delitem(sys.modules, "mine_for_replaced")


def test_weights_that_own_code_reads_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows which files it reads."""
    weights = tmp_path / "weights"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reads_for_replaced.py").write_text(
        NETWORK
        + "def read(shape, classes):\n"
        + "    net = network(shape, classes)\n"
        + f"    net[1].bias.data.fill_(float(open({str(weights)!r}).read()))\n"
        + "    return net\n"
    )
    archive(tmp_path / "own.npz", 10)
    found = []
    for number in ("1", "2", "2"):
        weights.write_text(number)
        world = build_world(settings(tmp_path / "own.npz", "reads_for_replaced:read"))
        found.append(world.initial.parameters["1.bias"].unique().tolist())
    assert found == [[1.0], [2.0], [2.0]]
    assert build_world(settings(tmp_path / "own.npz", "reads_for_replaced:read")) is world
    monkeypatch.delitem(sys.modules, "reads_for_replaced")


def test_pretrained_weights_that_were_replaced_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that reads its numbers from a file."""
    kind = type(model_settings({"name": "logistic"}))
    weights, build = tmp_path / "weights", kind.network

    def network(self: object, shape: tuple[int, int, int], classes: int) -> object:
        built = build(self, shape, classes)  # type: ignore[arg-type]
        next(built.parameters()).data.fill_(float(weights.read_text()))
        return built

    monkeypatch.setattr(kind, "network", network)
    monkeypatch.setattr(kind, "files", lambda self, folder: (weights,))
    archive(tmp_path / "own.npz", 10)
    found = []
    for number in ("1", "2", "2"):
        weights.write_text(number)
        world = build_world(settings(tmp_path / "own.npz"))
        found.append(next(iter(world.initial.parameters.values())).unique().tolist())
    assert found == [[1.0], [2.0], [2.0]]


def test_resumed_runs_read_the_file_as_it_is(tmp_path: Path) -> None:
    """In one process, too, they notice that it is another one."""
    own = tmp_path / "own.npz"
    archive(own, 10)
    start_run(settings(own, mechanism=GAUSSIAN), tmp_path / "run", "", Silent())
    rewritten(archive, own, 90)
    with pytest.raises(InputError, match="the data were changed after round 1"):
        resume_run(tmp_path / "run", Silent())
