"""The sentences claim what the scores show, and no more."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fedpriv.accounting import Release, guarantee
from fedpriv.core.config import Experiment
from fedpriv.core.figure import Interval
from fedpriv.core.lab.attack_stage import Leakage, Refusal
from fedpriv.core.lab.results import attack_results
from fedpriv.core.lab.summary import Ending, _of_ceiling, verdict
from fedpriv.core.records import (
    Ceiling,
    Failure,
    Guarantee,
    LeakageRate,
    Partition,
    RoundRecord,
    Score,
    SentenceScore,
    Summary,
    kind_of,
)

LAST = RoundRecord(12, 0.5, 0.8765, (0,), (0,), (), 0.1, 1, 1)
VMF = guarantee(Release("vmf", "example", "shuffled", 0.1, 3, (100,), 5.0, 1e-5))
NONE = guarantee(Release("none", "example", "shuffled", 0.1, 3, (100,), None, 1e-5))


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
        ssim=ssim, lpips=None, recovered=recovered, note="",
    )  # fmt: skip


def settings(mechanism: str = "vmf", **adversary: object) -> Experiment:
    noise = {} if mechanism == "none" else {"kappa": 5.0}
    return Experiment.model_validate({"mechanism": {"name": mechanism, **noise}, "adversary": adversary})


def sentences(
    experiment: Experiment, worst: Guarantee, scores: Sequence[Score], status: str = "completed", **leakage: Any
) -> tuple[str, ...]:
    found = Leakage(tuple(scores), **leakage)
    return verdict(Ending(experiment, status, [LAST], worst, found, kind_of(scores)))


def text(experiment: Experiment, scores: list[Score], status: str = "completed") -> str:
    return " ".join(sentences(experiment, VMF, scores, status))


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
    assert "recovers 2 of 2 images." in " ".join(sentences(settings("none"), NONE, scores))


def test_an_attack_without_a_result_is_named_with_its_reason() -> None:
    scores = [line(0, "dlg", "unprotected", True)]
    refusals = [
        Refusal("observation 0001-0003 is left out: the settings do not account for it"),
        Refusal("it needs the batch size", "iga"),
        Refusal("it lacks a tensor", "dlg", "unprotected", "round 1, client 1"),
    ]
    experiment = settings("none", attacks=["dlg", "iga"])
    said = sentences(experiment, NONE, scores, refusals=refusals)
    assert [text for text in said if "refused" in text] == ["Attack iga refused: it needs the batch size."]
    assert "refused" not in " ".join(sentences(experiment, NONE, scores))


def test_restarts_that_the_attack_did_not_choose_do_not_count() -> None:
    scores = [line(0, "dlg", "unprotected", True, chosen=False), line(0, "dlg", "unprotected", False)]
    assert "recovers 0 of 1" in " ".join(sentences(settings("none"), NONE, scores))
    (row,) = attack_results(scores, 0.6, None)
    assert (row.victims, row.recovered) == (1, 0)


def test_tokens_that_are_read_say_something_where_no_sentence_is_whole() -> None:
    few, many = (SentenceScore(rouge, rouge, rouge, 1, 4, False) for rouge in (0.2, 0.8))
    guess = replace(line(0, "guess", "none", False), words=few)
    for found, said in ((many, "compare the tokens that are read"), (few, "says nothing about the mechanism")):
        read = [replace(line(0, "text_map", upload, False), words=found) for upload in ("unprotected", "protected")]
        assert said in text(settings(), [*read, guess])


def test_of_attacks_that_read_the_same_tokens_the_one_with_their_order_is_named() -> None:
    shuffled, exact = (SentenceScore(1.0, 0.5, 0.5, right, 4, right == 4) for right in (2, 4))
    read = {"lamp": shuffled, "lookup": exact}
    scores = [replace(line(0, name, "unprotected", False), words=words) for name, words in read.items()]
    assert "lookup ROUGE-1 1.000, 100.0% of the tokens in their places" in text(settings(), scores)


def test_clients_whose_answers_were_not_used_are_named_with_how_often_and_why() -> None:
    never, late = "never connected", "did not reply within 90 s"
    rounds = [
        replace(LAST, round=1, clients=(0, 1, 2, 5), failures=(Failure(1, never), Failure(2, never))),
        replace(LAST, round=2, clients=(1, 2, 5), failures=(Failure(1, never), Failure(2, never), Failure(5, late))),
    ]
    ending = Ending(settings("none", attacks=[]), "completed", [LAST], NONE, Leakage(), "image")
    said = verdict(replace(ending, rounds=rounds))
    assert said[-1] == f"Left out: clients 1-2 of 2 of 2 rounds ({never}); client 5 of 1 of 2 rounds ({late})."
    assert not [text for text in verdict(ending) if "Left out" in text]


def test_an_accuracy_stands_beside_the_share_of_a_majority() -> None:
    ending = Ending(settings("none", attacks=[]), "completed", [LAST], NONE, Leakage(), "row")
    uneven = replace(ending, partition=Partition(("a", "b"), ((80, 10), (10, 0))))
    said = " ".join(verdict(uneven))
    assert "87.6% of the test data correctly; the most common class has 90.0% of the training examples." in said
    for counts in ((30, 25), (3, 1, 1, 1, 1, 1)):  # nearly even, and few examples of many classes
        few = replace(ending, partition=Partition(tuple("abcdef"[: len(counts)]), (counts,)))
        assert verdict(few) == verdict(ending)


def test_labels_that_leak_are_told() -> None:
    scores = [line(i, "iga", "unprotected", True) for i in (0, 1)]
    scores += [line(0, "iga", "protected", False, label_correct=True), line(1, "iga", "protected", False)]
    assert "The labels of 1 of 2 are still guessed correctly." in text(settings(), scores)


@pytest.mark.parametrize(
    ("experiment", "scores", "expected"),
    [
        (settings(attacks=[]), [], "No attack on uploads was run"),
        (settings(), [], "No upload could be attacked"),
        (settings(counterfactual=False), [line(0, "iga", "protected", False)], "not known whether the mech"),
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
    assert "No mechanism, so no privacy is proven." in " ".join(sentences(settings("none"), NONE, []))


def test_medians_are_over_victims() -> None:
    scores = [line(i, "iga", "protected", False, ssim=value) for i, value in enumerate((0.1, 0.2, 0.9))]
    (row,) = attack_results(scores, 0.6, "no weights")
    assert (row.ssim, row.lpips, row.lpips_reason, row.victims) == (0.2, None, "no weights", 3)
    assert "ssim_padded" not in row.intervals
    padded = [replace(score, ssim_padded=value) for score, value in zip(scores, (0.3, 0.1, 0.4), strict=True)]
    (second,) = attack_results(padded, 0.6, "no weights")
    assert second.ssim_padded == 0.3 and second.intervals["ssim_padded"] == (0.1, 0.4)
    # The other figures are the same, and a summary without the second SSIM has the keys that it had before.
    written = [Summary(status="completed", attacks=(each,)).to_json()["attacks"][0] for each in (row, second)]
    assert written[0].keys() == written[1].keys() - {"ssim_padded"}
    written[1]["intervals"].pop("ssim_padded")
    assert written[0] == {key: value for key, value in written[1].items() if key != "ssim_padded"}


def picture(client: int, rank: int | None, *, image: int = 0, clients: int = 1, attack: str = "iga") -> Score:
    base = line(client, attack, "unprotected", recovered=False)
    return replace(base, image=image, clients=clients, rank=rank, candidates=None if rank is None else 100)


def test_counts_and_intervals_of_the_identified() -> None:
    (row,) = attack_results([picture(client, 1 + client % 2) for client in range(10)], 0.6, None)
    assert (row.identified, row.candidates, row.victims, row.missing) == (5, 100, 10, 0)
    low, high = row.intervals["identified"]
    assert low < 0.5 < high
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)  # Wilson, 5 of 10
    assert row.intervals["recovered"][0] == 0.0
    assert row.intervals["mse"] == (0.1, 0.1)
    assert "lpips" not in row.intervals


def test_lines_of_earlier_versions_have_no_ranks() -> None:
    (row,) = attack_results([picture(0, 1), picture(1, None)], 0.6, None)
    assert row.identified is None
    assert "identified" not in row.intervals


def test_the_images_of_one_upload_give_no_interval_of_a_median() -> None:
    (row,) = attack_results([picture(0, 1, image=image) for image in range(8)], 0.6, None)
    assert set(row.intervals) == {"recovered", "identified"}
    summed = [picture(client, 1, image=image, clients=4) for client in range(4) for image in range(2)]
    (row,) = attack_results(summed, 0.6, None)
    assert set(row.intervals) == {"recovered", "identified"}


def test_intervals_repeat_and_follow_the_seed() -> None:
    scores = [replace(picture(client, 1), mse=0.01 * client**2) for client in range(12)]
    one, again, other = (attack_results(scores, 0.6, None, seed) for seed in (1, 1, 2))
    assert one == again
    assert one[0].intervals["mse"][0] < one[0].mse < one[0].intervals["mse"][1]
    assert one[0].intervals["recovered"] == other[0].intervals["recovered"]


def test_images_that_an_attack_has_nothing_for_are_counted() -> None:
    """A median over survivors must say that it is one."""
    scores = [picture(client, 1, attack="dlg") for client in range(3)] + [picture(0, 1, attack="iga")]
    rows = {row.attack: row for row in attack_results(scores, 0.6, None)}
    assert (rows["dlg"].victims, rows["dlg"].missing) == (3, 0)
    assert (rows["iga"].victims, rows["iga"].missing) == (1, 2)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [([1, 1, 30, 40], True), ([1, 20, 30, 40], False), ([1], False), ([2, 3, 4, 5], False), ([1] * 8, True)],
)
def test_originals_that_are_picked_out_of_others_are_told_to_the_reader(ranks: list[int], told: bool) -> None:
    """Nothing is recovered, and still a picture points at its original; one hit in four may be chance (4 %)."""
    scores = [picture(client, rank) for client, rank in enumerate(ranks)]
    rate = LeakageRate("told", "iga", "unprotected", ranks.count(1), len(ranks), (0.0, 1.0), 0.01, candidates=100)
    said = " ".join(sentences(settings("none"), NONE, scores, rates=[rate]))
    wanted = f"Picked out of 100, without protection: a guess 1.0%, measured {ranks.count(1)} of {len(ranks)} (iga)."
    assert (wanted in said) == told


def test_behind_a_mechanism_the_measured_rate_stands_between_guess_and_ceiling() -> None:
    scores = [replace(picture(client, 30), upload="protected") for client in range(4)]
    best = Interval(0.0372, 0.03, 0.04)
    rates = [
        LeakageRate("told", "iga", "protected", 0, 4, (0.0, 0.6), 0.01, best=best, ceiling=0.0389),
        LeakageRate("told", "map", "protected", 1, 4, (0.0, 0.6), 0.01, best=best, ceiling=0.0389),
        LeakageRate("label", "iga", "protected", 4, 4, (0.4, 1.0), 0.1, ceiling=0.2),
    ]
    said = sentences(settings("vmf"), NONE, scores, rates=rates)
    assert (
        "Picked out of other images, with the mechanism: a guess 1.0%, measured 1 of 4 (map), the best decision on "
        "these images 3.7%, the ceiling for any attack 3.9%."
    ) in said  # records of earlier versions do not say out of how many


@pytest.mark.parametrize(
    ("hits", "by"),
    [((2, 2, 1), "2 of 4 (dlg, iga)"), ((0, 1, 0), "1 of 4 (iga)"), ((0, 0, 0), "0 of 4"), ((2, 1, 2), "2 of 4 (dlg)")],
)
def test_attacks_that_tie_are_all_named(hits: tuple[int, ...], by: str) -> None:
    """Those against another guess are not: map offers two pictures for each image."""
    chances = {"dlg": 0.01, "iga": 0.01, "map": 0.02}
    rates = [
        LeakageRate("told", name, "protected", count, 4, (0.0, 1.0), chance, candidates=100)
        for count, (name, chance) in zip(hits, chances.items(), strict=True)
    ]
    scores = [replace(picture(0, 30), upload="protected")]
    said = " ".join(sentences(settings("vmf"), NONE, scores, rates=rates))
    assert f"Picked out of 100, with the mechanism: a guess 1.0%, measured {by}." in said


def test_recovered_images_need_no_second_sentence() -> None:
    scores = [replace(picture(client, 1), recovered=True) for client in range(4)]
    rate = LeakageRate("told", "iga", "unprotected", 4, 4, (0.4, 1.0), 0.01)
    assert "Picked out" not in " ".join(sentences(settings("none"), NONE, scores, rates=[rate]))


def test_an_upload_that_was_not_attacked_is_no_success_of_the_mechanism() -> None:
    """Client 1's protected upload was broken: of the protected images only client 0's counts."""
    scores = [line(client, "iga", "unprotected", True) for client in (0, 1)] + [line(0, "iga", "protected", True)]
    scores += [replace(line(client, "guess-mean", "none", False), label=None) for client in (0, 1)]
    said = " ".join(sentences(settings(), VMF, scores, unattacked=0))
    assert "recovers 2 of 2 images, with vmf 1 of 1." in said
    bare = [line(0, "iga", "unprotected", True)]
    assert "recovers 1 of 1 images. No upload with vmf was attacked" in text(settings(), bare)
    said = " ".join(sentences(settings(), VMF, scores, unattacked=1))
    assert "1 observed upload could not be attacked: missed where victims are picked out" in said


def test_a_ceiling_names_what_it_is_about() -> None:
    """With sampled batches any example, in one or not; where clients hold copies, that of one client."""
    noise = {"name": "gaussian", "sigma": 1.0}
    copies = {"partition": "overlapping", "examples_per_client": 20}
    for sampling, data, said in (
        ("shuffled", {}, "picks an example out of candidates in more than 2.00% of cases"),
        ("poisson", {}, "(worst client; whether or not a batch has the example)"),
        ("shuffled", copies, "picks one client's copy of an example"),
    ):
        sections = {"mechanism": noise, "training": {"sampling": sampling}, "data": data}
        (sentence,) = _of_ceiling(Experiment.model_validate(sections), Ceiling(0.01, 0.02, ""))
        assert said in sentence and ("batch" in sentence) is (sampling == "poisson")
