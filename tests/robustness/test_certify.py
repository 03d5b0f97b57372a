"""``fedpriv certify`` on the folder of a run: what is written, read back and refused."""

import errno
import json
import math
import struct
from pathlib import Path

import pytest
import torch
from scipy.stats import norm
from torch import nn

from fedpriv.attacks.membership.audit import audit_run
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.lab import resume_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.robustness.certify import certify_run
from fedpriv.robustness.records import Certificate, Robustness, read_certificates
from fedpriv.robustness.settings import CertifyConfig
from fedpriv.robustness.smoothed import pixel_images, read_smoothed
from tests.integration.small import copied, experiment, finished, left_behind

FEW = CertifyConfig(examples=25, selection=20, votes=60, radii_l2=(0.1, 0.3), radii_linf=(0.01,))
TRAINED: dict[str, dict[str, object]] = {
    "data": {"train_examples": 400},
    "federation": {"clients": 1, "rounds": 3, "algorithm": "fedavg"},
    "training": {"batch_size": 20, "optimizer": "adam", "learning_rate": 0.02},
}


class Heard(Silent):
    """Remembers warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def trained(path: Path, **sections: dict[str, object]) -> RunFolder:
    return finished(path, **{**TRAINED, **sections})


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = trained(tmp_path_factory.mktemp("certify") / "run", robustness={"noise": 0.4})
    certify_run(folder, FEW, None, Silent())
    return folder


def test_certificates_are_added_and_the_rest_stays(noisy: RunFolder, tmp_path: Path) -> None:
    folder = copied(noisy, tmp_path / "run")
    found, certificates = folder.read(Robustness), read_certificates(folder)
    assert found is not None and len(certificates) == found.examples == 25
    assert json.loads((folder.path / "summary.json").read_text())["robustness"] == found.model_dump(mode="json")
    assert [each.image for each in certificates] == sorted({each.image for each in certificates})
    assert found.noise.sigma == 0.4 and not found.noise.afterwards and found.noise.place == "hidden"
    assert 1 / found.norms.l2 == pytest.approx(0.4, rel=1e-6)
    assert found.voted.value == sum(each.right for each in certificates) / 25
    # All 60 votes for one of ten classes: each class is bounded at a tenth of alpha.
    assert found.reach.l2 == pytest.approx(norm.ppf((FEW.alpha / 10) ** (1 / 60)) / found.norms.l2)
    assert found.reach.linf == pytest.approx(found.reach.l2 * found.norms.l2 / found.norms.linf)
    assert found.beyond("l2", (0.1, found.reach.l2, 9.0)) == (found.reach.l2, 9.0)
    for curve in found.curves:
        held = [sum(each.holds(curve.norm, size, curve.bound) for each in certificates) for size in curve.sizes]
        assert [share.value for share in curve.shares] == [count / 25 for count in held]
        assert all(share.low is not None and share.low <= share.value for share in curve.shares)
    assert {curve.bound for curve in found.curves} == {"main", "renyi", "analytic", "classic", "extended", "paper"}
    assert max(share.value for share in found.curve("l2").shares) > 0.3  # the model has learnt something
    before = left_behind(folder.path)
    again = certify_run(folder, FEW, None, Silent())
    after = left_behind(folder.path)
    assert again == found.model_copy(update={"seconds": again.seconds})
    for tree in (before, after):
        del tree["robustness.json"], tree["summary.json"]
    assert before == after


def test_the_certified_network_can_be_asked_again(noisy: RunFolder) -> None:
    world = build_world(noisy.experiment())
    model, certificates = read_smoothed(noisy, world), read_certificates(noisy)
    rows = [each.image for each in certificates]
    images = pixel_images(world, torch.tensor(rows))
    counts = model.network.votes(images, FEW.votes, "robustness-votes", rows)
    assert [int(row[each.predicted]) for row, each in zip(counts, certificates, strict=True)] == [
        each.count for each in certificates
    ]
    assert model.network.norms().l2 == pytest.approx(noisy.read(Robustness).norms.l2)  # type: ignore[union-attr]


def test_a_model_without_noise_is_certified_afterwards(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    with pytest.raises(InputError, match=r"was trained without noise.*--noise 0.25 --place input"):
        certify_run(folder, FEW, None, Silent())
    assert not (folder.path / "robustness").exists()
    found = certify_run(folder, FEW, 0.2, Silent())
    assert found.noise.afterwards and found.noise.place == "input" and found.noise.dimension == 64
    assert found.norms.l2 == pytest.approx(1 / 0.2, rel=1e-6)
    assert found.norms.linf == pytest.approx(8 / 0.2, rel=1e-6)
    again = read_smoothed(folder, build_world(folder.experiment()))
    assert again.network.norms().l2 == pytest.approx(found.norms.l2)
    resume_run(folder.path, Silent())
    summary = folder.summary()
    assert summary is not None and (summary.model_extra or {})["robustness"] == found.model_dump(mode="json")


def test_other_noise_than_it_was_trained_with(noisy: RunFolder, tmp_path: Path) -> None:
    folder = copied(noisy, tmp_path / "run")
    found = certify_run(folder, FEW, 0.2, Silent())
    assert found.noise.afterwards and found.noise.place == "input"
    read_smoothed(folder, build_world(folder.experiment()))


def test_an_audit_refuses_a_model_that_is_random(noisy: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of the network is random while training, and such models") as error:
        audit_run(copied(noisy, tmp_path / "run"), 6, 20, Silent())
    assert "\n" not in str(error.value)


def test_a_full_disk_leaves_nothing_that_disagrees(
    noisy: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(noisy, tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write_bytes", "write_jsonl", "write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, name, full)
            with pytest.raises(RunFailedError, match=r"No space left.*go on with: the same command"):
                certify_run(folder, FEW.model_copy(update={"examples": 9}), 0.2, Silent())
        assert folder.read(Robustness) is None and read_certificates(folder) == ()
        again = certify_run(folder, FEW, None, Silent())
        assert len(read_certificates(folder)) == again.examples == 25


def test_noise_of_other_certificates_is_refused(noisy: RunFolder, tmp_path: Path) -> None:
    folder, other = copied(noisy, tmp_path / "run"), copied(noisy, tmp_path / "other")
    certify_run(other, FEW, 0.2, Silent())
    name = "robustness/noise.safetensors"
    (folder.path / name).write_bytes((other.path / name).read_bytes())
    with pytest.raises(InputError, match=r"is of other noise than robustness\.json"):
        read_smoothed(folder, build_world(folder.experiment()))


def test_public_images_are_not_certified(tmp_path: Path) -> None:
    shares = {"noise": 0.3, "redistribution": "vulnerable", "public_examples": 340}
    folder = trained(tmp_path / "run", robustness=shares)
    with pytest.raises(InputError, match="allowed is from 1 to 20; there are 360 test images, 340 of them public"):
        certify_run(folder, FEW, None, Silent())
    certify_run(folder, FEW.model_copy(update={"examples": 20}), None, Silent())
    with pytest.raises(InputError, match=r"robustness\.public_examples = 361: there are 360 test images"):
        build_world(experiment(robustness={**shares, "public_examples": 361}))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (
            "robustness/certificates.jsonl",
            lambda text: text[: len(text) // 2],
            r"certificates.jsonl, line \d+ is damaged",
        ),
        ("robustness/certificates.jsonl", lambda text: b"\n".join(text.split(b"\n")[:7]) + b"\n", "it has 7 lines"),
        (
            "robustness/certificates.jsonl",
            lambda text: text.replace(b'"main": ', b'"main": 0.0, "m": '),
            "at most margins.main",
        ),
        ("robustness/certificates.jsonl", lambda text: text.replace(b'"renyi"', b'"Renyi"'), "margins has no 'renyi'"),
        ("robustness/certificates.jsonl", lambda text: b"\xff" + text, "cannot be read"),
        ("robustness.json", lambda text: text[:-20], "robustness.json is damaged"),
        ("checkpoint/server.safetensors", lambda text: text[:90], "server.safetensors is damaged"),
        ("summary.json", lambda text: text.replace(b'"completed"', b'"failed"'), "the run is failed, not completed"),
    ],
)
def test_damage_is_one_line_and_nothing_is_overwritten(
    noisy: RunFolder, tmp_path: Path, name: str, damage: object, said: str
) -> None:
    folder = copied(noisy, tmp_path / "run")
    path = folder.path / name
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    before = {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match=said) as error:
        certify_run(folder, FEW, None, Untried())
    assert "\n" not in str(error.value)
    assert {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()} == before


def test_damaged_noise_is_one_line(noisy: RunFolder, tmp_path: Path) -> None:
    folder = copied(noisy, tmp_path / "run")
    world = build_world(folder.experiment())
    path = folder.path / "robustness" / "noise.safetensors"
    content = path.read_bytes()
    for changed in (content[:40], content.replace(b'"afterwards', b'"beforehand'), b""):
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"noise.safetensors is damaged"):
            read_smoothed(folder, world)
    for last in (math.inf, math.nan, -1.0, 0.0, 0.5 * struct.unpack("<f", content[-4:])[0]):
        path.write_bytes(content[:-4] + struct.pack("<f", last))
        with pytest.raises(InputError, match="is damaged: it is not of this network"):
            read_smoothed(folder, world)
    path.write_bytes(content.replace(noisy_digest(noisy), b"0" * 64))
    with pytest.raises(InputError, match="of another model than the checkpoint"):
        read_smoothed(folder, world)
    path.unlink()
    with pytest.raises(InputError, match="has no certificates: make them with fedpriv certify"):
        read_smoothed(folder, world)


def noisy_digest(folder: RunFolder) -> bytes:
    found = folder.read(Robustness)
    assert found is not None
    return found.noise.model.encode()


def test_a_run_without_a_checkpoint_or_noise_is_refused(noisy: RunFolder, tmp_path: Path) -> None:
    folder = copied(noisy, tmp_path / "run")
    (folder.path / "checkpoint" / "server.safetensors").unlink()
    with pytest.raises(InputError, match="holds no model after a round: there is nothing to certify"):
        certify_run(folder, FEW, None, Untried())
    silent = trained(tmp_path / "silent", robustness={"noise": 0.0})
    with pytest.raises(InputError, match=r"robustness.noise is 0, and without noise nothing can be certified"):
        certify_run(silent, FEW, None, Untried())


def test_how_long_many_votes_take_is_told_before_they_are_cast(noisy: RunFolder) -> None:
    """At 4e7 normal numbers a second."""

    class Impatient(Heard):
        def stage(self, title: str) -> None:
            raise KeyboardInterrupt(title)

    heard, found = Impatient(), noisy.read(Robustness)
    with pytest.raises(KeyboardInterrupt, match="certifying 25 examples"):
        certify_run(noisy, FEW, None, heard)
    assert heard.warnings == [] and found is not None
    with pytest.raises(KeyboardInterrupt, match="certifying 25 examples"):
        certify_run(noisy, FEW.model_copy(update={"votes": 10**10}), None, heard)
    (warning,) = heard.warnings
    assert f"take {found.noise.dimension * 25 * 10**10 / 4e7 / 60:.0f} minutes or more on one core" in warning
    assert "lower --examples or --votes, or use robustness.place = 'input'" in warning


class Past(nn.Module):
    """A network with a path past its first layer."""

    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(pixels, pixels), nn.Linear(pixels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x.flatten(1))) + x.flatten(1))


def past(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Past(shape[0] * shape[1] * shape[2], classes)


def test_a_model_with_a_bypass_is_refused_before_a_run(tmp_path: Path) -> None:
    settings = {"model": {"name": f"{__name__}:past"}, "robustness": {"noise": 0.3}}
    with pytest.raises(
        InputError, match=r"past': robustness\.place = 'hidden': something of the image goes past"
    ) as error:
        trained(tmp_path / "run", **settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
    build_world(experiment(**{**settings, "robustness": {"noise": 0.3, "place": "input"}}))


def test_margins_of_one_line_are_in_order() -> None:
    fields = {
        "image": 0,
        "label": 1,
        "predicted": 1,
        "count": 9,
        "votes": 10,
        "runner_up": 1,
        "lower": 0.6,
        "upper": 0.3,
    }
    proven = {"main": 0.4, "renyi": 0.3, "analytic": 0.3, "classic": 0.1, "extended": 0.1, "paper": 0.0}
    line = Certificate(**fields, margins=proven, radius_l2=0.2, radius_linf=0.1)  # type: ignore[arg-type]
    assert line.radius("l2") == 0.2 and line.radius("linf", "classic") == pytest.approx(0.025)
    assert line.holds("l2", 0.19) and not line.holds("l2", 0.2)
    for weaker in ("renyi", "analytic"):
        with pytest.raises(ValueError, match=rf"margins\.{weaker} = 0\.5: at most margins\.main"):
            Certificate(**fields, margins={**proven, weaker: 0.5}, radius_l2=0.2, radius_linf=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="9 and 2 of 10 votes"):
        Certificate(**{**fields, "runner_up": 2}, margins=proven, radius_l2=0.2, radius_linf=0.1)  # type: ignore[arg-type]


class Untried(Silent):
    """Nobody watches, and no vote is to be taken."""

    def stage(self, title: str) -> None:
        pytest.fail(title)
