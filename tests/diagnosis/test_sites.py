"""Site and property inference: what is told from uploads, next to a guess, and what the ledger proves of clients."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedpriv.accounting.memorisation import Statement
from fedpriv.core.errors import InputError
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.sites.audit import _sender_games, audit_sites, share_ceiling
from fedpriv.sites.report import SiteGame
from tests.integration.small import experiment

UNEQUAL = {"partition": "dirichlet", "alpha": 0.2}


def audited(path: Path, **sections: dict[str, object]) -> tuple[SiteGame, ...]:
    start_run(experiment(**sections), path, "", Silent())
    return audit_sites(RunFolder(path), 8, Silent()).games


def test_unequal_clients_are_told_apart_without_noise(tmp_path: Path) -> None:
    """Of four clients with other classes each; a guess names the sender in a quarter of cases: 16 of 16 by chance in
    1 of 4e9 such tests."""
    sender, together, *shares = audited(tmp_path / "run", data=UNEQUAL, training={"batch_size": 64})
    assert (sender.guess, sender.trials, together.trials) == (0.25, 16, 4)
    assert sender.right >= 12
    assert together.right == 4
    assert {game.what for game in shares} == {"whether a client has more of a class than the public"}
    assert shares[-1].right / shares[-1].trials > shares[-1].guess
    assert all(game.ceiling is None for game in (sender, *shares))


def test_noise_on_updates_has_a_ceiling_that_holds(tmp_path: Path) -> None:
    noise = {"name": "gaussian", "sigma": 20.0, "unit": "update"}
    games = audited(tmp_path / "run", data=UNEQUAL, mechanism=noise)
    proven = [game for game in games if game.ceiling is not None]
    assert [game.uploads for game in proven] == [1, 1]
    assert all(game.guess <= (game.ceiling or 0) < 1 and not game.figure.exceeded for game in proven)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_randomised_response_attains_no_more_than_the_ceiling(epsilon: float) -> None:
    """With k answers it is right with e^eps / (e^eps + k - 1), and it is epsilon-DP."""
    for count in (2, 3, 10):
        attained = math.exp(epsilon) / (math.exp(epsilon) + count - 1)
        assert attained <= share_ceiling(Statement(epsilon, 0.0), 1 / count) <= 1
    assert share_ceiling(Statement(0.0, 0.0), 0.3) == pytest.approx(0.3)


def test_uploads_that_say_nothing_are_a_guess() -> None:
    """Normal sketches: 1,000 answers with probability 1/5; outside 0.1 to 0.3 in 1e-14 of such tests."""
    sketches = np.random.default_rng(3).normal(size=(5, 400, 16))
    one, _ = _sender_games(sketches, 200, lambda uploads, guess: (None, ""))
    assert 0.1 < one.right / one.trials < 0.3


def test_what_it_needs_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--sites 5: an even number from 4"):
        audit_sites(RunFolder(tmp_path), 5, Silent())
