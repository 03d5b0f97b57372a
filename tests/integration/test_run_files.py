"""What docs/files.md says of a run's files: each is sorted, and only the laboratory's hold exact figures of data."""

import json
import re
import shutil
import stat
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.algorithms.labels.survey import read_survey
from fedpriv.core.config import Experiment
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import load_view, write_report
from fedpriv.core.runs import RunFolder
from tests.integration.small import experiment, left_behind

PAGE = Path(__file__).parents[2] / "docs" / "files.md"
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| [^|]+ \|$", re.MULTILINE)
KINDS = dict(ROW.findall(PAGE.read_text(encoding="utf-8")))
CLASSES, CLIENTS = 4, 3


def kind_of(name: str) -> str:
    """What the page says of a file; exactly one row is about it."""
    (kind,) = {pattern: kind for pattern, kind in KINDS.items() if fnmatch(name, pattern)}.values()
    return kind


def data(path: Path, labels: list[int]) -> None:
    """60 images, of which the labels say nothing; the public test images are always the same."""
    images = np.random.default_rng(1).integers(256, size=(80, 4, 4), dtype=np.uint8)
    names = np.array([f"class {label}" for label in range(CLASSES)])
    tests = np.arange(20) % CLASSES
    np.savez(path, x_train=images[:60], y_train=labels, x_test=images[60:], y_test=tests, class_names=names)


def settings(path: Path, **sections: dict[str, object]) -> Experiment:
    own = {"name": "npz", "path": str(path)} | sections.pop("data", {})
    return experiment(data=own, federation={"clients": CLIENTS, "rounds": 2}, **sections)


EVEN, SKEWED = [label % CLASSES for label in range(60)], [0] * 45 + [1, 2, 3] * 5


def without_times(content: bytes) -> bytes:
    return re.sub(rb'"seconds": [^,]+', b"", content)


def public_files(folder: Path) -> dict[str, bytes]:
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    shown = [name for name in names if kind_of(name) in ("released", "participants")]
    return {name: without_times((folder / name).read_bytes()) for name in shown}


@pytest.fixture(scope="module")
def same_release() -> Iterator[None]:
    """Whatever the labels are, clients change them to the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        changed = "fedpriv.algorithms.labels.preparation.changed_labels"
        patch.setattr(changed, lambda labels, *_: torch.arange(len(labels)) % CLASSES)
        yield


@pytest.fixture(scope="module")
def neighbours(same_release: None, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs on other labels, of which all that leaves the clients is the same."""
    place, folders = tmp_path_factory.mktemp("neighbours"), []
    for number, labels in enumerate((EVEN, SKEWED)):
        data(place / "own.npz", labels)
        attacked = {"attacks": ["idlg"], "victims": 1, "rounds": [1]}
        run = settings(place / "own.npz", data={"label_epsilon": 1.0}, training={"batch_size": 1}, adversary=attacked)
        folders.append(place / str(number))
        start_run(run, folders[-1], "fedpriv run x", Silent())
        write_report(folders[-1])
    return folders


def test_what_may_be_shown_follows_from_what_left_the_clients(neighbours: list[Path]) -> None:
    """Byte by byte; a file that the page does not sort fails here."""
    one, other = map(public_files, neighbours)
    assert {"ledger.json", "labels.json", "metrics.jsonl", "asked.jsonl", "checkpoint/server.safetensors"} <= one.keys()
    assert one == other
    for name in ("partition.json", "labels.json", "ceilings.json"):
        path = Path("referee", name)
        assert (neighbours[0] / path).read_bytes() != (neighbours[1] / path).read_bytes()


def test_the_referees_files_are_for_their_owner(neighbours: list[Path]) -> None:
    for folder in neighbours:
        assert stat.S_IMODE((folder / "referee").stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in (folder / "referee").iterdir()} == {0o600}
    told = read_survey(RunFolder.open(neighbours[1])).told  # type: ignore[union-attr]
    assert told is not None
    assert told.true_shares == (0.75, *[5 / 60] * 3)
    assert "told" not in json.loads((neighbours[1] / "labels.json").read_text())
    assert "75.00%" in (neighbours[1] / "report.html").read_text()  # the laboratory's own page


@pytest.mark.parametrize(
    "mechanism",
    [
        {"name": "none"},
        {"name": "gaussian", "target_epsilon": 3.0},
        {"name": "vmf", "kappa": 40.0},
        {"name": "laplace", "scale": 2.0},
    ],
    ids=lambda mechanism: mechanism["name"],
)
def test_the_ledger_depends_on_no_label(mechanism: dict[str, object], tmp_path: Path) -> None:
    """Which clients share a line included: that, too, must not tell whose classes are equally frequent."""
    ledgers = []
    for number, labels in enumerate((EVEN, SKEWED, [0] * 60)):
        data(tmp_path / "own.npz", labels)
        run = settings(tmp_path / "own.npz", training={"batch_size": 4}, mechanism=mechanism)
        start_run(run, tmp_path / str(number), "", Silent())
        ledgers.append((tmp_path / str(number) / "ledger.json").read_bytes())
    assert ledgers[0] == ledgers[1] == ledgers[2]
    even, skewed, single = (RunFolder.open(tmp_path / str(number)).label_ceilings() for number in range(3))
    assert single == ()  # there is nothing to tell
    assert max(line.label.k0 for line in even) < 0.5 < min(line.label.k0 for line in skewed)
    assert sum(line.count for line in skewed) == CLIENTS


def test_folders_of_earlier_versions_are_read_and_set_right(neighbours: list[Path], tmp_path: Path) -> None:
    """They have the referee's figures in the open; once the run is resumed they are apart, as in a new run."""
    new = neighbours[1]
    old = Path(shutil.copytree(new, tmp_path / "old"))
    survey, partition = read_survey(RunFolder.open(old)), RunFolder.open(old).partition()
    assert survey is not None
    (old / "partition.json").write_bytes((old / "referee" / "partition.json").read_bytes())
    (old / "labels.json").write_text(survey.model_dump_json())
    shutil.rmtree(old / "referee")
    assert read_survey(RunFolder.open(old)) == survey
    assert RunFolder.open(old).partition() == partition
    assert load_view(old).partition == partition
    resume_run(old, Silent())
    write_report(old)
    assert left_behind(old) == left_behind(new)
