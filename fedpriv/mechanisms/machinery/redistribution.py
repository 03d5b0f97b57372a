"""Redistribution of the heterogeneous Gaussian mechanism's noise: a public share of its power for each coordinate.

Privacy does not depend on the shares as long as they are public: they may come from the shapes of the parameters or
from public images, never from a client's data.
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.gradients import GradientOperator, Vector, per_example_gradients

# The share of the noise power that is spread evenly, so that no coordinate is without noise.
EVEN = 0.1
# Sums of shares in float32 may be off by their rounding.
TOLERANCE = 1e-3
# Numbers of gradients that are written out at once.
PIECE = 1 << 24


@dataclass(frozen=True, eq=False)
class Redistribution:
    """The vector r of the heterogeneous Gaussian mechanism (Phan et al. 2019, Theorem 3)."""

    shares: Vector  # for each parameter a tensor of its shape; all are positive and sum to 1 over all K coordinates

    def __post_init__(self) -> None:
        if not all(bool((torch.isfinite(value) & (value > 0)).all()) for value in self.shares.values()):
            raise ValueError("a share of the noise is not a positive number")
        total = sum(float(value.sum()) for value in self.shares.values())
        if not math.isclose(total, 1, rel_tol=TOLERANCE):
            raise ValueError(f"the shares of the noise sum to {total:.6g}, not to 1")

    @property
    def dimension(self) -> int:
        """K, the number of coordinates."""
        return sum(value.numel() for value in self.shares.values())

    @cached_property
    def deviations(self) -> Vector:
        """sqrt(K r): the noise of a coordinate over what it would be with even shares."""
        return {name: (self.dimension * value).sqrt() for name, value in self.shares.items()}

    @cached_property
    def weights(self) -> Vector:
        """1 / (K r): weights of the squares in the norm to which gradients are clipped."""
        return {name: value.square().reciprocal() for name, value in self.deviations.items()}

    @cached_property
    def steepest(self) -> float:
        """The root of the largest weight: the norm to which gradients are clipped is at most so many Euclidean ones."""
        return 1 / min(float(value.min()) for value in self.deviations.values())


def uniform_shares(parameters: Vector) -> Redistribution:
    """Every coordinate gets the same share: the homogeneous Gaussian mechanism."""
    dimension = sum(value.numel() for value in parameters.values())
    return Redistribution({name: torch.full_like(value, 1 / dimension) for name, value in parameters.items()})


def layer_shares(parameters: Vector) -> Redistribution:
    """Every parameter tensor gets the same share, spread evenly over its coordinates."""
    tensors = len(parameters)
    return Redistribution(
        {name: torch.full_like(value, 1 / (tensors * value.numel())) for name, value in parameters.items()}
    )


def public_shares(model: nn.Module, images: Tensor, inflation: float) -> Redistribution:
    """Shares that follow how strongly the network's outputs depend on each parameter, on public images (B, ...).

    The rule of Phan et al. (2019, Section 4) on parameters: with s_k = mean over images of sum over outputs c of |d
    output_c / d parameter_k|, r_k is proportional to s_k ** inflation. A tenth of the noise power is spread evenly.
    """
    with torch.no_grad():
        outputs = model(images[:1]).shape[1]
    sensitivity = {
        name: torch.zeros(value.shape, dtype=torch.float64)
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    # The targets are not read.
    targets = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    for output in range(outputs):
        gradients = per_example_gradients(model, partial(_pick, output), images, targets)
        for name, total in _absolute_totals(gradients).items():
            sensitivity[name] += total
    if not all(bool(torch.isfinite(value).all()) for value in sensitivity.values()):
        raise InputError(
            key="mechanism.redistribution", given="public", allowed="the network's derivatives are NaN or infinite"
        )
    largest = max(float(value.max()) for value in sensitivity.values())
    reference: Vector = {name: value.detach() for name, value in model.named_parameters() if name in sensitivity}
    if largest == 0:
        return uniform_shares(reference)
    powers = {name: (value / largest).pow(inflation) for name, value in sensitivity.items()}
    scale = (1 - EVEN) / sum(float(value.sum()) for value in powers.values())
    even = EVEN / sum(value.numel() for value in powers.values())
    return Redistribution({name: (scale * value + even).to(reference[name]) for name, value in powers.items()})


def _pick(output: int, outputs: Tensor, _: Tensor) -> Tensor:
    return outputs[:, output]


def _absolute_totals(gradients: GradientOperator) -> Vector:
    """For each parameter the sum over the examples of the gradients' absolute values; float64, on the CPU."""
    step = max(1, PIECE // gradients.dimension())
    totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in gradients.shapes.items()}
    for start in range(0, gradients.examples, step):
        for name, rows in gradients.rows(start, min(start + step, gradients.examples)).items():
            totals[name] += rows.abs().sum(dim=0).cpu()
    return totals
