"""The batched L-BFGS against scipy, and row by row."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, rosen, rosen_der
from torch import Tensor

from fedpriv.attacks.reconstruction.lbfgs import differentiable, minimise
from tests.cases import in_one_test


def rosenbrock(points: Tensor, _: Tensor) -> Tensor:
    return (100 * (points[:, 1:] - points[:, :-1] ** 2) ** 2 + (1 - points[:, :-1]) ** 2).sum(dim=1)


def starts(rows: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("size", [1, 2, 5, 16])
@in_one_test("condition", [1.0, 1e3])
def test_quadratics(size: int, condition: float) -> None:
    rows = 4
    rng = np.random.default_rng(size)
    matrices, centres = [], rng.standard_normal((rows, size))
    for _ in range(rows):
        basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
        matrices.append(basis @ np.diag(np.geomspace(1, condition, size)) @ basis.T)
    matrix, centre = torch.tensor(np.stack(matrices)), torch.tensor(centres)

    def value(points: Tensor, index: Tensor) -> Tensor:
        difference = points - centre[index]
        return torch.einsum("ri,rij,rj->r", difference, matrix[index], difference) / 2 + index

    found = minimise(differentiable(value), starts(rows, size), 500)
    torch.testing.assert_close(found.values, torch.arange(rows).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.points, centre, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.points[0], centre[0], atol=1e-7, rtol=0)  # its minimum is 0: no digits are lost


@pytest.mark.parametrize("size", [2, 3, 6])
def test_rosenbrock_is_solved_as_by_scipy(size: int) -> None:
    start = starts(10, size, seed=4)
    found = minimise(differentiable(rosenbrock), start, 500)
    for row in range(10):
        oracle = minimize(rosen, start[row].numpy(), jac=rosen_der, method="L-BFGS-B", options={"maxcor": 20})
        assert found.values[row].item() < oracle.fun + 1e-9
        assert rosen(found.points[row].numpy()) == pytest.approx(found.values[row].item(), rel=1e-6, abs=1e-18)
    # about as many steps as scipy needs on the same problem
    steps = [minimize(rosen, row.numpy(), jac=rosen_der, method="L-BFGS-B").nit for row in start]
    assert found.iterations.double().mean().item() < 3 * np.mean(steps)


def test_rows_do_not_know_each_other() -> None:
    start = starts(5, 4, seed=9) * torch.logspace(-1, 1, 5)[:, None]
    together = minimise(differentiable(rosenbrock), start, 40)
    for row in range(5):
        alone = minimise(differentiable(rosenbrock), start[row : row + 1], 40)
        assert alone.iterations.item() == together.iterations[row].item()
        torch.testing.assert_close(alone.points[0], together.points[row], rtol=1e-6, atol=1e-8)


def test_finished_rows_are_not_evaluated_again() -> None:
    """Row 0 is at its minimum, row 1 reaches it in a few steps, row 2 works on."""
    calls: list[list[int]] = []

    def evaluate(points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(index.tolist())
        bowl, _ = differentiable(lambda x, _: x.square().sum(dim=1))(points, index)
        valley, slope = differentiable(rosenbrock)(points, index)
        hard = index == 2
        return torch.where(hard, valley, bowl), torch.where(hard[:, None], slope, 2 * points)

    start = torch.tensor([[0.0, 0.0], [3.0, 4.0], [-1.2, 1.0]]).double()
    found = minimise(evaluate, start, 200)
    assert calls[0] == [0, 1, 2]
    assert all(0 not in index for index in calls[1:])
    assert calls[-1] == [2]
    assert found.iterations[0] == 0
    torch.testing.assert_close(found.points[2], torch.ones(2).double(), atol=1e-6, rtol=0)


def test_values_that_are_not_numbers() -> None:
    """Row 0 starts outside the domain and is left there; row 1 steps out of it on the way and finds back."""

    def value(points: Tensor, _: Tensor) -> Tensor:
        return (points - points.log()).sum(dim=1)  # NaN below zero, minimum at 1

    start = torch.tensor([[-1.0], [0.05]]).double()
    found = minimise(differentiable(value), start, 50)
    assert torch.isnan(found.values[0])
    assert found.points[0].item() == -1
    assert found.points[1].item() == pytest.approx(1, abs=1e-6)


@in_one_test("iterations", [1, 2, 7])
def test_no_more_steps_than_asked_and_never_uphill(iterations: int) -> None:
    start = starts(5, 6)
    before = rosenbrock(start, torch.arange(5))
    found = minimise(differentiable(rosenbrock), start, iterations)
    assert found.iterations.tolist() == [iterations] * 5
    assert bool((found.values < before).all())
    torch.testing.assert_close(found.values, rosenbrock(found.points, torch.arange(5)))


@in_one_test("factor", [1e-12, 1.0, 1e9])
def test_scale_of_the_function_does_not_matter(factor: float) -> None:
    """An upload through a mechanism may be a million times shorter than the gradient."""
    start = starts(4, 3)
    found = minimise(differentiable(lambda x, index: factor * rosenbrock(x, index)), start, 300)
    assert bool((found.values < 1e-8 * factor).all())


def test_constant_function_ends_at_once() -> None:
    start = starts(3, 2)
    found = minimise(lambda x, _: (torch.ones(len(x)).double(), torch.zeros_like(x)), start, 10)
    assert torch.equal(found.points, start)
    assert found.iterations.tolist() == [0, 0, 0]


def test_progress_never_goes_back() -> None:
    seen: list[int] = []
    minimise(differentiable(rosenbrock), starts(4, 3), 40, lambda done, _: seen.append(done) is None)
    assert seen == sorted(seen)
    assert seen[-1] == 40


def test_rows_end_at_their_targets() -> None:
    start = starts(3, 4)
    calls: list[int] = []

    def evaluate(points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(index))
        return differentiable(rosenbrock)(points, index)

    target = torch.stack([torch.tensor(1e-3), rosenbrock(start, torch.arange(3))[1], torch.tensor(0.0)])
    found = minimise(evaluate, start, 300, target=target)
    free = minimise(differentiable(rosenbrock), start, 300)
    assert found.values[0] <= 1e-3
    assert found.iterations[0] < free.iterations[0]
    assert found.iterations[1] == 0
    assert torch.equal(found.points[2], free.points[2])
    assert calls[0] == 3
    assert calls[-1] == 1
