"""docs/attack-your-own.md does what it says: its examples are run from its own text."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "attack-your-own.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def executed(*examples: str) -> dict[str, Any]:
    """Run examples one after the other in one namespace, as a reader who types them into one session."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
    return names


def test_the_page_has_the_examples() -> None:
    assert len(EXAMPLES) == 3
    assert all("flwr" not in example for example in (EXAMPLES[0], EXAMPLES[2]))


def test_a_gradient_from_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    names = executed(EXAMPLES[0])
    found, image, label = names["found"], names["image"], names["label"]
    assert found.labels.tolist() == label.tolist()
    error = float((found.images - image).square().mean())
    assert error < 0.002
    assert capsys.readouterr().out == f"label: {int(label)} true: {int(label)}\nmean squared error: {error}\n"


def test_a_flower_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = executed(*EXAMPLES[1:])
    found, images, labels = names["found"], names["images"], names["labels"]
    assert sorted(found.labels.tolist()) == sorted(labels.tolist())
    order = [found.labels.tolist().index(int(label)) for label in labels]
    errors = (found.images[order] - images).square().flatten(1).mean(dim=1)
    assert float(errors.max()) < 0.01


def test_a_list_of_numpy_arrays_is_the_same_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says about ``to_numpy_ndarrays``."""
    monkeypatch.chdir(tmp_path)
    adversary = EXAMPLES[2].replace("iterations=800", "iterations=5")
    names = executed(EXAMPLES[1], adversary)
    sent = [names[record].to_numpy_ndarrays() for record in ("sent_out", "sent_back")]
    by_name = names["found"]
    names["arrays"] = [after - before for before, after in zip(*sent, strict=True)]
    listed = adversary.replace("    update,", "    arrays,")
    assert listed != adversary
    exec(compile(listed, str(PAGE), "exec"), names)
    assert torch.equal(by_name.images, names["found"].images)


def test_every_named_command_exists() -> None:
    from typer.testing import CliRunner

    from fedpriv.cli_attack import attack_app

    options = CliRunner().invoke(attack_app, ["DIR", "--help"], env={"COLUMNS": "200"}).output
    for option in set(re.findall(r"fedpriv attack runs.*?(--\w+)", PAGE.read_text())):
        assert option in options
