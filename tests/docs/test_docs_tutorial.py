"""The tutorial, as a reader follows it: files are saved, commands run in order, output compared in words."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import fedpriv
from tests.docs.pages import ROOT, Block, blocks, commands, executed


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
            done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (program, arguments, done.stderr)
        printed += done.stdout
    return printed


def words(text: str) -> str:
    """Words without line breaks and figures, which differ between machines."""
    return re.sub(r"\d[\d.,]*\d|\d", "N", " ".join(text.split()))


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
def test_the_quickstart_prints_what_the_readme_says(tmp_path: Path) -> None:
    """In its words; what the ledger proves, which no machine changes, in its figures too."""
    (said,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "text")
    done = fedpriv("run", str(ROOT / "configs" / "quickstart.toml"), "--out", "runs/quickstart-1-1", cwd=tmp_path)
    assert words(done.stdout) == words(said)
    proven = [re.search(r"epsilon [\d.]+ at delta", text) for text in (done.stdout, said)]
    assert proven[0] and proven[1] and proven[0].group() == proven[1].group()
