"""docs/attack-your-own.md does what it says: its examples are run from its own text."""

from pathlib import Path

import pytest
import torch

from tests.docs.pages import ROOT, blocks, executed

PAGE = ROOT / "docs" / "attack-your-own.md"
EXAMPLES = [block.text for block in blocks(PAGE) if block.language == "python"]


def test_the_page_has_the_examples() -> None:
    assert len(EXAMPLES) == 3
    assert all("flwr" not in example for example in (EXAMPLES[0], EXAMPLES[2]))


@pytest.mark.slow
def test_a_gradient_from_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    names = executed(EXAMPLES[0])
    found, image, label = names["found"], names["image"], names["label"]
    assert found.labels.tolist() == label.tolist()
    error = float((found.images - image).square().mean())
    assert error < 0.002
    assert capsys.readouterr().out == f"label: {int(label)} true: {int(label)}\nmean squared error: {error}\n"


@pytest.mark.slow
def test_a_flower_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adversary's program stands alone: it has the two files and nothing of the client's."""
    monkeypatch.chdir(tmp_path)
    client = executed(EXAMPLES[1])
    found, images, labels = executed(EXAMPLES[2])["found"], client["images"], client["labels"]
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
