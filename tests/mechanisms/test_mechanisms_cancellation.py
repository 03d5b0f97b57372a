"""What is released of gradients whose positions cancel is as long as it may be, whatever the layer and the sizes.

Nothing here is random but with a seed. Lengths are measured in float64 on what was released.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cancelling_batches import EXAMPLES, LAYERS, cancelling
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedpriv.gradients import DenseGradients, GradientOperator, Vector, per_example_gradients
from fedpriv.gradients.numerics import ACCURACY
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.heterogeneous import HeterogeneousGaussianMechanism
from fedpriv.mechanisms.laplace import LaplaceMechanism
from fedpriv.mechanisms.machinery import vmf_sampling
from fedpriv.mechanisms.machinery.base import Mechanism, block_sizes
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.cases import in_one_test
from tests.noise import stream

# The noise of a draw with the largest concentration is shorter than this, and a block of float32 is rounded by less.
KAPPA, ROUNDED = 1e7, 1e-5
# Terms of a sum may be a thousand times the bound, so that an addition in float32 rounds by 6e-5 of it. Over 5,472 sums
# of three examples (each layer, size and clipping) the most was 8.3e-5 of the bound.
SUMMED = 1e-4
# Layers whose weight can be kept as a sum of outer products.
SUMS = [name for name in LAYERS if name.startswith(("linear", "conv"))]


def flat(vector: Vector) -> Tensor:
    return torch.cat([value.flatten() for value in vector.values()]).double()


def release(mechanism: Mechanism, gradients: GradientOperator) -> Vector:
    return mechanism.release(gradients, 1, stream(5))


def lengths(released: Vector, blocks: str) -> list[float]:
    """Of the blocks that the ledger counts."""
    sizes = block_sizes(blocks, [value.numel() for value in released.values()])
    return [float(part.norm()) for part in flat(released).split(list(sizes))]


def each(gradients: GradientOperator) -> Iterator[GradientOperator]:
    return (gradients.part(i, i + 1) for i in range(gradients.examples))


CLIPPING = ["flat", "layer", "laplace", "hgm"]


def clipped(name: str, gradients: GradientOperator, clip_norm: float) -> tuple[Mechanism, Tensor]:
    """A clipping mechanism without noise, and weights w such that what is released of x is clipped in w x."""
    one = torch.ones(gradients.dimension(), dtype=torch.float64)
    if name == "laplace":
        return LaplaceMechanism(0.0, clip_norm), one
    if name == "hgm":
        shares = torch.linspace(1, 9, len(one), dtype=gradients.dtype)
        redistribution = Redistribution(gradients.vector(shares / shares.sum()))
        return HeterogeneousGaussianMechanism(0.0, clip_norm, redistribution), 1 / flat(redistribution.deviations)
    return GaussianMechanism(0.0, clip_norm, "layer" if name == "layer" else "flat"), one


def own_norm(mechanism: Mechanism, released: Tensor, weights: Tensor) -> float:
    return float((weights * released).norm(p=1 if mechanism.name == "laplace" else 2))


@pytest.mark.parametrize("difference", [0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2])
@in_one_test("name", [*SUMS, "embedding"])
def test_what_cancels_is_not_too_long(name: str, difference: float) -> None:
    """The norm of a gradient, from products in float64, says nothing of what a sum in float32 leaves of it."""
    for one in each(cancelling(name, difference, 1e3, 1e3, written=False)):
        drawn = lengths(release(VmfMechanism(KAPPA, "layer"), one), "layer")
        assert drawn == pytest.approx([1] * len(drawn), abs=ACCURACY)
        clip_norm = max(1e-6, 1e-3 * float(one.norms()))
        mechanism, weights = clipped("flat", one, clip_norm)
        assert own_norm(mechanism, flat(release(mechanism, one)), weights) <= clip_norm * (1 + ROUNDED)


@in_one_test("name", SUMS)
def test_noise_is_not_rounded_away(name: str) -> None:
    """By what is added to it and taken away again: no term of a sum is more than a thousand times the bound."""
    made = cancelling(name, 0.0, 1e3, 1e3, written=False, examples=1)
    zero = DenseGradients({key: torch.zeros(1, *shape) for key, shape in made.shapes.items()})
    loud, noise = (release(GaussianMechanism(1.0, 1e-3), gradients)["weight"] for gradients in (made, zero))
    assert float((loud - noise).abs().max()) <= 1e-3 * ACCURACY


def sizes(most: float) -> st.SearchStrategy[float]:
    """Powers of ten, 1 the most often."""
    return st.one_of(st.just(1.0), st.floats(-most, most).map(lambda exponent: 10.0**exponent))


@settings(max_examples=120, deadline=None, derandomize=True)
@example("linear", 1e-4, 1.0, 1e6, False, False, 2, "whole", "flat", 1.0)  # what is left is summed the least exactly
@given(
    name=st.sampled_from(sorted(LAYERS)),
    difference=st.one_of(st.just(0.0), st.floats(-9, 0).map(lambda exponent: 10.0**exponent)),
    input_size=sizes(30),
    error_size=sizes(30),
    written=st.booleans(),
    double=st.booleans(),
    seed=st.integers(0, 3),
    blocks=st.sampled_from(["whole", "layer", "size:5"]),
    clipping=st.sampled_from(CLIPPING),
    clip_norm=sizes(6),
)
def test_lengths(
    name: str,
    difference: float,
    input_size: float,
    error_size: float,
    written: bool,
    double: bool,
    seed: int,
    blocks: str,
    clipping: str,
    clip_norm: float,
) -> None:
    """A draw has length 1, a clipped gradient at most the bound; a sum of B of them is at most B times as long."""
    dtype = torch.float64 if double else torch.float32
    made = cancelling(name, difference, input_size, error_size, written=written, dtype=dtype, seed=seed)
    directional = VmfMechanism(KAPPA, blocks)
    for one in each(made):
        drawn = lengths(release(directional, one), blocks)
        assert drawn == pytest.approx([1] * len(drawn), abs=ACCURACY)
    assert max(lengths(release(directional, made), blocks)) <= EXAMPLES * (1 + ACCURACY)
    mechanism, weights = clipped(clipping, made, clip_norm)
    alone = [flat(release(mechanism, one)) for one in each(made)]
    assert max(own_norm(mechanism, one, weights) for one in alone) <= clip_norm * (1 + ROUNDED)
    # So replacing one changes the sum by twice that: examples do not change each other's part.
    together = flat(release(mechanism, made))
    assert own_norm(mechanism, together - sum(alone), weights) <= SUMMED * clip_norm


@pytest.mark.parametrize(("dtype", "written"), [(torch.float32, False), (torch.float64, True)])
@in_one_test("name", LAYERS)
def test_what_does_not_cancel_keeps_its_direction(name: str, dtype: torch.dtype, written: bool) -> None:
    """And its length, where it is short: half of the positions take back nothing, so that norms are those of sums."""
    made = cancelling(name, 1.0, dtype=dtype, written=written)
    rows = made.rows(0, EXAMPLES)
    for blocks in ("whole", "layer"):
        released = release(VmfMechanism(KAPPA, blocks), made)
        parts = [flat({key: value[i] for key, value in rows.items()}) for i in range(EXAMPLES)]
        sizes = list(block_sizes(blocks, [shape.numel() for shape in made.shapes.values()]))
        for sums, *each_part in zip(flat(released).split(sizes), *(part.split(sizes) for part in parts), strict=True):
            expected = torch.stack([part / part.norm() for part in each_part]).sum(dim=0)
            assert float((sums - expected).norm()) < ACCURACY + 2 * (EXAMPLES * len(sums) / KAPPA) ** 0.5
    huge = 10 * float(made.norms().max())
    assert torch.equal(
        flat(release(GaussianMechanism(0.0, huge), made)), flat(made.combine(torch.ones(EXAMPLES, dtype=dtype)))
    )


def test_a_long_sum_keeps_its_direction() -> None:
    """Of thousands of positions a float32 sum may be off by more than a direction allows: they are added in float64."""
    errors, x = (torch.randn(2, 4000, 2, generator=torch.Generator().manual_seed(seed)) for seed in (11, 12))
    layer = nn.Linear(2, 2, bias=False)
    with patch("fedpriv.gradients.rules._write_out", lambda *_: False):
        made = per_example_gradients(
            layer, lambda out, examples: (out * errors[examples]).sum(dim=(1, 2)), x, torch.arange(2), chunk_bytes=1
        )
    exact = torch.bmm(errors.double().mT, x.double())
    expected = sum(row / row.norm() for row in exact.flatten(1))
    assert float((flat(release(VmfMechanism(KAPPA), made)) - expected).norm()) < 5e-3
    released = flat(release(GaussianMechanism(0.0, 1.0), made))
    assert float((released - expected).norm()) < 1e-6


@pytest.mark.parametrize("written", [False, True])
def test_a_bias_before_a_normalisation_has_no_direction(written: bool) -> None:
    """Its gradient is 0 but for rounding, whose direction another order of summing would change."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.GroupNorm(4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(80, 5))
        x = torch.randn(EXAMPLES, 3, 22)
    with patch("fedpriv.gradients.rules._write_out", lambda *_: written):
        made = per_example_gradients(
            model, lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"), x, torch.arange(EXAMPLES)
        )
    assert bool((made.norms(("0.bias",)) > 0).any())
    with recorded() as used:
        release(VmfMechanism(3.0, "layer"), made)
    present = {directions.block: bool((directions.scales > 0).all()) for directions, _ in used}
    absent = {directions.block: bool((directions.scales == 0).all()) for directions, _ in used}
    assert [block for block, none in absent.items() if none] == [("0.bias",)]
    assert [block for block, all_ in present.items() if not all_] == [("0.bias",)]


@contextmanager
def recorded() -> Iterator[list[tuple[vmf_sampling.Directions, vmf_sampling.Basis]]]:
    """The directions and bases that draws are made from, as they come."""
    used: list[tuple[vmf_sampling.Directions, vmf_sampling.Basis]] = []
    original = vmf_sampling.directions_of

    def record(*arguments: object) -> object:
        found = original(*arguments)
        if found is not None:
            used.append(found)
        return found

    with patch.object(vmf_sampling, "directions_of", record):
        yield used


def near(distances: list[float], dimension: int, dtype: torch.dtype) -> Tensor:
    """Rows near to the first, at these relative distances, on both sides, one more, zeros and a duplicate."""
    generator = torch.Generator().manual_seed(7)
    first, *others = torch.randn(len(distances) + 2, dimension, generator=generator, dtype=torch.float64)
    first, *others = (row / row.norm() for row in (first, *others))
    rows = [first, -3 * first, 0 * first, others[-1], first]
    rows += [
        sign * (first + distance * row) for distance, row in zip(distances, others, strict=False) for sign in (1, -2)
    ]
    return torch.stack(rows).to(dtype)


def assert_sound(used: list[tuple[vmf_sampling.Directions, vmf_sampling.Basis]], tolerance: float) -> int:
    """Directions have length 1 and bases are orthonormal as they are combined; return the number of directions."""
    count = 0
    for directions, bases in used:
        for group in range(len(directions.scales)):
            own = directions.group(group)
            present = own.scales[0] > 0
            units = torch.eye(len(present), dtype=torch.float64)
            rows = torch.stack([flat(own.combine(unit[None])) for unit in units])
            assert torch.allclose(rows.norm(dim=1), present.double(), rtol=0, atol=ACCURACY)
            index = group if len(bases.combination) > 1 else 0
            axes = [flat(own.combine(column[None])) for column in bases.combination[index].T]
            if axes:
                products = torch.stack(axes) @ torch.stack(axes).T
                assert torch.allclose(products, torch.eye(len(axes), dtype=torch.float64), rtol=0, atol=tolerance)
                held = bases.coordinates[index].T @ torch.stack(axes)
                assert torch.allclose(held, rows, rtol=0, atol=tolerance)
            count += int(present.sum())
    return count


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dimension", [3, 40])
def test_rows_near_to_each_other(
    dimension: int, dtype: torch.dtype, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicates, near duplicates, opposite and zero rows at once: no draw is longer than 1 for its company."""
    if size:
        monkeypatch.setattr(vmf_sampling, "group_size", lambda gradients, block: size)
    rows = near([10.0**-exponent for exponent in range(1, 9)], dimension, dtype)
    with recorded() as used:
        release(VmfMechanism(3.0), DenseGradients({"a": rows}))
    assert assert_sound(used, 2e-3) == len(rows) - 1
    drawn = flat(release(VmfMechanism(KAPPA), DenseGradients({"a": rows[torch.arange(len(rows)) != 2]})))
    expected = sum(row / row.norm() for row in rows.double() if row.any())
    assert float((drawn - expected).norm()) < 0.02


@pytest.mark.parametrize(("size", "difference"), [(None, 1e-2), (4, 3e-3)])
@pytest.mark.parametrize("name", SUMS)
def test_sums_near_to_each_other(
    name: str, difference: float, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same examples again, and again a little different, where gradients are kept as sums that nearly cancel."""
    if size:
        monkeypatch.setattr(vmf_sampling, "group_size", lambda gradients, block: size)

    def repeat(x: Tensor, errors: Tensor) -> None:
        generator = torch.Generator().manual_seed(3)
        x[1:] = x[:1]
        errors[1:] = errors[:1]
        # The first four are different, if not by much.
        for index, distance in ((1, 1e-1), (2, 1e-2), (3, 1e-3), (6, 1e-5)):
            errors[index] += distance * difference * errors[index] * torch.randn(errors[0].shape, generator=generator)
        errors[5] *= -2
        errors[7] = 0

    made = cancelling(name, difference, written=False, examples=8, spoil=repeat)
    with recorded() as used:
        release(VmfMechanism(3.0, "layer"), made)
    assert_sound(used, 2e-3)


def test_a_direction_depends_on_its_row_alone() -> None:
    """Whether there is one, in any company: large, small, zero, the same, and rows that cancel."""
    for name in ("linear-wide", "conv1d", "embedding", "layer-norm"):
        made = cancelling(name, 1e-4, written=False, examples=8, seed=9, spoil=_scaled)
        for block in made.shapes:
            alone = [present for one in each(made) for present in directions_of(one, block)]
            assert directions_of(made, block) == alone
            assert len(set(alone)) == 2


def directions_of(gradients: GradientOperator, block: str) -> list[bool]:
    """Which gradients have a direction."""
    with recorded() as used:
        draws = vmf_sampling.Draws(3.0, 1.0, stream(), np.random.default_rng(1))
        vmf_sampling.draw_sum(gradients, (block,), draws)
    return [bool(scale > 0) for directions, _ in used for scale in directions.scales.flatten()]


def _scaled(x: Tensor, errors: Tensor) -> None:
    """Examples of all sizes, one of zeros, and two that do not cancel."""
    errors *= torch.logspace(-24, 4, len(errors)).view(-1, *[1] * (errors.ndim - 1))
    errors[2] = 0
    errors[4:6] += errors[4:6].abs()


def test_a_norm_lost_in_float64_is_no_direction() -> None:
    """The products that give the squared norm of what cancels may add up to less than 0."""
    for seed in range(10):
        for one in each(cancelling("linear-wide", 0.0, 1e3, written=False, seed=seed, dtype=torch.float64)):
            drawn = lengths(release(VmfMechanism(KAPPA, "layer"), one), "layer")
            assert drawn == pytest.approx([1, 1], abs=ACCURACY)


def test_sides_whose_squares_are_lost() -> None:
    """Products of a tiny and a huge side, whose squares lose digits or are 0 in float32."""
    generator = torch.Generator().manual_seed(10)
    x, errors = (torch.randn(1, count, generator=generator) for count in (30, 20))
    for exponent in range(14, 30):
        layer = nn.Linear(30, 20, bias=False)
        sides = x * 10.0**-exponent, errors * min(1e18, 10.0 ** (exponent - 2))
        made = per_example_gradients(layer, lambda out, _, e=sides[1]: (out * e).sum(dim=1), sides[0], torch.zeros(1))
        drawn = lengths(release(VmfMechanism(KAPPA), made), "whole")
        assert drawn == pytest.approx([1], abs=1e-4)
        for name in CLIPPING:
            mechanism, weights = clipped(name, made, 1e-6)
            whole = own_norm(mechanism, flat(made.rows(0, 1)), weights)
            sent = own_norm(mechanism, flat(release(mechanism, made)), weights)
            assert sent == pytest.approx(min(1e-6, whole), rel=ROUNDED)


def test_sides_whose_squares_are_lost_in_float64() -> None:
    """They have no direction, and nothing else of the gradient is lost for them."""
    errors = torch.full((1, 20), 1e-161, dtype=torch.float64)
    errors[0, 0] *= 3
    x = torch.linspace(1e40, 2e40, 30, dtype=torch.float64)[None]
    layer = nn.Linear(30, 20, bias=False).double()
    made = per_example_gradients(layer, lambda out, _: (out * errors).sum(dim=1), x, torch.zeros(1))
    assert 0 < float(made.norms()) < 1e-115
    assert torch.isfinite(made.magnitudes()).all()
    assert directions_of(made, "weight") == [False]
    assert lengths(release(VmfMechanism(KAPPA), made), "whole") == pytest.approx([1])
