"""Model extraction: copies trained on answers (Tramer et al. 2016; Orekondy, Schiele and Fritz 2019)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from fedpriv.attacks.intervals import rate_interval
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.attacks.scene import (
    Network,
    ProbeReferee,
    ProbeScene,
    Public,
    outputs,
    probabilities,
    uniform_images,
)
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
