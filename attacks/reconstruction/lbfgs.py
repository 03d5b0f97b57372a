"""L-BFGS for many independent problems at once, each with its own curvature pairs and line search.

Every call evaluates one trial point of each unfinished row. The direction is that of Nocedal and Wright (2006), chapter
7, from inner products of pairs (Chen, Wang and Zhou 2014), so that pairs are read once; the line search is the
bisection for the weak Wolfe conditions of Lewis and Overton (2013), algorithm 2.6, which keeps every pair's curvature
positive.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points (n, D), numbers of their rows (n,)) -> (values (n,), maybe of a wider type, gradients (n, D))."""

PAIRS = 20  # curvature pairs kept
DECREASE = 1e-4  # Armijo constant
CURVATURE = 0.9  # weak Wolfe constant
TRIALS = 20  # of one line search
STANDSTILL = 1e-9  # of the value: a step that gains no more is the last


@dataclass(frozen=True)
class Minimum:
    """Where each row ended."""

    points: Tensor  # (N, D), the best point of each row; the start, where its value there is not finite
    values: Tensor  # (N,), the values there
    iterations: Tensor  # (N,), accepted steps


@dataclass
class _Rows:
    """The state of some rows; a row of every tensor belongs to one problem."""

    point: Tensor
    value: Tensor
    slope: Tensor  # gradient . direction
    gradient: Tensor
    direction: Tensor
    step: Tensor
    low: Tensor  # bracket of the line search
    high: Tensor
    trials: Tensor
    iterations: Tensor
    pairs: Tensor  # (N, 2 PAIRS, D): steps, then changes of the gradient; zeros where there is none yet
    products: Tensor  # (N, 2 PAIRS, 2 PAIRS), their inner products
    inverse: Tensor  # (N, PAIRS), 1 / (step . change), zero where there is no pair
    newest: Tensor  # (N,), the place of the newest pair; older ones are before it, in a ring


def differentiable(losses: Callable[[Tensor, Tensor], Tensor]) -> Evaluate:
    """Add the gradients to losses (n,) of points (n, D), each of which depends on its own point alone."""

    def evaluate(points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        leaf = points.detach().requires_grad_()
        with torch.enable_grad():
            values = losses(leaf, index)
            (gradients,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), gradients

    return evaluate


def minimise(
    evaluate: Evaluate,
    start: Tensor,  # (N, D)
    iterations: int,
    progress: Callable[[int, Tensor], bool] | None = None,  # whether to go on
    target: Tensor | None = None,  # (N,), values that are low enough
) -> Minimum:
    """Minimise row by row, until steps, target, gradient or gain end; a row that is not finite at the start stays."""
    rows = _start(evaluate, start)
    target = torch.full_like(rows.value, -torch.inf) if target is None else target
    active = torch.isfinite(rows.value) & (rows.slope < 0) & (rows.value > target)
    while bool(active.any()):
        index = active.nonzero().squeeze(1)
        trial = rows.point[index] + rows.step[index, None] * rows.direction[index]
        value, gradient = evaluate(trial, index)
        accepted = _search(rows, index, value, gradient)
        gained = rows.value[index] - value > STANDSTILL * value.abs()
        _advance(rows, index[accepted], trial[accepted], value[accepted], gradient[accepted])
        exhausted = index[~accepted & (rows.trials[index] >= TRIALS)]
        fresh = rows.inverse[exhausted].any(dim=1)
        _forget(rows, exhausted[fresh])
        active[exhausted[~fresh]] = False
        going_on = (rows.iterations < iterations) & (rows.slope < 0) & (rows.value > target)
        active[index[accepted]] = (going_on[index] & gained)[accepted]
        if progress is not None:
            done = int(rows.iterations[active].min()) if bool(active.any()) else iterations
            active &= progress(done, rows.value)
    return Minimum(rows.point, rows.value, rows.iterations)


def _start(evaluate: Evaluate, start: Tensor) -> _Rows:
    count, size = start.shape
    value, gradient = evaluate(start, torch.arange(count, device=start.device))
    zeros = start.new_zeros(count)
    whole = torch.zeros(count, dtype=torch.long, device=start.device)
    rows = _Rows(
        start.clone(), value, zeros, gradient, torch.zeros_like(start), zeros.clone(), zeros.clone(), zeros.clone(),
        whole, whole.clone(), start.new_zeros(count, 2 * PAIRS, size), start.new_zeros(count, 2 * PAIRS, 2 * PAIRS),
        start.new_zeros(count, PAIRS), whole.clone(),
    )  # fmt: skip
    _forget(rows, torch.arange(count, device=start.device))
    return rows


def _search(rows: _Rows, index: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """Judge one trial of each row, narrow the brackets, and return which trials are accepted."""
    step, slope = rows.step[index], rows.slope[index]
    # A comparison with NaN is false, so a point outside the function's domain counts as too far.
    decreased = (value <= rows.value[index] + DECREASE * step * slope) & torch.isfinite(gradient).all(dim=1)
    curved = (gradient * rows.direction[index]).sum(dim=1) >= CURVATURE * slope
    low = torch.where(decreased, step, rows.low[index])
    high = torch.where(decreased, rows.high[index], step)
    rows.low[index], rows.high[index] = low, high
    rows.step[index] = torch.where(torch.isinf(high), 2 * low, (low + high) / 2)
    rows.trials[index] += 1
    return decreased & curved


def _advance(rows: _Rows, index: Tensor, point: Tensor, value: Tensor, gradient: Tensor) -> None:
    """Move to accepted points, keep the pairs, and set out in new directions."""
    if len(index) == 0:
        return
    step, change = point - rows.point[index], gradient - rows.gradient[index]
    _remember(rows, index, step, change)
    rows.point[index], rows.value[index], rows.gradient[index] = point, value, gradient
    rows.iterations[index] += 1
    _set_out(rows, index, -_inverse_hessian(rows, index, gradient), torch.ones_like(rows.step[index]))


def _remember(rows: _Rows, index: Tensor, step: Tensor, change: Tensor) -> None:
    curvature = (step * change).sum(dim=1)
    usable = curvature > torch.finfo(step.dtype).eps * change.square().sum(dim=1)
    index, step, change, curvature = index[usable], step[usable], change[usable], curvature[usable]
    if len(index) == 0:
        return
    place = (rows.newest[index] + 1) % PAIRS
    rows.newest[index] = place
    rows.pairs[index, place], rows.pairs[index, place + PAIRS] = step, change
    rows.inverse[index, place] = 1 / curvature
    fresh = _along(rows.pairs, index, torch.stack([step, change], dim=2))
    for number, where in enumerate((place, place + PAIRS)):
        rows.products[index, :, where] = fresh[:, :, number]
        rows.products[index, where] = fresh[:, :, number]


def _inverse_hessian(rows: _Rows, index: Tensor, gradient: Tensor) -> Tensor:
    """Apply each row's inverse Hessian to its gradient, in the compact form of Byrd, Nocedal and Schnabel (1994)."""
    # From here on the last pair is the newest one; an unused pair has zeros, and a one on the diagonal.
    place = (rows.newest[index, None] + torch.arange(1, PAIRS + 1, device=index.device)) % PAIRS
    order = torch.cat([place, place + PAIRS], dim=1)
    inverse = rows.inverse[index].gather(1, place)
    products = rows.products[index[:, None, None], order[:, :, None], order[:, None, :]]
    along = _along(rows.pairs, index, gradient[:, :, None])[:, :, 0].gather(1, order)
    of_changes = products[:, PAIRS:, PAIRS:]
    newest = inverse[:, -1] * of_changes[:, -1, -1]
    scale = 1 / torch.where(newest > 0, newest, torch.ones_like(newest))
    curvature = torch.where(inverse > 0, 1 / inverse, 0.0)
    upper = products[:, :PAIRS, PAIRS:].triu() + torch.diag_embed((inverse == 0).to(inverse))
    removed = torch.linalg.solve_triangular(upper, along[:, :PAIRS, None], upper=True)
    felt = scale[:, None, None] * (of_changes @ removed - along[:, PAIRS:, None]) + curvature[:, :, None] * removed
    added = torch.linalg.solve_triangular(upper.mT, felt, upper=False)
    weights = torch.cat([added, -scale[:, None, None] * removed], dim=1)[:, :, 0]
    placed = torch.zeros_like(weights).scatter(1, order, weights)
    return scale[:, None] * gradient + _along(rows.pairs.mT, index, placed[:, :, None])[:, :, 0]


def _along(matrices: Tensor, index: Tensor, vectors: Tensor) -> Tensor:
    """Multiply matrices (N, a, b) of rows ``index`` (M,), ascending, by (M, b, c): (M, a, c), without copying."""
    if len(index) == len(matrices):
        return matrices @ vectors
    if matrices.device.type != "cpu":
        return matrices[index] @ vectors
    return torch.stack([matrices[row] @ vector for row, vector in zip(index.tolist(), vectors, strict=True)])


def _forget(rows: _Rows, index: Tensor) -> None:
    """Drop the pairs and set out along steepest descent, with a first step of length one."""
    rows.pairs[index], rows.products[index], rows.inverse[index] = 0.0, 0.0, 0.0
    gradient = rows.gradient[index]
    length = gradient.norm(dim=1)
    _set_out(rows, index, -gradient, 1 / torch.where(length > 0, length, torch.ones_like(length)))


def _set_out(rows: _Rows, index: Tensor, direction: Tensor, step: Tensor) -> None:
    rows.direction[index] = direction
    rows.slope[index] = (rows.gradient[index] * direction).sum(dim=1)
    rows.step[index] = step
    rows.low[index], rows.high[index], rows.trials[index] = 0.0, torch.inf, 0
