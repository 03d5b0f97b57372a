"""Filters: what leaves, by numpy; what that says of an update; and that nothing is claimed to be proven."""

import math

import numpy as np
import pytest
import torch

from fedpriv.accounting import Release, ceilings, guarantee
from fedpriv.core.config import Experiment
from fedpriv.core.plan import plan_client
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import MECHANISMS
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.filters import Filter, recognised
from tests.cases import in_one_test

FILTERS = {
    "percentile": {"name": "percentile", "percentile": 30.0, "gamma": 0.8},
    "percentile above gamma": {"name": "percentile", "percentile": 60.0, "gamma": 0.1},
    "percentile of all": {"name": "percentile", "percentile": 100.0},
    "top-k": {"name": "top-k", "share": 0.2},
    "sign": {"name": "sign"},
    "quantise": {"name": "quantise", "bits": 3},
}


def made(name: str) -> Filter:
    mechanism = mechanism_settings(FILTERS[name]).mechanism()
    assert isinstance(mechanism, Filter)
    return mechanism


def by_numpy(name: str, numbers: np.ndarray) -> np.ndarray:
    sizes = np.abs(numbers)
    if name.startswith("percentile"):
        cutoff, gamma = np.percentile(sizes, FILTERS[name]["percentile"]), FILTERS[name].get("gamma", 0.01)
        return np.where(sizes > cutoff, np.clip(numbers, -gamma, gamma), 0.0)
    if name == "top-k":
        return np.where(sizes >= np.sort(sizes)[-math.ceil(0.2 * len(sizes))], numbers, 0.0)
    if name == "sign":
        return np.sign(numbers) * sizes.mean()
    step = sizes.max() / 3
    return np.round(numbers / step) * step


def update(seed: int) -> dict[str, torch.Tensor]:
    numbers = torch.randn(61, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"weight": numbers[:60].view(6, 10), "bias": numbers[60:]}


def flat(vector: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([value.flatten() for value in vector.values()]).numpy()


@in_one_test("name", FILTERS)
@in_one_test("seed", [1, 2])
def test_what_leaves_is_what_numpy_says(name: str, seed: int) -> None:
    np.testing.assert_allclose(flat(made(name).expected(update(seed))), by_numpy(name, flat(update(seed))), rtol=1e-12)


@in_one_test("name", FILTERS)
def test_an_update_fits_what_left_of_it_and_others_do_not(name: str) -> None:
    """What attacks compare is the release itself for the true update, and away from it for another one."""
    mechanism, true, other = made(name), update(1), update(2)
    heard = mechanism.expected(true)
    least, most = mechanism.settings.within(torch.from_numpy(flat(heard)))
    assert bool((least <= most).all())
    np.testing.assert_allclose(flat(mechanism.fitted(true, heard)), flat(heard), atol=1e-12)
    if name != "percentile of all":
        assert np.abs(flat(mechanism.fitted(other, heard)) - flat(heard)).max() > 0.1


@in_one_test("name", FILTERS)
def test_only_what_lies_outside_moves_an_attack(name: str) -> None:
    mechanism = made(name)
    heard = mechanism.expected(update(1))
    guess = {key: value.clone().requires_grad_() for key, value in update(2).items()}
    fitted = mechanism.fitted(guess, heard)
    off = torch.cat([(fitted[key] - heard[key]).flatten() for key in heard])
    (off.square().sum() / 2).backward()
    moved = torch.cat([value.grad.flatten() for value in guess.values() if value.grad is not None])
    if name != "sign":  # whose length is compared, too
        np.testing.assert_allclose(moved.numpy(), off.detach().numpy(), atol=1e-12)


@in_one_test("name", FILTERS)
def test_nothing_is_claimed(name: str) -> None:
    """And nothing can be: two updates that a filter tells apart leave differently, always."""
    settings = mechanism_settings(FILTERS[name])
    release = Release(settings.name, "update", "full", 1.0, 3, (61,), None, 1e-5)
    assert guarantee(release).epsilon is None
    assert guarantee(release).pure_epsilon is None
    assert ceilings(release, [0.01])[0].gamma is None
    tree = {"mechanism": FILTERS[name], "training": {"batch_size": 1}}
    plan = plan_client(Experiment.model_validate(tree), 0, 5, [60, 1])
    left, again, right = (
        flat(
            plan.release_update({k: v.float() for k, v in update(seed).items()}, Secret.of_seed(each).stream("game", 1))
        )
        for each, seed in enumerate((1, 1, 2))
    )
    assert np.array_equal(left, again)
    assert np.array_equal(left, right) == (name == "percentile of all")


def test_they_are_filters_and_are_said_to_be() -> None:
    assert {name for name, kind in MECHANISMS.items() if kind.filters} == {"percentile", "top-k", "sign", "quantise"}


@in_one_test(
    ("name", "key", "value"), [("percentile", "percentile", 101), ("top-k", "share", 0), ("quantise", "bits", 1)]
)
def test_numbers_out_of_range_are_refused(name: str, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        mechanism_settings({"name": name, key: value})
    with pytest.raises(ValueError, match="unit"):
        mechanism_settings({"name": name, "unit": "example"})


QUANTISED = tuple(("quantise", "bits", bits) for bits in (3, 4, 8, 12, 16))


@in_one_test("seed", range(5))
def test_what_a_filter_has_left_is_recognised(seed: int) -> None:
    """Of 10,000 numbers; those of an update, with units that were not used or without, are not taken for any."""
    numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(seed)) * 0.01
    unused = torch.where(torch.arange(10_000) % 5 == 0, 0.0, numbers)
    told = (("percentile", "gamma", 0.01), ("top-k", "share", 0.1), ("sign", "unit", "update"), *QUANTISED)
    for name, key, value in told:
        given = {"name": name, key: value} if name == "quantise" else {"name": name}
        filtered = mechanism_settings(given).mechanism().expected({"w": numbers})
        found = recognised(filtered)
        assert found is not None
        assert found.name == name
        assert getattr(found, key) == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3))
    assert recognised({"w": numbers}) is None
    assert recognised({"w": unused}) is None
