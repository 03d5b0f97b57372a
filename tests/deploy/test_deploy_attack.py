"""What a listener has stored takes the place of what the server's tap wrote, in a copy of the run's folder."""

import json
import shutil
from pathlib import Path

import pytest

from fedpriv.attacks.observation import list_observations
from fedpriv.core.errors import InputError
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.runs import DEPLOYMENT, RunFolder
from fedpriv.deploy.attack import attack_heard
from fedpriv.deploy.report import LISTENED, Listened, write_listened
from tests.integration.small import experiment

SETTINGS: dict[str, dict[str, object]] = {
    "adversary": {"attacks": ["closed_form"], "victims": 3, "rounds": (1, 2), "knows_batch_size": False},
    "training": {"batch_size": 1},
}
RUN = "4711"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heard") / "run"
    start_run(experiment(**SETTINGS), folder, "fedpriv run small.toml", Silent())
    (folder / DEPLOYMENT).write_text(json.dumps({"run_id": RUN}))
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def listener(folder: Path, connections: dict[str, int], uploads: int, run_id: str = RUN) -> Path:
    """The folder of a listener that stored so many uploads, in ``folder``."""
    (folder / f"run-{run_id}" / "observations").mkdir(parents=True)
    write_listened(folder, Listened("here:1", "there:2", connections, 1000, 2000, 2 * uploads, uploads))
    return folder


def hear(run: Path, heard: Path, *stems: str) -> None:
    """Put into the listener's folder what the server's tap wrote, which is the same."""
    for stem in stems:
        for ending in ("safetensors", "json"):
            text = (run / "observations" / f"{stem}.{ending}").read_bytes()
            if ending == "json":
                about = json.loads(text)
                about["settings"]["batch_size"] = 1
                text = json.dumps(about).encode()
            (heard / f"run-{RUN}" / "observations" / f"{stem}.{ending}").write_bytes(text)


def attack(run: Path, heard: Path, out: Path, *names: str) -> dict:
    return attack_heard(run, heard, names, (), (), out, "fedpriv attack run --heard heard", Silent()).to_json()


def test_only_what_was_heard_is_attacked_and_the_run_stays_as_it_is(run: Path, tmp_path: Path) -> None:
    heard = listener(tmp_path / "heard", {"http": 3}, 2)
    hear(run, heard, "0001-0001", "0002-0002")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    summary = attack(run, heard, tmp_path / "out")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    (row,) = [row for row in summary["attacks"] if row["attack"] == "closed_form"]
    assert (row["victims"], row["recovered"]) == (2, 2)
    assert summary["threat_model"]["name"] == "network-plaintext"
    assert "without TLS" in summary["verdict"][0]
    found = RunFolder.open(tmp_path / "out").experiment().adversary
    assert (found.threat_model, found.rounds, found.knows_batch_size) == ("network-plaintext", (1, 2), True)
    assert [path.stem for path in list_observations(tmp_path / "out" / "observations")] == ["0001-0001", "0002-0002"]
    assert not list((tmp_path / "out" / "reconstructions").glob("0001-0000-*"))


def test_with_tls_nothing_is_attacked_and_summary_and_report_say_so(run: Path, tmp_path: Path) -> None:
    heard = listener(tmp_path / "heard", {"tls": 3, "silent": 1}, 0)
    summary = attack(run, heard, tmp_path / "out")
    assert summary["attacks"] == []
    assert summary["threat_model"]["name"] == "network-tls"
    assert "all of them TLS" in summary["verdict"][0]
    assert "cannot read the uploads" in summary["verdict"][1]
    assert not list((tmp_path / "out" / "reconstructions").iterdir())
    assert "all of them TLS" in write_report(tmp_path / "out").read_text()


def no_run_of_a_deployment(run: Path, heard: Path, out: Path) -> str:
    (run / DEPLOYMENT).unlink()
    return "is not the run of a deployment"


def damaged_number(run: Path, heard: Path, out: Path) -> str:
    (run / DEPLOYMENT).write_text("[]")
    return "is damaged"


def no_listener(run: Path, heard: Path, out: Path) -> str:
    (heard / LISTENED).unlink()
    return "is not the folder of a listener"


def damaged_account(run: Path, heard: Path, out: Path) -> str:
    (heard / LISTENED).write_text('{"connections": 3}')
    return "is damaged"


def another_run(run: Path, heard: Path, out: Path) -> str:
    (heard / f"run-{RUN}").rename(heard / "run-4712")
    return "nothing of run 4711; it has heard run-4712"


def nothing_left(run: Path, heard: Path, out: Path) -> str:
    for path in (heard / f"run-{RUN}" / "observations").iterdir():
        path.unlink()
    return "nothing of run 4711; the uploads that it has heard are gone"


def folder_taken(run: Path, heard: Path, out: Path) -> str:
    out.mkdir()
    (out / "mine").touch()
    return "exists already"


def cut_off(run: Path, heard: Path, out: Path) -> str:
    path = heard / f"run-{RUN}" / "observations" / "0001-0001.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    return "is damaged"


SPOILT = [
    no_run_of_a_deployment,
    damaged_number,
    no_listener,
    damaged_account,
    another_run,
    nothing_left,
    folder_taken,
    cut_off,
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(spoil, run: Path, tmp_path: Path) -> None:
    heard, out = listener(tmp_path / "heard", {"http": 3}, 1), tmp_path / "out"
    hear(run, heard, "0001-0001")
    reason = spoil(run, heard, out)
    with pytest.raises(InputError, match=reason):
        attack(run, heard, out)
    assert not (out / "config.toml").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nonsense", "attack 'nonsense' is not known"),
        ("imprint", r"^a listener on the network: adversary: attacks: imprint .* only listens; allowed: [a-z, -]*$"),
    ],
)
def test_attacks_that_a_listener_cannot_make_are_refused(name: str, reason: str, run: Path, tmp_path: Path) -> None:
    heard = listener(tmp_path / "heard", {"http": 3}, 1)
    hear(run, heard, "0001-0001")
    with pytest.raises(InputError, match=reason):
        attack(run, heard, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()
