"""How many people some facts single out, against counting every choice of facts."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fedpriv.attacks.linkage import facts_of, unicity
from fedpriv.core.config import DataConfig
from fedpriv.core.errors import InputError
from fedpriv.data.datasets import load_dataset
from tests.cases import in_one_test
from tests.command_line import fedpriv


@in_one_test("known", [1, 2, 4])
def test_it_is_the_mean_over_every_choice_of_facts(known: int) -> None:
    """Fifty people, each drawn once for each of 40 seeds: within four standard errors (false alarm below 1e-4)."""
    facts = np.random.default_rng(1).random((50, 9)) < 0.5
    counted = []
    for person in facts[facts.sum(axis=1) >= known]:
        choices = list(combinations(np.flatnonzero(person), known))
        counted.append(np.mean([facts[:, list(choice)].all(axis=1).sum() == 1 for choice in choices]))
    found = [unicity(facts, known, 50, np.random.default_rng(seed)).value for seed in range(40)]
    error = float(np.sqrt(sum(share * (1 - share) for share in counted)) / len(counted) / np.sqrt(40))
    assert abs(np.mean(found) - np.mean(counted)) <= 4 * error + 1e-12


def test_nobody_is_alone_among_twins_and_everybody_in_a_diagonal() -> None:
    draws = np.random.default_rng(0)
    assert unicity(np.ones((6, 5), dtype=bool), 5, 6, draws).value == 0
    assert unicity(np.eye(6, dtype=bool), 1, 6, draws).value == 1
    with pytest.raises(InputError, match="nobody has 2 facts; the most that anybody has are 1"):
        unicity(np.eye(6, dtype=bool), 2, 6, draws)


def test_facts_hold_or_do_not() -> None:
    digits = load_dataset(DataConfig(), 0)
    with pytest.raises(InputError, match="digits has features between 0 and 1"):
        facts_of(digits)
    black = replace(digits, x_train=255 * (digits.x_train > 100), x_test=255 * (digits.x_test > 100))
    assert facts_of(black).shape == (len(digits.x_train) + len(digits.x_test), 64)


def test_five_places_single_out_one_of_six(shared_data: Path, tmp_path: Path) -> None:
    """Published with this data set: 15.7 % of 300 people, five points either way."""
    asked = ("data", "--unicity", "5", "--root", str(shared_data), "--json")  # location30, unless --of says otherwise
    found = json.loads(fedpriv(*asked, cwd=tmp_path).stdout)
    assert (found["data"], found["people"], found["known"]) == ("location30", 5010, 5)
    assert abs(found["singled_out"]["value"] - 0.157) < 0.05
