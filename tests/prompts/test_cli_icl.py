"""``fedpriv icl`` as a user meets it: the folder, the report, resuming, and one line for what is wrong."""

import json
import os
import re
import shutil
import stat
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from fedpriv.core import cli
from fedpriv.core.config import json_schema
from fedpriv.prompts.settings import Prompting, load_prompting

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("icl*.toml"))
SCHEMA = json.loads((CONFIGS / "icl.schema.json").read_text(encoding="utf-8"))

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `fedpriv ...` in this process: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["fedpriv", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capsys.readouterr()
        return int(ended.value.code or 0), text.out, text.err

    return run


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of settings and the texts that it names."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)
    rows = ["text,label"]
    for number in range(400):
        label = number % 2
        words = [f"{'ham' if label == 0 else 'spam'}{word}" for word in generator.integers(0, 30, 4)]
        rows.append(f"{' '.join(words)},{'no' if label == 0 else 'yes'}")
    (folder / "own.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    settings = f"""
        name = "own"
        seed = 3
        [data]
        name = "csv"
        path = "{folder / "own.csv"}"
        [icl]
        shots = 4
        prompts = 8
        queries = 60
        target_epsilon = 8
        compare = [20]
        calibrated = false
        [leaks]
        pairs = 30
    """
    (folder / "own.toml").write_text(settings, encoding="utf-8")
    return folder / "own.toml"


@pytest.fixture(scope="module")
def done(texts: Path) -> Path:
    """The folder of a run."""
    from fedpriv.core.progress import Silent
    from fedpriv.prompts.report import write_icl_report
    from fedpriv.prompts.run import start_icl

    folder = texts.parent / "run"
    start_icl(load_prompting(texts), folder, Silent())
    write_icl_report(folder)
    return folder


def test_a_run_says_what_it_is_worth_and_what_it_proves(done: Path) -> None:
    found, ledger = (json.loads((done / name).read_text()) for name in ("icl.json", "ledger.json"))
    assert [level["epsilon"] for level in found["levels"]] == [8, 20, None]
    assert [level["released"] for level in found["levels"]] == [True, False, False]
    assert found["levels"][-1]["accuracy"]["value"] > found["majority"] > 0
    assert found["together"] > 20
    assert 8 * (1 - 1e-3) <= ledger["worst"]["epsilon"] <= 8
    assert ledger["worst"]["participations"] == 60
    assert any("anyone who runs it, reads the examples" in note for note in ledger["worst"]["notes"])
    answers = [json.loads(line) for line in (done / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 60
    assert {line["answer"] for line in answers} == {"no", "yes"}


def test_what_is_private_is_for_its_owner(done: Path) -> None:
    private = done / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {path.name for path in private.iterdir()} == {"votes.jsonl", "secret.key", "origin.json"}
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in private.iterdir())


def test_the_report_has_guess_measured_and_proven(done: Path) -> None:
    page = (done / "report.html").read_text()
    assert re.search(r'<h2 id="prompts">Prompts</h2>', page)
    for words in ("Not a language model", "Guess: the most common label", "nothing proven", "No attack exceeds", "ε 8"):
        assert words in page
    # Nobody is a client here, and a bullet that nothing is proven would refer to nothing.
    for words in ("<script", "client", ">Client", "Nothing proven", ">nothing proven."):
        assert words not in page[: page.index('<h2 id="settings">')], words
    assert re.search(r">Protected</th>.*>each example</th>", page, re.DOTALL)


def test_an_interrupted_run_goes_on_to_the_same_bytes(done: Path, call: Call, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(done, cut)
    lines = (cut / "private" / "votes.jsonl").read_text().splitlines(keepends=True)
    (cut / "private" / "votes.jsonl").write_text("".join(lines[:20]) + lines[20][:9])
    for name in ("icl.json", "ledger.json", "answers.jsonl", "report.html"):
        (cut / name).unlink()
    code, out, _ = call("icl", "--resume", cut, "--quiet")
    assert (code, "Report: " in out) == (0, True)
    for name in ("ledger.json", "answers.jsonl", "private/votes.jsonl"):
        assert (cut / name).read_bytes() == (done / name).read_bytes()
    before, after = (json.loads((folder / "icl.json").read_text()) for folder in (done, cut))
    assert {**before, "seconds": 0} == {**after, "seconds": 0}
    assert call("report", cut)[0] == 0
    # 1.000 and not 1; attacks are a table.
    assert re.search(r"^Membership of a 1-shot prompt \(AUC\) +guess +measured +95 % +at most$", out, re.MULTILINE)
    row = r"^vote of 8 prompts, no noise +0\.500 +\d\.\d{3} +\d\.\d{3} to \d\.\d{3} +unproven$"
    assert re.search(row, out, re.MULTILINE)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SETTINGS = "was changed where it decides what is released"


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("icl.toml", "shots = 4", "shots = 1", SETTINGS),
        ("icl.toml", "prompts = 8", "prompts = 4", SETTINGS),
        ("icl.toml", "target_epsilon = 8.0", "target_epsilon = 20.0", SETTINGS),
        ("icl.toml", "queries = 60", "queries = 10", SETTINGS),
        ("icl.toml", "compare = [", "compare = [ 1.0,", SETTINGS),
        ("icl.toml", "delta = 0.0001", "delta = 0.001", SETTINGS),
        ("icl.toml", "calibrated = false", "calibrated = true", SETTINGS),
        ("icl.toml", "seed = 3", "seed = 4", SETTINGS),
        ("icl.toml", 'noise = "secret"', 'noise = "reproducible"', SETTINGS),
        ("icl.toml", "words = 40", "words = 2", SETTINGS),
        ("icl.toml", 'unit = "example"\nclients = 1', 'unit = "client"\nclients = 2', SETTINGS),
        ("icl.toml", 'name = "counting"', 'name = "stories"', "was changed where it names the model"),
        ("private/secret.key", None, "ab" * 32, "secret.key was replaced"),
        ("private/origin.json", None, None, "has no private/origin.json: nobody wrote down"),
        ("private/votes.jsonl", "[", "[0, ", "line 1 is damaged: expected 8 votes, each from 0 to 1"),
        ("private/votes.jsonl", '"zero_shot": ', '"zero_shot": 2', "line 1 is damaged: expected 8 votes"),
        ("own.csv", "ham", "ram", "the texts were changed"),
    ],
)
def test_a_run_that_was_changed_is_not_resumed(
    done: Path, call: Call, tmp_path: Path, file: str, old: str | None, new: str | None, words: str
) -> None:
    """What is proven is of all votes: those that are there were made with other settings, texts or draws."""
    folder = copied(done, tmp_path)
    path = tmp_path / file if file == "own.csv" else folder / file
    text = path.read_text()
    if new is None:
        path.unlink()
    else:
        assert old is None or old in text
        path.write_text(new if old is None else text.replace(old, new))
    before = files(folder)
    for command in (["icl", "--resume"], ["report"]) if file == "icl.toml" else (["icl", "--resume"],):
        code, _, err = call(*command, folder)
        assert (code, err.count("\n"), words in err) == (2, 1, True), err
    assert files(folder) == before


def test_more_votes_than_questions_are_refused(done: Path, call: Call, tmp_path: Path) -> None:
    folder = copied(done, tmp_path)
    votes = folder / "private" / "votes.jsonl"
    votes.write_text(votes.read_text() + votes.read_text().splitlines()[0].replace(": 0,", ": 60,", 1) + "\n")
    code, _, err = call("icl", "--resume", folder)
    assert (code, "it has 61 lines, and 60 questions are asked" in err) == (2, True), err


def test_what_decides_nothing_may_change(done: Path, call: Call, tmp_path: Path) -> None:
    """The texts have moved, too."""
    folder = copied(done, tmp_path)
    text = (folder / "icl.toml").read_text()
    for old, new in (('name = "own"', 'name = "other"'), ("pairs = 30", "pairs = 0"), ("threads = 1", "threads = 2")):
        assert old in text
        text = text.replace(old, new)
    (folder / "icl.toml").write_text(text)
    assert call("icl", "--resume", folder, "--quiet")[0] == 0
    assert (folder / "answers.jsonl").read_bytes() == (done / "answers.jsonl").read_bytes()


def copied(done: Path, place: Path) -> Path:
    """A copy of a run, with texts of its own."""
    shutil.copytree(done, place / "run")
    shutil.copy(done.parent / "own.csv", place / "own.csv")
    settings = place / "run" / "icl.toml"
    settings.write_text(settings.read_text().replace(str(done.parent / "own.csv"), str(place / "own.csv")))
    return place / "run"


def test_files_of_experiments_and_of_prompts_are_told_apart(call: Call) -> None:
    """One line that says which command is meant, and no list of keys."""
    for command, name, words in (("run", "icl.toml", "fedpriv icl"), ("icl", "cloak.toml", "fedpriv run")):
        path = CONFIGS / name
        code, _, err = call(command, path)
        assert (code, err.count("\n"), err.rstrip().endswith(f"run {words} {path}")) == (2, 1, True), err


def test_people_and_programs_read_the_same(texts: Path, call: Call, tmp_path: Path) -> None:
    small = ("--set", "icl.queries=10", "--set", "icl.compare=[]", "--set", "leaks.pairs=0", "--set", "seed=9")
    code, out, _ = call("icl", texts, *small, "--out", tmp_path / "a", "--quiet")
    assert code == 0
    assert out.count("not a language model") == 1
    code, out, _ = call("icl", texts, *small, "--out", tmp_path / "b", "--json", "--set", "icl.unit=client",
                        "--set", "icl.clients=40", "--set", "icl.prompts=1")  # fmt: skip
    assert (code, json.loads(out)["queries"]) == (0, 10)
    ledger = json.loads((tmp_path / "b" / "ledger.json").read_text())
    assert (ledger["unit"], len(ledger["clients"])) == ("client", 40)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.path=gone.csv"], "gone.csv: no such file"),
        (["data.label=nothing"], "there is no column 'nothing'"),
        (["icl.queries=81"], "icl.queries = 81: .* has 80 test texts"),
        (["icl.prompts=100"], "take 400 examples, and there are 320"),
        (["icl.mode=generate"], "icl.mode = 'generate' needs a language model"),
        (["icl.unit=client"], "clients = 1 with unit = 'client'"),
        (["icl.shot=1"], "unknown key icl.shot; did you mean icl.shots"),
        (["model.name=folder"], "path goes with name = 'folder'"),
        (["model.name=folder", "model.path=/nowhere"], "there is no config.json"),
        (["model.name=http", "model.url=http://192.0.2.1/v1"], "not on the loopback"),
        (["model.name=http", "model.url=http://127.0.0.1:9/v1"], "does not answer"),
        (["model.name=http", "model.url=http://xn--/v1", "model.remote=true"], "does not answer"),
        (["leaks.pairs=81"], "leaks.pairs = 81: there are 320"),
        (["icl.unit=client", "icl.clients=40"], "take 32 examples, and there are 8 for each of 40 clients"),
        (["data.labels=[a,a]"], "expected at least two labels, each with a word of its own; given: 'a', 'a'"),
        (["data.labels=[a,' a']"], "begin with the same token|each with a word of its own"),
    ],
)
def test_bad_input_is_one_line(texts: Path, call: Call, tmp_path: Path, settings: list[str], words: str) -> None:
    overrides = [word for setting in settings for word in ("--set", setting)]
    code, _, err = call("icl", texts, *overrides, "--out", tmp_path / "new", "--quiet")
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(words, err), err
    assert not (tmp_path / "new").exists()


def test_folders_are_told_apart(done: Path, texts: Path, call: Call, tmp_path: Path) -> None:
    for command in (["icl", texts, "--out", done], ["icl"], ["icl", texts, "--resume", done], ["attack", done],
                    ["icl", "--resume", tmp_path], ["config", "check", texts, "--deep"]):  # fmt: skip
        code, _, err = call(*command)
        assert (code, err.count("\n")) == (2, 1), command
    damaged = tmp_path / "damaged"
    shutil.copytree(done, damaged)
    (damaged / "private" / "votes.jsonl").write_text('{"question": 1, "votes": [0], "zero_shot": 0}\n')
    code, _, err = call("icl", "--resume", damaged)
    assert (code, "is damaged: questions are missing" in err) == (2, True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_shipped_files_name_and_follow_their_schema(path: Path, call: Call) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#:schema icl.schema.json\n")
    jsonschema.validate(tomllib.loads(text), SCHEMA)
    assert call("config", "check", path)[0] == 0
    assert "icl.target_epsilon" in call("config", "show", path)[1]


def test_the_schema_is_that_of_the_settings() -> None:
    """``fedpriv config schema --icl > configs/icl.schema.json`` writes it anew."""
    assert json.loads(json.dumps(json_schema(Prompting))) == SCHEMA
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"icl": {"shot": 1}}, SCHEMA)


def test_account_finds_the_noise_of_votes_with_sampling(call: Call) -> None:
    question = ("account", "votes", "--answers", "500", "--sampling-rate", 40 / 6920, "--delta", "1e-4", "--json")
    code, out, _ = call(*question, "--target-epsilon", "8")
    found = json.loads(out)
    assert (code, found["sigma"]) == (0, pytest.approx(0.647, rel=0.01))
    again = json.loads(call(*question, "--sigma", found["sigma"])[1])
    assert again["epsilon"] == pytest.approx(found["epsilon"])
    for wrong in (["--scale", "2"], ["--votes-per-client", "2"], [], ["--sigma", "1", "--target-epsilon", "1"]):
        code, _, err = call(*question, *wrong)
        assert (code, err.count("\n")) == (2, 1), wrong


STORIES = Path(os.environ.get("FEDPRIV_DATA", "data")) / "stories260k.npz"


@pytest.mark.skipif(not STORIES.is_file(), reason="stories260k.npz is not in FEDPRIV_DATA")
def test_synthetic_examples_are_written_and_serve(texts: Path, call: Call, tmp_path: Path) -> None:
    settings = ["model.name=stories", "icl.mode=generate", "icl.tokens=2", "icl.shots=1", "icl.prompts=2",
                "icl.queries=3", "icl.synthetic=1", "icl.likeliest=5", "leaks.repeats=2", "leaks.tokens=2",
                f"data.root={STORIES.parent}"]  # fmt: skip
    overrides = [word for setting in settings for word in ("--set", setting)]
    code, out, _ = call("icl", texts, *overrides, "--out", tmp_path / "written", "--quiet")
    assert (code, "Not run: membership" in out) == (0, True)
    written = [json.loads(line) for line in (tmp_path / "written" / "synthetic.jsonl").read_text().splitlines()]
    assert [one["label"] for one in written] == ["no", "yes"]
    ledger = json.loads((tmp_path / "written" / "ledger.json").read_text())
    assert [line["participations"] for line in ledger["clients"]] == [2, 2]
    assert all(8 * (1 - 1e-3) <= line["epsilon"] <= 8 for line in ledger["clients"])
    assert "Synthetic examples" in (tmp_path / "written" / "report.html").read_text()
