"""``fedpriv probe`` on the folder of a run: the sandwich, what is written and read back, broken certificates."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fedpriv.attacks.evasion.methods import EVASIONS
from fedpriv.attacks.evasion.steps import Ball, EvasionAttempt, EvasionTrial, Victims, attempts
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.lab import resume_run
from fedpriv.core.names import NormName
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.robustness.certify import certify_run
from fedpriv.robustness.evade import evade_run
from fedpriv.robustness.records import Certificate, Evasion, read_attempts, read_certificates
from fedpriv.robustness.settings import EvadeConfig
from fedpriv.robustness.smoothed import pixel_images, read_smoothed
from tests.integration.small import copied, left_behind
from tests.robustness.test_certify import FEW, TRAINED, Heard, trained

CERTIFY = FEW.model_copy(update={"examples": 60, "votes": 200, "alpha": 0.01})
QUICK = EvadeConfig(sizes=(0.05, 0.15, 0.5, 1.0), norm="l2", steps=6, draws=4, restarts=2, victims=60, votes=100)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = trained(tmp_path_factory.mktemp("evade") / "run", robustness={"noise": 0.4})
    certify_run(folder, CERTIFY, None, Silent())
    return folder


@pytest.fixture(scope="module")
def probed(certified: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = copied(certified, tmp_path_factory.mktemp("evade") / "probed")
    evade_run(folder, QUICK, Silent())
    return folder


def test_the_sandwich_holds_at_every_size(probed: RunFolder) -> None:
    found, attempts = probed.read(Evasion), read_attempts(probed)
    assert found is not None and found.certified is not None
    assert found.certified[0].value > 0.3 > found.certified[-1].value  # there is something between the two slices
    assert found.least[-1].value < found.clean.value
    for at, size in enumerate(found.sizes):
        shares = [curve.shares[at].value for curve in found.curves]
        assert found.certified[at].value <= found.least[at].value <= min(shares)
        assert max(shares) <= found.clean.value
        right = {each.image for each in attempts if each.size == size and each.right}
        assert {each.image for each in read_certificates(probed) if each.holds("l2", size)} <= right
    assert [curve.attack for curve in found.curves] == ["fgsm", "ifgsm", "mim", "pgd"]
    assert all(curve.draws == 4 and not any(curve.broken) for curve in found.curves)
    assert found.broken == 0 and found.clean.value == found.attacked / 60
    refuse_exceeded(found.figures)
    for curve in found.curves:
        for size, share in zip(found.sizes, curve.shares, strict=True):
            own = [each for each in attempts if (each.attack, each.size) == (curve.attack, size)]
            assert len(own) == found.attacked and sum(each.right for each in own) / 60 == share.value


def test_results_are_added_and_the_rest_stays(certified: RunFolder, probed: RunFolder, tmp_path: Path) -> None:
    before, after = left_behind(certified.path), left_behind(probed.path)
    assert set(after) - set(before) == {"evasion.json", "robustness/attacks.jsonl"}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"summary.json"}
    found = probed.read(Evasion)
    assert found is not None
    assert json.loads((probed.path / "summary.json").read_text())["evasion"] == found.model_dump(mode="json")
    folder = copied(probed, tmp_path / "run")
    again = evade_run(folder, QUICK, Silent())
    assert again == found.model_copy(update={"seconds": again.seconds})
    assert read_attempts(folder) == read_attempts(probed)
    resume_run(folder.path, Silent())
    summary = folder.summary()
    assert summary is not None and (summary.model_extra or {})["evasion"] == again.model_dump(mode="json")
    certify_run(folder, CERTIFY, None, Silent())
    summary = folder.summary()
    assert (
        folder.read(Evasion) is None
        and not read_attempts(folder)
        and summary is not None
        and not summary.repeats("evasion")
    )


@pytest.mark.essential
def test_below_the_radius_nothing_changes(tmp_path: Path) -> None:
    """More than 300 images at 0.999 of their own radius: by chance at most q of the certificates are wrong.

    Images of the same radius are attacked together. The class that is defended is the certified one, right or not.
    """
    longer = {**TRAINED["federation"], "rounds": 5}
    folder = trained(tmp_path / "run", robustness={"noise": 0.1, "place": "input"}, federation=longer)
    few = CERTIFY.model_copy(update={"examples": 350, "votes": 100, "rivals": "together"})
    robustness = certify_run(folder, few, None, Silent())
    world = build_world(folder.experiment())
    target = read_smoothed(folder, world).network
    norms: tuple[NormName, ...] = ("l2", "linf")
    for norm in norms:
        groups: dict[float, list[Certificate]] = {}
        for each in read_certificates(folder):
            if each.radius(norm) > 0:
                groups.setdefault(each.radius(norm), []).append(each)
        found: list[EvasionAttempt] = []
        for radius, some in groups.items():
            rows = [each.image for each in some]
            labels = torch.tensor([each.predicted for each in some])
            victims = Victims(
                rows, pixel_images(world, torch.tensor(rows)), labels, {each.image: radius for each in some}
            )
            trial = EvasionTrial("pgd", EVASIONS["pgd"], Ball(norm, 0.999 * radius), 4, 3, 1, 100, CERTIFY.alpha, 3)
            found += attempts(trial, target, victims)
        assert len(found) >= 300 and all(each.certified for each in found)
        assert sum(not each.right for each in found) <= robustness.wrong_at_most


def test_without_noise_there_is_one_vote_and_nothing_proven(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    config = EvadeConfig(attacks=("pgd", "pgd-noiseless", "fgsm"), sizes=(0.02, 0.3), victims=80, steps=5)
    found = evade_run(folder, config, Silent())
    assert found.certified is None and found.wrong_at_most is None and found.votes == 1
    assert [(curve.attack, curve.draws) for curve in found.curves] == [("pgd", 0), ("fgsm", 0)]
    assert {each.votes for each in read_attempts(folder)} == {1}
    assert found.clean.value > 0.5 and found.least[1].value < 0.2


def test_noise_without_certificates_and_attacks_without_noise(certified: RunFolder, tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", robustness={"noise": 0.4})
    config = QUICK.model_copy(update={"attacks": ("mim", "mim-noiseless"), "sizes": (0.3,), "victims": 30})
    found = evade_run(folder, config, Silent())
    assert found.certified is None and found.votes == 100
    assert [(curve.attack, curve.draws) for curve in found.curves] == [("mim", 4), ("mim-noiseless", 0)]
    found = evade_run(folder, config.model_copy(update={"draws": 0}), Silent())
    assert [(curve.attack, curve.draws) for curve in found.curves] == [("mim-noiseless", 0)]


def test_attacks_through_the_noise_find_more_images(certified: RunFolder, tmp_path: Path) -> None:
    """Than those that look at the network without it: at no size fewer, and more over all sizes."""
    folder = copied(certified, tmp_path / "run")
    attacks = ("ifgsm", "ifgsm-noiseless", "pgd", "pgd-noiseless")
    changes = {"attacks": attacks, "norm": "linf", "sizes": (0.1, 0.2), "draws": 16, "restarts": 1}
    found = evade_run(folder, QUICK.model_copy(update=changes), Silent())
    right = {curve.attack: [share.value for share in curve.shares] for curve in found.curves}
    for name in ("ifgsm", "pgd"):
        assert [curve.draws for curve in found.curves if curve.attack.startswith(name)] == [16, 0]
        assert sum(right[name]) < sum(right[f"{name}-noiseless"])
        assert all(own <= other for own, other in zip(right[name], right[f"{name}-noiseless"], strict=True))


def test_a_broken_certificate_is_written_and_then_an_error(certified: RunFolder, tmp_path: Path) -> None:
    """Radii ten times too large: an attack must find that, and everything is kept."""
    folder = copied(certified, tmp_path / "run")

    def larger(each: Certificate) -> dict[str, object]:
        tree = asdict(each)
        return {**tree, "radius_l2": 10 * each.radius_l2}

    folder.write_jsonl("robustness/certificates.jsonl", [larger(each) for each in read_certificates(folder)])
    found = evade_run(folder, QUICK, Silent())
    assert found.broken > 3
    with pytest.raises(
        RunFailedError, match=rf"broken certificates: {found.broken}, claimed: at most 0 .by chance at most"
    ) as error:
        refuse_exceeded(found.figures)
    assert "\n" not in str(error.value)
    assert folder.read(Evasion) == found
    broken = [each for each in read_attempts(folder) if each.broken]
    assert len({each.image for each in broken}) == found.broken
    assert sum(sum(curve.broken) for curve in found.curves) == len(broken)
    # They were asked again, and another class is ahead beyond doubt.
    assert all(each.votes == 20 * 100 and each.count < each.rival for each in broken)


def test_only_certified_images_are_attacked(certified: RunFolder, tmp_path: Path) -> None:
    folder = copied(certified, tmp_path / "run")
    heard = Heard()
    config = QUICK.model_copy(update={"victims": 200, "attacks": ("fgsm",), "sizes": (0.1,)})
    assert evade_run(folder, config, heard).victims == 60
    assert heard.warnings == ["evade.victims = 200: only certified images are attacked, 60"]
    assert evade_run(folder, config.model_copy(update={"victims": 20}), Silent()).victims == 20
    assert {each.image for each in read_attempts(folder)} <= {each.image for each in read_certificates(folder)}


Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("robustness/attacks.jsonl", lambda text: text[:-30], r"attacks.jsonl, line \d+ is damaged"),
        ("robustness/attacks.jsonl", lambda text: text[: text.index(b"\n") + 1], "it has 1 lines; evasion.json is of"),
        ("robustness/attacks.jsonl", lambda text: text.replace(b'"distance": 0', b'"distance": 7'), "at most size"),
        ("robustness/attacks.jsonl", lambda text: text.replace(b"false", b"true"), "no certificate can be broken"),
        ("robustness/certificates.jsonl", lambda text: text[:-30], r"certificates.jsonl, line \d+ is damaged"),
        ("robustness/noise.safetensors", lambda text: text[:40], r"noise.safetensors is damaged"),
        ("evasion.json", lambda text: text[:-9], r"evasion.json is damaged"),
        ("summary.json", lambda text: text.replace(b'"completed"', b'"failed"'), "the run is failed, not completed"),
    ],
)
def test_damage_is_one_line_and_nothing_is_overwritten(
    probed: RunFolder, tmp_path: Path, name: str, damage: Damage, said: str
) -> None:
    folder = copied(probed, tmp_path / "run")
    path = folder.path / name
    path.write_bytes(damage(path.read_bytes()))
    before = left_behind(folder.path)
    with pytest.raises(InputError, match=said) as error:
        evade_run(folder, QUICK, Silent())
    assert "\n" not in str(error.value)
    if path.name != "noise.safetensors":  # it is made again from the model
        with pytest.raises(InputError, match=said):
            certify_run(folder, CERTIFY, None, Silent())
    assert left_behind(folder.path) == before


def test_too_many_victims_are_one_line(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    with pytest.raises(InputError, match=r"evade\.victims = 5000: allowed is from 1 to 360; there are 360 test images"):
        evade_run(folder, EvadeConfig(victims=5000), Silent())
    assert folder.read(Evasion) is None and not (folder.path / "robustness").exists()
    (folder.path / "checkpoint" / "server.safetensors").unlink()
    with pytest.raises(InputError, match="holds no model after a round: there is nothing to attack"):
        evade_run(folder, EvadeConfig(victims=5), Silent())


def test_a_line_that_cannot_be_is_refused() -> None:
    fields = {"image": 1, "label": 2, "attack": "pgd", "norm": "l2", "size": 0.5, "distance": 0.5, "predicted": 3}
    counts = {"count": 2, "rival": 8, "votes": 10}
    assert EvasionAttempt(**fields, **counts, radius=0.6, broken=True).certified  # type: ignore[arg-type]
    for changed in ({"radius": 0.4}, {"radius": None}, {"predicted": 2}):
        with pytest.raises(ValueError, match="no certificate can be broken"):
            EvasionAttempt(**{**fields, **counts, "radius": 0.6, "broken": True, **changed})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 and 9 of 10 votes"):
        EvasionAttempt(**{**fields, **counts, "rival": 9})  # type: ignore[arg-type]
