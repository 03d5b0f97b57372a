"""Each block of code in README and docs runs, is a valid experiment or sweep, or is a command that exists."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.core import TyperCommand
from typer.testing import CliRunner

from fedpriv.core.cli.app import app
from fedpriv.core.config import load_experiment
from fedpriv.core.config.file import kind_of_file
from fedpriv.flower.app_settings import read_settings
from fedpriv.prompts.settings import load_prompting
from fedpriv.sweep.settings import load_sweep
from tests.docs.pages import PAGES, ROOT, blocks, commands, executed

EVERYWHERE = [ROOT / "README.md", *PAGES]


def with_blocks(language: str) -> list[Path]:
    return [page for page in EVERYWHERE if any(block.language == language for block in blocks(page))]


# Run by tests of their own.
ELSEWHERE = {"attack-your-own", "flower-app", "tutorial", "tutorial-own", "tutorial-gradient", "tutorial-sweep"} | {
    "notebook"
}
WITH_PYTHON = [
    pytest.param(page, marks=pytest.mark.slow if page.stem == "README" else (), id=page.stem)
    for page in with_blocks("python")
    if page.stem not in ELSEWHERE
]

SMALL = """
seed = 1
noise = "reproducible"
data = { name = "digits" }
model = { name = "mlp", hidden = [8] }
federation = { clients = 2, rounds = 2 }
training = { batch_size = 1 }
mechanism = { name = "vmf", epsilon = 600 }
adversary = { attacks = ["closed_form"], victims = 1 }
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a quickstart of its own, which takes a second instead of a minute."""
    for folder in (tmp_path, tmp_path / "configs"):
        folder.mkdir(exist_ok=True)
        (folder / "quickstart.toml").write_text(SMALL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_says_what_it_is() -> None:
    """Console sessions and text are excerpts; all else is tested."""
    for page in EVERYWHERE:
        assert {block.language for block in blocks(page)} <= {"python", "toml", "sh", "console", "text"}, page
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page)), page


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs_as_it_stands(page: Path, clone: Path) -> None:
    executed(*(block.text for block in blocks(page) if block.language == "python"))


@pytest.mark.parametrize("page", with_blocks("toml"), ids=lambda page: page.stem)
def test_toml_is_an_experiment_a_sweep_or_a_file_of_prompts(page: Path, clone: Path) -> None:
    for number, block in enumerate(block for block in blocks(page) if block.language == "toml"):
        # A sweep names its base, which lies beside it or in the folder above.
        path = clone / "configs" / f"{number}.toml"
        if 'base = "configs/' in block.text:
            path = clone / f"{number}.toml"
        path.write_text(block.text, encoding="utf-8")
        if "base" in tomllib.loads(block.text):
            assert load_sweep(path).trials
        elif {"tap", "privatise"} & tomllib.loads(block.text).keys():
            assert read_settings(path).tap or read_settings(path).mechanism.protects
        elif kind_of_file(tomllib.loads(block.text)):
            load_prompting(path)
        else:
            load_experiment(path, [])


@pytest.mark.parametrize("page", with_blocks("sh"), ids=lambda page: page.stem)
def test_commands_exist(page: Path, nothing_done: None) -> None:
    for block in blocks(page):
        if block.language == "sh":
            for words in commands(block):
                check(words)


@pytest.fixture
def nothing_done(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are parsed, but not carried out."""
    monkeypatch.setattr(TyperCommand, "invoke", lambda *_: None)


def check(words: list[str]) -> None:
    """A command of this project is known, with all its options; those of others are left alone."""
    program, *arguments = words
    if program.rpartition("/")[2] == "fedpriv":
        for folder in arguments:
            if folder.startswith(("runs/", "sweeps/")):
                Path(folder).mkdir(parents=True, exist_ok=True)
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    elif program == "python" and arguments[0] == "-m":
        assert find_spec(arguments[1]), words
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE), words


@pytest.mark.parametrize(
    "words",
    [["fedpriv", "run", "x.toml", "--no-such"], ["fedpriv", "ran"], ["python", "-m", "benchmarks.gone"], ["make", "x"]],
)
def test_a_wrong_command_is_found(words: list[str], nothing_done: None) -> None:
    with pytest.raises(AssertionError):
        check(words)
