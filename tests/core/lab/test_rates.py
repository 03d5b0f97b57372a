"""What attacks did, between guess and ceiling: k0, participations, the check against the ceiling, and whole runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr, ndtri

from fedpriv.attacks.referee import Truth, missed
from fedpriv.core.errors import RunFailedError
from fedpriv.core.figure import refuse_exceeded
from fedpriv.core.lab import attack_run, start_run
from fedpriv.core.lab import results as rates
from fedpriv.core.lab.results import leakage_rates, recovery_rates
from fedpriv.core.lab.victims import UploadTarget, candidates, truth
from fedpriv.core.progress import Silent
from fedpriv.core.records import Ceiling, LeakageRate, Score
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from tests.integration.small import experiment

SIGMA = 0.5
PICKING = {
    "attacks": ["candidate"], "knows_candidates": True, "victims": 4, "counterfactual": False, "best_decision": True,
}  # fmt: skip


def world(**changes: Any) -> World:
    return build_world(experiment(**{"mechanism": {"name": "gaussian", "sigma": SIGMA}, **changes}))


def line(client: int, rank: int, **changes: Any) -> Score:
    usual = Score(
        round=1, client=client, image=0, attack="iga", upload="protected", restart=0, chosen=True, loss=0.1, label=3,
        true_label=3, label_correct=True, mse=0.1, mse_normalised=0.1, psnr=10.0, ssim=0.1, lpips=None, recovered=False,
        note="", rank=rank, candidates=100, chance=0.01, releases=1,
    )  # fmt: skip
    return replace(usual, **changes)


def told(world: World, scores: Sequence[Score]) -> LeakageRate:
    return next(rate for rate in leakage_rates(world, scores) if rate.event == "told")


@pytest.mark.parametrize("releases", [1, 4])
def test_the_ceiling_counts_how_often_the_image_was_used(releases: int) -> None:
    """Phi(Phi^-1(k0) + sqrt(T) / sigma), whatever the run's sampling is."""
    for sampling in ("shuffled", "fixed", "poisson"):
        rate = told(
            world(training={"sampling": sampling}), [line(0, 1, releases=releases), line(1, 7, releases=releases)]
        )
        assert rate.ceiling == pytest.approx(float(ndtr(ndtri(0.01) + releases**0.5 / SIGMA)), rel=1e-9)
        assert (rate.hits, rate.images, rate.chance) == (1, 2, 0.01)


def test_the_ceiling_of_a_mean_rate_is_the_mean_of_the_ceilings() -> None:
    rate = told(world(), [line(0, 1, releases=1), line(1, 2, releases=3, chance=0.2)])
    wanted = np.mean([ndtr(ndtri(0.01) + 1 / SIGMA), ndtr(ndtri(0.2) + 3**0.5 / SIGMA)])
    assert rate.ceiling == pytest.approx(float(wanted), rel=1e-9)
    assert rate.chance == pytest.approx(0.105)


def test_the_adjacency_is_no_part_of_a_ceiling() -> None:
    """Zero-out is defined for Poisson batches alone, and the ceiling asks without sampling."""
    here = world(
        mechanism={"name": "gaussian", "sigma": SIGMA, "adjacency": "zero-out"}, training={"sampling": "poisson"}
    )
    assert told(here, [line(0, 1)]).ceiling == pytest.approx(float(ndtr(ndtri(0.01) + 1 / SIGMA)), rel=1e-9)


def test_without_noise_there_is_no_ceiling() -> None:
    assert told(world(), [line(0, 1, upload="unprotected")]).ceiling is None
    bare = world(mechanism={"name": "none"})
    assert told(bare, [line(0, 1, upload="unprotected")]).ceiling is None
    assert not any(rate.exceeded for rate in leakage_rates(bare, [line(0, 1, upload="unprotected")]))


def test_lines_of_earlier_versions_have_none() -> None:
    rate = told(world(), [line(0, 1, releases=None)])
    assert rate.ceiling is None
    assert [rate.event for rate in leakage_rates(world(), [line(0, 1, chance=None)])] == ["label"]


def test_a_guess_may_name_a_label_for_each_picture_that_it_offers() -> None:
    """The referee pairs pictures with originals, so a guess with two pictures may name the two commonest classes."""
    here = world()
    shares = sorted(here.class_counts_of(here.true_labels, 0), reverse=True)
    for offered in (1, 2, 5):  # more than images behind the upload, where a Poisson batch came out small
        (rate,) = [rate for rate in leakage_rates(here, [line(0, 9, offered=offered)]) if rate.event == "label"]
        assert rate.chance == pytest.approx(sum(shares[:offered]) / sum(shares))


def test_known_labels_are_no_success() -> None:
    here = world(adversary={"knows_labels": True})
    assert [rate.event for rate in leakage_rates(here, [line(0, 1)])] == ["told"]


def test_an_estimated_baseline_proves_nothing() -> None:
    (rate,) = recovery_rates(
        world(mechanism={"name": "gaussian", "sigma": 50.0}), [line(0, 1, recovered=True)] * 12, 0.02
    )
    assert rate.estimated
    assert not rate.exceeded
    assert rate.theorem.startswith("the baseline is an estimate")
    assert not recovery_rates(world(), [line(0, 1, picked=True)], 0.02)


def test_what_is_above_its_ceiling_is_an_error() -> None:
    """The exact lower limit at 99.9 %: 5 of 8 clients are more than 1.2 % allows, 2 of 8 may be luck."""
    here = world(mechanism={"name": "gaussian", "sigma": 20.0}, federation={"clients": 8})
    for hits in range(9):
        scores = [line(client, 1 if client < hits else 2) for client in range(8)]
        rate = told(here, scores)
        assert rate.ceiling is not None
        chance = stats.binom.sf(hits - 1, 8, rate.ceiling)
        assert rate.exceeded == (chance < 0.001)
        if rate.exceeded:
            with pytest.raises(RunFailedError, match=f"picked out of 100, by iga: {hits / 8:.1%} .*claimed: at most"):
                refuse_exceeded([rate.figure])
        else:
            refuse_exceeded([rate.figure])


def test_images_with_common_noise_count_once() -> None:
    """Eight images of one client's batch are one piece of evidence."""
    here = world(mechanism={"name": "gaussian", "sigma": 20.0})
    assert not told(here, [line(0, 1, image=image) for image in range(8)]).exceeded
    assert not told(here, [line(0, 1, round=number) for number in range(8)]).exceeded
    assert not told(here, [line(client % 4, 1, clients=4, round=client) for client in range(8)]).exceeded


def test_the_others_are_training_images_of_other_clients() -> None:
    here = world(data={"train_examples": None})
    for client in range(4):
        known = truth(here, UploadTarget(1, (client,)), {client: [1]})
        assert known.others is not None
        assert len(known.others) == 99
        rows = {image.numpy().tobytes() for image in here.dataset.x_train[here.partitions[client]].float() / 255}
        training = {image.numpy().tobytes() for image in here.dataset.x_train.float() / 255}
        others = [image.numpy().tobytes() for image in known.others]
        assert len(set(others)) == 99
        assert set(others) <= training
        assert not set(others) & rows
        assert known.releases == (1,) * len(known.images)


def test_one_client_has_its_own_images_to_be_told_from() -> None:
    here = world(federation={"clients": 1}, training={"batch_size": 4})
    known = truth(here, UploadTarget(1, (0,)))
    assert known.others is not None
    own = {image.numpy().tobytes() for image in known.images}
    assert len(known.others) == 99
    assert not own & {image.numpy().tobytes() for image in known.others}


@pytest.mark.parametrize(("partition", "alone"), [("iid", False), ("dirichlet", True)])
def test_where_labels_tell_the_guess_is_among_its_own_class(partition: str, alone: bool) -> None:
    known = truth(world(data={"partition": partition}), UploadTarget(1, (0,)))
    assert known.labels_known == alone


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_uses_are_counted_up_to_the_attacked_round(sampling: str) -> None:
    here = world(training={"sampling": sampling, "batch_size": 8}, federation={"rounds": 40})
    rounds = [1, 2, 3, 20, 30, 31, 40]
    known = truth(here, UploadTarget(30, (1,)), {1: rounds})
    plan = here.plans[1]
    for row, count in zip(here.uploaded_rows(1, 30).tolist(), known.releases or (), strict=True):
        position = here.partitions[1].tolist().index(row)
        used = [number for number in (1, 2, 3, 20, 30) if position in plan.batch(number - 1).tolist()]
        assert count == len(used) >= 1


def test_lists_hold_the_image_and_others_in_random_order_and_none_of_another_list() -> None:
    here = world(training={"batch_size": 3})
    known = truth(here, UploadTarget(1, (2,)))
    listed = candidates(here, UploadTarget(1, (2,)), known)
    assert listed is not None
    assert listed.lists.shape == (3, 100)
    assert len(listed.lists.unique()) == 300
    places = []
    for number, row in enumerate(listed.lists):
        same = [(listed.images[record] == known.images[number]).all() for record in row.tolist()]
        assert sum(same) == 1
        places.append(same.index(True))
        assert int(listed.labels[row[places[-1]]]) == int(known.labels[number])
        others = [k for k in range(3) if k != number]
        assert not any((listed.images[row] == known.images[k]).flatten(1).all(1).any() for k in others)
    assert len({tuple(row.tolist()) for row in listed.lists}) == 3


@pytest.mark.parametrize("copies", [False, True])
def test_two_equal_images_in_a_batch_have_no_lists(copies: bool) -> None:
    here = world(training={"batch_size": 3})
    rows = here.uploaded_rows(2, 1)
    pictures = here.dataset.x_train.clone()
    pictures[rows[0]] = pictures[rows[1 if copies else 0]]
    here = replace(here, dataset=replace(here.dataset, x_train=pictures))
    listed = candidates(here, UploadTarget(1, (2,)), truth(here, UploadTarget(1, (2,))))
    assert (listed is None) == copies


def test_an_attack_that_speaks_only_when_it_is_sure_is_no_better() -> None:
    """Of 40 clients it names two images, right both times: 2 of 40, not 2 of 2, and below the ceiling."""
    here, others = world(), torch.rand(99, 1, 8, 8)
    truths = [
        Truth(1, client, torch.rand(1, 1, 8, 8), torch.tensor([3]), others=others, releases=(1,))
        for client in range(4)
        for _ in range(10)
    ]
    spoken = [line(0, 1), line(1, 1)]
    silent = [one for known in truths[2:] for one in missed(known, "iga", "protected", (), picked=False)]
    rate = told(here, [*spoken, *silent])
    assert (rate.hits, rate.images) == (2, 40)
    labels = next(rate for rate in leakage_rates(here, [*spoken, *silent]) if rate.event == "label")
    assert (labels.hits, labels.images) == (2, 40)


def test_a_batch_of_which_some_pictures_are_missing() -> None:
    known = Truth(1, 2, torch.rand(5, 1, 8, 8), torch.arange(5), others=torch.rand(99, 1, 8, 8), releases=(1,) * 5)
    shown = [line(2, 1, image=image, offered=5, chance=0.05) for image in (1, 3)]
    absent = missed(known, "iga", "protected", shown, picked=False)
    assert [one.image for one in absent] == [0, 2, 4]
    assert {(one.offered, one.chance, one.recovered, one.rank) for one in absent} == {(5, 0.05, False, None)}


@pytest.mark.parametrize("knows_labels", [False, True])
def test_a_pick_from_lists_of_a_batch_behind_much_noise_is_a_guess(knows_labels: bool, tmp_path: Path) -> None:
    """The baseline is what a blind pick reaches; false alarm: below 1e-3 for both cases together."""
    changes: dict[str, Any] = {**PICKING, "victims": 20, "knows_labels": knows_labels, "best_decision": False}
    settings = experiment(
        mechanism={"name": "gaussian", "sigma": 300.0},
        adversary=changes,
        training={"batch_size": 4},
        federation={"clients": 20, "rounds": 1},
        data={"train_examples": 1400},
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    (rate,) = [rate for rate in summary.rates if rate.event == "told"]
    assert rate.images == 80
    assert rate.hits <= stats.binom.isf(5e-4, 80, rate.chance)
    assert not rate.exceeded


@pytest.mark.essential
def test_a_run_prints_guess_measured_best_decision_and_ceiling(tmp_path: Path) -> None:
    settings = experiment(mechanism={"name": "gaussian", "sigma": 0.02}, adversary=PICKING, training={"batch_size": 1})
    summary = start_run(settings, tmp_path / "run", "", Silent())
    (rate,) = [rate for rate in summary.rates if rate.event == "told"]
    assert (rate.attack, rate.images, rate.chance, rate.candidates) == ("candidate", 4, 0.01, 100)
    assert rate.best is not None
    assert rate.ceiling is not None
    assert 0.01 < rate.best.value <= rate.ceiling
    scores = RunFolder(tmp_path / "run").scores()
    picks = [score for score in scores if score.attack == "candidate"]
    assert all(score.picked and not score.recovered for score in picks)
    assert sum(score.rank == 1 for score in picks) == rate.hits
    assert summary.verdict[0].startswith("Picked out of 100, with the mechanism: a guess 1.0%, measured")
    page = write_report(tmp_path / "run").read_text()
    assert '<a href="#rates">' in page
    assert "picked out of a list, not reconstructed" in page
    assert "Picked out of 100 with" in page
    assert RunFolder(tmp_path / "run").final_summary().rates == summary.rates


@pytest.mark.parametrize("settings", [{"knows_labels": True}, {}], ids=["labels", "shards"])
def test_the_best_decision_is_no_worse_than_the_guess(settings: dict[str, Any], tmp_path: Path) -> None:
    """Who knows the label, or a client's few classes, has fewer records to decide among; in noise that hides all."""
    changes = {**PICKING, "victims": 2, **settings}
    data = {} if settings else {"partition": "shards"}
    mechanism = {"name": "gaussian", "sigma": 100.0}
    tree = experiment(mechanism=mechanism, adversary=changes, data=data, training={"batch_size": 1})
    summary = start_run(tree, tmp_path / "run", "", Silent())
    (rate,) = [rate for rate in summary.rates if rate.event == "told"]
    assert rate.best is not None
    assert rate.ceiling is not None
    assert rate.chance > 0.03
    assert rate.best.value == pytest.approx(rate.chance, rel=0.2)
    assert rate.best.value < rate.ceiling * 1.1


def test_a_list_that_is_not_granted_is_withheld(tmp_path: Path) -> None:
    settings = experiment(adversary={**PICKING, "knows_candidates": False}, training={"batch_size": 1})
    summary = start_run(settings, tmp_path / "run", "", Silent())
    assert any("withholds (adversary.knows_candidates = false)" in text for text in summary.warnings)
    assert not summary.rates


def test_the_best_decision_can_be_left_out(tmp_path: Path) -> None:
    changes = {**PICKING, "best_decision": False}
    mechanism = {"name": "gaussian", "sigma": 0.02}
    summary = start_run(
        experiment(adversary=changes, mechanism=mechanism, training={"batch_size": 1}), tmp_path / "run", "", Silent()
    )
    assert all(rate.best is None for rate in summary.rates)


def test_a_wrong_ceiling_ends_with_1_and_everything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ceiling that is claimed too low is found out by the candidate attack."""

    def claimed(release: object, baselines: Sequence[float]) -> tuple[Ceiling, ...]:
        return tuple(Ceiling(k0, k0, "a wrong theorem") for k0 in baselines)

    monkeypatch.setattr(rates, "ceilings", claimed)
    settings = experiment(mechanism={"name": "gaussian", "sigma": 1e-3}, adversary=PICKING, training={"batch_size": 1})
    with pytest.raises(
        RunFailedError, match=r"picked out of 100, by candidate: 100\.0% .*claimed: at most 1\.0% .a wrong theorem"
    ):
        start_run(settings, tmp_path / "run", "", Silent())
    folder = RunFolder(tmp_path / "run")
    assert folder.final_summary().status == "completed"
    assert folder.ledger() is not None
    assert "Above the proven ceiling" in write_report(folder.path).read_text()
    with pytest.raises(RunFailedError, match="the implementation or the proof is wrong"):
        attack_run(folder.path, ["candidate"], (), (), None, "", Silent())
