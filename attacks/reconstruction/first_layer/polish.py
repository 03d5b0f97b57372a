"""The unmixing made exact by the network itself, for any activation: errors must be those of the images found.

Images ``A V`` are combinations of the gradient's right factors V, so that only B x B numbers are unknown, and the
errors that the network gives them must add up to the left factors: ``E(A V) A = L``. That is far more equations than
unknowns. They are solved by damped Newton steps on the sum of squares (Gauss-Newton, Levenberg and Marquardt), with
derivatives of the errors along the B factors from differences. Close to the answer each step doubles the digits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.attacks.reconstruction.first_layer.spectrum import Spectrum

__all__ = ["MOST", "Errors", "Polished", "polish"]

MOST = 64  # images: beyond, the B^2 unknowns take minutes
STEPS = 15
NUDGE = 1e-6  # of an image's length, for differences
FIRST_DAMPING, LESS, MORE = 1e-3, 0.05, 8.0
TRIALS = 8  # of one step
SETTLED = 1e-6  # relative gain of a step after which it is over
RIDGE = 1e-14  # relative to the mean of the diagonal

Errors = Callable[[Tensor], Tensor]
"""Batches of images (N, B, P) -> each example's share in the upload's errors (N, B, rows); float64 on the CPU."""


@dataclass(frozen=True, eq=False)
class Polished:
    """A mixing (B, B), scaled, and the squared distance of left factors that its images leave, relative to them."""

    mixing: Tensor
    misfit: float


def polish(spectrum: Spectrum, mixing: Tensor, errors: Errors) -> Polished:
    """Solve for the mixing.

    Args:
        spectrum: of the gradient.
        mixing: (B, B), scaled (see :func:`switching.scaled`), roughly right.
        errors: what the network makes of images.
    """
    problem = _Problem(spectrum, errors)
    # Unknown is A = mixing^-1 in coordinates of orthonormal right factors.
    point = _Point.of(problem, torch.linalg.inv(mixing) * spectrum.values)
    damping = FIRST_DAMPING
    for _ in range(STEPS):
        system, slope = problem.linearised(point)
        moved: _Point | None = None
        for _ in range(TRIALS):
            moved = problem.step(point, system, slope, damping)
            if moved is not None and moved.size < point.size:
                break
            moved, damping = None, damping * MORE
        if moved is None:
            break
        gain = 1 - moved.size / point.size
        point, damping = moved, damping * LESS
        if gain < SETTLED:
            break
    inverse = point.unmixing / spectrum.values
    return Polished(torch.linalg.inv(inverse), point.size / float(problem.left.square().sum()))


@dataclass(frozen=True, eq=False)
class _Point:
    """Where the search is.

    Attributes:
        unmixing: A, (B, B).
        errors: (B, rows), of its images.
        rest: (rows + 1, B): what is left of the equations; the last row says that images end in a one.
        size: squared length of the rest.
    """

    unmixing: Tensor
    errors: Tensor
    rest: Tensor
    size: float

    @staticmethod
    def of(problem: "_Problem", unmixing: Tensor) -> "_Point":
        errors = problem.errors(problem.images(unmixing)[None])[0]
        ends = problem.weight * (unmixing @ problem.last - 1)
        rest = torch.cat([errors.mT @ unmixing - problem.left, ends[None]])
        return _Point(unmixing, errors, rest, float(rest.square().sum()))


class _Problem:
    """The equations and their linearisation.

    Args:
        spectrum: of the gradient.
        errors: what the network makes of images.
    """

    def __init__(self, spectrum: Spectrum, errors: Errors) -> None:
        self.left = spectrum.left * spectrum.values
        self.errors = errors
        self.last = spectrum.right[:, -1]
        self.weight = float(self.left.norm()) / len(self.last)
        self._pixels = spectrum.right[:, :-1]

    def images(self, unmixing: Tensor) -> Tensor:
        """(B, P)."""
        return unmixing @ self._pixels

    def linearised(self, point: _Point) -> tuple[Tensor, Tensor]:
        """The matrix (B B, B B) and the vector (B, B) of the normal equations of the change of A."""
        count = len(point.unmixing)
        along = self._derivatives(point)  # (B, rows, B): of image i's errors, along factor l
        flat = along.permute(1, 0, 2).flatten(1)
        system = (flat.mT @ flat).view(count, count, count, count)
        system = system * (point.unmixing @ point.unmixing.mT)[:, None, :, None]
        mixed = torch.einsum("iul,ju,in->iljn", along, point.errors, point.unmixing)
        same = torch.eye(count, dtype=along.dtype)
        system = system + mixed + mixed.permute(2, 3, 0, 1)
        system = system + (point.errors @ point.errors.mT)[:, None, :, None] * same[None, :, None, :]
        ends = self.weight**2 * torch.outer(self.last, self.last)
        system = system + same[:, None, :, None] * ends[None, :, None, :]
        rest, end = point.rest[:-1], point.rest[-1]
        slope = torch.einsum("iul,ui->il", along, rest @ point.unmixing.mT)
        slope = slope + point.errors @ rest + self.weight * end[:, None] * self.last
        return system.reshape(count**2, count**2), slope

    def step(self, point: _Point, system: Tensor, slope: Tensor, damping: float) -> _Point | None:
        """Where a damped step leads; ``None`` where it is not defined."""
        diagonal = system.diagonal()
        damped = system + torch.diag(damping * diagonal + RIDGE * diagonal.mean())
        factor, failed = torch.linalg.cholesky_ex(damped)
        if int(failed):
            return None
        change = torch.cholesky_solve(slope.reshape(-1, 1), factor).view_as(slope)
        moved = _Point.of(self, point.unmixing - change)
        return moved if math.isfinite(moved.size) else None

    def _derivatives(self, point: _Point) -> Tensor:
        images = self.images(point.unmixing)
        nudge = NUDGE * float(images.norm(dim=1).mean())
        moved = [self.errors(images[None] + nudge * row)[0] for row in self._pixels]
        derivatives: Tensor = (torch.stack(moved, dim=2) - point.errors[:, :, None]) / nudge
        return derivatives
