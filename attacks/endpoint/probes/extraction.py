"""Model extraction: equations solved, or copies trained on answers (Tramer et al. 2016; Orekondy et al. 2019)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.linalg import lstsq
from torch import Tensor, nn
from typing_extensions import override

from fedpriv.attacks.intervals import rate_interval
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.questions import Questions
from fedpriv.attacks.scene import (
    Network,
    ProbeReferee,
    ProbeScene,
    Public,
    outputs,
    probabilities,
    rounding_unit,
    uniform_images,
)
from fedpriv.core.errors import InputError
from fedpriv.core.figure import CurvePoint, Figure, Interval
from fedpriv.core.randomness import numpy_stream, torch_stream
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Integer

Array = NDArray[np.float64]

# From so many numbers on a step of L-BFGS costs more than many of Adam's.
MOST_FOR_LBFGS = 100_000
LBFGS_STEPS, ADAM_STEPS, ADAM_BATCH, ADAM_RATE = 300, 3000, 256, 1e-3
# Of the squared numbers: holds copies of few answers together, and is far too small to show in those of many.
DECAY = 1e-6


def trained_copy(scene: ProbeScene, images: Tensor, targets: Array) -> Network:
    """Train a network of the model's architecture on probabilities, with the cross entropy of all classes."""
    network = scene.copy(int(numpy_stream(scene.seed, "probe-copy", 0).integers(2**31))).eval()
    inputs, wanted = scene.normalise(images.double()), torch.from_numpy(targets)
    parameters = [value for value in network.parameters() if value.requires_grad]
    if sum(value.numel() for value in parameters) < MOST_FOR_LBFGS:
        _by_lbfgs(network, parameters, inputs, wanted)
    else:
        stream = torch_stream(scene.seed, "probe-batches", 0)
        loss = partial(_loss, network, parameters)
        descend(parameters, loss, inputs, wanted, ADAM_STEPS, ADAM_BATCH, ADAM_RATE, stream)
    network.requires_grad_(False)
    return lambda asked: network(scene.normalise(asked.double()))


def mixed_images(public: Public, count: int, generator: np.random.Generator) -> Tensor:
    """Draw mixtures of two public images each, with a weight from U(0, 1): (count, C, H, W), float64."""
    pairs = generator.integers(len(public.images), size=(2, count))
    weights = torch.from_numpy(generator.random(count))[:, None, None, None]
    first, second = (public.images[torch.from_numpy(rows)] for rows in pairs)
    return weights * first + (1 - weights) * second


def _loss(network: nn.Module, parameters: list[nn.Parameter], inputs: Tensor, wanted: Tensor) -> Tensor:
    entropy: Tensor = -(wanted * network(inputs).log_softmax(dim=1)).sum(dim=1).mean()
    return entropy + DECAY * sum((value.square().sum() for value in parameters), torch.zeros(()))


def _by_lbfgs(network: nn.Module, parameters: list[nn.Parameter], inputs: Tensor, wanted: Tensor) -> None:
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=LBFGS_STEPS, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(network, parameters, inputs, wanted)
        loss.backward()
        return loss

    optimizer.step(evaluate)


def descend(
    moved: Iterable[Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    wanted: Tensor,
    steps: int,
    batch: int,
    rate: float,
    stream: torch.Generator,
) -> None:
    """Make Adam's steps, each on a random batch of inputs and what is wanted of them."""
    optimizer = torch.optim.Adam(moved, lr=rate)
    for _ in range(steps):
        rows = torch.randint(len(inputs), (min(batch, len(inputs)),), generator=stream)
        optimizer.zero_grad()
        loss(inputs[rows], wanted[rows]).backward()
        optimizer.step()


UNIFORM = 1000
NO_THEOREM = "no theorem bounds how well a copy does that is trained on answers"


def never_asked(scene: ProbeScene) -> Network | None:
    """Return the copy of someone who asked nothing, trained on labelled public images; ``None`` without these."""
    if scene.public is None:
        return None
    return trained_copy(scene, scene.public.images, np.eye(scene.classes)[scene.public.labels.numpy()])


def agreement(referee: ProbeReferee, copy: Network, images: Tensor) -> Interval:
    """Return the share of images that the copy and the model name the same class for."""
    same = outputs(copy, images).argmax(dim=1) == referee.scores(images).argmax(dim=1)
    return rate_interval(int(same.sum()), len(images))


def agreement_figures(
    referee: ProbeReferee, copy: Network, guess: Network | None, ceiling: float | None = None, theorem: str = NO_THEOREM
) -> tuple[Figure, ...]:
    """Return how a copy agrees on the referee's and uniform images, next to the better guess."""
    _, channels, height, width = referee.held.images.shape
    uniform = uniform_images(UNIFORM, (channels, height, width), numpy_stream(referee.seed, "probe-uniform"))
    agreements = (
        Figure(
            f"agreement on {what} images",
            agreement(referee, copy, images),
            _guessed(referee, guess, images),
            ceiling=ceiling,
            theorem=theorem,
        )
        for what, images in (("test", referee.held.images), ("uniform", uniform))
    )
    variation = Figure(
        "total variation on test images",
        Interval(_variation(referee, copy), None, None),
        None if guess is None else _variation(referee, guess),
        theorem="0 is a perfect copy",
        unit="number",
    )
    return (*agreements, variation)


def _guessed(referee: ProbeReferee, guess: Network | None, images: Tensor) -> float:
    labels = referee.scores(images).argmax(dim=1)
    most = float(labels.bincount(minlength=referee.classes).max()) / len(labels)
    return most if guess is None else max(most, agreement(referee, guess, images).value)


def _variation(referee: ProbeReferee, copy: Network) -> float:
    images = referee.held.images
    mine = outputs(copy, images).softmax(dim=1)
    return float((mine - referee.scores(images).softmax(dim=1)).abs().sum(dim=1).mean() / 2)


@PROBES.register
class Extraction(ModelAttack):
    """The same architecture; the more answers, the more alike."""

    name: ClassVar[str] = "extraction"
    title: ClassVar[str] = "Extraction by a copy"
    reference: ClassVar[str] = (
        "Tramer et al. 2016; Orekondy, Schiele and Fritz: Knockoff Nets, CVPR 2019; Papernot et al.: Practical "
        "Black-Box Attacks against Machine Learning, 2017"
    )

    points: Annotated[Integer, Field(ge=1, le=20)] = Field(4, description="of the curve, each a fifth of the next")

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        guess = never_asked(scene)
        kinds = ["random"] if scene.public is None else ["random", "public", "mixed public"]
        variants = [(kind, scene.labels_only) for kind in kinds]
        if not scene.labels_only:
            variants.append((kinds[-1], True))
        return tuple(self._variant(scene, referee, guess, kind, labels) for kind, labels in variants)

    def _variant(
        self, scene: ProbeScene, referee: ProbeReferee, guess: Network | None, kind: str, labels: bool
    ) -> ProbeOutcome:
        endpoint, images = scene.open(), _asked(scene, kind, scene.budget)
        answers = endpoint.ask(images)
        targets = np.eye(scene.classes)[answers.labels] if labels else probabilities(answers, scene.classes)
        counts = sorted({max(1, len(images) // 5**step) for step in range(self.points)})
        copies = [trained_copy(scene, images[:count], targets[:count]) for count in counts]
        curve = tuple(
            CurvePoint(count, agreement(referee, copy, referee.held.images).value)
            for count, copy in zip(counts, copies, strict=True)
        )
        figures = agreement_figures(referee, copies[-1], guess)
        variant = f"{kind} images, {'labels' if labels else 'probabilities'}"
        share, floor = figures[0].measured.value, figures[0].guess
        sentence = (
            f"After {endpoint.asked} answers to {kind} images the copy names the model's class for {share:.1%} of "
        )
        sentence += f"test images{f', {floor:.1%} without a question' if floor is not None else ''}."
        return self.outcome(endpoint.asked, figures, sentence, variant=variant, curve=curve)


def _asked(scene: ProbeScene, kind: str, count: int) -> Tensor:
    """The images that are asked about, (n, C, H, W); of public ones as many as there are."""
    generator = numpy_stream(scene.seed, "probe-questions", ["random", "public", "mixed public"].index(kind))
    if kind == "random":
        return uniform_images(count, scene.shape, generator)
    public = scene.known_public()
    return public.images[:count] if kind == "public" else mixed_images(public, count, generator)


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
