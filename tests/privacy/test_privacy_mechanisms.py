"""One release of every mechanism, many thousands of times: the smallest errors in noise, clipping and directions.

False alarms: each game uses two limits that fail with probability 1e-9 each (``bounds.ALARM``), and there are fewer
than 100 games: less than 2e-7 for the file. Seeds are fixed, and every game finds out what it has to.
"""

import pytest

from tests.privacy.mechanism_game import MechanismGame, play_mechanism, play_passes

# Others lie where the victim is zero, so that they add nothing to the statistic of Gaussian and Laplace noise; one of
# them is below the bound and one above it. Those of VMF games point where the victim does, or beside it.
ASIDE = ((0.0, 0.1, -0.1, 0.0, 0.0), (0.0, 3.0, 0.0, 0.0, -7.0))
SPREAD = ((2.0, 0.0), (0.0, 3.0, 0.0))
SPIKE = ((0.0, 0.0), (0.0, 4.0, 0.0))
ALIKE = (1.0, 0.0, 5.0, 0.0, -1.0)

GAUSSIAN = {"name": "gaussian", "sigma": 1.4}
LAYERS = {**GAUSSIAN, "clipping": "layer"}
LAPLACE = {"name": "laplace", "scale": 1.0}
HGM = {"name": "hgm", "sigma": 1.4}


def vmf(kappa: float, blocks: str = "whole") -> dict[str, object]:
    return {"name": "vmf", "kappa": kappa, "blocks": blocks}


# Many copies at once: a fifth less noise is found out (a third less among others).
CHEAP = {
    "gaussian": MechanismGame(GAUSSIAN, SPREAD),
    "gaussian, batch of 3": MechanismGame(GAUSSIAN, SPREAD, ASIDE),
    "gaussian by layer": MechanismGame(LAYERS, SPREAD),
    "gaussian by layer, batch of 3": MechanismGame(LAYERS, SPREAD, ASIDE),
    "gaussian on updates": MechanismGame(GAUSSIAN, SPREAD, unit="update"),
    "laplace": MechanismGame(LAPLACE, SPIKE),
    "laplace, batch of 3": MechanismGame(LAPLACE, SPIKE, (ALIKE, ALIKE)),
    "hgm, uniform": MechanismGame(HGM, SPREAD),
    "hgm, by layer": MechanismGame({**HGM, "redistribution": "layer"}, SPREAD),
    "hgm, public": MechanismGame({**HGM, "redistribution": "public"}, SPREAD),
    "hgm, public, batch of 3": MechanismGame({**HGM, "redistribution": "public"}, SPREAD, ASIDE),
    "vmf in blocks of 1, on updates": MechanismGame(vmf(0.7, "size:1"), ((3.0,),), unit="update"),
    "vmf in blocks of 2": MechanismGame(vmf(1.0, "size:2"), ((1.0, -1.0),)),
    "vmf in blocks of 5": MechanismGame(vmf(1.5, "size:5"), ((1.0, 2.0, 2.0, 0.0, 1.0),)),
    "vmf in blocks of 20": MechanismGame(vmf(3.0, "size:20"), ((1.0, 2.0) * 10,)),
    "vmf in blocks of 3, batch of 2": MechanismGame(
        vmf(1.2, "size:3"), ((1.0, 2.0, 2.0),), ((1.0, 2.0, 2.5),), weaker=0.7
    ),
}

# Draws of whole gradients and of layers have to be made one by one.
DEAR = {
    "vmf, one dimension": MechanismGame(vmf(0.85), ((3.0,),), runs=400, copies=1, weaker=0.4),
    "vmf on updates": MechanismGame(vmf(0.85), ((3.0,),), runs=400, copies=1, unit="update", weaker=0.4),
    "vmf": MechanismGame(vmf(1.0), ((1.0,), (1.0,)), runs=500, copies=1, weaker=0.4),
    "vmf, batch of 2": MechanismGame(vmf(1.2), ((1.0,), (1.0,)), ((2.0, 2.0),), runs=500, copies=1, weaker=0.35),
    "vmf by layer, batch of 2": MechanismGame(
        vmf(0.6, "layer"), ((1.0,), (-2.0,)), ((2.0, -1.0),), runs=450, copies=1, weaker=0.35
    ),
    "vmf in blocks across tensors": MechanismGame(
        vmf(0.5, "size:2"), ((1.0, 2.0, 2.0), (-1.0, 1.0)), runs=400, copies=1, weaker=0.4
    ),
}
GAMES = CHEAP | DEAR
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in DEAR else []) for name in GAMES]


@pytest.mark.parametrize("name", NAMES)
def test_no_release_tells_more_than_the_ledger_says(name: str) -> None:
    verdict = play_mechanism(GAMES[name])
    assert not verdict.violation, str(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_too_little_noise_is_found_out(name: str) -> None:
    verdict = play_mechanism(GAMES[name], noise=GAMES[name].weaker)
    assert verdict.violation, str(verdict)


# Two examples are the fewest: the ledger counts one draw a step, and a step has as many as there may be examples in it.
# With two, half the noise tells as much as 0.7 of it would in a single draw.
PASSES = {
    "vmf": MechanismGame(vmf(6.0, "size:30"), ((1.0,) + (0.0,) * 29,), ((0.0,) * 30,), 4_000, 1_000, allocated=True),
    "laplace": MechanismGame({"name": "laplace", "scale": 0.7}, ((1.0,),), ((0.0,),), 4_000, 4_000, allocated=True),
}


@pytest.mark.parametrize("name", PASSES)
def test_no_pass_of_balls_in_bins_tells_more_than_the_ledger_says(name: str) -> None:
    verdict = play_passes(PASSES[name])
    assert not verdict.violation, str(verdict)


@pytest.mark.parametrize("name", PASSES)
def test_half_the_noise_of_balls_in_bins_is_found_out(name: str) -> None:
    verdict = play_passes(PASSES[name], noise=0.5)
    assert verdict.violation, str(verdict)
