"""Whole runs on texts: the loss falls, the ledger names its unit, and what reads pictures says that it does not."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedpriv.attacks.membership.audit import audit_run
from fedpriv.core.cli.app import app
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab import attack_run, resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder

WORDS = ("the cat sat on the mat", "a dog ran to the cat", "the mat was red", "who let the dog out")


def experiment(folder: Path, task: str, rounds: int = 2, **changes: Any) -> Experiment:
    rows = "".join(f"{WORDS[n % 4]} {n % 7},speaker {n % 3},{'cat' in WORDS[n % 4]}\n" for n in range(48))
    (folder / "own.csv").write_text(f"text,who,label\n{rows}", encoding="utf-8")
    columns = {"task": task, "label": "label", "length": 16, "pack": task == "next"}
    settings: dict[str, Any] = {
        "data": {"name": "text", "path": str(folder / "own.csv"), "key": "who", "partition": "key", "text": columns},
        "model": {"name": "gpt" if task == "next" else "encoder", "width": 8, "depth": 1, "heads": 2},
        "federation": {"clients": 3, "rounds": rounds, "server_optimizer": "adam", "server_learning_rate": 0.02},
        "training": {"batch_size": 4},
        "noise": "reproducible",
    }
    return Experiment.model_validate(settings | changes)


MECHANISMS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "gaussian": {"name": "gaussian", "sigma": 1.0},
    "gaussian, speakers": {"name": "gaussian", "sigma": 1.0, "unit": "update"},
    "vmf": {"name": "vmf", "kappa": 200.0},
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("task", ["next", "classify"])
def test_a_whole_run(task: str, mechanism: str, tmp_path: Path) -> None:
    # Without noise long enough that something is learnt.
    given = experiment(tmp_path, task, 12 if mechanism == "none" else 2, mechanism=MECHANISMS[mechanism])
    summary = start_run(given, tmp_path / "run", "", Silent())
    assert summary.status == "completed"
    assert summary.data.task == task
    rounds = RunFolder.open(tmp_path / "run").rounds()
    if mechanism == "none":
        assert rounds[-1].loss < rounds[0].loss
    else:
        assert summary.ledger is not None
        unit = "one example" if given.mechanism.unit == "example" else "client"
        assert any(unit in sentence for sentence in summary.verdict)
    said = " ".join(summary.verdict)
    assert ("nats per token" in said) == (task == "next")
    assert "No attack on uploads was run" in said
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "No attack on uploads was run" in page
    assert ("nats per token" in page) == (task == "next")


@pytest.mark.parametrize("clients", [2, 3])
def test_texts_of_keys_that_take_no_part_are_told(clients: int, tmp_path: Path) -> None:
    given = experiment(tmp_path, "classify", 1, federation={"clients": clients, "rounds": 1})
    told = [text for text in start_run(given, tmp_path / "run", "", Silent()).warnings if "are not used" in text]
    sizes = [16 - 2, 16 - 2, 16 - 2]  # of 16 texts of each of three speakers, a tenth is for tests
    expected = f"2 clients hold {sum(sizes[:2])} of {sum(sizes)} training examples"
    assert len(told) == (clients < 3)
    assert all(expected in text for text in told)


def test_a_finished_run_is_resumed_and_not_audited(tmp_path: Path) -> None:
    start_run(experiment(tmp_path, "next"), tmp_path / "run", "", Silent())
    assert resume_run(tmp_path / "run", Silent()).status == "completed"
    with pytest.raises(InputError, match=r"data\.name = 'text' are texts"):
        audit_run(RunFolder.open(tmp_path / "run"), 6, 2, Silent())


def test_a_run_whose_uploads_are_read(tmp_path: Path) -> None:
    change: dict[str, Any] = {
        "adversary": {"attacks": ["dager"], "victims": 1},
        "model": {"name": "gpt", "width": 128, "depth": 2, "heads": 2},
        "mechanism": {"name": "gaussian", "sigma": 1.0},
    }
    summary = start_run(experiment(tmp_path, "classify", 1, **change), tmp_path / "run", "", Silent())
    (read,) = (result for result in summary.attacks if result.upload == "unprotected")
    assert read.sentences is not None and read.sentences.rouge1 == 1 and read.recovered == read.victims == 4
    assert not any(result.upload == "protected" for result in summary.attacks)
    assert any("noise edge" in refusal for refusal in summary.refusals)  # never a silent failure
    assert any("Tokens read without protection: dager ROUGE-1 1.000" in sentence for sentence in summary.verdict)
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert '<span class="read">' in page and "ROUGE-L" in page
    folder = RunFolder.open(tmp_path / "run")
    before = folder.scores()
    attack_run(tmp_path / "run", ["dager"], [], [], None, "", Silent())
    assert folder.scores() == before
    with pytest.raises(InputError, match="iga reads images or rows of tables"):
        attack_run(tmp_path / "run", ["iga"], [], [], None, "", Silent())


def test_an_attack_made_again_says_the_same_of_the_model(tmp_path: Path) -> None:
    adversary: dict[str, Any] = {"attacks": ["tag"], "victims": 1, "tag": {"iterations": 2}, "counterfactual": False}
    adversary["knows_candidates"] = True
    before = start_run(experiment(tmp_path, "next", 1, adversary=adversary), tmp_path / "run", "", Silent())
    again = attack_run(tmp_path / "run", ["tag"], [], [], None, "", Silent())
    assert again.verdict == before.verdict
    assert "nats per token" in " ".join(again.verdict)


def test_attacks_say_that_they_read_no_texts(tmp_path: Path) -> None:
    assert experiment(tmp_path, "next").adversary.attacks == ()
    with pytest.raises(ValueError, match=r"adversary\.attacks: iga reads images or rows of tables"):
        experiment(tmp_path, "next", adversary={"attacks": ["iga"]})
    with pytest.raises(ValueError, match=r"section \[pate\] is for images"):
        experiment(tmp_path, "next", federation={"clients": 3, "algorithm": "pate"})
    listed = CliRunner().invoke(app, ["attack", "list"]).output
    assert "reads texts (data.name = " in " ".join(listed.split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partition": "dirichlet"}, "sorts by labels, and the next token is predicted"),
        ({"label_epsilon": 1.0}, "data.label_epsilon is about labels"),
        ({"groups": [[0], [1]]}, "data.groups"),
    ],
)
def test_what_is_about_labels_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    given = experiment(tmp_path, "next")
    tree = given.model_dump(mode="json")
    with pytest.raises(InputError, match=words):
        start_run(Experiment.model_validate(tree | {"data": tree["data"] | change}), tmp_path / "run", "", Silent())


def test_more_clients_than_speakers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"federation\.clients = 4: data\.partition = 'key'.* belong to 3"):
        start_run(experiment(tmp_path, "next", federation={"clients": 4}), tmp_path / "run", "", Silent())
