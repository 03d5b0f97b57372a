"""Equation solving: every number of a logistic or softmax model, from d + 1 answers."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.linalg import lstsq
from torch import Tensor
from typing_extensions import override

from fedpriv.attacks.endpoint.probes.extraction import Array, agreement, agreement_figures, never_asked
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.questions import Questions
from fedpriv.attacks.scene import Network, ProbeReferee, ProbeScene, rounding_unit, uniform_images
from fedpriv.core.errors import InputError
from fedpriv.core.figure import CurvePoint, Figure, Interval
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.registry import PROBES

# Equation solving: recover a model whose logits are affine in the image from d + 1 answers.
#
# The logarithm of a probability minus its mean over classes is affine in the image where the logits are. So d + 1 exact
# answers give all K (d + 1) numbers, up to one that all classes share and no answer depends on (Tramer, Zhang, Juels,
# Reiter and Ristenpart 2016, Section 4.1, for two classes and one against all).


# A probability of exactly 0 comes from logits that differ by more than float64 can show.
_SMALLEST = 1e-300
_AFFINE = 1e-9


@dataclass(frozen=True, eq=False)
class AffineScores:
    """Logits that are affine in the image, with a mean of 0 over the classes."""

    weights: Array  # (classes, d), of pixels on [0, 1]
    bias: Array  # (classes,)

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits (n, classes) of images (n, C, H, W)."""
        return images.double().flatten(1) @ torch.from_numpy(self.weights).mT + torch.from_numpy(self.bias)

    def error(self, other: "AffineScores") -> float:
        """Return the largest difference of two numbers, as a share of the largest number of the other one."""
        differences = max(np.abs(self.weights - other.weights).max(), np.abs(self.bias - other.bias).max())
        return float(differences / max(np.abs(other.weights).max(), np.abs(other.bias).max()))


def is_affine(scene: ProbeScene) -> bool:
    """Return whether the architecture, which the adversary knows, has logits that are affine in the image."""
    network = scene.copy(scene.seed).eval()
    images = uniform_images(8, scene.shape, numpy_stream(scene.seed, "probe-affine"))
    with torch.no_grad():
        ends = network(scene.normalise(images))
        middle = network(scene.normalise((images[:4] + images[4:]) / 2))
    return bool(((ends[:4] + ends[4:]) / 2 - middle).abs().max() < _AFFINE * (1 + ends.abs().max()))


def affine_scores(network: Network, shape: tuple[int, int, int]) -> AffineScores:
    """Return the numbers of a network that is affine, from its logits of the black image and of single white pixels."""
    pixels = int(np.prod(shape))
    with torch.no_grad():
        black = network(torch.zeros((1, *shape), dtype=torch.float64))[0]
        lit = network(torch.eye(pixels, dtype=torch.float64).view(pixels, *shape))
    weights, bias = (lit - black).mT.double().numpy(), black.double().numpy()
    return AffineScores(weights - weights.mean(axis=0), bias - bias.mean())


def solved_scores(images: Tensor, shown: Array) -> AffineScores:
    """Solve for the logits that explain answers, by least squares of smallest norm; zeros are half a unit."""
    logs = np.log(np.maximum(shown, max(rounding_unit(shown) / 2, _SMALLEST)))
    targets = logs - logs.mean(axis=1, keepdims=True)
    flat = images.double().flatten(1).numpy()
    rows = np.hstack([flat, np.ones((len(flat), 1))])
    solution = lstsq(rows, targets, lapack_driver="gelsy")[0]
    return AffineScores(np.ascontiguousarray(solution[:-1].T), solution[-1].copy())


# How many times d + 1 questions, for answers that are not exact.
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 10.0)

_PROVEN = "d + 1 exact answers determine every number up to a common shift (Tramer et al. 2016, Section 4.1)"
_UNPROVEN = "nothing is proven for fewer than d + 1 answers, or for answers that are not exact"
_PERFECT = "0 is a perfect copy"


@PROBES.register
class EquationSolving(ModelAttack):
    """Random images; one linear system for all classes."""

    name: ClassVar[str] = "equation-solving"
    title: ClassVar[str] = "Extraction by equation solving"
    reference: ClassVar[str] = (
        "Tramer, Zhang, Juels, Reiter and Ristenpart: Stealing Machine Learning Models via Prediction APIs, USENIX "
        "Security 2016"
    )

    @override
    def refusal(self, scene: ProbeScene) -> str | None:
        if scene.labels_only:
            return f"{self.name} solves for probabilities, and this policy names labels only"
        if not is_affine(scene):
            return f"{self.name} is for models whose logits are affine in the image (mlp with hidden = [])"
        return None

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        needed, endpoint = scene.pixels + 1, scene.open()
        solution, curve, exact = self._solve(scene, referee, endpoint)
        figures = agreement_figures(
            referee, solution.logits, never_asked(scene), 1.0 if exact else None, _PROVEN if exact else _UNPROVEN
        )
        error = solution.error(affine_scores(referee.truth, scene.shape))
        last = Figure("error of the numbers", Interval(error, None, None), theorem=_PERFECT, unit="number")
        sentence = (
            f"{endpoint.asked} answers (of exact ones {needed} are enough) give all {scene.classes * needed} "
            f"numbers with an error of {error:.1e} of the largest."
        )
        return (self.outcome(endpoint.asked, (*figures, last), sentence, curve=tuple(curve)),)

    def _solve(
        self, scene: ProbeScene, referee: ProbeReferee, endpoint: "Questions"
    ) -> tuple[AffineScores, list[CurvePoint], bool]:
        """Ask more and more; the last solution, how well each did, and whether answers were exact and enough."""

        needed = scene.pixels + 1
        counts = [max(1, int(times * needed)) for times in MULTIPLES if times * needed <= scene.budget]
        counts = counts or [scene.budget]
        images = uniform_images(counts[-1], scene.shape, numpy_stream(scene.seed, "probe-equations"))
        shown, curve = np.empty((0, scene.classes)), []
        for count in counts:
            answers = endpoint.ask(images[len(shown) : count])
            if answers.probabilities is None or np.isnan(answers.probabilities).any():
                raise InputError(f"{self.name} needs every probability, and this policy withholds some")
            shown = np.concatenate([shown, answers.probabilities])
            solution = solved_scores(images[:count], shown)
            curve.append(CurvePoint(count, agreement(referee, solution.logits, referee.held.images).value))
            if count >= needed and not rounding_unit(shown):  # more answers say nothing new
                return solution, curve, True
        return solution, curve, False
