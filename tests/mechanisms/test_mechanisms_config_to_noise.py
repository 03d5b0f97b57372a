"""From the experiment file to the drawn noise: what the ledger is told is what is measured in releases.

The whole path: TOML and overrides, the plan of one client, its releases. All seeds are fixed. Each statistical
comparison raises a false alarm with probability 1e-6 had they been random, and each is shown to tell a fifth more or
less noise (vmf: kappa halved or doubled) from the right amount.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from vmf_oracle import angle_law

from fedpriv.core.config import load_experiment
from fedpriv.core.plan import Plan, plan_client
from fedpriv.gradients import DenseGradients, Vector
from fedpriv.mechanisms.machinery.redistribution import Redistribution, layer_shares
from tests.cases import in_one_test
from tests.noise import stream

ALARM = 1e-6
BATCH = 10
FILE = f"[training]\nbatch_size = {BATCH}\n[federation]\nclients = 3\nrounds = 4000\n"
Floats = NDArray[np.float64]


def planned(
    folder: Path, tensors: tuple[int, ...], settings: tuple[str, ...], shares: Redistribution | None = None
) -> Plan:
    path = folder / "experiment.toml"
    path.write_text(FILE)
    experiment = load_experiment(path, [f"mechanism.{setting}" for setting in settings])
    return plan_client(experiment, 1, 50, tensors, shares)


def released(plan: Plan, gradient: Vector, index: int) -> Vector:
    """One release of a batch (or update) that holds this one gradient."""
    if plan.config.unit == "update":
        return plan.release_update(gradient, stream(index))
    return plan.release_gradient(DenseGradients({name: value[None] for name, value in gradient.items()}), stream(index))


def divisor(plan: Plan) -> int:
    return 1 if plan.config.unit == "update" else BATCH


def fits(noise: Floats, law: stats.rv_continuous) -> bool:
    return bool(stats.kstest(noise, law.cdf).pvalue > ALARM)


@in_one_test(("dtype", "unit"), [(torch.float32, "update"), (torch.float64, "example")])
@pytest.mark.parametrize(
    "settings",
    [
        ("name=gaussian", "sigma=1.7", "clip_norm=0.5"),
        ("name=gaussian", "sigma=0.02", "clip_norm=30", "clipping=layer"),
        ("name=laplace", "scale=1.7", "clip_norm=0.5"),
        ("name=laplace", "epsilon=0.25", "clip_norm=2"),
        ("name=hgm", "sigma=1.7", "clip_norm=0.5", "redistribution=layer"),
    ],
    ids=lambda settings: "-".join(setting.partition("=")[2] for setting in settings),
)
def test_added_noise(tmp_path: Path, settings: tuple[str, ...], dtype: torch.dtype, unit: str) -> None:
    """The law of the noise on a zero gradient, from the parameters that the ledger is told."""
    zero = {"a": torch.zeros(30_000, dtype=dtype), "b": torch.zeros(100, 100, dtype=dtype)}
    plan = planned(tmp_path, (30_000, 10_000), (*settings, f"unit={unit}"), layer_shares(zero))
    told = plan.accounted([1])
    assert told.mechanism == plan.config.name
    assert dict(setting.split("=") for setting in settings)["clip_norm"] == f"{plan.config.clip_norm:g}"
    given = dict(setting.split("=") for setting in settings)
    if told.mechanism == "laplace":
        assert told.noise == pytest.approx(float(given.get("scale", 1 / float(given.get("epsilon", 1)))))
    else:
        assert told.noise == float(given["sigma"])
    noise = released(plan, zero, 3)
    for name, size in (("a", 30_000), ("b", 10_000)):
        assert noise[name].dtype == dtype
        width = plan.config.clip_norm / divisor(plan)
        if told.mechanism == "hgm":
            width *= math.sqrt(40_000 / (2 * size))
        measured = noise[name].double().numpy().ravel()
        for factor, right in ((1.0, True), (1.2, False), (1 / 1.2, False)):
            if told.mechanism == "laplace":
                law = stats.laplace(scale=factor * width * told.noise)
            else:
                law = stats.norm(scale=factor * width * told.noise)
            assert fits(measured, law) is right


# Every value of each: they enter at places of their own.
@pytest.mark.parametrize(
    ("setting", "dtype", "unit", "blocks", "sizes"),
    [
        ("kappa=12", torch.float32, "example", "whole", (18,)),
        ("kappa=12", torch.float64, "update", "size:7", (7, 7, 4)),
        ("epsilon=24", torch.float64, "example", "layer", (12, 6)),
        ("epsilon=24", torch.float32, "update", "whole", (18,)),
    ],
)
def test_turned_directions(
    tmp_path: Path, setting: str, dtype: torch.dtype, unit: str, blocks: str, sizes: tuple[int, ...]
) -> None:
    """The cosine of each block that the ledger is told of, over 400 releases, against its density."""
    generator = torch.Generator().manual_seed(61)
    gradient = {
        "a": torch.randn(3, 4, generator=generator).to(dtype),
        "b": torch.randn(6, generator=generator).to(dtype),
    }
    options = ("name=vmf", setting, f"blocks={blocks}", f"unit={unit}", "clip_norm=0.5")
    plan = planned(tmp_path, (12, 6), options)
    told = plan.accounted([1])
    assert told.noise == 12.0
    assert told.dimensions == sizes
    length = (0.5 if unit == "update" else 1.0) / divisor(plan)
    draws = np.stack([flat(released(plan, gradient, index)) for index in range(400)]) / length
    mean, start = flat(gradient), 0
    for size in sizes:
        block = slice(start, start + size)
        start += size
        np.testing.assert_allclose(np.linalg.norm(draws[:, block], axis=1), 1, rtol=1e-5)
        cosines = draws[:, block] @ mean[block] / np.linalg.norm(mean[block])
        found = np.arccos(np.clip(cosines, -1, 1))
        for factor, right in ((1.0, True), (2.0, False), (0.5, False)):
            angles, cumulative = angle_law(factor * told.noise, size)
            pvalue = stats.kstest(found, lambda x, a=angles, c=cumulative: np.interp(x, a, c)).pvalue
            assert bool(pvalue > ALARM) is right


def flat(vector: Vector) -> Floats:
    return np.concatenate([value.double().numpy().ravel() for value in vector.values()])


@pytest.mark.parametrize("name", ["gaussian", "hgm"])
@pytest.mark.parametrize(
    ("calibration", "epsilon", "sigma"),
    [
        ("classic", 1.0, 4.8448),
        ("analytic", 1.0, 3.7306),
        ("extended", 4.0, 1.285),
        ("analytic", 4.0, 1.081),
    ],
)
def test_one_update_gets_the_noise_of_its_calibration(
    tmp_path: Path, name: str, calibration: str, epsilon: float, sigma: float
) -> None:
    """Published values for sensitivity 1; replacing an update moves the clipped one by up to 2 clip_norm."""
    zero = {"a": torch.zeros(40_000)}
    settings = (f"name={name}", "unit=update", f"epsilon={epsilon}", f"calibration={calibration}", "clip_norm=0.3")
    plan = planned(tmp_path, (40_000,), settings, layer_shares(zero))
    told = plan.accounted([1])
    assert told.noise == pytest.approx(2 * sigma, rel=5e-4)
    proven = plan.guarantee([1]).epsilon
    assert proven is not None
    assert proven <= epsilon * (1 + 1e-9)
    if calibration == "analytic":
        assert proven == pytest.approx(epsilon, rel=1e-4)
    noise = released(plan, zero, 0)["a"].double().numpy()
    for factor, right in ((1.0, True), (1.2, False), (1 / 1.2, False)):
        assert fits(noise, stats.norm(scale=factor * 0.3 * 2 * sigma)) is right


@pytest.mark.parametrize("unit", ["example", "update"])
@pytest.mark.parametrize("name", ["gaussian", "laplace", "hgm", "vmf"])
def test_a_target_reaches_the_noise(tmp_path: Path, name: str, unit: str) -> None:
    """Measure the calibrated noise in a release, and tell the ledger what was measured: the target comes back."""
    zero = {"a": torch.zeros(40_000, dtype=torch.float64)}
    one = {"a": torch.ones(40_000, dtype=torch.float64)}
    settings = (f"name={name}", f"unit={unit}", "target_epsilon=6")
    plan = planned(tmp_path, (40_000,), settings, layer_shares(zero))
    assert (plan.config.epsilon, plan.config.target_epsilon) == (None, None)
    every = list(range(1, 4001))
    reached = plan.guarantee(every).epsilon
    assert reached is not None
    assert 6 * (1 - 2e-3) <= reached <= 6
    if name == "vmf":
        kappa = plan.accounted(every).noise
        assert kappa is not None
        release = flat(released(plan, one, 0)) * divisor(plan)
        # The cosine of one draw in 40,000 dimensions: mean kappa / K, deviation 1 / sqrt(K).
        cosine = float(release @ flat(one)) / 200 / np.linalg.norm(release)
        assert abs(cosine - kappa / 40_000) < 5 / 200
        return
    noise = flat(released(plan, zero, 0)) * divisor(plan)
    claimed = plan.config.noise
    assert claimed is not None
    law = stats.laplace(scale=claimed) if name == "laplace" else stats.norm(scale=claimed)
    assert fits(noise, law)
