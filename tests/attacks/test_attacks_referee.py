"""Scores against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attack_victims import digits
from torch import Tensor

from fedpriv.attacks import metrics
from fedpriv.attacks.baselines import Guess, guesses
from fedpriv.attacks.intervals import median_interval, rate_interval
from fedpriv.attacks.reconstruction import Reconstruction, Restart
from fedpriv.attacks.referee import Truth, score, score_guesses
from fedpriv.core.records import Score
from tests.cases import in_one_test

STD = (0.25,)
PUBLIC = guesses(digits()[0][1000:])


def truth(count: int, first: int = 0) -> Truth:
    images, labels = digits()
    return Truth(1, 4, images[first : first + count], labels[first : first + count])


def offered(*attempts: tuple[Tensor, Tensor], chosen: int = 0) -> Reconstruction:
    made = tuple(Restart(images, labels, 0.1 + k, 10) for k, (images, labels) in enumerate(attempts))
    return Reconstruction(1, 4, "iga", made, chosen, "a note", 2.5)


def scored(reconstruction: Reconstruction, known: Truth, threshold: float = 0.6) -> tuple[Score, ...]:
    return score(reconstruction, "protected", known, PUBLIC, STD, threshold, perceptual=False).scores


def test_figures_by_hand() -> None:
    known = truth(1)
    shifted = (known.images * 0.5 + 0.3).clamp(0, 1)
    (line,) = scored(offered((shifted, torch.tensor([int(known.labels)]))), known)
    error = float(np.mean((known.images.double().numpy() - shifted.double().numpy()) ** 2))
    assert line.mse == pytest.approx(error)
    assert line.mse_normalised == pytest.approx(error / 0.25**2)
    assert line.psnr == pytest.approx(-10 * np.log10(error))
    assert line.ssim == pytest.approx(float(metrics.ssim(known.images, shifted)))
    assert (line.round, line.client, line.image, line.attack, line.upload) == (1, 4, 0, "iga", "protected")
    assert (line.restart, line.chosen, line.loss, line.note) == (0, True, 0.1, "a note")
    assert (line.label, line.true_label, line.label_correct, line.lpips) == (0, 0, True, None)


def test_channels_have_their_own_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    original, image = (torch.rand(1, 3, 12, 12, generator=generator) for _ in range(2))
    std = (0.2, 0.5, 1.0)
    known = Truth(1, 4, original, torch.tensor([0]))
    public = guesses(torch.rand(4, 3, 12, 12, generator=generator))
    (line,) = score(offered((image, known.labels)), "protected", known, public, std, 0.6, perceptual=False).scores
    squares = (original - image).double().square().mean(dim=(0, 2, 3)).numpy()
    assert line.mse_normalised == pytest.approx(np.mean(squares / np.square(std)))
    assert line.mse == pytest.approx(np.mean(squares))


def test_values_outside_the_range_are_clamped_first() -> None:
    known = truth(1)
    wild = torch.where(known.images > 0.5, 40.0, -3.0)
    (line,) = scored(offered((wild, known.labels)), known)
    assert line.mse == pytest.approx(float((wild.clamp(0, 1) - known.images).square().mean()))


def test_a_perfect_image() -> None:
    known = truth(1)
    (line,) = scored(offered((known.images.clone(), known.labels)), known)
    assert (line.mse, line.psnr, line.recovered) == (0, 200, True)
    assert line.ssim == pytest.approx(1)


def test_what_stands_for_unread_images_takes_no_original_of_one_that_was_read() -> None:
    """By the least total, the filler nearer to the second original would leave its exact picture to the first."""
    known = Truth(1, 4, torch.tensor([0.2, 0.3, 0.9]).view(3, 1, 1, 1).expand(3, 1, 8, 8), torch.tensor([0, 1, 2]))
    made = torch.tensor([0.3, 0.6, 0.6]).view(3, 1, 1, 1).expand(3, 1, 8, 8)
    lines = scored(offered((made, torch.tensor([1, -1, -1]))), known)
    assert [line.label for line in lines] == [None, 1, None]
    assert lines[1].mse == 0


@in_one_test("order", [(0, 1, 2, 3), (3, 1, 0, 2), (1, 2, 3, 0)])
def test_images_of_a_batch_are_matched_and_labels_go_with_them(order: tuple[int, ...]) -> None:
    known = truth(4, first=60)
    shuffled, labels = known.images[list(order)] * 0.9, known.labels[list(order)].clone()
    wrong = order[2]
    labels[2] = (labels[2] + 1) % 10
    lines = scored(offered((shuffled, labels)), known)
    assert [line.image for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line.mse == pytest.approx(float((0.1 * known.images[line.image]).square().mean()), rel=1e-4)
        assert line.true_label == int(known.labels[line.image])
        assert line.label_correct == (line.image != wrong)


def test_one_good_picture_does_not_count_for_all() -> None:
    known = truth(3)
    copies = known.images[:1].repeat(3, 1, 1, 1)
    lines = scored(offered((copies, known.labels[:1].repeat(3))), known)
    assert [line.recovered for line in lines].count(True) == 1


@pytest.mark.parametrize(("threshold", "recovered"), [(0.5, True), (0.999999, False)])
def test_recovered_needs_the_ssim(threshold: float, recovered: bool) -> None:
    known = truth(1)
    image = (known.images + 0.05 * torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    (line,) = scored(offered((image, known.labels)), known, threshold)
    assert 0.5 < line.ssim < 0.999999
    assert line.recovered is recovered


@in_one_test("threshold", [0.5, 0.999999])
def test_the_ssim_of_the_padded_picture_is_added_and_decides_nothing(threshold: float) -> None:
    known = truth(2)
    image = (known.images + 0.05 * torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    made = offered((image, known.labels))
    bare = score(made, "protected", known, PUBLIC, STD, threshold, perceptual=False).scores
    lines = score(made, "protected", known, PUBLIC, STD, threshold, perceptual=False, padded=True).scores
    assert [line.ssim_padded for line in lines] == metrics.padded_ssim(known.images, image).tolist()
    assert tuple(replace(line, ssim_padded=None) for line in lines) == bare
    assert all("ssim_padded" not in line.to_json() for line in bare)
    assert [line.to_json()["ssim_padded"] for line in lines] == [line.ssim_padded for line in lines]
    guessed = score_guesses(PUBLIC, known, STD, perceptual=False, padded=True).scores
    assert all(line.ssim_padded is not None for line in guessed)


def test_recovered_needs_to_beat_every_guess() -> None:
    known = truth(1)
    image = (known.images + 0.05 * torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    reconstruction = offered((image, known.labels))
    lucky = Guess("guess-lucky", known.images[0])
    both = (*PUBLIC, lucky)
    assert score(reconstruction, "protected", known, PUBLIC, STD, 0.5, perceptual=False).scores[0].recovered
    assert not score(reconstruction, "protected", known, both, STD, 0.5, perceptual=False).scores[0].recovered


def test_every_restart_is_scored_and_the_choice_stays_the_attacks() -> None:
    """Peers choose the restart by the truth: here a better picture that the attack did not choose stays unchosen."""
    known = truth(1)
    bad, good = torch.full_like(known.images, 0.5), known.images.clone()
    lines = scored(offered((bad, known.labels), (good, known.labels), chosen=0), known)
    assert [(line.restart, line.chosen, line.recovered) for line in lines] == [(0, True, False), (1, False, True)]


def test_lpips_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    known = truth(2)
    asked: list[int] = []

    def values(originals: Tensor, images: Tensor) -> metrics.LpipsResult:
        asked.append(len(images))
        return metrics.LpipsResult(torch.tensor([0.25, 0.5]), None)

    reconstruction = offered((known.images, known.labels), (known.images, known.labels), chosen=1)
    monkeypatch.setattr(metrics, "lpips_scores", values)
    result = score(reconstruction, "protected", known, PUBLIC, STD, 0.6)
    assert [line.lpips for line in result.scores] == [None, None, 0.25, 0.5]
    assert (result.lpips_reason, asked) == (None, [2])
    monkeypatch.setattr(metrics, "lpips_scores", lambda *_: metrics.LpipsResult(None, "no weights"))
    result = score(reconstruction, "protected", known, PUBLIC, STD, 0.6)
    assert all(line.lpips is None for line in result.scores)
    assert result.lpips_reason == "no weights"
    two = Truth(1, 4, torch.rand(1, 2, 8, 8), torch.tensor([1]))
    public = guesses(torch.rand(3, 2, 8, 8))
    assert "2" in (score_guesses(public, two, (1.0, 1.0)).lpips_reason or "")


def test_guesses_recover_nothing() -> None:
    known = truth(3)
    lines = score_guesses(PUBLIC, known, STD, perceptual=False).scores
    assert [line.attack for line in lines] == ["guess-mean"] * 3 + ["guess-grey"] * 3
    assert all(line.upload == "none" and line.chosen and not line.recovered and line.loss is None for line in lines)
    assert all(line.label is None and line.label_correct is None for line in lines)
    for line in lines[3:]:
        assert line.mse == pytest.approx(float((known.images[line.image] - 0.5).square().mean()))


@pytest.mark.parametrize("change", [{"round": 2}, {"client": 0}])
def test_truth_of_another_victim(change: dict[str, int]) -> None:
    known = truth(1)
    with pytest.raises(ValueError, match="client"):
        scored(replace(offered((known.images, known.labels)), **change), known)


def test_truth_of_another_shape() -> None:
    known = truth(1)
    with pytest.raises(ValueError, match="shape"):
        scored(offered((torch.zeros(1, 1, 9, 9), known.labels)), known)


@in_one_test(("offer", "true", "pairs"), [([4, 0], 6, [0, 4]), ([1, 5, 0, 2], 2, [0, 1]), ([0, 1], 0, [])])
def test_numbers_of_images_may_differ(offer: list[int], true: int, pairs: list[int]) -> None:
    """The adversary works with the public batch size; a Poisson batch may have more examples, fewer, or none."""
    every, known = truth(6), truth(true)
    lines = scored(offered((every.images[offer], every.labels[offer])), known)
    assert [line.image for line in lines] == pairs
    assert all(line.mse < 1e-12 and line.recovered and line.label_correct for line in lines)
    assert all(f"{len(offer)} images reconstructed for {true} true ones" in line.note for line in lines)


def test_median_interval_against_the_order_statistics() -> None:
    """The bootstrap distribution of a median is known: its 2.5 % and 97.5 % points lie at order statistics."""
    from scipy.stats import binom

    values = np.random.default_rng(0).standard_normal(41)
    found = median_interval(values.tolist(), np.random.default_rng(1))
    ordered = np.sort(values)
    # P(median of a resample <= ordered[k]) = P(Binomial(41, (k + 1) / 41) >= 21)
    chance = np.array([binom.sf(20, 41, (k + 1) / 41) for k in range(41)])
    low, high = ordered[np.searchsorted(chance, 0.025)], ordered[np.searchsorted(chance, 0.975)]
    assert found.value == pytest.approx(np.median(values))
    assert found.low == pytest.approx(low)
    assert found.high == pytest.approx(high)
    assert found.confidence == 0.95


@pytest.mark.parametrize(("values", "ends"), [([2.0], None), ([3.0, 3.0, 3.0], 3.0)])
def test_median_interval_of_few_or_equal_values(values: list[float], ends: float | None) -> None:
    found = median_interval(values, np.random.default_rng(0))
    assert (found.value, found.low, found.high) == (values[0], ends, ends)


def test_images_of_one_upload_are_drawn_together() -> None:
    """Against resampling written out: uploads of 3, 1 and 2 images and so on, each with a level of its own."""
    rng = np.random.default_rng(5)
    sizes = [3, 1, 2, 4, 2, 1, 3, 2]
    uploads = [level + 0.05 * rng.standard_normal(size) for level, size in zip(rng.random(8), sizes, strict=True)]
    values = np.concatenate(uploads).tolist()
    groups = [number for number, upload in enumerate(uploads) for _ in upload]
    found = median_interval(values, np.random.default_rng(1), groups=groups)
    drawn = rng.integers(0, 8, (20_000, 8))
    medians = [np.median(np.concatenate([uploads[number] for number in row])) for row in drawn]
    assert found.value == pytest.approx(np.median(values))
    # Medians take few different values; the two samples' quantiles may land on neighbouring ones.
    step = np.diff(np.unique(medians)).max()
    np.testing.assert_allclose([found.low, found.high], np.quantile(medians, [0.025, 0.975]), atol=step)
    single = median_interval(values, np.random.default_rng(1))
    assert found.low is not None and found.high is not None and single.low is not None and single.high is not None
    assert found.high - found.low > single.high - single.low


def test_one_upload_has_no_interval() -> None:
    found = median_interval([1.0, 2.0, 4.0], np.random.default_rng(0), groups=["a", "a", "a"])
    assert (found.value, found.low, found.high) == (2.0, None, None)
    with pytest.raises(ValueError, match="3 values, but 2 groups"):
        median_interval([1.0, 2.0, 4.0], np.random.default_rng(0), groups=["a", "a"])


@in_one_test(("successes", "trials"), [(0, 4), (4, 4), (7, 16), (1, 1), (0, 1000)])
def test_rate_interval_against_the_formula(successes: int, trials: int) -> None:
    found, z, rate = rate_interval(successes, trials), 1.959963984540054, successes / trials
    centre = (rate + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * np.sqrt(rate * (1 - rate) / trials + z**2 / (4 * trials**2))
    assert found.value == rate
    assert found.low == pytest.approx(centre - half, abs=1e-12)
    assert found.high == pytest.approx(centre + half, abs=1e-12)


@in_one_test(("successes", "trials"), [(0, 0), (3, 2), (-1, 4)])
def test_rate_interval_refuses(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="successes of"):
        rate_interval(successes, trials)


def ranked(images: Tensor, known: Truth) -> list[tuple[int | None, int | None]]:
    return [(line.rank, line.candidates) for line in scored(offered((images, known.labels)), known)]


def test_the_original_is_picked_out_of_a_hundred() -> None:
    images, labels = digits()
    generator = torch.Generator().manual_seed(2)
    known = Truth(1, 4, images[:3], labels[:3], others=images[500:599])
    noisy = (images[:3] + 0.3 * torch.randn(3, 1, 8, 8, generator=generator)).clamp(0, 1)
    expected = []
    for true, made in zip(images[:3].numpy(), noisy.numpy(), strict=True):
        own = np.mean((true - made) ** 2)
        expected.append((1 + int(sum(np.mean((other - made) ** 2) <= own for other in images[500:599].numpy())), 100))
    assert ranked(noisy, known) == expected
    assert ranked(images[:3].clone(), known) == [(1, 100)] * 3
    assert ranked(images[500:503].clone(), replace(known, images=images[500:503]))[0][0] == 1


def test_a_tie_picks_nothing_and_copies_of_the_original_do_not_count() -> None:
    images, labels = digits()
    binary = (images[:40] > 0.5).float()  # the grey picture is as far from each of these as from all others
    known = Truth(1, 4, binary[:1], labels[:1], others=torch.cat([binary[1:], binary[:1], binary[:1]]))
    assert ranked(torch.full((1, 1, 8, 8), 0.5), known) == [(40, 40)]
    assert ranked(binary[:1].clone(), known) == [(1, 40)]


def test_a_guess_picks_by_chance() -> None:
    """Chance is 1 in 100: over 600 digits, each among 99 others, the mean image is right for at most 2 %."""
    images, labels = digits()
    order = torch.randperm(1700, generator=torch.Generator().manual_seed(1))
    hits = 0
    for start in range(0, 600, 20):
        own, rest = order[start : start + 20], order[600 + start // 2 : 600 + start // 2 + 99]
        known = Truth(1, 4, images[own], labels[own], others=images[rest])
        lines = score_guesses(PUBLIC[:1], known, STD, perceptual=False).scores
        assert {line.candidates for line in lines} == {100}
        hits += sum(line.rank == 1 for line in lines)
    assert hits <= 12


def test_no_candidates_no_rank() -> None:
    known = truth(2)
    assert ranked(known.images.clone(), known) == [(None, None)] * 2


def test_images_of_a_sum_belong_to_their_clients() -> None:
    known = replace(truth(3), owners=((2, 0), (2, 1), (5, 0)), clients=2)
    order = [2, 0, 1]
    result = score(
        offered((known.images[order], known.labels[order])), "protected", known, PUBLIC, STD, 0.6, perceptual=False
    )
    assert [(line.client, line.image, line.clients) for line in result.scores] == [(2, 0, 2), (2, 1, 2), (5, 0, 2)]
    assert all(line.mse == 0 for line in result.scores)
    assert sorted(result.pictures) == [0, 1, 2]
    lines = score_guesses(PUBLIC, known, STD, perceptual=False).scores
    assert [(line.client, line.image) for line in lines[:3]] == [(2, 0), (2, 1), (5, 0)]


def test_a_guess_by_class_raises_the_bar_and_has_pictures_of_its_own() -> None:
    """With labels known, the mean image of the class is no leak of the upload: it must not count as recovered."""
    images, labels = digits()
    known = truth(4)
    public = guesses(images[1000:], labels[1000:], 10)
    offer = offered((public[2].offer(known.labels), known.labels))
    blind = score(offer, "protected", known, PUBLIC, STD, 0.3, perceptual=False).scores
    told = score(offer, "protected", known, public, STD, 0.3, perceptual=False).scores
    assert any(line.recovered for line in blind)
    assert not any(line.recovered for line in told)
    result = score_guesses(public, known, STD, perceptual=False)
    assert [line.attack for line in result.scores[8:]] == ["guess-class"] * 4
    assert torch.equal(torch.stack([result.pictures[k] for k in range(4)]), public[2].offer(known.labels))


@in_one_test("values", [[], [1.0, float("nan")], [1.0, float("inf")]])
def test_median_interval_refuses(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        median_interval(values, np.random.default_rng(0))
