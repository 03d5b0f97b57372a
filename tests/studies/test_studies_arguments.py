"""Bad input ends a study with 2 and one line that names it."""

import os
from importlib import import_module
from pathlib import Path

import pytest

from studies.arguments import StudyParser

STUDIES = Path(__file__).parents[2] / "studies"
COMMANDS = sorted(path.stem for path in STUDIES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("study", COMMANDS)
def test_an_unknown_option_is_one_line(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(study, ["a", "b", "c", "--frobnicate"], capsys)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dager --corpora sst2,nothing", "'nothing' is not known; allowed: sst2, cola"),
        ("dager --batches 1,0", "'0': a whole number of 1 or more is wanted"),
        ("noise --models nothing --victims 1", "model.name"),
        ("noise --data nothing --victims 1", "data.name"),
        ("pate --seeds none", "'none': a whole number"),
        ("pate --seeds 1 --set pate.nothing=1", "nothing"),
        ("paper table9 missing", "table9"),
        ("paper table2 missing --mechanisms none,nothing", "'nothing' is not known; allowed: none, gaussian, vmf"),
        ("paper table2 --mechanisms none missing", "missing: no such file or folder"),
        ("blocks missing missing missing", "missing: no such file or folder"),
        ("equal_privacy missing", "missing: no such file or folder"),
        ("kept missing out.csv.gz", "missing: no such file or folder"),
        ("paper_answers missing", "missing"),
        ("paper_robustness missing", "missing"),
        ("trust missing", "missing"),
        ("robustness missing --only input,nothing", "'nothing' is not known; allowed: input, "),
        ("smollm2 missing out", "missing"),
        ("text_search --set iterations", "'iterations': KEY=VALUE is wanted"),
        ("text_search --noise gaussian:much", "sigma = 'much' is no number"),
        ("unroll --optimizer nothing --victims 1", "training.optimizer"),
    ],
)
def test_what_is_wrong_is_named(
    line: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    study, *arguments = line.split()
    assert words in refused(study, arguments, capsys)
    assert not any(tmp_path.iterdir())


def test_a_reader_that_goes_away_hears_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit) as ended, StudyParser("test", None).parsed([]):
            print("a line")
    assert ended.value.code == 1
    assert capsys.readouterr().err == ""


def refused(study: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the study says of bad arguments: one line that begins with its command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [study, *arguments])
        with pytest.raises(SystemExit) as ended:
            import_module(f"studies.{study}").main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(f"python -m studies.{study}: ")
    assert told.count("\n") == 1
    return told
