"""The endpoint in this process: what each heuristic shows, what is refused, and what is counted."""

import numpy as np
import pytest
import torch

from fedpriv.attacks.questions import UsedUpError
from fedpriv.attacks.scene import Counted
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret
from fedpriv.service.endpoint import Endpoint, Oracle, checked_images
from fedpriv.service.policies import POLICIES, Draws, Facts
from tests.service.named import first_numbers, named_policy

SHAPE = (1, 2, 2)


def endpoint(answers: str = "none") -> Endpoint:
    return Endpoint(Oracle(named_policy(answers), Facts(3), SHAPE, first_numbers, 0.0, Secret.of_seed(0)))


def test_what_heuristics_show() -> None:
    logits = np.log(np.array([[0.5124, 0.2, 0.2876], [0.334, 0.333, 0.333]]))
    exact = named_policy("none").answer(logits, Draws())
    np.testing.assert_allclose(exact.probabilities, np.exp(logits))
    rounded = named_policy("rounded:2").answer(logits, Draws())
    np.testing.assert_allclose(rounded.probabilities, [[0.51, 0.2, 0.29], [0.33, 0.33, 0.33]])
    assert rounded.labels.tolist() == [0, 0]
    top = named_policy("top:2").answer(logits, Draws())
    np.testing.assert_allclose(top.probabilities, [[0.5124, np.nan, 0.2876], [0.334, 0.333, np.nan]])
    assert np.isfinite(named_policy("top:5").answer(logits, Draws()).probabilities).all()
    labels = named_policy("label-only").answer(logits, Draws())
    assert labels.probabilities is None
    assert labels.labels.tolist() == [0, 0]


def test_the_label_of_rounded_answers_says_no_more_than_they_do() -> None:
    # The second is likelier, and both are rounded to 0.5.
    assert named_policy("rounded:1").answer(np.log([[0.499, 0.501]]), Draws()).labels.tolist() == [0]


def test_answers_are_counted_and_the_budget_is_hard() -> None:
    asked = Counted(endpoint(), 5)
    assert len(asked.ask(torch.rand(3, *SHAPE))) == 3
    with pytest.raises(UsedUpError, match="answers asked for: 3; left: 2 of 5"):
        asked.ask(torch.rand(3, *SHAPE))
    assert asked.asked == 3
    asked.ask(torch.zeros(2, *SHAPE, dtype=torch.uint8))
    assert asked.asked == 5


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (torch.rand(2, 2, 2), "images of 2 x 2 x 2: expected n x 1 x 2 x 2"),
        (torch.rand(2, 3, 2, 2), "images of 2 x 3 x 2 x 2"),
        (torch.rand(0, *SHAPE), "n from 1"),
        (torch.full((1, *SHAPE), torch.nan), "not a number on"),
        (torch.full((1, *SHAPE), 1.5), "not a number on"),
        (torch.ones(1, *SHAPE, dtype=torch.int64), "images of int64"),
    ],
)
def test_what_is_no_image_is_refused(images: torch.Tensor, said: str) -> None:
    with pytest.raises(InputError, match=said):
        checked_images(images, SHAPE)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("rouded:2", "no answer policy 'rouded'; did you mean rounded"),
        ("none:2", "none takes nothing behind a colon"),
        ("rounded:-1", "decimals = '-1': allowed is from 0"),
        ("rounded:x", "decimals = .*: expected a whole number"),
        ("rounded:", "decimals = .*: expected a whole number"),
        ("top:0", "kept = .*: allowed is from 1"),
    ],
)
def test_mistakes_in_a_policys_name_are_told(answers: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        named_policy(answers)


def test_every_policy_is_titled() -> None:
    assert all(kind.title for kind in POLICIES.values())
