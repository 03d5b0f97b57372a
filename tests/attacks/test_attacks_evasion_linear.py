"""Attacks on a network whose certificates are exact: one above the radius succeeds, one below cannot."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedpriv.attacks.evasion.methods import EVASIONS
from fedpriv.attacks.evasion.steps import Ball, EvasionTrial, Victims, attempts
from fedpriv.core.randomness import torch_stream
from tests.cases import in_one_test
from tests.robustness.test_smoothing_exact import SHAPE, Linear, radii


@pytest.fixture
def image() -> Tensor:
    """In the middle of the box, which is then in no attack's way."""
    return torch.full(SHAPE, 0.5)


def worst(seed: int, image: Tensor) -> tuple[Linear, float]:
    made = Linear(seed, worst=True)
    made.shifted_to(image, 0.9)
    return made, radii(made, made.probability(image))[0]


@in_one_test("name", list(EVASIONS))
@pytest.mark.parametrize("draws", [0, 8])
@pytest.mark.parametrize("seed", range(2))
def test_only_an_attack_above_the_radius_succeeds(seed: int, draws: int, name: str, image: Tensor) -> None:
    made, radius = worst(seed, image)
    stream = torch_stream(seed, "attack")
    loss, labels = made.voting.loss(draws, stream), torch.zeros(1, dtype=torch.int64)
    # Of what a random start is beside the worst direction, all steps together leave e^-2.5.
    above = 1.03 if EVASIONS[name].starts_anywhere else 1.01
    for share, turned in ((0.99, False), (above, True)):
        trial = EvasionTrial(name, EVASIONS[name], Ball("l2", share * radius), draws, 100, 8, 1, 0.001, seed)
        found = trial.strongest(loss, image[None], labels, stream)[0]
        assert (made.probability(found) < 0.5) == turned


def test_a_certificate_is_broken_only_beyond_doubt(image: Tensor) -> None:
    """Certificates of twice the radius: refuted far outside it; at its edge, where chance decides, they are not."""
    made, radius = worst(1, image)
    victims = Victims([0], image[None], torch.zeros(1, dtype=torch.int64), {0: 2 * radius})
    trial = EvasionTrial("pgd", EVASIONS["pgd"], Ball("l2", 1.5 * radius), 4, 10, 1, 200, 1e-6, 5)
    target = made.voting
    (line,) = attempts(trial, target, victims)
    assert line.broken and not line.right and line.votes == 20 * 200 and line.radius == 2 * radius
    (line,) = attempts(replace(trial, votes=25, ball=Ball("l2", 1.9 * radius)), target, victims)
    assert line.broken and line.votes == 2_000  # however few votes judge
    for seed in range(20):
        (line,) = attempts(replace(trial, ball=Ball("l2", radius), seed=seed), target, victims)
        assert not line.broken and (line.right or line.votes == 20 * 200)
    honest = replace(victims, radii={0: 1.4 * radius})
    (line,) = attempts(trial, target, honest)
    assert not line.certified and not line.broken and not line.right and line.votes == 200
    (line,) = attempts(trial, target, replace(victims, radii={}))
    assert line.radius is None and not line.right
