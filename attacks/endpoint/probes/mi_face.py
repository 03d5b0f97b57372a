"""Model inversion, MI-FACE (Fredrikson, Jha and Ristenpart 2015, Algorithm 1): an image for each class of a model.

The printed stop rule, cost <= gamma, is met at once with the usual gamma = 0.99, since the cost is at most 1. What is
meant, and what is done here, is cost <= 1 - gamma; and the best picture is returned behind the loop.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from scipy.ndimage import gaussian_filter
from torch import Tensor
from typing_extensions import override

from fedpriv.attacks import metrics
from fedpriv.attacks.intervals import median_interval, rate_interval
from fedpriv.attacks.probing import Inverted, ModelAttack, ProbeOutcome
from fedpriv.attacks.questions import Questions
from fedpriv.attacks.reconstruction.priors import fit_prior
from fedpriv.attacks.scene import Network, ProbeReferee, ProbeScene, probabilities, rounding_unit
from fedpriv.attacks.settings import Access
from fedpriv.core.figure import Figure
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count, NonNegative, Positive, Real

Cost = Callable[[Tensor], Tensor]
"""Probabilities of the wanted labels (n,) -> costs (n,)."""

Auxiliary = Callable[[Tensor], Tensor]
"""Images (n, C, H, W) -> what unlikely ones cost (n,), differentiable."""

Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""Images and labels (n,) -> costs (n,) and gradients (n, C, H, W); ``None``: no questions are left."""

_SMALLEST = 1e-12


@dataclass(frozen=True)
class Descent:
    """How far each step goes, and when it ends."""

    rate: float  # of a step
    steps: int  # at most (alpha)
    patience: int  # steps without gain after which a class ends (beta)
    enough: float  # the cost at which a class ends
    blur: float = 0.0  # standard deviation in pixels of the blur after each step; 0: none


def invert(gradient: Gradient, start: Tensor, descent: Descent) -> tuple[Tensor, Tensor]:
    """Go down the cost of every class at once, and keep the best picture of each."""
    images, labels = start.clone(), torch.arange(len(start))
    best, costs = start.clone(), torch.full((len(start),), torch.inf, dtype=torch.float64)
    waited = torch.zeros(len(start), dtype=torch.int64)
    active = torch.ones(len(start), dtype=torch.bool)
    for step in range(descent.steps + 1):
        cost_and_slope = gradient(images[active], labels[active])
        if cost_and_slope is None:
            # Nobody could be asked whether the last step was one too far; the steps before it gained.
            ahead = active & (waited == 0) & (costs < torch.inf)
            best[ahead] = images[ahead]
            break
        _keep(images, labels[active], cost_and_slope[0], best, costs, waited)
        if step == descent.steps:
            break
        images[active] = _processed(images[active] - descent.rate * cost_and_slope[1], descent.blur)
        active = (waited < descent.patience) & (costs > descent.enough)
        if not bool(active.any()):
            break
    return best, costs


def by_model(model: Network, cost: Cost, auxiliary: Auxiliary) -> Gradient:
    """Return the exact gradient of whoever has the model."""

    def gradient(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        leaf = images.detach().requires_grad_()
        shares = model(leaf).log_softmax(dim=1).gather(1, labels[:, None])[:, 0].exp()
        costs = cost(shares) + auxiliary(leaf)
        (gradients,) = torch.autograd.grad(costs.sum(), leaf)
        return costs.detach(), gradients

    return gradient


def by_answers(endpoint: Questions, budget: int, cost: Cost, auxiliary: Auxiliary, difference: float) -> Gradient:
    """Return the gradient by differences of answers: d + 1 questions an image, shared by labels that start there."""

    def gradient(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        distinct, place = images.unique(dim=0, return_inverse=True)
        pixels = distinct[0].numel()
        if endpoint.asked + len(distinct) * (pixels + 1) > budget:
            return None
        shares = [_differences(endpoint, image, difference) for image in distinct]
        here = torch.stack([shares[at][0][label] for at, label in zip(place.tolist(), labels.tolist(), strict=True)])
        moved = [shares[at][1][:, label] for at, label in zip(place.tolist(), labels.tolist(), strict=True)]
        costs = cost(here)
        signs = torch.where(images > 0.5, -difference, difference).flatten(1)
        slopes = (cost(torch.stack(moved)) - costs[:, None]) / signs
        leaf = images.detach().requires_grad_()
        extra = auxiliary(leaf)
        (added,) = torch.autograd.grad(extra.sum(), leaf)
        return costs + extra.detach(), slopes.view_as(images) + added

    return gradient


def total_variation(images: Tensor) -> Tensor:
    """Return the mean squared difference of neighbouring pixels (n,), of images (n, C, H, W)."""
    down, right = images.diff(dim=2).square(), images.diff(dim=3).square()
    return down.mean(dim=(1, 2, 3)) + right.mean(dim=(1, 2, 3))


def _keep(images: Tensor, labels: Tensor, costs: Tensor, best: Tensor, least: Tensor, waited: Tensor) -> None:
    """Remember the pictures that are better than all before, and count the steps without gain of the others."""
    gained = labels[costs < least[labels]]
    waited[labels] += 1
    waited[gained] = 0
    least[labels] = torch.minimum(least[labels], costs)
    best[gained] = images[gained]


def _differences(endpoint: Questions, image: Tensor, difference: float) -> tuple[Tensor, Tensor]:
    """The probabilities at an image (classes,), and with each pixel changed (d, classes)."""
    flat = image.flatten()
    step = torch.where(flat > 0.5, -difference, difference)
    asked = torch.cat([flat[None], flat + torch.diag(step)]).view(-1, *image.shape)
    answers = endpoint.ask(asked)
    shown = probabilities(answers, endpoint.classes)
    unit = 0.0 if answers.probabilities is None else rounding_unit(np.nan_to_num(answers.probabilities))
    shares = torch.from_numpy(shown.clip(max(unit / 2, _SMALLEST), 1.0))
    return shares[0], shares[1:]


def _processed(images: Tensor, blur: float) -> Tensor:
    """PROCESS: a small blur where the settings say so, then back onto [0, 1]."""
    if blur:
        reach = max(1, math.ceil(2 * blur))
        images = torch.from_numpy(gaussian_filter(images.numpy(), blur, mode="nearest", radius=reach, axes=(2, 3)))
    return images.clamp(0, 1)


# Whom an inverted picture shows, by pictures that nobody trained with; and how near to a likeness it is.
#
# A second model that was trained on the same pictures is fooled by whatever fools the first, so that it is no judge.
# The floor is what a guess gets that offers the same for every class, the reference the mean of a class's training
# pictures. An inversion may exceed the reference: it amplifies what sets a class apart.


HALF_THE_ERROR = 3.0  # dB above the one picture for all, from which on an attack is said to show how classes look

_NOTHING = "no theorem bounds what a model shows of a class"
_FLOOR = "a picture that does not depend on the class is nearest to its own test pictures for one class in all"


def places(pictures: Tensor, test_means: Tensor) -> Tensor:
    """Return at which place, by cosine, each class's own test pictures are for its picture, (K,)."""
    middle = test_means.mean(dim=0)
    offered = torch.nn.functional.normalize((pictures - middle).flatten(1), dim=1)
    shown = torch.nn.functional.normalize((test_means - middle).flatten(1), dim=1)
    likeness = offered @ shown.mT
    return (likeness >= likeness.diagonal()[:, None]).sum(dim=1)


def inverted_classes(referee: ProbeReferee, pictures: Tensor, names: Sequence[str]) -> tuple[Inverted, ...]:
    """Return how each class came out; classes without test or training pictures are left out."""
    kept = _complete(referee)
    ranks = places(pictures[kept], referee.test_means[kept])
    confidence = referee.scores(pictures).softmax(dim=1).diagonal()[kept]
    likeness = metrics.psnr(referee.train_means[kept], pictures[kept]).clamp(max=200)
    return tuple(
        Inverted(int(label), names[int(label)], float(confidence[at]), int(ranks[at]), float(likeness[at]))
        for at, label in enumerate(kept)
    )


def inversion_figures(referee: ProbeReferee, inverted: Sequence[Inverted], guess: Tensor) -> tuple[Figure, ...]:
    """Return who is told, and how near the pictures are, with floor and reference."""
    kept, count = _complete(referee), len(inverted)
    reference = places(referee.train_means[kept], referee.test_means[kept])
    floor = metrics.psnr(referee.train_means[kept], guess.expand(count, *guess.shape)).clamp(max=200)
    generator = numpy_stream(referee.seed, "probe-likeness")
    figures = [
        Figure(
            f"classes told, top {top}",
            rate_interval(sum(inversion.rank <= top for inversion in inverted), count),
            min(1.0, top / count),
            reference=float((reference <= top).double().mean()),
            theorem=f"{_NOTHING}; floor: {_FLOOR}",
        )
        for top in (1, 5)
    ]
    likeness = median_interval([inversion.psnr for inversion in inverted], generator)
    figures.append(
        Figure("PSNR to the class's mean, median", likeness, float(floor.median()), theorem=_NOTHING, unit="dB")
    )
    confidence = median_interval([inversion.confidence for inversion in inverted], generator)
    figures.append(Figure("the model's confidence, median", confidence, theorem="it says nothing about likeness"))
    return tuple(figures)


def two_sentences(figures: Sequence[Figure]) -> tuple[str, str]:
    """Return whether the pictures tell who, and whether they show how they look."""
    told, likeness = figures[0], figures[2]
    floor = told.guess or 0.0
    tells = told.measured.low is not None and told.measured.low > floor
    reference = (
        f" ({told.reference:.1%} for the mean of a class's training pictures)" if told.reference is not None else ""
    )
    who = (
        f"It {'tells' if tells else 'does not tell'} who: {told.measured.value:.1%} of the classes are told by their "
        f"test pictures, a guess {floor:.1%}{reference}."
    )
    ahead = (likeness.measured.low or 0.0) - (likeness.guess or 0.0)
    verdict = "shows" if ahead >= HALF_THE_ERROR else "hints at" if ahead > 0 else "does not show"
    look = (
        f"It {verdict} how they look: {likeness.measured.value:.1f} dB to the class's mean, "
        f"{likeness.guess or 0.0:.1f} dB for one picture offered for all."
    )
    return who, look


def _complete(referee: ProbeReferee) -> np.ndarray:
    """The classes that have training and test pictures."""
    there = ~(referee.train_means.isnan() | referee.test_means.isnan()).flatten(1).any(dim=1)
    return np.flatnonzero(there.numpy())


@PROBES.register
class MiFace(ModelAttack):
    """A picture of each class by going down the cost of its label."""

    name: ClassVar[str] = "mi-face"
    title: ClassVar[str] = "Model inversion (MI-FACE)"
    reference: ClassVar[str] = (
        "Fredrikson, Jha and Ristenpart: Model Inversion Attacks that Exploit Confidence Information, CCS 2015"
    )
    needs: ClassVar[tuple[Access, ...]] = (Access.MODEL,)

    cost: Literal["1-p", "log"] = Field("log", description="1-p: as printed; log: -log p")
    start: Literal["public", "grey", "black"] = Field(
        "public", description="of every class; public: mean of public images"
    )
    rate: Positive | None = Field(None, description="of a step; unset: 1.0 for log, 0.1 for 1-p")
    steps: Count = Field(120, description="at most (alpha)")
    patience: Count = Field(100, description="steps without gain after which a class ends (beta)")
    gamma: Annotated[Real, Field(gt=0, lt=1)] = Field(0.99, description="probability at which a class ends")
    blur: NonNegative = Field(0.0, description="after each step, standard deviation in pixels; 0: clamp only")
    variation: NonNegative = Field(0.0, description="AuxTerm: weight of the total variation")
    prior: NonNegative = Field(0.0, description="AuxTerm: weight of the normal distribution of public images")

    @override
    def refusal(self, scene: ProbeScene) -> str | None:
        if scene.public is None and (self.start == "public" or self.prior):
            return (
                f"{self.name} needs public images for start = {self.start!r}, prior = {self.prior:g}, which the threat "
                "model withholds (adversary.knows_public_data = false)"
            )
        return None

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        gradient, asked = self.gradient(scene)
        pictures, _ = invert(gradient, self._start(scene).expand(scene.classes, *scene.shape), self._descent())
        names = [f"{self.name}-{label:04d}.png" for label in range(scene.classes)]
        floor = torch.full(scene.shape, 0.5, dtype=torch.float64)
        floor = floor if scene.public is None else scene.public.images.mean(dim=0)
        inverted = inverted_classes(referee, pictures, names)
        figures = inversion_figures(referee, inverted, floor)
        shown = {shown_class.picture: pictures[shown_class.label] for shown_class in inverted}
        return (
            self.outcome(
                asked(), figures, *two_sentences(figures), variant=self._variant(), inverted=inverted,
                pictures={**shown, "floor.png": floor}, guess_picture="floor.png",
            ),
        )  # fmt: skip

    def gradient(self, scene: ProbeScene) -> tuple[Gradient, Callable[[], int]]:
        """Return what goes down the cost, and how many questions it has taken so far."""
        if scene.model is None:
            raise ValueError("the scene has no model")
        return by_model(scene.model, self.costs(), self.auxiliary(scene)), lambda: 0

    def costs(self) -> Cost:
        """The cost of a label's probability."""
        return (lambda shares: 1 - shares) if self.cost == "1-p" else (lambda shares: -shares.clamp(min=1e-300).log())

    def auxiliary(self, scene: ProbeScene) -> Auxiliary:
        """What unlikely images cost."""
        energy = fit_prior(scene.known_public().images).energy if self.prior else None

        def extra(images: Tensor) -> Tensor:
            costs = self.variation * total_variation(images)
            return costs if energy is None else costs + self.prior * energy(images) / 2

        return extra

    def _start(self, scene: ProbeScene) -> Tensor:
        if self.start == "public":
            return scene.known_public().images.mean(dim=0)
        return torch.full(scene.shape, 0.5 if self.start == "grey" else 0.0, dtype=torch.float64)

    def _descent(self) -> Descent:
        printed = self.cost == "1-p"
        rate = self.rate if self.rate is not None else (0.1 if printed else 1.0)
        enough = 1 - self.gamma if printed else -math.log(self.gamma)
        return Descent(rate, self.steps, self.patience, enough, self.blur)

    def _variant(self) -> str:
        parts = [f"cost {'1 - p' if self.cost == '1-p' else '-log p'}", f"start {self.start}"]
        parts += [f"{key} {value:g}" for key in ("blur", "variation", "prior") if (value := getattr(self, key))]
        return ", ".join(parts)


@PROBES.register
class MiFaceByAnswers(MiFace):
    """The first step takes d + 1 questions for all classes together, each further one d + 1 a class."""

    name: ClassVar[str] = "mi-face-answers"
    title: ClassVar[str] = "Model inversion through answers"
    needs: ClassVar[tuple[Access, ...]] = (Access.ANSWERS,)

    difference: Annotated[Real, Field(gt=0, le=0.5)] = Field(
        0.01, description="by which a pixel is changed, from 0 to 1; larger where answers are rounded"
    )

    @override
    def refusal(self, scene: ProbeScene) -> str | None:
        if scene.labels_only:
            return f"{self.name} follows probabilities, and this policy names labels only"
        if scene.budget <= scene.pixels:
            return f"{self.name} takes {scene.pixels + 1} questions for its first step, and {scene.budget} are answered"
        return super().refusal(scene)

    @override
    def gradient(self, scene: ProbeScene) -> tuple[Gradient, Callable[[], int]]:
        endpoint = scene.open()
        estimate = by_answers(endpoint, scene.budget, self.costs(), self.auxiliary(scene), self.difference)
        return estimate, lambda: endpoint.asked
