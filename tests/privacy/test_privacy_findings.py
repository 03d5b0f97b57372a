"""Eight ways in which clients once told more than the ledger said, each with the game that finds it.

Each finding is played twice. On the code as it is nothing may be found. With its fix taken out (``FIXES`` names the
functions, and what stands in for them) the game has to find it: a game that could not fail would prove nothing.

False alarms: fewer than 30 games, two limits that fail with probability 1e-9 each.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.accounting.gaussian import gaussian_epsilon
from fedpriv.clients import answering
from fedpriv.clients.model_errors import Sound, unless_raised
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import NoiseStream, Secret, torch_stream
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import State, _built
from fedpriv.gradients import Block, GradientOperator
from fedpriv.gradients.dense import FactoredGradients
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.machinery.base import Mechanism
from tests.privacy.bounds import Scores, Verdict, play
from tests.privacy.game import CLIP_NORM, Answer, Examples, Game, Neighbours, Table, claims, play_game, release, zeros
from tests.privacy.worst_cases import BLANK, MANY, ONE_PIXEL, WHITE, WORST_CASES, alone, cancelling, pair

GAUSSIAN: dict[str, object] = {"name": "gaussian", "sigma": 8.0}
TURNED = pair(WHITE, WHITE, BLANK, 1, (0, 1))

# ---- 1: a refusal is an answer --------------------------------------------------------------------------------------


def failing(case: str) -> Verdict:
    """A client whose gradient is not finite, or whose network raises, and that sends no upload."""
    worst = WORST_CASES[case]
    return play_game(
        Game(worst.neighbours, {"mechanism": GAUSSIAN, "model": worst.model}, parameters=(worst.parameters,))
    )


def failing_together() -> Verdict:
    """A client whose network raises on an example in a batch, and not when it looks which one that was."""
    worst, network = WORST_CASES["raises"], {"name": "tests.privacy.networks:raising_together"}
    return play_game(Game(worst.neighbours, {"mechanism": GAUSSIAN, "model": network}))


# ---- 2: examples mixed while training -------------------------------------------------------------------------------


def mixing() -> Verdict | None:
    """A network that mixes the images of a batch in training mode only: one of them turns up in every gradient."""
    game = Game(
        pair(WHITE, BLANK, BLANK, MANY, (0, 0)),
        {
            "mechanism": {**GAUSSIAN, "clip_norm": 1e-3},
            "model": {"name": "tests.privacy.networks:mixed_in_training"},
        },
    )
    try:
        return play_game(game)
    except InputError:
        return None  # such a network is not trained at all


# ---- 3: noise of 32 bits, and of a seed that others know ------------------------------------------------------------

# Under seed 7, when noise came from torch generators keyed with 32 bits: (client, step) and another (client, step) with
# the same key, all of those among 80 clients and 8641 steps.
COLLISIONS = np.fromstring(
    """
    79 503 33 651  73 731 21 1946  69 1786 26 2201  23 776 27 2272  22 1104 28 2501  28 1605 20 2539  43 530 33 3064
    43 1952 33 3214  8 541 79 3292  54 611 76 3537  46 453 28 3627  30 3066 24 3801  20 2981 60 4107  31 3684 63 4146
    65 3555 67 4222  32 3754 73 4278  42 2230 10 4396  22 2911 35 4510  23 1296 47 4576  15 1044 11 4820  4 685 37 4903
    6 234 72 5157  61 2113 66 5160  15 2719 48 5247  13 1602 77 5308  79 4570 33 5502  12 4455 32 5637  39 5009 17 5644
    55 1246 21 5648  69 5122 25 5792  35 2961 17 5968  13 4656 55 6014  31 4563 70 6023  76 4385 54 6067  7 3547 5 6153
    71 3674 0 6209  64 1525 25 6277  6 4818 31 6362  48 30 67 6364  50 340 31 6369  50 361 31 6394  0 3030 74 6404
    2 5309 26 6634  12 1302 32 6836  13 5970 46 6987  36 4059 27 7112  68 896 73 7133  11 4451 71 7285  9 5966 24 7371
    26 3687 2 7470  46 4706 64 7495  53 2151 22 7541  51 1775 21 7580  17 2181 27 7681  15 7223 34 7775  67 3776 58 7906
    32 6018 12 7916  65 2931 67 7950  33 4918 79 8082  25 4160 69 8098  36 5351 53 8140  11 2210 36 8568  78 275 48 8637
    6 417 42 8640
    """,
    dtype=np.int64,
    sep=" ",
).reshape(-1, 4)


def colliding() -> Verdict:
    """The server asks two clients, each in the round in which its noise is the other's, and subtracts."""
    images, ones = np.array([WHITE] * 80), np.ones(80, np.int64)
    # Of the right federation only the first client of a pair is asked: it alone differs.
    both = Neighbours(Examples(images, 0 * ones), Examples(images, ones))
    settings = {"seed": 7, "federation": {"clients": 80}, "training": {"batch_size": 1}}
    table = Table(Game(both, {"mechanism": GAUSSIAN, **settings}))
    pairs = {side: iter(COLLISIONS.tolist()) for side in ("left", "right")}

    def difference(side: str, one: int, at: int, other: int, then: int) -> float:
        return float((answer(table, side, one, at + 1) - answer(table, "left", other, then + 1)).norm())

    def draw(side: str, runs: int) -> Scores:
        found = [difference(side, *next(pairs[side])) for _ in range(runs)]
        return {"difference of two clients' answers": np.array(found)}

    return play(draw, claims(table.worlds["left"].plans[0], [1]), 36)


def replayed() -> Verdict:
    """The adversary knows the experiment, its seed included, and runs the client's own code on what it suspects."""
    game = Game(TURNED, {"mechanism": GAUSSIAN})
    table, guess = Table(game, secret=Secret.drawn()), Table(game, secret=Secret.of_seed(0))
    rounds = {"left": count(1, 2), "right": count(2, 2)}

    def same(side: str, number: int) -> bool:
        return torch.equal(answer(table, side, 0, number), answer(guess, "left", 0, number))

    def draw(side: str, runs: int) -> Scores:
        return {"equals the replay": np.array([same(side, next(rounds[side])) for _ in range(runs)], np.float64)}

    return play(draw, claims(table.plan, [1]), 48)


def answer(table: Table, side: str, client: int, number: int) -> Tensor:
    """The upload of a client that was never asked before."""
    return table.ask(table.grid(side), side, client, number, table.states[0]).numbers


# ---- 4: two answers with the same noise -----------------------------------------------------------------------------


def asked_twice() -> Verdict:
    """The server asks about one round with two models and subtracts. The ledger is asked about both answers."""

    def certain(initial: State) -> State:
        weights = {name: torch.zeros_like(value) for name, value in initial.parameters.items()}
        for value in weights.values():
            value[0] = 1e4  # label 0 is certain, and its gradient zero
        return State(weights, initial.buffers)

    def difference(_: Table, run: Sequence[Answer]) -> float:
        first, second = (each.numbers for each in run)
        return float((first - second).norm()) if len(first) == len(second) else 0.0

    adversaries = {"difference of the answers": difference}
    return play_game(Game(TURNED, {"mechanism": GAUSSIAN}, parameters=(zeros, certain), adversaries=adversaries))


# ---- 5: a run resumed with other settings ---------------------------------------------------------------------------


def resumed(folder: Path, edited: dict[str, object], **mechanism: object) -> tuple[float, Experiment] | None:
    """Run, edit config.toml, resume: the epsilon that is printed then, and the experiment of the rounds before.

    Args:
        folder: of the run.
        edited: rounds, and keys of the mechanism, after the edit.
        mechanism: its keys before.
    """
    game = Game(TURNED, {"mechanism": {"name": "gaussian", **mechanism}, "federation": {"rounds": 2}})
    before = game.experiment("left")
    start_run(before, folder, "", Silent())
    tree = before.model_dump(exclude_none=True)
    tree["federation"]["rounds"] = edited.pop("rounds")
    tree["mechanism"] |= edited
    RunFolder.open(folder).write_text("config.toml", Experiment.model_validate(tree).to_toml())
    try:
        resume_run(folder, Silent())
    except InputError:
        return None
    return float(json.loads((folder / "ledger.json").read_text())["worst"]["epsilon"]), before


def rewritten(folder: Path) -> Verdict | None:
    """After two rounds sigma is edited from 0.3 to 30: what was released before is printed as if it had been little."""
    found = resumed(folder, {"rounds": 3, "sigma": 30.0}, sigma=0.3)
    if found is None:
        return None
    printed, before = found
    table = Table(Game(TURNED, {"mechanism": {"name": "gaussian", "sigma": 0.3}}, rounds=2))
    return play(table.draw, {before.mechanism.delta: printed}, 48)


def recalibrated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float] | None:
    """More rounds for the same target: noise is calibrated anew, but what was released before had less.

    Returns:
        The printed epsilon, and that of the deviations that the noise really had; for one client's normal noise
        around gradients of opposite signs it is exact (Balle and Wang 2018, Theorem 8).
    """
    used: list[float] = []
    release_ = GaussianMechanism._release

    def spy(self: GaussianMechanism, *args: object) -> object:
        used.append(self.sigma)
        return release_(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(GaussianMechanism, "_release", spy)
    found = resumed(folder, {"rounds": 20}, target_epsilon=1.0)
    if found is None:
        return None
    printed, before = found
    mu = math.sqrt(sum((2 / sigma) ** 2 for sigma in used))
    return printed, gaussian_epsilon(before.mechanism.delta, mu)


# ---- 6: gradients whose terms cancel --------------------------------------------------------------------------------

LAYER: dict[str, object] = {"name": "vmf", "kappa": 0.1, "blocks": "layer"}
# How much too long a gradient of rounding errors is depends on the processor's kernels: enough runs for a small share.
ROUNDING_RUNS = 300


def too_long() -> Verdict:
    """A block that should have length 1, scaled by a norm in float64 and added up in float32."""

    def deviation(_: Table, run: Sequence[Answer]) -> float:
        return max(
            (math.log10(abs(float(each.numbers.norm()) - 1) + 1e-12) for each in run if not each.error), default=0
        )

    network = {"name": "tests.privacy.networks:nearly_cancelling"}
    adversaries = {"digits by which the length is not 1": deviation}
    experiment = {"mechanism": LAYER, "model": network}
    return play_game(Game(alone(cancelling(32)), experiment, adversaries=adversaries, runs=ROUNDING_RUNS))


def beyond_the_bound(mechanism: dict[str, object], case: str) -> Verdict:
    """A gradient of rounding errors that is longer than clip_norm, or whose length is the root of a negative number."""
    worst = WORST_CASES[case]
    return play_game(Game(worst.neighbours, {"mechanism": mechanism, "model": worst.model}, runs=ROUNDING_RUNS))


# ---- 7: one example decides how all are computed --------------------------------------------------------------------


def deciding() -> Verdict:
    """Large numbers of one example hide that a layer does not repeat itself; else the whole model is dense."""
    network = {"name": "tests.privacy.networks:company"}
    sets = pair(ONE_PIXEL, BLANK, WHITE, MANY, (0, 0))
    return play_game(Game(sets, {"mechanism": GAUSSIAN, "model": network}, parameters=(lambda initial: initial,)))


# ---- 8: settings that a message brings ------------------------------------------------------------------------------


def asked_with_less_noise() -> Verdict:
    """The server asks in one round as it said it would, and in the next with hardly any noise."""
    table = Table(Game(TURNED, {"mechanism": GAUSSIAN}))
    rounds = {"left": count(1, 4), "right": count(3, 4)}
    less = GAUSSIAN | {"sigma": 1e-6, "clip_norm": CLIP_NORM}
    tasks = {
        side: Experiment.model_validate({**world.experiment.model_dump(), "mechanism": less}).model_dump_json()
        for side, world in table.worlds.items()
    }

    def second(side: str, number: int) -> float:
        grid, world = table.grid(side), table.worlds[side]
        table.ask(grid, side, 0, number, table.states[0])
        found = release(grid, world, tasks[side], 0, number + 1, table.states[0])
        return float(table.standardised(found.parameters) @ table.victim) if found.parameters else 0.0

    def draw(side: str, runs: int) -> Scores:
        return {"second answer": np.array([second(side, next(rounds[side])) for _ in range(runs)])}

    return play(draw, claims(table.plan, [1, 2]), 48)


# ---- the tests ------------------------------------------------------------------------------------------------------

FINDINGS: dict[str, Callable[[Path], Verdict | None]] = {
    "1: NaN": lambda _: failing("nan"),
    "1: raises": lambda _: failing("raises"),
    "1: raises in a batch only": lambda _: failing_together(),
    "1: overflow": lambda _: failing("overflow"),
    "2: mixing": lambda _: mixing(),
    "3: collisions": lambda _: colliding(),
    "3: replay": lambda _: replayed(),
    "4: asked twice": lambda _: asked_twice(),
    "5: rewritten": rewritten,
    "6: block longer than 1": lambda _: too_long(),
    "6: gradient longer than clip_norm": lambda _: beyond_the_bound(GAUSSIAN, "cancelling"),
    "6: no length": lambda _: beyond_the_bound(LAYER, "cancelling, longer"),
    "7: decided by one": lambda _: deciding(),
    "8: less noise": lambda _: asked_with_less_noise(),
}


def refusing(self: Mechanism, gradients: GradientOperator) -> GradientOperator:
    """As it was: a gradient that is not finite ends the client's round."""
    if not bool(torch.isfinite(gradients.magnitudes()).all()):
        raise ValueError("a gradient is not finite")
    return gradients


def where_alone(compute: Callable[[Tensor], GradientOperator], examples: int) -> Sound[GradientOperator] | None:
    """As it was: each example was tried alone, and where that found none all counted as zero."""
    sound = torch.tensor([unless_raised(lambda k=k: compute(torch.tensor([k]))) is not None for k in range(examples)])
    rows = torch.where(sound, torch.arange(examples), sound.nonzero()[0, 0])
    found = unless_raised(lambda: compute(rows))
    return None if found is None else Sound(found, sound)


@dataclass(frozen=True)
class ThirtyTwoBits:
    """As it was: noise that follows from 32 bits of a torch generator's seed."""

    client: int
    round: int

    def stream(self, purpose: str, step: int) -> NoiseStream:
        bits = torch_stream(7, purpose, self.client, step)
        return NoiseStream(bytes(torch.randint(256, (32,), generator=bits).tolist()))


def of_client_and_round(secret: Secret, client: int, round_number: int, received: bytes) -> Secret:
    """As it was: whatever is asked in a round gets the same noise."""
    return secret.derived("answer", client, round_number)


def no_rounding(gradients: FactoredGradients, block: Block | None = None) -> Tensor:
    """As it was: nothing was known of what rounding does where terms cancel."""
    return torch.zeros(gradients.examples, dtype=gradients.dtype)


def any_length(gradients: GradientOperator, block: Block | None) -> Tensor:
    """As it was: a gradient had a direction unless its norm was next to nothing."""
    limits = torch.finfo(gradients.dtype)
    return torch.full((gradients.examples,), limits.tiny / limits.eps, dtype=torch.float64)


CANCELLING: dict[str, object] = {
    "fedpriv.gradients.dense.FactoredGradients.roundings": no_rounding,
    "fedpriv.mechanisms.machinery.vmf_sampling._shortest": any_length,
}

# finding -> module.name of what fixes it: what stands in for it.
FIXES: dict[str, dict[str, object]] = {
    "1: NaN": {"fedpriv.mechanisms.machinery.base.Mechanism._admitted": refusing},
    "1: raises": {"fedpriv.clients.training._unless_raised": lambda _, compute: compute()},
    "1: raises in a batch only": {"fedpriv.clients.training.where_sound": where_alone},
    "1: overflow": {"fedpriv.mechanisms.machinery.base.Mechanism._admitted": refusing},
    "2: mixing": {"fedpriv.core.world._refuse_leaks": lambda *_: None},
    "3: collisions": {
        "fedpriv.clients.answering.answer_secret": lambda _, client, number, __: ThirtyTwoBits(client, number)
    },
    "3: replay": {"fedpriv.core.randomness.Secret.drawn": staticmethod(lambda: Secret.of_seed(0))},
    "4: asked twice": {
        "fedpriv.clients.answering.answer_secret": of_client_and_round,
        "fedpriv.clients.answering.secret_for": lambda context, number, received, shared: shared,
    },
    "8: less noise": {"fedpriv.clients.answering.check_question": lambda *_: None},
    "5: rewritten": {"fedpriv.core.lab.run.check_unchanged": lambda *_: None},
    "5: recalibrated": {"fedpriv.core.lab.run.check_unchanged": lambda *_: None},
    "6: block longer than 1": CANCELLING,
    "6: gradient longer than clip_norm": CANCELLING,
}


@contextmanager
def without_its_fix(finding: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the fix of one finding out. Built worlds are forgotten before and after: they may rest on it."""
    with monkeypatch.context() as patch:
        for name, stand_in in FIXES[finding].items():
            patch.setattr(name, stand_in)
        forget_worlds()
        yield
    forget_worlds()


def forget_worlds() -> None:
    answering._world.cache_clear()
    _built.cache_clear()


@pytest.mark.parametrize("finding", FINDINGS)
def test_the_finding_is_fixed(finding: str, tmp_path: Path) -> None:
    verdict = FINDINGS[finding](tmp_path / "run")
    assert verdict is None or not verdict.violation, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("finding", [finding for finding in FINDINGS if finding in FIXES])
def test_the_game_finds_it_without_its_fix(finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_its_fix(finding, monkeypatch):
        verdict = FINDINGS[finding](tmp_path / "run")
    assert verdict is not None
    assert verdict.violation, str(verdict)


def test_noise_is_not_calibrated_anew_in_the_middle_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recalibrated(tmp_path / "run", monkeypatch)
    assert found is None or found[1] <= found[0] * (1 + 1e-9)


@pytest.mark.slow
def test_noise_calibrated_anew_is_found_without_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_its_fix("5: recalibrated", monkeypatch):
        found = recalibrated(tmp_path / "run", monkeypatch)
    assert found is not None
    assert found[1] > 1.2 * found[0]
