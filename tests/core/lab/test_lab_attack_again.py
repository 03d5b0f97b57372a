"""Other attacks on the folder of a run: what was there stays, what is added is what the run would have written."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.attacks.campaign import Campaign
from fedpriv.attacks.membership.audit import audit_run
from fedpriv.attacks.referee import Truth
from fedpriv.core.config import read_toml
from fedpriv.core.errors import InputError
from fedpriv.core.lab import attack_again, attack_run, attack_stage, start_run, victims
from fedpriv.core.lab.victims import UploadTarget
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World
from fedpriv.sweep.record import read_record
from tests.integration.small import experiment

ADVERSARY = {
    "attacks": ["iga"],
    "victims": 3,
    "iga": {"iterations": 4},
    "dlg": {"iterations": 3, "restarts": 2},
}
SETTINGS: dict[str, dict[str, object]] = {
    "adversary": ADVERSARY,
    "mechanism": {"name": "vmf", "kappa": 200.0},
    "training": {"batch_size": 2},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab") / "run"
    start_run(experiment(**SETTINGS), folder, "fedpriv run small.toml", Silent())
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def attack(
    run: Path, *names: str, chosen: tuple[str, ...] = (), overrides: tuple[str, ...] = (), out: Path | None = None
) -> dict[str, Any]:
    command = f"fedpriv attack run {' '.join(names)}".strip()
    return attack_run(run, names, chosen, overrides, out, command, Silent()).to_json()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "reconstructions" / "scores.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_nothing_that_was_there_is_lost(run: Path) -> None:
    before, scored = contents(run), lines(run)
    summary = attack(run, "dlg")
    after = contents(run)
    changed = {name for name, content in before.items() if after[name] != content}
    assert changed == {"reconstructions/scores.jsonl", "summary.json", "command.txt"}
    assert [line for line in lines(run) if line in scored] == scored
    assert {line["attack"] for line in lines(run)} == {"iga", "dlg", "guess-mean", "guess-grey"}
    assert [(row["attack"], row["upload"]) for row in summary["attacks"]] == [
        *[(name, kind) for name in ("iga", "dlg") for kind in ("protected", "unprotected")],
        ("guess-mean", "none"),
        ("guess-grey", "none"),
    ]
    assert json.loads((run / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["command"].splitlines() == ["fedpriv run small.toml", "fedpriv attack run dlg"]
    assert "Deep Leakage from Gradients" in write_report(run).read_text()


def test_the_same_results_as_if_the_run_had_made_the_attack(run: Path, tmp_path: Path) -> None:
    attack(run, "dlg")
    both = experiment(**{**SETTINGS, "adversary": {**ADVERSARY, "attacks": ["iga", "dlg"]}})
    start_run(both, tmp_path / "both", "", Silent())
    assert lines(run) == lines(tmp_path / "both")
    left, right = (
        {path.name: path.read_bytes() for path in (folder / "reconstructions").glob("*.png")}
        for folder in (run, tmp_path / "both")
    )
    assert left == right
    figures = [json.loads((folder / "summary.json").read_text()) for folder in (run, tmp_path / "both")]
    assert figures[0]["attacks"] == figures[1]["attacks"]
    assert figures[0]["verdict"] == figures[1]["verdict"]


def test_an_attack_with_other_settings_stands_beside_the_runs(run: Path) -> None:
    before = lines(run)
    summary = attack(run, overrides=("adversary.iga.tv=0.5", "adversary.iga.iterations=2"))
    names = {row["attack"] for row in summary["attacks"]}
    assert names == {"iga", "iga,iterations=2,tv=0.5", "guess-mean", "guess-grey"}
    assert [line for line in lines(run) if line in before] == before
    assert (run / "reconstructions" / "0001-0000-iga,iterations=2,tv=0.5-protected-0.png").is_file()
    assert "Inverting Gradients (iterations=2, tv=0.5)" in write_report(run).read_text()


def test_the_same_attack_again_replaces_its_own_results(run: Path) -> None:
    before = lines(run)
    attack(run)
    attack(run, "iga")
    assert lines(run) == before
    assert (run / "command.txt").read_text().splitlines()[1:] == ["fedpriv attack run", "fedpriv attack run iga"]


def test_a_second_ssim_is_added_where_the_report_is_to_show_it(run: Path) -> None:
    """The section [report] of a finished run may change; all other figures stay."""
    before = lines(run)
    assert all("ssim_padded" not in line for line in before)
    assert "ssim" not in read_toml(run / "config.toml")["report"]
    assert all("ssim_padded" not in row for row in json.loads((run / "summary.json").read_text())["attacks"])
    config = run / "config.toml"
    config.write_text(config.read_text().replace("[report]\n", '[report]\nssim = "padded"\n'))
    summary = attack(run)
    after = lines(run)
    padded = [line.pop("ssim_padded") for line in after]
    assert after == before
    assert all(-1 <= value <= 1 for value in padded) and padded != [line["ssim"] for line in before]
    assert all(min(padded) <= row["ssim_padded"] <= max(padded) for row in summary["attacks"])
    assert "SSIM (padded)" in write_report(run).read_text()


def test_the_offered_restart_is_the_one_with_the_lowest_loss_of_its_own(run: Path) -> None:
    """Peers offer the restart that looks most like the original."""
    attack(run, "dlg", overrides=("adversary.dlg.restarts=4",))
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines(run):
        if line["attack"] == "dlg,restarts=4" and line["image"] == 0:
            groups.setdefault((line["client"], line["upload"]), []).append(line)
    assert len(groups) == 6
    for group in groups.values():
        (offered,) = [line for line in group if line["chosen"]]
        assert offered["loss"] == min(line["loss"] for line in group)
    assert any(
        line["mse"] < offered["mse"]
        for group in groups.values()
        for offered in group
        if offered["chosen"]
        for line in group
    ), "somewhere another restart looks better, or this test shows nothing"


def test_nothing_of_the_truth_reaches_an_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other originals in the referee's hands the same pictures come out."""
    settings = experiment(**{**SETTINGS, "training": {"batch_size": 1}})
    start_run(settings, tmp_path / "run", "", Silent())

    def blank(world: World, target: UploadTarget, asked: Mapping[int, Sequence[int]]) -> Truth:
        known = victims.truth(world, target, asked)
        return replace(known, images=torch.zeros_like(known.images), labels=(known.labels + 1) % 10)

    monkeypatch.setattr(attack_stage, "truth", blank)
    start_run(settings, tmp_path / "blank", "", Silent())
    names = [path.name for path in (tmp_path / "run" / "reconstructions").glob("*-iga-*.png")]
    assert len(names) == 6
    for name in names:
        one, other = (tmp_path / folder / "reconstructions" / name for folder in ("run", "blank"))
        assert one.read_bytes() == other.read_bytes()
    losses = [[line["loss"] for line in lines(tmp_path / folder)] for folder in ("run", "blank")]
    assert losses[0] == losses[1]


def test_some_victims_only(run: Path) -> None:
    summary = attack(run, "dlg", chosen=("1-2", "1-0"))
    rows = {(row["attack"], row["upload"]): row for row in summary["attacks"]}
    assert (rows["dlg", "protected"]["victims"], rows["dlg", "protected"]["missing"]) == (4, 2)
    assert (rows["iga", "protected"]["victims"], rows["iga", "protected"]["missing"]) == (6, 0)
    assert {line["client"] for line in lines(run) if line["attack"] == "dlg"} == {0, 2}


def test_a_copy_leaves_the_run_as_it_is(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    attack(run, "dlg", out=tmp_path / "copy")
    assert contents(run) == before
    attack(run, "dlg")
    assert lines(run) == lines(tmp_path / "copy")


def test_a_kill_between_two_files_is_mended_by_doing_it_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are written, the summary is not: the folder can be read, and the same command finishes it."""
    before = (run / "summary.json").read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(attack_again, "_append_command", killed)
        attack(run, "dlg")
    assert (run / "summary.json").read_bytes() == before
    write_report(run)
    summary = attack(run, "dlg")
    assert {row["attack"] for row in summary["attacks"]} >= {"iga", "dlg"}
    assert len(lines(run)) == len({json.dumps(line) for line in lines(run)})


def test_a_kill_during_the_attack_leaves_scores_and_summary_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(run)

    def killed(*_: object, **__: object) -> Campaign:
        raise KeyboardInterrupt

    monkeypatch.setattr(attack_stage, "attack_each", killed)
    with pytest.raises(KeyboardInterrupt):
        attack(run, "dlg")
    assert contents(run) == before


def test_folders_of_earlier_versions_can_be_attacked(run: Path) -> None:
    """With seconds in the scores and no ranks; no intervals in the summary, stops, sums in the observations."""
    path = run / "reconstructions" / "scores.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()]
    for line in old:
        for key in ("rank", "candidates", "clients"):
            del line[key]
        line["seconds"] = 1.5
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    tree = json.loads((run / "summary.json").read_text())
    del tree["stops"]
    for row in tree["attacks"]:
        for key in ("identified", "candidates", "intervals", "missing", "confidence"):
            del row[key]
    (run / "summary.json").write_text(json.dumps(tree))
    for about in (run / "observations").glob("*.json"):
        observed = json.loads(about.read_text())
        del observed["settings"]["clients"]
        about.write_text(json.dumps(observed))
    write_report(run)
    rows = {(row["attack"], row["upload"]): row for row in attack(run, "dlg")["attacks"]}
    assert rows["iga", "protected"]["identified"] is None
    assert rows["dlg", "protected"]["identified"] is not None


def test_warnings_before_an_attack_and_of_the_run_are_kept(run: Path) -> None:
    tree = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**tree, "warnings": ["an old one"]}))
    (run / "observations" / "0001-0001.safetensors").unlink()
    summary = attack(run, "dlg")
    assert summary["warnings"][0] == "an old one"
    assert any("round 1, client 1 is left out" in text for text in summary["warnings"])
    assert any("1 observed upload could not be attacked" in text for text in summary["verdict"])


@pytest.mark.parametrize("change", [{"shape": [1, 9, 9]}, {"shape": [1, 4, 16]}, {"classes": 5}])
def test_an_upload_that_says_it_is_of_other_data_is_left_out(run: Path, change: dict[str, Any]) -> None:
    path = run / "observations" / "0001-0001.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "settings": {**about["settings"], **change}}))
    (text,) = (text for text in attack(run, "dlg")["warnings"] if "round 1, client 1 is left out" in text)
    assert "the run's are of shape (1, 8, 8) in 10" in text


@pytest.mark.parametrize(("victims", "count"), [((), 3), (("1-1",), 1)])
def test_nothing_readable_is_an_error(run: Path, victims: tuple[str, ...], count: int) -> None:
    for path in (run / "observations").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:30])
    before = contents(run)
    with pytest.raises(InputError, match=rf"no upload that is to be attacked can be read \({count}\): .*is damaged"):
        attack(run, "dlg", chosen=victims)
    assert contents(run) == before


def no_summary(run: Path) -> None:
    (run / "summary.json").unlink()


def damage(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text) and None  # type: ignore[func-returns-value]


def no_observations(run: Path) -> None:
    for path in (run / "observations").iterdir():
        path.unlink()


def test_a_copy_inside_the_run_is_refused(run: Path) -> None:
    before = contents(run)
    with pytest.raises(InputError, match="is inside"):
        attack(run, "dlg", out=run / "copy")
    assert contents(run) == before


@pytest.mark.parametrize(
    ("spoil", "names", "chosen", "overrides", "words"),
    [
        (no_summary, (), (), (), "finish the run with fedpriv run --resume"),
        (damage("summary.json", "{"), (), (), (), "summary.json is damaged"),
        (damage("summary.json", '{"ledger": 3}'), (), (), (), "summary.json is damaged"),
        (damage("reconstructions/scores.jsonl", "{}\n"), (), (), (), "scores.jsonl, line 1 is damaged"),
        (damage("metrics.jsonl", "{}\n"), (), (), (), "metrics.jsonl, line 1 is damaged"),
        (no_observations, (), (), (), "holds no observations: none of the rounds"),
        (None, ("gan",), (), (), "attack 'gan' is not known"),
        (None, ("iga", "iga"), (), (), "attack iga is named twice"),
        (None, (), ("1-7",), (), "1-7: the adversary did not observe it; observed (as ROUND-CLIENT): 1-0, 1-1, 1-2"),
        (None, (), ("five",), (), "victim five"),
        (None, (), (), ("seed=5",), "an existing run keeps its settings"),
        (None, (), (), ("adversary.threat_model=network-tls",), "an existing run keeps its settings"),
        (None, (), (), ("adversary.knows_labels=true",), "an existing run keeps its settings"),
        (None, (), (), ("adversary.success_ssim=0.1",), "an existing run keeps its settings"),
        (None, (), (), ("iga.tv=1",), "write adversary.iga.tv"),
        (None, ("igaa",), (), (), "attack 'igaa' is not known; did you mean iga?"),
        (None, (), (), ("adversary.iga.tvv=1",), "did you mean adversary.iga.tv?"),
        (None, ("dlg",), (), ("adversary.iga.tv=1",), "iga is not among the attacks to make: dlg"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    spoil: Callable[[Path], None] | None,
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    overrides: tuple[str, ...],
    words: str,
    run: Path,
) -> None:
    if spoil is not None:
        spoil(run)
    before = contents(run)
    with pytest.raises(InputError) as caught:
        attack(run, *names, chosen=chosen, overrides=overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(run) == before


READERS: dict[str, Callable[[Path], object]] = {
    "attack": attack,
    "audit": lambda run: audit_run(RunFolder.open(run), 6, 10, Silent()),
    "report": write_report,
    "compare": lambda run: read_record(RunFolder.open(run), "run"),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("old", "new"), [("kappa = 200.0", "kappa = 2.0"), ("success_ssim = 0.6", "success_ssim = 0.1")]
)
def test_figures_are_not_shown_beside_settings_that_were_changed_later(
    reader: Callable[[Path], object], old: str, new: str, run: Path
) -> None:
    file = run / "config.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    before = contents(run)
    with pytest.raises(InputError, match=r"config\.toml was changed after the run had ended"):
        reader(run)
    assert contents(run) == before
    # Comments, and what the report looks like, are nobody's figures.
    file.write_text("# mine\n" + text.replace("pictures = 16", "pictures = 3"))
    write_report(run)


def test_a_folder_that_is_not_a_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the folder of a run"):
        attack(tmp_path)


def test_out_must_be_new(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        attack(run, out=tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_where_everything_is_withheld_nothing_is_done(run: Path) -> None:
    before = contents(run)
    said = r"attack candidate needs .* \(adversary.knows_candidates = false\); .* belongs to a run: change it there"
    with pytest.raises(InputError, match=said):
        attack_run(run, ["candidate"], (), (), None, "", Silent())
    assert contents(run) == before
