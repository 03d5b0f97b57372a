"""The distinguishing game of ``privatise``: what a server sees of somebody's own app, against the app's own ledger.

The update points one way on the left and the other way on the right; or it is there on the left, and on the right the
app raises. The claim is what the client's own ledger prints after one answer. As in :mod:`tests.privacy.mechanism_game`
one message holds many independent releases, as parts of one long update: the bound of the norm is that of all of them
together, and the noise over the bound is as much smaller.

False alarms: each game uses two limits that fail with probability 1e-9 each (``bounds.ALARM``): less than 3e-8.
"""

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedpriv.core.plan import Plan
from fedpriv.core.registry import MECHANISMS
from fedpriv.flower._privatise import Privatiser
from fedpriv.flower.app_settings import FlowerSettings, PrivatiseSettings
from fedpriv.mechanisms import mechanism_settings
from tests.flower.apps import Arrays, arrays, client, context, question
from tests.privacy.bounds import Claims, Scores, Verdict, play

DELTA, CLIP, COPIES, RUNS = 0.1, 0.5, 10_000, 40_000
Trained = Callable[[Arrays], Arrays]


@dataclass(frozen=True)
class AppGame:
    """A mechanism in somebody's own app."""

    mechanism: Mapping[str, Any]  # its settings, without the bound
    size: int = 1  # coordinates of one release
    order: int | None = 2  # of the norm that is clipped; `None` for draws on a sphere, in blocks of `size`

    def app(self, folder: Path, trained: Trained, copies: int) -> ClientApp:
        """The app, whose one message holds so many releases."""
        key, longer = (
            str(MECHANISMS[self.mechanism["name"]].parameter),
            copies ** (1 / self.order) if self.order else 1.0,
        )
        noise = {key: self.mechanism[key] / longer, "clip_norm": CLIP * longer, "delta": DELTA, "unit": "update"}
        config = mechanism_settings({**self.mechanism, **noise})
        own = FlowerSettings.model_construct(privatise=PrivatiseSettings(folder=folder), mechanism=config)
        return client([Privatiser(own)], trained)

    def claims(self, folder: Path) -> Claims:
        """What the ledger of one release prints."""
        ask(self.app(folder, towards(1.0), 1), self.size, 0)
        line = json.loads((folder / "client-0.json").read_text())
        printed = {DELTA: line["epsilon"], 0.0: line["pure_epsilon"]}
        return {delta: epsilon for delta, epsilon in printed.items() if epsilon is not None}


def ask(app: ClientApp, numbers: int, partition: int) -> Message:
    return app(question({"weight": np.zeros(numbers, np.float32)}), context(partition=partition))


def towards(sign: float) -> Trained:
    return lambda given: {name: value + np.float32(10 * sign) for name, value in given.items()}


GAMES = {
    "gaussian": AppGame({"name": "gaussian", "sigma": 1.4}),
    "laplace": AppGame({"name": "laplace", "scale": 1.0}, order=1),
    "vmf": AppGame({"name": "vmf", "kappa": 1.0, "blocks": "size:2"}, size=2, order=None),
}


def play_app(game: AppGame, folder: Path) -> Verdict:
    """Opposite updates, many releases a message."""
    claims, clients = game.claims(folder / "claimed"), count()
    apps = {side: game.app(folder / "played", towards(sign), COPIES) for side, sign in (("left", 1.0), ("right", -1.0))}

    def draw(side: str, runs: int) -> Scores:
        replies = [ask(apps[side], COPIES * game.size, next(clients)) for _ in range(math.ceil(runs / COPIES))]
        rows = np.concatenate([arrays(reply)["weight"].reshape(COPIES, game.size) for reply in replies])
        return {"projection": rows.sum(axis=1, dtype=np.float64)[:runs]}

    return play(draw, claims, RUNS)


@pytest.mark.parametrize("name", GAMES)
def test_an_app_tells_no_more_than_its_ledger_says(name: str, tmp_path: Path) -> None:
    verdict = play_app(GAMES[name], tmp_path)
    assert not verdict.violation, str(verdict)


@pytest.mark.parametrize("name", GAMES)
def test_half_the_noise_is_found_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def release(plan: Plan, *given: Any) -> Any:
        config = plan.config
        assert config.noise is not None
        less = config.with_noise(config.noise * (2.0 if config.parameter == "kappa" else 0.5))
        return less.mechanism().release(*given)

    monkeypatch.setattr(Plan, "_release", release)
    verdict = play_app(GAMES[name], tmp_path)
    assert verdict.violation, str(verdict)


def test_a_mechanism_whose_noise_nobody_adds_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal, which was missing once: the ledger's epsilon stands beside an update without noise."""
    monkeypatch.setattr(MECHANISMS["central"], "require_noise_at", lambda *_: None)
    verdict = play_app(AppGame({"name": "central", "sigma": 1.4}), tmp_path)
    assert verdict.violation and verdict.rates == (1.0, 0.0), str(verdict)


# ---- an app that raises ---------------------------------------------------------------------------------------------


class Panic(BaseException):
    """Neither an Exception nor the end of the process."""


def panicking(given: Arrays) -> Arrays:
    raise Panic("the third image is a seven")


def play_error(folder: Path) -> Verdict:
    """An update or an error, and much noise, so that few messages are enough; the server sees whatever comes."""
    game, clients = AppGame({"name": "gaussian", "sigma": 8.0}), count()
    claims = game.claims(folder / "claimed")
    apps = {"left": game.app(folder / "played", towards(1.0), 1), "right": game.app(folder / "played", panicking, 1)}

    def seen(side: str) -> tuple[float, float]:
        try:
            reply = ask(apps[side], 1, next(clients))
        except BaseException as error:  # noqa: BLE001 - what a client raises reaches the server as an error
            return 0.0, crc32(f"{type(error).__name__}: {error}".encode())
        said = {name: dict(record) for name, record in reply.content.metric_records.items()}
        return float(arrays(reply)["weight"][0]), crc32(repr(said).encode())

    def draw(side: str, runs: int) -> Scores:
        rows = np.array([seen(side) for _ in range(runs)])
        return {"update": rows[:, 0], "what is said": rows[:, 1]}

    return play(draw, claims, 80)


def test_an_app_that_raises_tells_no_more_either(tmp_path: Path) -> None:
    verdict = play_error(tmp_path)
    assert not verdict.violation, str(verdict)


def test_an_error_that_passes_through_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a handler of Exception and SystemExit alone, as it was once."""

    def unless_raised(compute: Callable[[], object], *_: object, level: int) -> object:
        try:
            return compute()
        except (Exception, SystemExit):  # noqa: BLE001 - the mistake itself
            return None

    module = importlib.import_module("fedpriv.flower._privatise")
    monkeypatch.setattr(module, "unless_raised", unless_raised)
    verdict = play_error(tmp_path)
    assert verdict.violation and verdict.rates == (1.0, 0.0), str(verdict)
