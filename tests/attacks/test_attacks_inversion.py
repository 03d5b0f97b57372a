"""MI-FACE: a step by hand, gradients by differences, planted pictures, stop rules, and who counts as told."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.attacks.endpoint.probes.mi_face import (
    Descent,
    MiFace,
    MiFaceByAnswers,
    by_answers,
    by_model,
    invert,
    places,
    total_variation,
    two_sentences,
)
from fedpriv.attacks.scene import ProbeReferee
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Figure, Interval
from tests.attacks.endpoint_scenes import SHAPE, endpoint, hidden, linear, public, referee, scene
from tests.cases import in_one_test

CLASSES = 3


def minus_log(shares: Tensor) -> Tensor:
    return -shares.log()


def nothing(images: Tensor) -> Tensor:
    return 0 * total_variation(images)


def grey(classes: int = CLASSES) -> Tensor:
    return torch.full((classes, *SHAPE), 0.5, dtype=torch.float64)


def test_one_step_on_softmax_regression_is_the_weight_row() -> None:
    """-log p of label k has the gradient sum_j p_j w_j - w_k."""
    network = linear(CLASSES, seed=3, scale=0.02)
    descent = Descent(rate=0.7, steps=1, patience=9, enough=0.0)
    pictures, costs = invert(by_model(network, minus_log, nothing), grey(), descent)
    weights = network[1].weight.detach()
    shares = network(grey(1)).softmax(1)[0].detach()
    step = 0.7 * (weights - shares @ weights)
    torch.testing.assert_close(pictures.flatten(1), 0.5 + step, rtol=0, atol=1e-12)
    assert bool((costs < -shares.log()).all())


@pytest.mark.parametrize("variation", [0.0, 2.0])
def test_differences_of_answers_are_the_gradient(variation: float) -> None:
    network = hidden(CLASSES, seed=2)

    def auxiliary(images: Tensor) -> Tensor:
        return variation * total_variation(images)

    images, labels = public(4, 5, CLASSES).images, torch.tensor([0, 1, 2, 2])
    exact = by_model(network, minus_log, auxiliary)(images, labels)
    server = endpoint(network, CLASSES)
    found = by_answers(server, 10**6, minus_log, auxiliary, 1e-6)(images, labels)
    assert exact is not None and found is not None
    torch.testing.assert_close(found[0], exact[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(found[1], exact[1], rtol=1e-4, atol=1e-5)
    assert server.asked == 4 * 17


def test_the_first_step_is_shared_by_all_classes_and_no_question_is_beyond_the_budget() -> None:
    network = hidden(CLASSES, seed=2)
    descent = Descent(rate=0.1, steps=50, patience=50, enough=0.0)
    asked = {}
    for budget in (16, 17, 67, 68, 500):
        server = endpoint(network, CLASSES, most=budget)
        pictures, _ = invert(by_answers(server, budget, minus_log, nothing, 1e-3), grey(), descent)
        asked[budget] = server.asked
        assert bool((pictures != grey()).any()) == (budget >= 17)
    assert asked == {16: 0, 17: 17, 67: 17, 68: 17 + 3 * 17, 500: 17 + 9 * 51}


def planted() -> Tensor:
    """Four pictures that are far apart."""
    return torch.from_numpy(np.random.default_rng(4).integers(2, size=(CLASSES, *SHAPE)) * 0.6 + 0.2)


def near_planted(images: Tensor) -> Tensor:
    """A network that is sure of a class near its picture, and takes all else for a last class."""
    distances = (images[:, None] - planted()).square().flatten(2).sum(2)
    return torch.cat([4 - 8 * distances, images.new_zeros(len(images), 1)], dim=1)


def test_planted_pictures_are_found_again() -> None:
    descent = Descent(rate=0.02, steps=300, patience=50, enough=0.0)
    start = torch.full((CLASSES + 1, *SHAPE), 0.5, dtype=torch.float64)
    pictures, _ = invert(by_model(near_planted, minus_log, nothing), start, descent)
    assert float((pictures[:CLASSES] - planted()).abs().max()) < 0.05
    assert places(pictures[:CLASSES], planted()).tolist() == [1] * CLASSES


def test_the_printed_stop_rule_would_end_at_once_and_the_corrected_one_does_not() -> None:
    network = linear(CLASSES, seed=3, scale=0.5)
    attack = MiFace(cost="1-p", start="grey", steps=400)
    descent = attack._descent()
    assert descent.enough == pytest.approx(0.01) and descent.rate == 0.1
    begun = 1 - network(grey(1)).softmax(1)[0]
    assert bool((begun <= attack.gamma).all())  # the printed rule, cost <= gamma, is met before the first step
    pictures, costs = invert(by_model(network, attack.costs(), nothing), grey(), descent)
    reached = 1 - network(pictures).softmax(1).diagonal()
    torch.testing.assert_close(costs, reached.detach(), rtol=0, atol=1e-12)
    assert bool((costs < begun.min()).all())
    assert MiFace()._descent().enough == pytest.approx(-math.log(0.99))


def test_a_class_that_gains_nothing_ends_and_its_best_picture_is_kept() -> None:
    """A step that is far too large: nothing is gained after the start, which is what is returned."""
    calls: list[int] = []

    def gradient(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(images))
        return torch.full((len(images),), float(len(calls)), dtype=torch.float64), torch.ones_like(images)

    pictures, costs = invert(gradient, grey(), Descent(rate=0.1, steps=90, patience=4, enough=0.0))
    torch.testing.assert_close(pictures, grey())
    assert costs.tolist() == [1.0] * CLASSES and calls == [CLASSES] * 5


def test_places_are_those_of_a_count_by_hand() -> None:
    rng = np.random.default_rng(8)
    means, pictures = (torch.from_numpy(rng.random((6, *SHAPE))) for _ in range(2))
    middle = means.mean(0).flatten().numpy()
    expected = []
    for label in range(6):
        one = pictures[label].flatten().numpy() - middle
        others = [mean.flatten().numpy() - middle for mean in means]
        cosines = [one @ other / np.linalg.norm(one) / np.linalg.norm(other) for other in others]
        expected.append(sum(cosine >= cosines[label] for cosine in cosines))
    assert places(pictures, means).tolist() == expected
    # One picture for every class is nearest to one of them, whatever it is.
    assert (places(pictures[:1].expand(6, *SHAPE), means) == 1).sum() == 1


def test_a_model_that_holds_its_classes_means_tells_who() -> None:
    """Softmax regression whose rows are pictures: test and training pictures are these with noise."""
    truth = public(12, 6, 12).images
    noise = np.random.default_rng(1).normal(size=(2, *truth.shape)) * 0.05
    train, test = truth + torch.from_numpy(noise[0]), truth + torch.from_numpy(noise[1])
    network = linear(12, seed=0)
    with torch.no_grad():
        network[1].weight.copy_(3 * (truth - truth.mean(0)).flatten(1))
    judge = ProbeReferee(network, 12, public(5, 1, 12), train, test, 3)
    here = scene(network, lambda seed: linear(12, seed), 12, 17)
    (finding,) = MiFace(start="grey").run(here, judge)
    told, top5, likeness, confidence = finding.result.figures
    assert told.measured.value == 1.0 and told.guess == pytest.approx(1 / 12) and told.reference == 1.0
    assert top5.guess == pytest.approx(5 / 12) and likeness.unit == "dB" and confidence.measured.value > 0.9
    assert finding.result.sentences[0].startswith("It tells who: 100.0% of the classes")
    assert len(finding.result.inverted) == 12 and set(finding.pictures) >= {"mi-face-0000.png", "floor.png"}
    assert finding.result.queries == 0
    (asked,) = MiFaceByAnswers(start="grey").run(here, judge)
    assert asked.result.queries == 17 and asked.result.figures[0].measured.value > 0.8


def test_what_is_withheld_is_refused() -> None:
    network = linear(CLASSES, seed=1)
    labels = scene(network, lambda seed: linear(CLASSES, seed), CLASSES, 50, "label-only")
    assert "names labels only" in str(MiFaceByAnswers().refusal(labels))
    few = scene(network, lambda seed: linear(CLASSES, seed), CLASSES, 16)
    assert "takes 17 questions for its first step, and 16 are answered" in str(MiFaceByAnswers().refusal(few))
    assert MiFace().refusal(few) is None
    found = MiFace(variation=0.5, prior=0.1, blur=0.8, steps=3).run(few, referee(network, CLASSES))
    assert found[0].result.variant == "cost -log p, start public, blur 0.8, variation 0.5, prior 0.1"
    poor = replace(few, public=public(19, 1, CLASSES))
    with pytest.raises(InputError, match="a prior needs at least 20 images"):
        MiFace(prior=0.1).run(poor, referee(network, CLASSES))


@in_one_test(("low", "verb"), [(15.0, "does not show"), (21.0, "hints at"), (24.0, "shows")])
def test_the_second_sentence_goes_by_the_one_picture_for_all(low: float, verb: str) -> None:
    told = Figure("classes told, top 1", Interval(0.1, 0.05, 0.2), 0.1, reference=0.5)
    likeness = Figure("PSNR", Interval(low + 1, low, low + 2), 20.0, unit="dB")
    who, look = two_sentences([told, told, likeness])
    assert who.startswith("It does not tell who: 10.0%") and look.startswith(f"It {verb} how they look")
