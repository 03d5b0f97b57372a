"""The sentences claim what the scores show, and no more."""

import itertools

import pytest

from attacks.referee import Score
from fedpriv.accounting import Release, guarantee
from fedpriv.config import Experiment
from fedpriv.lab.summary import attack_results, verdict
from fedpriv.runs import RoundRecord

LAST = RoundRecord(12, 0.5, 0.8765, (0,), (0,), (), 0.1, 1, 1)
VMF = guarantee(Release("vmf", "example", "shuffled", 0.1, 3, (100,), 5.0, None, None, 1.0, 1e-5))
NONE = guarantee(Release("none", "example", "shuffled", 0.1, 3, (100,), None, None, None, 1.0, 1e-5))


def line(
    client: int,
    attack: str,
    upload: str,
    recovered: bool,
    *,
    label_correct: bool = False,
    chosen: bool = True,
    ssim: float = 0.5,
) -> Score:
    return Score(
        round=1, client=client, image=0, attack=attack, upload=upload, restart=0, chosen=chosen, loss=0.1, label=1,
        true_label=1 if label_correct else 2, label_correct=label_correct, mse=0.1, mse_normalised=0.4, psnr=10.0,
        ssim=ssim, lpips=None, recovered=recovered, seconds=1.0, note="",
    )  # fmt: skip


def settings(mechanism: str = "vmf", **adversary: object) -> Experiment:
    return Experiment.model_validate({"mechanism": {"name": mechanism, "kappa": 5.0}, "adversary": adversary})


def text(experiment: Experiment, scores: list[Score], status: str = "completed") -> str:
    return " ".join(verdict(experiment, status, LAST, VMF, scores))


@pytest.mark.parametrize(("bare", "protected"), list(itertools.product([(0, 0), (1, 0), (1, 1)], repeat=2)))
def test_a_victim_counts_once_however_many_attacks_recover_it(
    bare: tuple[int, int], protected: tuple[int, int]
) -> None:
    """Two victims, two attacks: the tuples say which victim the first attack recovers; the second recovers the same."""
    scores = [
        line(client, attack, upload, bool(hits[client]))
        for upload, hits in (("unprotected", bare), ("protected", protected))
        for client, attack in itertools.product((0, 1), ("dlg", "iga"))
    ]
    said = text(settings(), scores)
    assert f"recovers {sum(bare)} of 2 images, with vmf {sum(protected)} of 2." in said
    assert ("says nothing about the mechanism" in said) == (sum(bare) == 0)
    assert ("a stronger attack may do better" in said) == (sum(bare) > 0)


def test_another_attack_adds_its_victims() -> None:
    scores = [line(0, "dlg", "unprotected", True), line(1, "dlg", "unprotected", False)]
    scores += [line(0, "iga", "unprotected", False), line(1, "iga", "unprotected", True)]
    assert "recovers 2 of 2 images." in " ".join(verdict(settings("none"), "completed", LAST, NONE, scores))


def test_restarts_that_the_attack_did_not_choose_do_not_count() -> None:
    scores = [line(0, "dlg", "unprotected", True, chosen=False), line(0, "dlg", "unprotected", False)]
    assert "recovers 0 of 1" in " ".join(verdict(settings("none"), "completed", LAST, NONE, scores))
    (row,) = attack_results(scores, 0.6, None)
    assert (row.victims, row.recovered) == (1, 0)


def test_labels_that_leak_are_told() -> None:
    scores = [line(i, "iga", "unprotected", True) for i in (0, 1)]
    scores += [line(0, "iga", "protected", False, label_correct=True), line(1, "iga", "protected", False)]
    assert "The labels of 1 of 2 are still guessed rightly." in text(settings(), scores)


@pytest.mark.parametrize(
    ("experiment", "scores", "expected"),
    [
        (settings(attacks=[]), [], "No attack was run"),
        (settings(), [], "No upload could be attacked"),
        (settings(counterfactual=False), [line(0, "iga", "protected", False)], "not known whether that is the mech"),
    ],
)
def test_what_was_not_tried_is_not_claimed(experiment: Experiment, scores: list[Score], expected: str) -> None:
    assert expected in text(experiment, scores)


@pytest.mark.parametrize(("status", "word"), [("failed", "failed"), ("interrupted", "was interrupted")])
def test_an_unfinished_run_says_so(status: str, word: str) -> None:
    said = text(settings(), [], status)
    assert f"not finished: it {word}" in said
    assert "eavesdropper" not in said


def test_a_proven_epsilon_never_stands_alone() -> None:
    said = text(settings(), [])
    assert VMF.epsilon is not None
    for part in (f"epsilon {VMF.epsilon:.4g}", "delta 1e-05", "replace-one", "3 uses of an example", "worst client"):
        assert part in said
    assert "No mechanism, so no privacy is proven." in " ".join(verdict(settings("none"), "completed", LAST, NONE, []))


def test_medians_are_over_victims() -> None:
    scores = [line(i, "iga", "protected", False, ssim=value) for i, value in enumerate((0.1, 0.2, 0.9))]
    (row,) = attack_results(scores, 0.6, "no weights")
    assert (row.ssim, row.lpips, row.lpips_reason, row.victims) == (0.2, None, "no weights", 3)
