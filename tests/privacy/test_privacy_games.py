"""Every mechanism and sampling against the worst neighbours, through the client's own code path.

Two kinds of games. The *product* plays all mechanisms and worst cases, with samplings, units, algorithms and engine
settings in turn, and with so much noise that the ledger claims next to nothing: few runs are enough to find out
whatever tells the neighbours apart for certain (a failure, a text, a length, a gradient past its bound). The *sharp*
games have little noise and many runs: they find out wrong amounts of noise, of sampling and of participations.

False alarms: each game uses two limits that fail with probability 1e-9 each (``bounds.ALARM``); fewer than 100 games
make less than 2e-7 for the file. With the other two files of this folder it is less than 1e-6. Noise follows from the
experiment, and so from the folder of its data: every run of these tests draws its own.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from fedpriv.data.sampling import Sampling
from tests.privacy.bounds import ALARM
from tests.privacy.game import CLIP_NORM, Answer, Game, Table, play_game
from tests.privacy.worst_cases import BLANK, ONE_PIXEL, WHITE, WORST_CASES, pair

# ---- the product ----------------------------------------------------------------------------------------------------

MECHANISMS: dict[str, dict[str, object]] = {
    "gaussian": {"name": "gaussian", "sigma": 8.0},
    "gaussian by layer": {"name": "gaussian", "sigma": 8.0, "clipping": "layer"},
    "laplace": {"name": "laplace", "scale": 10.0},
    "hgm": {"name": "hgm", "sigma": 8.0},
    "hgm by layer": {"name": "hgm", "sigma": 8.0, "redistribution": "layer"},
    "hgm, public": {"name": "hgm", "sigma": 8.0, "redistribution": "public"},
    "vmf": {"name": "vmf", "kappa": 0.1},
    "vmf by layer": {"name": "vmf", "kappa": 0.1, "blocks": "layer"},
    "vmf in blocks": {"name": "vmf", "kappa": 0.1, "blocks": "size:3"},
}
SAMPLINGS = ("shuffled", "fixed", "poisson", "balls-in-bins")

VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "fedsgd, update": {"mechanism": {"unit": "update"}},
    "fedavg, example": {"federation": {"algorithm": "fedavg"}, "training": {"local_epochs": 2}},
    "fedavg, update": {"federation": {"algorithm": "fedavg"}, "mechanism": {"unit": "update"}},
    "float64": {"engine": {"precision": "float64"}},
    "bfloat16": {"engine": {"precision": "bfloat16"}},
    "three clients": {"federation": {"clients": 3}, "training": {"batch_size": 21}},
}


def product_game(mechanism: str, case: str, sampling: str = "shuffled", variant: str | None = None) -> Game:
    worst, changes = WORST_CASES[case], VARIANTS[variant] if variant else {}
    size = len(worst.neighbours.left.labels)
    settings: dict[str, dict[str, object]] = {
        "mechanism": dict(MECHANISMS[mechanism]),
        "model": worst.model,
        # Almost all of the data, so that the victim is in nearly every batch.
        "training": {"sampling": sampling, "batch_size": size if sampling == "shuffled" else max(1, size - 1)},
    }
    if mechanism == "vmf in blocks" and worst.network == "positions":
        settings["mechanism"]["blocks"] = "size:1000"  # a claim for each of a thousand blocks would be none
    merged = {name: {**settings.get(name, {}), **changes.get(name, {})} for name in {*settings, *changes}}
    return Game(worst.neighbours, merged, parameters=(worst.parameters,))


def claims_it(mechanism: str, case: str, sampling: str) -> bool:
    """Whether the two data sets are neighbours in the sense of the ledger's line."""
    zero_out = MECHANISMS[mechanism]["name"] in ("gaussian", "hgm") and sampling == "poisson"
    return WORST_CASES[case].zero_out or not zero_out


# In a data set of one example there is nothing to sample, and nothing to share with other clients.
ALONE = {name for name, case in WORST_CASES.items() if len(case.neighbours.left.labels) == 1}


def samplings(mechanism: str, case: str) -> list[str]:
    return [one for one in SAMPLINGS if claims_it(mechanism, case, one) and (one == "shuffled" or case not in ALONE)]


# Those whose own lines of code are the most play all worst cases; the others, which differ from one of these in where
# they clip or how they share out the noise, every second one.
WHOLE = ("gaussian", "laplace", "hgm", "vmf", "vmf in blocks")
PAIRS = [
    (row, column, mechanism, case)
    for row, mechanism in enumerate(MECHANISMS)
    for column, case in enumerate(WORST_CASES)
    if mechanism in WHOLE or (row + column) % 2 == 0
]


def turn(case: str, number: int) -> str:
    """One variant after the other, of those that the worst case can be played with."""
    fitting = [name for name in VARIANTS if case not in ALONE or "clients" not in name]
    return fitting[number % len(fitting)]


# Every third pair with one of the variants, in turn; the others with the samplings that their lines of the ledger
# allow, in turn.
EACH_THIRD = [(mechanism, case) for row, column, mechanism, case in PAIRS if (row + column) % 3 == 0]
VARIED = [(mechanism, case, turn(case, number)) for number, (mechanism, case) in enumerate(EACH_THIRD)]
SAMPLED_PAIRS = [
    (mechanism, case, allowed[(row + column) % len(allowed)])
    for row, column, mechanism, case in PAIRS
    if (row + column) % 3
    for allowed in [samplings(mechanism, case)]
]


def fast_pairs() -> Iterator[tuple[str, str, str]]:
    """The first game of each mechanism and the first of each worst case: the fast tier."""
    seen: set[str] = set()
    for mechanism, case, sampling in SAMPLED_PAIRS:
        if not {mechanism, case} <= seen:
            seen |= {mechanism, case}
            yield mechanism, case, sampling


FAST_PAIRS = list(fast_pairs())


@pytest.mark.parametrize(
    ("mechanism", "case", "sampling"),
    [pytest.param(*each, marks=[] if each in FAST_PAIRS else [pytest.mark.slow]) for each in SAMPLED_PAIRS],
)
def test_nothing_tells_the_worst_neighbours_apart(mechanism: str, case: str, sampling: str) -> None:
    verdict = play_game(product_game(mechanism, case, sampling))
    assert not verdict.violation, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "case", "variant"), VARIED)
def test_nor_with_other_units_algorithms_and_engines(mechanism: str, case: str, variant: str) -> None:
    verdict = play_game(product_game(mechanism, case, variant=variant))
    assert not verdict.violation, str(verdict)


# ---- sharp games ----------------------------------------------------------------------------------------------------

# The victim's gradient is turned round; it is alone, or the others' gradients are zero.
TURNED = pair(WHITE, WHITE, BLANK, 1, (0, 1))
SPIKE = pair(ONE_PIXEL, ONE_PIXEL, BLANK, 1, (0, 1))
ONE_OF_FOUR = pair(WHITE, WHITE, BLANK, 4, (0, 1))
ZERO_OUT = pair(WHITE, BLANK, BLANK, 4, (0, 0))
SPIKE_OF_FOUR = pair(ONE_PIXEL, ONE_PIXEL, BLANK, 4, (0, 1))
SIX = pair(WHITE, WHITE, BLANK, 6, (0, 1))

FEDAVG = {"algorithm": "fedavg"}
TWO_EPOCHS = {"local_epochs": 2, "learning_rate": 0.01}
SPIKED = {"name": "tests.privacy.networks:spike"}


def fixed(sampling: str = "fixed") -> dict[str, object]:
    return {"sampling": sampling, "batch_size": 1}


SHARP = {
    "gaussian, two rounds": Game(TURNED, {"mechanism": {"name": "gaussian", "sigma": 2.2}}, rounds=2, runs=130),
    "gaussian on updates, two clients": Game(
        pair(WHITE, WHITE, WHITE, 2, (0, 1)),
        {
            "mechanism": {"name": "gaussian", "sigma": 1.6, "unit": "update"},
            "federation": {**FEDAVG, "clients": 2},
            "training": {"batch_size": 1, "learning_rate": 100.0},
        },
        runs=220,
    ),
    "laplace": Game(SPIKE, {"mechanism": {"name": "laplace", "scale": 1.3}, "model": SPIKED}, runs=200),
    "hgm by layer, two local steps": Game(
        TURNED,
        {
            "mechanism": {"name": "hgm", "sigma": 2.2, "redistribution": "layer"},
            "federation": FEDAVG,
            "training": TWO_EPOCHS,
        },
        runs=130,
    ),
    "vmf, batch of 2": Game(
        pair(WHITE, WHITE, WHITE, 2, (0, 1)), {"mechanism": {"name": "vmf", "kappa": 1.2}}, runs=220
    ),
    "vmf by layer, on updates": Game(
        TURNED,
        {
            "mechanism": {"name": "vmf", "kappa": 0.6, "blocks": "layer", "unit": "update"},
            "federation": FEDAVG,
            "training": TWO_EPOCHS,
        },
        runs=160,
    ),
}


def allocated(table: Table, run: Sequence[Answer]) -> float:
    """How much likelier a pass of balls in bins is on the left: log of the means over its steps of each one's ratio."""
    config = table.plan.config
    sums = [float(table.standardised(answer.parameters) @ table.victim) for answer in run if answer.parameters]
    shifts = np.array(sums) * table.plan.sampling.batch_size / CLIP_NORM

    def ratios(x: np.ndarray) -> np.ndarray:
        """Logs, of a step with the victim to the same step without it; the neighbour's are those of the opposite."""
        noise = config.noise or 1.0
        return (np.abs(x) - np.abs(x - 1)) / noise if config.name == "laplace" else (x - 0.5) / noise**2

    return float(np.logaddexp.reduce(ratios(shifts)) - np.logaddexp.reduce(ratios(-shifts)))


SAMPLED = {
    "gaussian, fixed": Game(
        ONE_OF_FOUR, {"mechanism": {"name": "gaussian", "sigma": 0.4}, "training": fixed()}, runs=80
    ),
    "gaussian, poisson": Game(
        ZERO_OUT, {"mechanism": {"name": "gaussian", "sigma": 0.4}, "training": fixed("poisson")}, rounds=2, runs=200
    ),
    "hgm by layer, fixed, two rounds": Game(
        ONE_OF_FOUR,
        {"mechanism": {"name": "hgm", "sigma": 0.85, "redistribution": "layer"}, "training": fixed()},
        rounds=2,
        runs=220,
    ),
    "laplace, fixed": Game(
        SPIKE_OF_FOUR,
        {"mechanism": {"name": "laplace", "scale": 0.35}, "model": SPIKED, "training": fixed()},
        runs=170,
    ),
    "gaussian, balls-in-bins": Game(
        ONE_OF_FOUR,
        {"mechanism": {"name": "gaussian", "sigma": 0.7}, "training": fixed("balls-in-bins")},
        rounds=4,
        runs=200,
        adversaries={"likelihood of the allocation": allocated},
    ),
    # The amounts of these two are found out by passes in test_privacy_mechanisms, at a tenth of the cost.
    "laplace, balls-in-bins": Game(
        SPIKE_OF_FOUR,
        {"mechanism": {"name": "laplace", "scale": 0.35}, "model": SPIKED, "training": fixed("balls-in-bins")},
        rounds=4,
        runs=100,
        adversaries={"likelihood of the allocation": allocated},
    ),
    "vmf, balls-in-bins": Game(
        ONE_OF_FOUR,
        {"mechanism": {"name": "vmf", "kappa": 4.0}, "training": fixed("balls-in-bins")},
        rounds=4,
        runs=100,
    ),
    "vmf, fixed": Game(ONE_OF_FOUR, {"mechanism": {"name": "vmf", "kappa": 4.0}, "training": fixed()}, runs=170),
}

SECURE = Game(
    SIX,
    {
        "mechanism": {"name": "gaussian", "sigma": 8.0},
        "federation": {"clients": 3, "secure_aggregation": True},
        "training": {"batch_size": 2},
    },
)

FAST = ("gaussian, two rounds", "gaussian, fixed", "gaussian, poisson")


def named(games: dict[str, Game]) -> list[object]:
    return [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in games]


@pytest.mark.parametrize("name", named(SHARP | SAMPLED))
def test_no_run_tells_more_than_the_ledger_says(name: str) -> None:
    verdict = play_game((SHARP | SAMPLED)[name])
    assert not verdict.violation, str(verdict)


# Added noise and draws on a sphere, and of each unit and each algorithm one; far smaller errors of every mechanism are
# found out by test_privacy_mechanisms.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gaussian, two rounds", "vmf by layer, on updates"])
def test_a_quarter_of_the_noise_is_found_out(name: str) -> None:
    verdict = play_game(SHARP[name], noise=0.25)
    assert verdict.violation, str(verdict)


# 1.1 is printed, and the lower limit is 1.7. Half the noise of a pass is found out by test_privacy_mechanisms.
@pytest.mark.slow
def test_a_third_of_the_noise_of_balls_in_bins_is_found_out() -> None:
    verdict = play_game(SAMPLED["gaussian, balls-in-bins"], noise=0.35)
    assert verdict.violation, str(verdict)


# Each sampling that draws; which mechanism follows makes no difference.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gaussian, fixed", "gaussian, poisson"])
def test_batches_that_always_hold_the_victim_are_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Sampling.batch

    def batch(self: Sampling, seed: int, partition: int, step: int) -> np.ndarray:
        return np.union1d(draw(self, seed, partition, step)[1:], [0])

    monkeypatch.setattr(Sampling, "batch", batch)
    verdict = play_game(SAMPLED[name])
    assert verdict.violation, str(verdict)


@pytest.mark.slow
def test_the_sum_of_masked_uploads_tells_no_more_than_the_ledger_says() -> None:
    verdict = play_game(SECURE)
    assert not verdict.violation, str(verdict)


@pytest.mark.slow
def test_the_sum_of_masked_uploads_without_noise_is_found_out() -> None:
    verdict = play_game(SECURE, noise=0.01)
    assert verdict.violation, str(verdict)


def test_false_alarms_are_as_rare_as_this_file_says() -> None:
    assert len(SAMPLED_PAIRS) + len(VARIED) + len(SHARP | SAMPLED) + 1 < 100
    others = 100 + 20
    assert 2 * (100 + others) * ALARM < 1e-6
