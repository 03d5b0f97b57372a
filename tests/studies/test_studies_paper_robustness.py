"""The tables of the Secure-SGD page, of invented records and of one small run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.models.convnets import StridedSettings
from fedpriv.robustness.build import with_noise
from fedpriv.robustness.certify import certify_run
from fedpriv.robustness.evade import evade_run
from fedpriv.robustness.noise import noise_layers
from fedpriv.robustness.norms import FirstLayer
from fedpriv.robustness.records import Evasion, Robustness, read_attempts, read_certificates, write_evasion
from fedpriv.robustness.report import CertifiedFigures, EvasionFigures
from fedpriv.robustness.settings import CertifyConfig, EvadeConfig
from fedpriv.sweep.record import TrialRecord
from studies.paper_robustness import claims, claims_of, difference, largest_row, orderings, rows_of, table, theorems
from tests.integration.small import experiment

PLAIN: dict[str, Any] = {"robustness.noise": 0}
DP: dict[str, Any] = {"mechanism.target_epsilon": 2, "robustness.noise": 0}


def record(mechanism: str, settings: dict[str, Any], right: int, proven: int = 0, left: int = 0) -> TrialRecord:
    """One trial: so many images of 100 are right, certified at l2 0.25 and right under attack at linf 0.1."""
    shares = {"right": rate_interval(right, 100), "proven": rate_interval(proven, 100), "left": rate_interval(left, 50)}
    figures: dict[str, Any] = {}
    if settings["robustness.noise"]:
        voted, share = shares["right"], shares["proven"]
        figures = {"voted": voted.value, "voted_low": voted.low, "voted_high": voted.high}
        one = CertifiedFigures(norm="l2", size=0.25, share=share.value, low=share.low, high=share.high)
        figures["certified"] = (one,)
    under = shares["left"]
    attacked = EvasionFigures(attack="every", norm="linf", size=0.1, right=under.value, low=under.low, high=under.high)
    return TrialRecord(
        trial=1, folder="trials/0001", status="completed", settings=settings, seed=1, data="mnist", model="own",
        mechanism=mechanism, accuracy=shares["right"].value, accuracy_low=shares["right"].low,
        accuracy_high=shares["right"].high, evasions=(attacked,), **figures,
    )  # fmt: skip


RECORDS = [
    record("none", PLAIN, 98, left=30),
    record("gaussian", DP, 90, left=10),
    record("none", {"robustness.noise": 0.5}, 95, 60, 40),
    record("none", {"robustness.noise": 0.5, "robustness.redistribution": "vulnerable"}, 80, 20, 35),
    record("gaussian", {**DP, "robustness.noise": 0.5}, 70, 30, 20),
    record("none", {"robustness.noise": 0.5, "robustness.place": "input"}, 97, 90, 45),
    record("gaussian", {**DP, "robustness.noise": 0.25, "robustness.redistribution": "vulnerable"}, 60, 10, 15),
]


def test_rows_have_the_papers_names_and_their_shares() -> None:
    rows = table(rows_of(RECORDS)).rows
    assert [row[:3] for row in rows] == [
        ("plain", "", ""),
        ("DP-SGD", "2", ""),
        ("PixelDP", "", "0.5"),
        ("HGM_PixelDP", "", "0.5"),
        ("Secure-SGD (AGM)", "2", "0.5"),
        ("PixelDP, on image", "", "0.5"),
        ("Secure-SGD (HGM)", "2", "0.25"),
    ]
    assert rows[2][3] == "95.0 (88.8 to 97.8)"
    assert rows[2][4:] == ("", "60.0", "", "", "80.0", "")


def test_only_rows_of_the_same_epsilon_and_sigma_are_ordered() -> None:
    lines = orderings(rows_of(RECORDS)).rows
    assert [line[0] for line in lines] == [
        "HGM_PixelDP - PixelDP",
        "Secure-SGD (HGM) - DP-SGD",
        "Secure-SGD (AGM) - DP-SGD",
        "PixelDP - PixelDP, on image",
    ]
    assert lines[0][1:3] == ("", "0.5") and lines[0][4].startswith("-40.0 (")
    assert lines[1][4] == ""  # DP-SGD has no certificates


def test_differences_have_newcombes_interval() -> None:
    """56 of 70 against 48 of 80, as printed in Newcombe 1998, table II, method 10."""
    found = difference(rate_interval(56, 70), rate_interval(48, 80))
    assert found is not None and found.ends is not None
    assert (found.value, *found.ends) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    path = tmp_path_factory.mktemp("claims") / "run"
    made = experiment(robustness={"noise": 0.3}, federation={"clients": 1, "rounds": 40}, training={"batch_size": 100})
    start_run(made, path, "fedpriv run small.toml", Silent())
    folder = RunFolder.open(path)
    certify_run(folder, CertifyConfig(examples=30, selection=20, votes=1000, radii_l2=(0.1,)), None, Silent())
    evade_run(folder, EvadeConfig(attacks=("pgd",), sizes=(0.02, 0.6), steps=5, victims=20, votes=40), Silent())
    return folder


def test_theorems_and_claims_are_read_from_the_runs_folder(run: RunFolder) -> None:
    here = record("none", {"robustness.noise": 0.3}, 95).model_copy(update={"folder": run.path.name})
    rows = rows_of([here])
    robustness, evasion = run.read(Robustness), run.read(Evasion)
    assert robustness is not None and evasion is not None
    wanted = [
        f"{100 * robustness.curve('l2', bound).shares[0].value:.1f}"
        for bound in ("main", "renyi", "analytic", "classic", "extended", "paper")
    ]
    assert theorems(rows, run.path.parent).rows[-1] == ("PixelDP", "", "0.3", *wanted)
    assert wanted[0] != wanted[-1]
    small, large = claims_of(run)
    cells = claims(rows, run.path.parent).rows[-1]
    assert cells[3:5] == tuple(f"{each.claimed} / {each.broken} / 20" for each in (small, large))


def test_claims_are_of_the_row_norm_and_counted_against_attacks(run: RunFolder) -> None:
    world = build_world(run.experiment())
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    weight = next(value for value in checkpoint.tensors.values() if value.ndim == 2).double()
    deviations = load_file(run.path / "robustness" / "noise.safetensors")["deviations"]
    scale = torch.as_tensor(world.dataset.std).double().flatten()
    norm = float((weight.abs().sum(dim=1) / scale / deviations.flatten().double()).max())
    small, large = claims_of(run)
    attempts, evasion = read_attempts(run), run.read(Evasion)
    assert evasion is not None
    radii = {each.image: each.margins["paper"] / norm for each in read_certificates(run)}
    for claim in (small, large):
        here = [each for each in attempts if each.size == claim.size and radii[each.image] > claim.size]
        assert (claim.images, claim.claimed) == (20, len(here))
        assert claim.broken == sum(not each.right for each in here) == 0
    assert small.claimed > large.claimed and large.proven == 0
    victim = next(each for each in attempts if each.size == 0.02 and radii[each.image] > 0.02)
    write_evasion(
        run, evasion, [replace(each, predicted=(each.label + 1) % 10) if each == victim else each for each in attempts]
    )
    turned, _ = claims_of(run)
    assert (turned.claimed, turned.broken) == (small.claimed, 1)


def test_the_row_norm_is_what_the_worst_signs_do() -> None:
    """The image of signs that follow one row moves that coordinate by its 1-norm, and no coordinate by more."""
    shape = (1, 8, 8)
    model = with_noise(StridedSettings().network(shape, 3), "hidden", shape, 5)
    (layer,) = noise_layers(model)
    first = FirstLayer(model, layer, lambda pixels: pixels / 0.3, shape)
    deviations = torch.full_like(first(first.blank())[0], 0.7)
    found = largest_row(first, deviations)
    rows = torch.autograd.functional.jacobian(lambda image: first(image)[0].flatten(), first.blank()).flatten(1)
    assert found == pytest.approx(float(rows.abs().sum(dim=1).max() / 0.7), rel=1e-5)
