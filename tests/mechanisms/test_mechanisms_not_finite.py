"""A gradient that is not finite counts as zero: nothing fails, and the other gradients are released as without it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.gradients import DenseGradients, GradientOperator, Vector, per_example_gradients
from fedpriv.gradients.dense import dense_gradients
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.heterogeneous import HeterogeneousGaussianMechanism
from fedpriv.mechanisms.laplace import LaplaceMechanism
from fedpriv.mechanisms.machinery.base import Mechanism
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.mechanisms.none import NoMechanism
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.cases import in_one_test
from tests.noise import stream

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm under autocast
EXAMPLES, BAD = 5, 3
VALUES = [torch.nan, torch.inf, -torch.inf, 1e38]
cross_entropy = partial(functional.cross_entropy, reduction="none")


def hgm(sigma: float, gradients: GradientOperator) -> Mechanism:
    shares = torch.linspace(1, 9, gradients.dimension(), dtype=gradients.dtype)
    return HeterogeneousGaussianMechanism(sigma, 0.1, Redistribution(gradients.vector(shares / shares.sum())))


# From a noise parameter and gradients to a mechanism.
MECHANISMS: dict[str, Callable[[float, GradientOperator], Mechanism]] = {
    "gaussian": lambda noise, _: GaussianMechanism(noise, 0.1),
    "gaussian-layer": lambda noise, _: GaussianMechanism(noise, 0.1, "layer"),
    "laplace": lambda noise, _: LaplaceMechanism(noise, 0.1),
    "hgm": hgm,
    "vmf": lambda noise, _: VmfMechanism(noise),
    "vmf-layer": lambda noise, _: VmfMechanism(noise, "layer"),
    "vmf-size": lambda noise, _: VmfMechanism(noise, "size:3"),
}
CLIPPING = [name for name in MECHANISMS if not name.startswith("vmf")]


def flat(vector: Vector) -> Tensor:
    return torch.cat([value.flatten() for value in vector.values()])


def release(name: str, noise: float, gradients: GradientOperator) -> Tensor:
    mechanism = MECHANISMS[name](noise, gradients)
    return flat(mechanism.release(gradients, EXAMPLES, stream(1)))


def dense(gradients: GradientOperator) -> DenseGradients:
    """The gradients written out, with zeros for the one that is not finite."""
    rows = {name: value.clone() for name, value in gradients.rows(0, EXAMPLES).items()}
    for value in rows.values():
        value[BAD] = 0
    return DenseGradients(rows)


def rows(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"a": (3, 4), "b": (5,), "c": (1,)}
    return {name: torch.randn(EXAMPLES, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Branches(nn.Module):
    """Two layers side by side, kept as sums and written out, whose outputs stand side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv1d(2, 3, 2), nn.Linear(2, 3)
        self.norm = nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(self.norm(x)).flatten(1), self.right(x.mT).flatten(1)], dim=1)


def of_branches(errors: Tensor, dtype: torch.dtype, x: Tensor) -> GradientOperator:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Branches().to(dtype)
    return per_example_gradients(
        model, lambda outputs, i: (outputs * errors.to(dtype)[i]).sum(dim=1), x.to(dtype), torch.arange(EXAMPLES)
    )


def some(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape, generator=torch.Generator().manual_seed(4))


def bad_input(value: float, dtype: torch.dtype) -> GradientOperator:
    x = some(2, 7).to(dtype)
    x[BAD, 1, 2] = value
    return of_branches(some(39), dtype, x)


def bad_branch(value: float, dtype: torch.dtype) -> GradientOperator:
    """Not finite in one layer only; the other has a gradient that could be released."""
    errors = some(39).to(dtype)
    errors[BAD, 20] = value
    return of_branches(errors, dtype, some(2, 7))


def bad_number(value: float, dtype: torch.dtype) -> GradientOperator:
    given = rows(dtype)
    given["b"][BAD, 1] = value
    return DenseGradients(given)


KINDS = {"input": bad_input, "branch": bad_branch, "number": bad_number}


@in_one_test("dtype", [torch.float32, torch.float64])
@in_one_test("value", VALUES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_it_counts_as_zero(name: str, kind: str, value: float, dtype: torch.dtype) -> None:
    """With the same noise the release is that of a zero gradient."""
    if value == 1e38 and dtype == torch.float64:
        value = 1e300
    made = KINDS[kind](value, dtype)
    assert not bool(torch.isfinite(made.magnitudes())[BAD] & (made.magnitudes()[BAD] < 1e37))
    released = release(name, 3.0, made)
    assert bool(torch.isfinite(released).all())
    expected = release(name, 3.0, dense(made))
    assert torch.allclose(released, expected, rtol=0, atol=2e-5 if dtype == torch.float32 else 1e-9)


@in_one_test("kind", KINDS)
@pytest.mark.parametrize("name", CLIPPING)
def test_the_others_are_released_as_without_it(name: str, kind: str) -> None:
    for value in VALUES:
        made = KINDS[kind](value, torch.float32)
        others = DenseGradients({key: rows_[[0, 1, 2, 4]] for key, rows_ in made.rows(0, EXAMPLES).items()})
        assert torch.allclose(release(name, 0.0, made), release(name, 0.0, others), rtol=0, atol=1e-7)


@in_one_test("name", MECHANISMS)
def test_nothing_but_what_is_not_finite(name: str) -> None:
    """All of a batch, and an update that is one gradient: noise alone."""
    for examples in (1, EXAMPLES):
        given = {key: value[:examples] for key, value in rows(torch.float32).items()}
        given["a"][:, 2, 3] = torch.nan
        zeros = DenseGradients({key: torch.zeros_like(value) for key, value in given.items()})
        assert torch.equal(release(name, 2.0, DenseGradients(given)), release(name, 2.0, zeros))


@in_one_test("name", MECHANISMS)
@pytest.mark.parametrize("operator", ["chosen", "dense"])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_image_overflows_the_weights(name: str, operator: str, autocast: bool) -> None:
    """Its activations are beyond float32, in a network with all that there is a rule for and a layer without one."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(
            *(nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.PReLU(), nn.Flatten(2), nn.Linear(16, 3)),
            *(nn.LayerNorm(3), nn.RMSNorm(3), nn.Flatten(), nn.Linear(12, 5)),
        )
        model[0].weight.data *= 1e10
        x, y = torch.randn(EXAMPLES, 2, 6, 6), torch.arange(EXAMPLES) % 5
    x[BAD] *= 1e30
    compute = partial(dense_gradients, reason="a test") if operator == "dense" else per_example_gradients
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        made = compute(model, cross_entropy, x, y)
    assert torch.isfinite(made.magnitudes()).tolist() == [index != BAD for index in range(EXAMPLES)]
    released = release(name, 3.0, made)
    assert torch.allclose(released, release(name, 3.0, dense(made)), rtol=0, atol=2e-5)


def test_words_have_losses_that_are_not_finite() -> None:
    """Of an embedding nothing but the errors can be."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Flatten(), nn.Linear(12, 5))
        x, y = torch.randint(4, (EXAMPLES, 4)), torch.arange(EXAMPLES)

    def spoiled(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * torch.where(targets == BAD, torch.nan, 1.0)

    made = per_example_gradients(model, spoiled, x, y)
    for name in CLIPPING:
        assert torch.allclose(release(name, 3.0, made), release(name, 3.0, dense(made)), rtol=0, atol=2e-5)
    # Directions are drawn in a basis that rounding decides here: the inner products say the same.
    kept = made.masked(torch.arange(EXAMPLES) != BAD)
    assert torch.allclose(kept.gram(), dense(made).gram(), rtol=0, atol=1e-6)
    for name in set(MECHANISMS) - set(CLIPPING):
        assert bool(release(name, 3.0, made).isfinite().all())


def test_finite_gradients_are_worked_on_as_they_are() -> None:
    """Nothing is copied, whatever their sizes."""
    given = rows(torch.float32)
    given["a"][1] *= 1e30
    given["c"][2] *= 1e-30
    gradients = DenseGradients(given)
    assert GaussianMechanism(1.0, 1.0)._admitted(gradients) is gradients


def test_without_a_mechanism_it_shows() -> None:
    made = bad_number(torch.nan, torch.float32)
    released = NoMechanism().release(made, EXAMPLES, stream())
    assert torch.isnan(flat(released)).sum() == 1
