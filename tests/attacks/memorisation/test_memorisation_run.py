"""Canaries in whole runs: what they change and what not, the audit, its report, and bad input in one line."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from fedpriv.attacks.memorisation.audit import audit_memorisation
from fedpriv.attacks.memorisation.report import Memorisation
from fedpriv.core.cli.app import app
from fedpriv.core.config import Experiment
from fedpriv.core.config.data import CanaryConfig
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.data.canaries import drawn_canaries
from fedpriv.data.tokenizers import Bytes

WORDS = ("the cat sat on the mat", "a dog ran to the cat", "the mat was red", "who let the dog out")
LONG = {"clients": 3, "rounds": 40, "algorithm": "fedavg", "weighting": "uniform"}
CANARIES = {"count": 4, "copies": [1, 12], "length": 2, "prefix": "pin ", "client": 1}


def experiment(folder: Path, canaries: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    rows = "".join(f"{WORDS[n % 4]} {n % 7},speaker {n % 3},{'cat' in WORDS[n % 4]}\n" for n in range(144))
    (folder / "own.csv").write_text(f"text,who,label\n{rows}", encoding="utf-8")
    columns = {"task": "next", "length": 16, "pack": True, **changes.pop("text", {})}
    data = {"name": "text", "path": str(folder / "own.csv"), "partition": "key", "key": "who", "text": columns}
    if canaries is not None:
        data["canaries"] = canaries
    settings: dict[str, Any] = {
        "data": data,
        "model": {"name": "gpt", "width": 16, "depth": 1, "heads": 2},
        "federation": {"clients": 3, "rounds": 2, "algorithm": "fedavg", "weighting": "uniform"},
        "training": {"batch_size": 8, "optimizer": "adam", "learning_rate": 0.01},
        "noise": "reproducible",
    }
    return Experiment.model_validate(settings | changes)


def ran(folder: Path, given: Experiment) -> RunFolder:
    start_run(given, folder / "run", "", Silent())
    return RunFolder.open(folder / "run")


def changed_rows(with_them: World, without: World) -> list[int]:
    differ = (with_them.dataset.x_train != without.dataset.x_train).flatten(1).any(dim=1)
    return differ.nonzero()[:, 0].tolist()


def test_canaries_replace_sequences_of_one_client_and_nothing_else(tmp_path: Path) -> None:
    plain, given = experiment(tmp_path), experiment(tmp_path, CANARIES)
    without, world = build_world(plain), build_world(given)
    rows = changed_rows(world, without)
    assert len(rows) == 2 * (1 + 12)
    assert set(rows) <= set(world.partitions[1].tolist())
    assert all(np.array_equal(a, b) for a, b in zip(world.partitions, without.partitions, strict=True))
    assert world.dataset.x_test.equal(without.dataset.x_test)
    text = world.dataset.text
    assert text is not None
    assert given.data.canaries is not None
    secrets = drawn_canaries(given.data.canaries, world.dataset, given.seed).secrets[:4]
    copies = zip(secrets.tolist(), (1, 12, 1, 12), strict=True)
    expected = sorted(f"pin {one}{two}" for (one, two), times in copies for _ in range(times))
    assert sorted(text.tokenizer.decode(world.dataset.x_train[row].flatten().tolist()) for row in rows) == expected
    x, y = world.dataset.x_train[rows].flatten(1), world.dataset.y_train[rows]
    assert bool((y[:, :-1] == x[:, 1:].long().masked_fill(x[:, 1:] == 0, -100)).all())


def test_settings_without_canaries_have_the_bytes_that_they_had(tmp_path: Path) -> None:
    assert "canaries" not in experiment(tmp_path).model_dump(mode="json")["data"]
    assert "canaries" not in experiment(tmp_path).decisive()["data"]
    assert "canaries" in experiment(tmp_path, CANARIES).decisive()["data"]


@pytest.fixture(scope="module")
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a mechanism that has seen two of its secrets often."""
    folder = tmp_path_factory.mktemp("remembering")
    return ran(folder, experiment(folder, {**CANARIES, "length": 4}, federation=LONG)).path


def audited(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["audit", str(folder), "--samples", "20", "--tokens", "6", *arguments])


def test_a_model_that_repeats_a_secret_is_caught_and_the_report_says_so(remembering: Path) -> None:
    said, folder = audited(remembering), RunFolder.open(remembering)
    assert said.exit_code == 0, said.output
    exposure = "Exposure: log2 of the number of secrets over the rank, at most 13.3. Every secret was ranked."
    assert exposure in said.output
    assert "Proven: nothing: texts are not drawn at random" in said.output
    table = [line for line in said.output.splitlines() if line.lstrip().startswith(("copies", "0 ", "1 ", "12 "))]
    assert len(table) == 4
    assert max(map(len, table)) <= 80
    found = folder.read(Memorisation)
    assert found is not None
    assert [(group.copies, group.canaries) for group in found.groups] == [(0, 4), (1, 2), (12, 2)]
    none, _, often = found.groups
    assert often.exposure > 11
    assert often.exposure > none.exposure + 4
    assert often.written > none.written == 0
    assert [group.ceiling is None for group in found.groups] == [False, True, True]
    assert found.extraction.samples == 20
    assert not found.refuted
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "What the model remembers" in page
    assert "Exposure of canaries" in page
    summary = json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))
    assert summary["memorisation"]["guess"] == found.guess
    assert json.loads(audited(remembering, "--json").stdout)["groups"] == summary["memorisation"]["groups"]
    # Here, since another process of the tests would make the run once more for it.
    with pytest.raises(InputError, match="--tokens 16: a sequence of this run has 16; allowed: 1 to 15"):
        audit_memorisation(RunFolder.open(remembering), 10, 16, Silent())


def test_a_ledger_that_exposures_refute_is_an_error(remembering: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(remembering, tmp_path / "run")
    path = folder / "ledger.json"
    ledger = json.loads(path.read_text(encoding="utf-8"))
    for line in ledger["clients"]:  # what a bug in the accounting might claim
        line.update(epsilon=0.01, delta=1e-9)
    path.write_text(json.dumps(ledger), encoding="utf-8")
    said = audited(folder)
    assert isinstance(said.exception, RunFailedError)
    assert "an exposure whose probability is below 0.1 % under what is claimed" in str(said.exception)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "The ledger is refuted" in page
    assert "refuted-memorisation" in page


@pytest.mark.parametrize("unit", ["example", "update"])
def test_with_a_mechanism_the_ceilings_are_those_of_the_ledger(unit: str, tmp_path: Path) -> None:
    mechanism = {"name": "gaussian", "target_epsilon": 1.0, "unit": unit}
    folder = ran(tmp_path, experiment(tmp_path, CANARIES, mechanism=mechanism))
    found, ledger = audit_memorisation(folder, 10, 6, Silent()), folder.ledger()
    assert ledger is not None
    line = next(line for line in ledger.clients if any(1 in each for each in line.ranges))
    assert line.epsilon is not None
    groups = {group.copies: group for group in found.groups}
    assert groups[1].epsilon == pytest.approx(line.epsilon)
    # All copies are one client's.
    assert groups[12].epsilon == pytest.approx(line.epsilon * (1 if unit == "update" else 12))
    assert (groups[12].ceiling is None) == (unit == "example")
    assert groups[1].ceiling is not None
    assert found.guess < groups[1].ceiling < found.bits
    assert "report" in write_report(folder.path).name


def test_a_run_without_canaries_is_searched_for_texts_alone(tmp_path: Path) -> None:
    folder = ran(tmp_path, experiment(tmp_path))
    found = audit_memorisation(folder, 10, 6, Silent())
    assert found.groups == ()
    assert found.extraction.of_train > 0
    assert "What the model remembers" in write_report(folder.path).read_text(encoding="utf-8")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such client": ({**CANARIES, "client": 7}, "data.canaries.client = 7: there are clients 0 to 2"),
    "too many copies": ({**CANARIES, "copies": [1000]}, "4000 copies in all replace training sequences of client 1"),
    "no token": ({**CANARIES, "alphabet": "01é"}, "'é' is no token of the tokenizer byte"),
    "too long": ({**CANARIES, "length": 12}, "have 5 + 12 tokens, and a sequence has 16"),
}


def test_secrets_are_learnt_where_responses_are(tmp_path: Path) -> None:
    text = {"pack": False, "response": " "}
    with pytest.raises(InputError, match=r"data\.canaries\.prefix = .pin.: data\.text\.response = . . in it"):
        build_world(experiment(tmp_path, {**CANARIES, "prefix": "pin"}, text=text))
    dataset = build_world(experiment(tmp_path, CANARIES, text=text)).dataset
    assert dataset.text is not None
    ending = replace(dataset, text=replace(dataset.text, until="!"))
    with pytest.raises(InputError, match="behind which the loss counts up to '!'"):
        drawn_canaries(CanaryConfig(prefix="pin !"), ending, 0)
    begin = torch.tensor(Bytes().encode("pin "))
    canaries = (dataset.x_train[:, 0, 0, 1:5] == begin).all(dim=1)
    learnt = (dataset.y_train[canaries] >= 0).sum(dim=0)
    assert learnt.tolist() == [0] * 4 + [26] * 3 + [0] * 9  # two digits and the end, of 1 + 12 + 1 + 12 copies


@pytest.mark.parametrize("name", BAD)
def test_canaries_that_do_not_fit_are_one_line(name: str, tmp_path: Path) -> None:
    canaries, reason = BAD[name]
    with pytest.raises(InputError, match=re.escape(reason)):
        build_world(experiment(tmp_path, canaries))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"alphabet": "aab"}, "has a character twice"),
        ({"count": 51, "length": 2}, "make 100 secrets"),
        ({"copies": []}, "copies"),
        ({"copies": [0]}, "copies"),
    ],
)
def test_settings_of_canaries_are_checked(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        experiment(tmp_path, {**CANARIES, **change})


def test_canaries_are_of_texts_whose_next_token_is_learnt(tmp_path: Path) -> None:
    labelled = {"task": "classify", "label": "label", "pack": False}
    given = experiment(tmp_path, None, text=labelled, model={"name": "encoder", "width": 8, "depth": 1, "heads": 2})
    folder = ran(tmp_path, given)
    with pytest.raises(InputError, match="are texts, and an audit of anything but the next token"):
        audit_memorisation(folder, 10, 6, Silent())
    bad = experiment(tmp_path, CANARIES, text=labelled, model={"name": "encoder", "width": 8, "depth": 1, "heads": 2})
    with pytest.raises(InputError, match=r"data\.text\.task = 'next'"):
        build_world(bad)
