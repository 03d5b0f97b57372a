import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from example_runs import read_json, write_json

from fedpriv.core.errors import InputError
from fedpriv.core.finding import Picture
from fedpriv.core.report import load_view, write_report

MakeRun = Callable[..., Path]


def test_victims_come_with_their_candidates_in_order(make_run: MakeRun) -> None:
    view = load_view(make_run(victims=3, attacks=("iga", "dlg")))
    assert [(victim.round, victim.client) for victim in view.victims] == [(1, 0), (1, 1), (1, 2)]
    expected = [
        ("iga", "unprotected"),
        ("dlg", "unprotected"),
        ("iga", "protected"),
        ("dlg", "protected"),
        ("guess-mean", "none"),
    ]
    for victim in view.victims:
        assert [(one.attack, one.upload) for one in victim.candidates] == expected
        assert all(one.content and one.score for one in victim.candidates)


def test_the_chosen_restart_is_shown(make_run: MakeRun) -> None:
    view = load_view(make_run())
    scores = [one.score for victim in view.victims for one in victim.candidates if one.score]
    assert len(view.scores) > len(scores)
    assert all(score.chosen for score in scores)


def test_a_batch_has_one_victim_an_image_each_with_its_own_picture(make_run: MakeRun) -> None:
    folder = make_run(victims=2, images=3)
    view = load_view(folder)
    assert [(v.client, v.image) for v in view.victims] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for victim in view.victims:
        stem = f"0001-{victim.client:04d}"
        assert isinstance(victim.original, Picture)
        assert victim.original.png == (folder / f"reconstructions/{stem}-original-{victim.image}.png").read_bytes()
        found = next(one for one in victim.candidates if (one.attack, one.upload) == ("dlg", "protected"))
        assert isinstance(found.content, Picture)
        path = folder / f"reconstructions/{stem}-dlg-protected-{victim.image}.png"
        assert found.content.png == path.read_bytes()


def test_the_guess_shown_is_the_better_one(make_run: MakeRun) -> None:
    folder = make_run(victims=1)
    path = folder / "reconstructions/scores.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["attack"] == "guess-grey":
            line["mse"] = 1e-6
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_view(folder).victims[0].candidates[-1].attack == "guess-grey"


def test_only_as_many_victims_as_the_settings_say(make_run: MakeRun) -> None:
    view = load_view(make_run(victims=5, pictures=2))
    assert (len(view.victims), view.attacked) == (2, 5)


def test_pictures_without_scores_are_found(make_run: MakeRun) -> None:
    folder = make_run(victims=2)
    (folder / "reconstructions/scores.jsonl").unlink()
    view = load_view(folder)
    assert len(view.victims) == 2
    assert all(one.score is None and one.content for victim in view.victims for one in victim.candidates)
    assert [one.attack for one in view.victims[0].candidates] == ["dlg", "iga", "dlg", "iga", "guess-mean"]


def test_a_line_of_metrics_that_a_kill_cut_off_is_left_out(make_run: MakeRun) -> None:
    folder = make_run()
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-30])
    assert [record.round for record in load_view(folder).rounds] == list(range(20))


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("summary.json", "{", "summary.json is damaged"),
        ("summary.json", "[]", "summary.json is damaged"),
        ("summary.json", '{"status": "completed", "test_loss": NaN}', "test_loss"),
        ("summary.json", '{"status": "completed", "seconds": "long"}', "seconds"),
        ("ledger.json", '{"unit": "example", "mechanism": "none", "clients": [{"client": 0}]}', "clients.0.adjacency"),
        ("referee/partition.json", '{"clients": [[1, 2]], "class_names": ["a"]}', "1 classes"),
        ("referee/partition.json", '{"clients": [], "class_names": ["a"]}', "1 classes"),
        ("metrics.jsonl", '{"round": 0, "loss": 1}\nnonsense\n', "line 1"),
        ("reconstructions/scores.jsonl", '{"round": 1, "client"', "scores.jsonl, line 1"),
        ("summary.json", b"\xff\xfe", "summary.json cannot be read"),
        ("config.toml", "name = ", "config.toml: not TOML"),
        ("config.toml", "nome = 'x'", "unknown key nome"),
        ("reconstructions/0001-0000-original.png", "no picture", "0001-0000-original.png is damaged"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(make_run: MakeRun, name: str, content: str | bytes, where: str) -> None:
    folder = make_run()
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=where.replace(".", r"\.")) as caught:
        write_report(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_a_truncated_picture_is_refused(make_run: MakeRun) -> None:
    path = make_run() / "reconstructions/0001-0001-dlg-protected.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match=r"dlg-protected\.png is damaged"):
        load_view(path.parent.parent)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [11_000, 60_000])
def test_a_picture_that_says_it_is_huge_is_refused(make_run: MakeRun, side: int) -> None:
    """It has that many pixels in its header alone."""
    path = make_run() / "reconstructions/0001-0001-dlg-protected.png"
    whole = path.read_bytes()
    header = whole[12:16] + struct.pack(">II", side, side) + whole[24:29]
    path.write_bytes(whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:])
    with pytest.raises(InputError, match=r"dlg-protected\.png is damaged: not a PNG picture") as caught:
        load_view(path.parent.parent)
    assert "\n" not in str(caught.value)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_view(tmp_path / "missing")
    with pytest.raises(InputError, match=r"it has no config\.toml"):
        load_view(tmp_path)


def test_the_command_is_read_without_a_summary(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "summary.json").unlink()
    assert load_view(folder).command == "fedpriv run configs/digits.toml --set seed=7"


def test_unknown_keys_of_later_versions_do_not_matter(make_run: MakeRun) -> None:
    folder = make_run()
    summary = read_json(folder / "summary.json")
    write_json(folder / "summary.json", {**summary, "fairness": {"gap": 0.5}})
    shutil.rmtree(folder / "observations")
    read = load_view(folder).summary
    assert read is not None
    assert read.test_accuracy == summary["test_accuracy"]
