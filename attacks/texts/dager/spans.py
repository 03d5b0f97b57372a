"""Row spaces of gradients, and whether a vector lies in one: the test that tells tokens of the batch from others.

Let the gradient have R singular values above the noise's edge (``first_layer.spectrum``), of n dimensions that inputs
have. What an input of the batch has outside the R right singular vectors is noise: to first order its length is
chi-distributed with n - R degrees of freedom times ``deviation |S^-1 V^T x|`` (perturbation of singular subspaces,
Stewart 1990). Of any other input it is that of a random direction, whose squared share follows
Beta((n - R) / 2, R / 2). Both together give a tolerance and say whether the test can tell the two at all.
"""

import math
from dataclasses import dataclass

import torch
from scipy.stats import beta, chi2
from torch import Tensor

from fedpriv.attacks.reconstruction.first_layer.batch import Spectrum, take_apart
from fedpriv.attacks.texts.dager.probes import Probe

__all__ = ["Span", "Unusable", "span_of"]

FALSE_TOKENS = 1e-2  # other tokens, of all that are tried, that a test may take for one of the batch's
MISSED = 1e-6  # chance that a token of the batch is missed, if the noise is as it is taken to be
NEAR = 0.5  # other inputs share parts with those of the batch, as positions, and are nearer than random ones
ROUNDED = 1e-2  # of an input that rounding alone puts outside
SLACK = 4.0  # rounding errors are no independent noise


@dataclass(frozen=True)
class Unusable:
    """Why a probe tells nothing.

    Attributes:
        kind: zero, noise or rank.
        reason: in one line.
    """

    kind: str
    reason: str


@dataclass(frozen=True, eq=False)
class Span:
    """The row space of one probe's gradient.

    Attributes:
        probe: whose it is.
        spectrum: of the gradient.
        null: (n, n - R) orthonormal columns outside the row space.
        weighted: (n, R), right singular vectors over their values times the noise's deviation.
        dimensions: that inputs have.
        noisy: whether noise of a mechanism, or of several steps, is in the gradient.
        sees_first: whether the first position of a sequence is in it.
    """

    probe: Probe
    spectrum: Spectrum
    null: Tensor
    weighted: Tensor
    dimensions: int
    noisy: bool
    sees_first: bool = True

    @property
    def free(self) -> int:
        """Dimensions that inputs have, and the row space has not."""
        return self.dimensions - self.spectrum.examples

    def residuals(self, inputs: Tensor) -> Tensor:
        """The share (...,) of inputs (..., n) that lies outside the row space, from 0 to 1."""
        lengths = inputs.norm(dim=-1).clamp(min=torch.finfo(inputs.dtype).tiny)
        shares: Tensor = (inputs @ self.null.to(inputs)).norm(dim=-1) / lengths
        return shares

    def holds(self, inputs: Tensor, tried: int) -> Tensor:
        """Whether each of the inputs (..., n) lies in the row space, (...,), where so many are tried."""
        share = self.residuals(inputs)
        least = self.tolerance(tried)
        lengths = inputs.norm(dim=-1).clamp(min=torch.finfo(inputs.dtype).tiny)
        error = (inputs @ self.weighted.to(inputs)).norm(dim=-1) / lengths
        quantile = SLACK * math.sqrt(float(chi2.ppf(1 - MISSED, self.free)))
        # Inputs themselves are computed with rounding errors.
        rounding = SLACK * self.null.shape[0] ** 0.5 * torch.finfo(inputs.dtype).eps
        passed: Tensor = share <= (quantile * error + rounding).clamp(max=least if self.noisy else min(least, ROUNDED))
        return passed

    def tolerance(self, tried: int) -> float:
        """The largest share outside that an input may have, such that hardly another one of so many has as little."""
        share = beta.ppf(min(FALSE_TOKENS / max(tried, 1), 0.5), self.free / 2, max(self.spectrum.examples, 1) / 2)
        return NEAR * math.sqrt(float(share))


def span_of(probe: Probe, gradient: Tensor, deviation: float, floor: float, samples: Tensor) -> Span | Unusable:
    """Return the row space of a gradient, or why it tells nothing.

    Args:
        probe: whose gradient it is.
        gradient: (rows, n).
        deviation: of the noise in each entry; 0: none.
        floor: as a share of the largest singular value what else is in the gradient, as of later steps.
        samples: (M, n), inputs of any tokens, which say how many dimensions inputs have.
    """
    if not bool(gradient.any()):
        return Unusable("zero", f"the gradient of {probe.layer} is zero")
    rows, width = gradient.shape
    largest = float(torch.linalg.matrix_norm(gradient.double(), 2))
    other = floor * largest / (rows**0.5 + width**0.5)
    spectrum = take_apart(gradient, max(deviation, other), min(rows, width))
    dimensions = _dimensions(samples)
    if spectrum.examples == 0:
        return Unusable(
            "noise",
            f"noise edge: no singular value of the gradient of {probe.layer} is above what noise alone shows "
            f"({spectrum.edge:.3g}; the largest is {largest:.3g})",
        )
    if spectrum.examples >= min(dimensions, rows):
        of = f"{dimensions} dimensions" if dimensions <= rows else f"{rows} rows"
        return Unusable(
            "rank",
            f"rank: the gradient of {probe.layer} fills all its {of}: the batch has at least as many positions, or "
            "there is noise that is not public",
        )
    null = torch.linalg.qr(spectrum.right.T, mode="complete").Q[:, spectrum.examples :]
    weighted = spectrum.right.T / spectrum.values * spectrum.deviation
    return Span(probe, spectrum, null, weighted, dimensions, max(deviation, other) > 0)


def _dimensions(samples: Tensor) -> int:
    """The rank of inputs."""
    return int(torch.linalg.matrix_rank(samples.double(), rtol=1e-6))
