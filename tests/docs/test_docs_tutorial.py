"""The tutorial, as a reader follows it: files are saved, commands run in order, output compared in words."""

import math
import shutil
from pathlib import Path

import pytest

from fedpriv.core.config import load_experiment
from fedpriv.core.world import build_world
from tests.command_line import fedpriv, python
from tests.docs.pages import ROOT, Block, blocks, commands, executed, words


def follow(page: Path, folder: Path) -> str:
    """Save and run the blocks of a page in a folder with a copy of the examples; return what was printed."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    printed = ""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            printed += carried_out(block, folder)
    return printed


def carried_out(block: Block, folder: Path) -> str:
    printed = ""
    for program, *arguments in commands(block):
        if program == "fedpriv":
            done = fedpriv(*arguments, cwd=folder)
        else:
            assert program == "python"
            done = python(*arguments, cwd=folder)
        assert done.returncode == 0, (program, arguments, done.stderr)
        printed += done.stdout
    return printed


def excerpts(page: Path) -> list[str]:
    return [words(block.text) for block in blocks(page) if block.language == "text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorial", "tutorial-own", "tutorial-sweep"])
def test_a_reader_who_follows_it(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / f"{name}.md"
    printed = words(follow(page, tmp_path))
    for excerpt in excerpts(page):
        assert excerpt in printed
    assert list(tmp_path.glob("runs/*/report.html"))


def test_a_gradient_without_noise() -> None:
    names = executed(*gradient_page()[:2])
    assert names["error"] < 1e-6
    assert names["found"].labels.tolist() == names["label"].tolist()


@pytest.mark.slow
def test_a_gradient_behind_noise(capsys: pytest.CaptureFixture[str]) -> None:
    """Something is learnt, but less."""
    names = executed(*gradient_page())
    assert names["error"] < names["noisy_error"] < names["guess_error"]
    assert names["proven"].epsilon > 0
    assert capsys.readouterr().out.count("\n") == 4


def gradient_page() -> list[str]:
    return [block.text for block in blocks(ROOT / "docs" / "tutorial-gradient.md")]


@pytest.mark.slow
def test_the_quickstart_proves_what_the_readme_says() -> None:
    """Its words are compared where the wheel is tested."""
    (said,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "text")
    world = build_world(load_experiment(ROOT / "configs" / "quickstart.toml"))
    rounds = range(1, world.experiment.federation.rounds + 1)
    worst = max((plan.guarantee(rounds) for plan in world.plans), key=lambda proven: proven.epsilon or math.inf)
    assert f"epsilon {worst.epsilon:.4g} at delta {worst.delta:g}" in said
    assert f"pure epsilon {worst.pure_epsilon:,g}" in said
    assert f"{max(plan.participations(rounds) for plan in world.plans)} uses of an example" in said
    assert f"After {len(rounds)} rounds" in said
