"""Questions that are charged and answered: free repeats, fresh noise for each number, and what a restart keeps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.attacks.questions import UsedUpError
from fedpriv.core.randomness import Secret
from fedpriv.service.endpoint import Oracle, Question, Served, StoredAnswers
from fedpriv.service.ledger import Opening, QueryLedger
from fedpriv.service.policies import Facts, Scores
from tests.service.named import named_policy

SHAPE = (1, 2, 2)


def flat(images: torch.Tensor) -> Scores:
    return np.zeros((len(images), 3))


def served(folder: Path, repeats: bool = True, answers: int = 20, method: str = "logits") -> Served:
    policy = named_policy(method, {"noise": 1.0})
    oracle = Oracle(policy, Facts(3, 0.1, 1.0, 4), SHAPE, flat, 1.0, Secret.of_seed(0))
    ledger = QueryLedger(folder / "charges.jsonl", Opening("ef" * 32, answers), {})
    return Served(oracle, ledger, StoredAnswers(folder / "answers.jsonl", ledger) if repeats else None)


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def test_the_same_question_is_free_and_has_the_same_answer(tmp_path: Path) -> None:
    asked = images(3)
    endpoint = served(tmp_path)
    first = endpoint.ask(torch.cat([asked, asked[:1]]))
    assert endpoint.asked == 3
    assert first.probabilities is not None
    np.testing.assert_array_equal(first.probabilities[0], first.probabilities[3])
    endpoint.close()
    again = served(tmp_path)
    np.testing.assert_array_equal(again.ask(asked.flip(0)).probabilities, first.probabilities[2::-1])
    assert again.asked == 3
    # Bytes and numbers of one picture are one question.
    picture = torch.randint(256, (1, *SHAPE), dtype=torch.uint8)
    assert again.ask(picture).labels == again.ask(picture.double() / 255).labels
    assert again.asked == 4


def test_an_answer_that_a_kill_cut_off_takes_no_other_with_it(tmp_path: Path) -> None:
    """What is answered afterwards is kept, and stays free."""
    served(tmp_path).ask(images(1))
    with (tmp_path / "answers.jsonl").open("ab") as file:
        file.write(b'{"number": 1, "que')
    first = served(tmp_path).ask(images(1, seed=1))
    again = served(tmp_path)
    np.testing.assert_array_equal(again.ask(images(1, seed=1)).probabilities, first.probabilities)
    assert again.asked == 2


def test_charged_repeats_have_fresh_noise_and_no_noise_comes_twice(tmp_path: Path) -> None:
    endpoint = served(tmp_path, repeats=False)
    one = images(1)
    rows = [endpoint.ask(one).probabilities for _ in range(5)]
    endpoint.close()
    rows += [served(tmp_path, repeats=False).ask(one).probabilities for _ in range(3)]
    assert len({row.tobytes() for row in rows if row is not None}) == 8
    with pytest.raises(UsedUpError, match="answers asked for: 13; left: 12 of 20"):
        served(tmp_path, repeats=False).ask(images(13))


def test_an_answer_that_was_lost_is_charged_again_with_other_noise(tmp_path: Path) -> None:
    """Killed between charge and answer, and a stored answer that was edited in or cut off."""
    endpoint = served(tmp_path)
    first = endpoint.ask(images(1))
    endpoint.close()
    path = tmp_path / "answers.jsonl"
    path.write_text(path.read_text()[:-5])
    again = served(tmp_path)
    assert (again.ask(images(1)).probabilities != first.probabilities).any()
    assert again.asked == 2
    path.write_text(path.read_text().splitlines()[-1].replace('"number": 1', '"number": 7') + "\n")
    assert served(tmp_path).ask(images(1)) and served(tmp_path).asked == 3


def test_a_batch_of_users_is_charged_in_order(tmp_path: Path) -> None:
    endpoint = served(tmp_path, method="label")
    sizes = (9, 9, 9, 2)
    found = endpoint.answer([Question(f"u{at}", images(size, at)) for at, size in enumerate(sizes)])
    assert [outcome.charged for outcome in found] == [9, 9, 0, 2]
    assert [len(outcome.given) for outcome in found] == [9, 9, 0, 2]
    assert found[2].refusal == "answers asked for: 9; left: 2 of 20"
    assert all(given.probabilities is None for given in found[0].given)
