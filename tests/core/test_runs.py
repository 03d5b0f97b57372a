"""The run folder: written whole, read back, and refused when it is not one."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.files import locked
from fedpriv.core.lab import resume_run
from fedpriv.core.progress import Silent
from fedpriv.core.records import Asked, Failure, RoundRecord
from fedpriv.core.runs import Checkpoint, RunFolder


def record(number: int) -> RoundRecord:
    return RoundRecord(number, 1.5, 0.25, (0, 1), (0,), (Failure(1, "raised"),), 0.1, 10, 20)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", Experiment(name="x", seed=5))


def test_the_folder_keeps_the_experiment(folder: RunFolder) -> None:
    assert RunFolder.open(folder.path).experiment() == Experiment(name="x", seed=5)
    assert folder.command() == f"fedpriv run {folder.path / 'config.toml'}"


def test_a_folder_with_something_in_it_is_left_alone(folder: RunFolder) -> None:
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(InputError, match="exists already"):
        RunFolder.create(folder.path, Experiment())
    assert sorted(folder.path.rglob("*")) == before
    (folder.path.parent / "file").write_text("x")
    with pytest.raises(InputError, match="exists already"):
        RunFolder.create(folder.path.parent / "file", Experiment())
    with pytest.raises(InputError, match="cannot be written"):
        RunFolder.create(folder.path.parent / "file" / "below", Experiment())


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path, Experiment()).experiment() == Experiment()


def test_rounds_come_back_and_a_torn_last_line_is_dropped(folder: RunFolder) -> None:
    assert folder.rounds() == []
    for number in range(4):
        folder.append_round(record(number))
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "loss"')
    assert folder.rounds() == [record(number) for number in range(4)]
    folder.keep_rounds(2)
    assert folder.rounds() == [record(number) for number in range(3)]


def test_a_question_that_a_kill_cut_off_does_not_spoil_the_next(folder: RunFolder) -> None:
    """What was not written down whole was not sent."""
    folder.remove_parts()  # there is no such file yet
    for cut in range(1, 20):
        folder.append_asked(Asked(cut, (0, 1)))
        with (folder.path / "asked.jsonl").open("a") as file:
            file.write('{"round": 2, "clients"'[:cut])
        assert [line.round for line in folder.asked()] == list(range(1, cut + 1))
        folder.remove_parts()
    folder.append_asked(Asked(20, (0, 1)))
    assert [line.round for line in folder.asked()] == list(range(1, 21))


@pytest.mark.parametrize(
    "line", [b"not json\n", b"[1]\n", b'{"round": 1}\n', b'{"round": 1.5, "clients": []}\n', b"\xff\xfe\n", b"\n"]
)
def test_damaged_lines_are_refused(folder: RunFolder, line: bytes) -> None:
    folder.append_round(record(0))
    folder.append_asked(Asked(1, (0, 1)))
    for name, read in (("metrics", folder.rounds), ("asked", folder.asked)):
        with (folder.path / f"{name}.jsonl").open("ab") as file:
            file.write(line)
        with pytest.raises(InputError, match=rf"{name}\.jsonl, line 2 is damaged"):
            read()


def test_metrics_of_an_older_version_are_read(folder: RunFolder) -> None:
    """Before the running epsilon was written; and keys of a later version do not matter."""
    line = {key: value for key, value in asdict(record(0)).items() if key != "epsilon"}
    (folder.path / "metrics.jsonl").write_text(json.dumps({**line, "later": 1}) + "\n")
    assert folder.rounds() == [record(0)]


def test_the_running_epsilon_comes_back(folder: RunFolder) -> None:
    folder.append_round(replace(record(0), epsilon=1.25))
    assert folder.rounds()[0].epsilon == 1.25


def test_a_checkpoint_comes_back(folder: RunFolder) -> None:
    assert folder.load_checkpoint() is None
    tensors = {"parameters/a": torch.randn(3, 2), "optimizer/0/step": torch.tensor(3.0)}
    folder.save_checkpoint(Checkpoint(7, tensors))
    loaded = folder.load_checkpoint()
    assert loaded is not None
    assert loaded.round == 7
    assert loaded.tensors.keys() == tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_damaged_checkpoint_is_refused(folder: RunFolder, keep: int) -> None:
    folder.save_checkpoint(Checkpoint(7, {"parameters/a": torch.randn(30)}))
    path = folder.path / "checkpoint" / "server.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"server\.safetensors is damaged"):
        folder.load_checkpoint()


def test_nothing_that_is_not_json_is_written(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        folder.write_json("x.json", {"epsilon": float("inf")})
    assert not (folder.path / "x.json").exists()


def test_other_folders_are_no_runs(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="is not the folder of a run"):
            RunFolder.open(path)


def test_a_run_that_goes_on_is_not_resumed_beside_itself(folder: RunFolder) -> None:
    with locked(folder.path), pytest.raises(InputError, match=rf"run is being written by process {os.getpid()}$"):
        resume_run(folder.path, Silent())
