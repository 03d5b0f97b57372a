"""Noise in the sum under Flower's SecAgg+: what its server adds up is what the ledger is about.

The mod and the workflow are Flower's own. False alarms of statistical tests: 1e-6 each.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from scipy import stats

from fedpriv.accounting import guarantee
from fedpriv.core.errors import InputError, RefusedError
from fedpriv.flower import _privatise, privatise, secure_sum
from fedpriv.flower._privatise import _plan
from fedpriv.flower.arrays import WrongAppError
from fedpriv.flower.ledger import line_of
from fedpriv.flower.secure_sum import Protocol, check_claim, check_protocol
from fedpriv.mechanisms import mechanism_settings
from studies import noise_in_sum
from tests.flower.apps import client, context, question, settings
from tests.flower.secure_sums import summed
from tests.privacy.bounds import play

ALARM, CLIENTS, CLIP = 1e-6, 4, 0.5
USUAL = Protocol(clients=CLIENTS, neighbours=CLIENTS, threshold=3, limit=8.0, levels=1 << 22, weight=1000.0)


def mod_of(folder: Path, sigma: float = 2.0, clip: float = CLIP, more: str = "", own: str = "") -> Any:
    mechanism = f'name = "distributed"\nsigma = {sigma}\nclip_norm = {clip}\nsurvivors = 3\n{more}'
    text = f'[mechanism]\n{mechanism}\n[privatise]\nfolder = "{folder / "privacy"}"\n{own}\n'
    return privatise(settings(folder, text))


def test_the_server_has_exactly_the_sum_of_what_clients_noised(tmp_path: Path) -> None:
    """Flower's quantisation changes no number, whatever came: off the grid, all positive, whole."""
    rng = np.random.default_rng(1)
    start = [rng.normal(size=(30, 20)).astype(np.float32), np.full(7, 1e-3, np.float32), np.array([4])]
    ended, sent = summed([mod_of(tmp_path, sigma=1.0)], start, lambda who: [np.float32(0.01 * who)] * 3)
    for values in sent:
        for value in values:
            (levels,) = quantize([value * 1.0], 8.0, 1 << 22)
            np.testing.assert_array_equal(dequantize([levels], 8.0, 1 << 22)[0], value)
            assert {float(each) for each in np.unique(quantize([value * 1.0], 8.0, 1 << 22)[0] - levels)} == {0.0}
    for place, value in enumerate(ended):
        mean = np.mean([values[place].astype(float) for values in sent], axis=0)
        np.testing.assert_allclose(value, mean, rtol=0, atol=1e-12)
    assert min(float(values[1].min()) for values in sent) < 0  # no clamp of what looks like a variance
    ledger = json.loads((tmp_path / "privacy" / "client-2.json").read_text())
    assert ledger["participations"] == 1 and "Skellam" in ledger["theorem"]["epsilon"]
    assert any("of the sum only" in note and "3 clients" in note for note in ledger["notes"])


def law_of(noise: np.ndarray, sigma: float, clients: int = CLIENTS) -> float:
    """The p-value of 40 bins of equal probability of the discrete law, of the sum in levels."""
    levels = (noise / (CLIP / 65536)).round()
    np.testing.assert_allclose(noise / (CLIP / 65536), levels, rtol=0, atol=1e-5)
    half = (sigma * 65536) ** 2 / 3 * clients / 2
    edges = np.unique(stats.skellam.ppf(np.arange(1, 40) / 40, half, half))
    chances = np.diff(np.concatenate([[0.0], stats.skellam.cdf(edges, half, half), [1.0]]))
    counts = np.bincount(np.searchsorted(edges, levels, side="left"), minlength=len(edges) + 1)
    return float(stats.chisquare(counts, chances * len(levels)).pvalue)


def test_the_noise_of_the_sum_has_the_discrete_law_and_halved_noise_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little noise, for the tables of the discrete law; nothing would be claimed of it."""
    sigma = 0.02
    monkeypatch.setattr(_privatise, "check_claim", lambda _: None)

    def noise() -> np.ndarray:
        ended, _ = summed([mod_of(tmp_path, sigma)], [np.zeros(5_000, np.float32)], lambda _: [np.zeros(5_000)])
        return ended[0] * CLIENTS

    assert law_of(noise(), sigma) > ALARM
    honest = secure_sum.noisy_levels
    monkeypatch.setattr(
        secure_sum, "noisy_levels", lambda values, variance, stream: honest(values, variance / 4, stream)
    )
    assert law_of(noise(), sigma) < ALARM


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_the_sum_tells_no_more_of_a_client_than_its_ledger(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's update points one way or the other; with a quarter of the noise's variance the ledger is refuted.

    As in :mod:`tests.privacy.test_privacy_flower` a message holds many releases, as parts of one long update. The sum
    is that of three clients, whose shares are just the whole noise. False alarms: less than 3e-8.
    """
    copies, sigma, delta, long = 1 << 14, 1.5, 0.1, 128.0
    monkeypatch.setattr(_privatise, "check_claim", lambda _: None)  # of all parts together nothing is claimed
    honest = secure_sum.noisy_levels
    monkeypatch.setattr(secure_sum, "noisy_levels", lambda v, variance, noise: honest(v, factor * variance, noise))
    summed([mod_of(tmp_path, sigma, more=f"delta = {delta}")], [np.zeros(1, np.float32)], lambda _: [np.zeros(1)])
    line = json.loads((tmp_path / "privacy" / "client-0.json").read_text())
    (tmp_path / "long").mkdir()
    mod = mod_of(tmp_path / "long", sigma / long, CLIP * long, f"delta = {delta}")

    def ask(side: str) -> np.ndarray:
        step = np.full(copies, CLIP if side == "left" else -CLIP)
        own = {"clipping_range": 128.0, "num_shares": 1.0, "reconstruction_threshold": 1.0}
        ended, _ = summed([mod], [np.zeros(copies, np.float32)], lambda who: [step * (who == 0)], clients=3, **own)
        return ended[0] * 3

    def draw(side: str, runs: int) -> Mapping[str, np.ndarray]:
        return {"sum": np.concatenate([ask(side) for _ in range(math.ceil(runs / copies))])[:runs]}

    verdict = play(draw, {delta: line["epsilon"]}, copies)
    assert verdict.violation is (factor < 1), str(verdict)


# ---- how many clients a sum has, and what does not fit --------------------------------------------------------------


def neighbourhoods(clients: int, shares: int) -> list[set[int]]:
    """As SecAggPlusWorkflow makes them."""
    shares += clients != shares and shares % 2 == 0
    half = shares >> 1
    return [{(place + offset) % clients for offset in range(-half, half + 1)} for place in range(clients)]


@pytest.mark.parametrize("clients", [2, 5, 8, 9])
def test_no_sum_has_fewer_clients_than_is_said(clients: int) -> None:
    """All sets of clients that pass the workflow's check of each neighbourhood are tried."""
    for shares in range(2, clients + 2):
        near = neighbourhoods(clients, shares)
        sets = [set(chosen) for size in range(clients + 1) for chosen in combinations(range(clients), size)]
        for threshold in range(1, shares + 1):
            fitting = [len(active) for active in sets if all(len(own & active) >= threshold for own in near)]
            said = replace(USUAL, clients=clients, neighbours=shares, threshold=threshold).least
            assert threshold <= said <= min(fitting, default=clients + shares)


@pytest.mark.parametrize("variance", [200.0, 2_000.0])
def test_noise_that_would_be_clipped_is_as_rare_as_said(variance: float) -> None:
    """The tail of the Skellam law by Bessel functions."""
    mpmath.mp.dps = 60
    reached = math.floor(secure_sum._farthest(variance, 1000)) + 1
    terms = (mpmath.besseli(reached + more, variance) for more in range(60))
    assert 2000 * mpmath.exp(-variance) * mpmath.fsum(terms) <= secure_sum.PASSES


WRONG = {
    "few": ({"threshold": 2}, "mechanism.survivors = 3: at most 2"),
    "grid": ({"limit": 10.0}, "allowed are powers of two"),
    "fine": ({"levels": 1 << 25}, r"up to 2\*\*24"),
    "weight": ({"weight": 0.5}, "max_weight=0.5"),
    "clip": ({"limit": 32.0}, "mechanism.clip_norm = 0.5: a multiple of 1, which is 65,536 levels"),
    "range": ({"limit": 1.0}, "clipping_range=1.*allowed is a larger range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_ledger_would_not_be_true_of_is_one_line(name: str) -> None:
    changed, expected = WRONG[name]
    own = {"name": "distributed", "unit": "update", "sigma": 2.0, "clip_norm": CLIP, "survivors": 3}
    plan, before = _plan(mechanism_settings(own), 3, 0, (4,), "sum"), {"w": torch.full((4,), 0.6)}
    check_protocol(replace(USUAL, limit=16.0), plan, before, ["w"], "weights")
    check_protocol(replace(USUAL, limit=16.0), plan, {"w": torch.full((4,), 99.0)}, ["w"], "update")
    with pytest.raises(WrongAppError, match=expected) as caught:
        check_protocol(replace(USUAL, **{"limit": 16.0, **changed}), plan, before, ["w"], "weights")
    assert "\n" not in str(caught.value)
    with pytest.raises(WrongAppError, match=r"w is torch\.float16"):
        check_protocol(replace(USUAL, limit=16.0), plan, {"w": before["w"].half()}, ["w"], "weights")
    with pytest.raises(WrongAppError, match=r"w has no dimensions.* allowed is a parameter of the shape \(1,\)"):
        check_protocol(replace(USUAL, limit=16.0), plan, {"w": before["w"][0]}, ["w"], "weights")


def test_a_share_leaves_nobody_without_masks(tmp_path: Path) -> None:
    """Neither without the mod, nor where its record is forged, nor after an earlier round under masks."""
    message, who = question({"w": np.zeros(3, np.float32)}), context()
    message.content["secaggplus_configs"] = ConfigRecord({})
    who.state["secaggplus_state"] = ConfigRecord({"threshold": 3, "sample_num": 4})
    with pytest.raises(WrongAppError, match="leaves under Flower's secure aggregation only") as caught:
        client([mod_of(tmp_path)], lambda given: given)(message, who)
    assert "\n" not in str(caught.value) and not (tmp_path / "privacy").exists()


@pytest.mark.parametrize("own", ['send = ["num_examples"]', 'pass = ["fitres.num_examples"]', 'weight = "count"'])
def test_weights_that_differ_are_refused(own: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs equal weights") as caught:
        mod_of(tmp_path, own=own)
    assert "\n" not in str(caught.value)


def test_how_many_clients_share_is_asked_for(tmp_path: Path) -> None:
    text = f'[mechanism]\nname = "distributed"\nsigma = 1.0\n[privatise]\nfolder = "{tmp_path}"\n'
    with pytest.raises(InputError, match=r"mechanism\.survivors is not set"):
        privatise(settings(tmp_path, text))


def test_a_claim_that_delta_has_no_room_for_is_refused() -> None:
    own = {"name": "distributed", "unit": "update", "sigma": 1.0, "survivors": 3}
    release = _plan(mechanism_settings(own), None, 0, (4,), "sum").accounted([1])
    line = line_of(0, guarantee(release), release)
    check_claim(line)
    with pytest.raises(RefusedError, match="epsilon 50; noise in the sum proves none above 44"):
        check_claim(replace(line, epsilon=50.0))


def test_the_study_of_noise_in_the_sum() -> None:
    """Small: five clients, one round, the ledgers of all."""
    right, said = noise_in_sum.protected(5, 1, 8.0, 1, inline=True)
    assert 0 < right < 1 and re.search(r"epsilon 7\.9\d+ at delta 1e-05 .*, 1 round, 5 clients", said)
