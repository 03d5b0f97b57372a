"""Cloak attack: what a curious endpoint reconstructs from cloaked queries, and how often its answers are correct."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from fedpriv.attacks.endpoint.probes.extraction import descend, mixed_images, trained_copy
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome, Shown
from fedpriv.attacks.scene import Network, ProbeReferee, ProbeScene, Public, outputs, probabilities
from fedpriv.attacks.settings import Access
from fedpriv.core.errors import InputError
from fedpriv.core.figure import CONFIDENCE, Figure, Interval
from fedpriv.core.randomness import numpy_stream, torch_stream
from fedpriv.core.registry import MODELS, PROBES
from fedpriv.core.settings import Count, Groups, Positive, Registered
from fedpriv.data.datasets import group_numbers
from fedpriv.models.machinery.build import build_model

# The model stays as it is. Each feature gets a shift and a deviation of its own: large where the model does not look.
# It is a heuristic: it is no differential privacy, and nothing is proven about what somebody reads out of a question.

# Deviations begin in the middle of their range, and shrink where noise hurts; from small ones few would ever grow.
_START = 0.0


@dataclass(frozen=True, eq=False)
class Cloak:
    """What a client does to an image before it asks: kept features get noise, the others are the same in all images."""

    shift: Tensor  # (C, H, W), mu, added to the kept features
    sigma: Tensor  # (C, H, W), the deviation of each one's noise, in pixels from 0 to 1
    kept: Tensor  # (C, H, W), bool
    constants: Tensor  # (C, H, W), what stands in place of the others
    clamped: bool  # whether what is sent is put back onto [0, 1], as endpoints of images want it

    def hide(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return images (n, C, H, W) as they are sent, each with noise of its own."""
        noise = torch.randn(images.shape, generator=generator, dtype=images.dtype)
        sent = torch.where(self.kept, images + self.shift + self.sigma * noise, self.constants)
        return (sent.clamp(0, 1) if self.clamped else sent).to(images.dtype)

    def bits(self, variances: Tensor) -> float:
        """Return what one sent image tells of the image at most, in bits, whatever the data look like.

        The sum of log2(1 + variance / sigma^2) / 2 over the kept features: the capacity of as many Gaussian channels
        (Cover and Thomas, Elements of Information Theory, section 9.4), which features that depend on one another do
        not reach. Clamping tells no more. Of an image that is sent k times it is at most k times as much.
        """
        ratio = torch.where(self.kept, variances / self.sigma.square(), torch.zeros_like(variances))
        return float((torch.log2(1 + ratio) / 2).sum())


@dataclass(frozen=True)
class Learning:
    """How noise is learnt."""

    weight: float  # lambda, of the cross entropy against -log of the noise power
    least: float = 1e-3  # m, of each deviation, above 0
    most: float = 1.5  # M, of each deviation, above `least`
    steps: int = 1500  # of Adam
    rate: float = 0.05  # of its steps
    batch: int = 128  # images of a step
    clamped: bool = False  # as in Cloak

    def deviations(self, rho: Tensor) -> Tensor:
        """Return sigma = m + (1 + tanh rho) (M - m) / 2, from m to M."""
        return self.least + (1 + torch.tanh(rho)) * (self.most - self.least) / 2


def uniform_noise(shape: Sequence[int], sigma: float, clamped: bool) -> Cloak:
    """Return what Cloak is compared with: one deviation for all features (C, H, W), nothing shifted or suppressed."""
    nothing = torch.zeros(shape, dtype=torch.float64)
    return Cloak(nothing, nothing + sigma, nothing == 0, nothing, clamped)


def cloak_loss(
    model: Network, cloak: Cloak, weight: float, images: Tensor, labels: Tensor, generator: torch.Generator
) -> Tensor:
    """Return -log mean sigma^2 + lambda CE(f(x + mu + sigma z), y), a number, differentiable in shift and sigma."""
    entropy = functional.cross_entropy(model(cloak.hide(images, generator)), labels)
    return weight * entropy - cloak.sigma.square().mean().log()


def learn_noise(
    model: Network, images: Tensor, labels: Tensor, learning: Learning, generator: torch.Generator
) -> Cloak:
    """Learn shift and deviations on public images: what is learnt from somebody's own images may tell of them."""
    shift = torch.zeros(images.shape[1:], dtype=images.dtype, requires_grad=True)
    rho = torch.full_like(shift, _START).requires_grad_()
    even = uniform_noise(images.shape[1:], 1.0, learning.clamped)

    def loss(batch: Tensor, wanted: Tensor) -> Tensor:
        cloak = replace(even, shift=shift, sigma=learning.deviations(rho))
        return cloak_loss(model, cloak, learning.weight, batch, wanted, generator)

    descend([shift, rho], loss, images, labels, learning.steps, learning.batch, learning.rate, generator)
    return replace(even, shift=shift.detach(), sigma=learning.deviations(rho).detach())


def suppress(
    cloak: Cloak,
    threshold: float,
    model: Network,
    images: Tensor,
    labels: Tensor,
    learning: Learning,
    generator: torch.Generator,
) -> Cloak:
    """Send a constant in place of each feature whose deviation is above a threshold, trained for the cross entropy."""
    kept = cloak.sigma <= threshold
    constants = (images.mean(dim=0) + cloak.shift).requires_grad_()

    def loss(batch: Tensor, wanted: Tensor) -> Tensor:
        sent = replace(cloak, kept=kept, constants=constants).hide(batch, generator)
        return functional.cross_entropy(model(sent), wanted)

    descend([constants], loss, images, labels, learning.steps, learning.batch, learning.rate, generator)
    return replace(cloak, kept=kept, constants=constants.detach())


# What a curious endpoint reads out of the images that it is asked about, when people put noise on them.
#
# It knows what noise that is (Kerckhoffs), and has public images with the attribute that it is after. First it takes
# off as much noise as a linear filter can; then a network learns from public images, sent as people send theirs, with
# fresh noise at every step.


Rates = NDArray[np.float64]
"""One an image: the share of draws of noise in which it was read, or answered, correctly."""

DRAWS = 4  # of noise, that each judged image is sent with
_TWO_SIDED = 1.96
# Even noise is searched for up to this deviation, in pixels from 0 to 1, to a thousandth of it.
_LARGEST, _HALVINGS = 8.0, 12
_FREE = 0.0025  # of the accuracy: what noise that is hardly there may cost


@dataclass(frozen=True)
class Training:
    """How an adversary's network is trained, by Adam."""

    steps: int  # each with fresh noise
    filtered: bool = True  # whether noise is taken off first
    batch: int = 128  # images of a step
    rate: float = 1e-3  # of its steps


@dataclass(frozen=True, eq=False)
class Reader:
    """A network behind a linear filter, in float32."""

    network: nn.Module  # filtered images -> logits of the attribute
    sent: Tensor  # (d,), mean of public images as they are sent
    # what images less `sent` are multiplied by, (d, r) and (r, d), or (d, d); empty: nothing
    factors: tuple[Tensor, ...]
    scale: Tensor  # that what comes out is divided by

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (n, values) for images (n, C, H, W) as they are sent."""
        flat = images.float().flatten(1) - self.sent
        for factor in self.factors:
            flat = flat @ factor
        return self.network((flat / self.scale).view(images.shape))


def linear_filter(images: Tensor, cloak: Cloak) -> tuple[Tensor, ...]:
    """Return the best linear estimate of images from what is sent: what to multiply deviations from the mean by.

    With S the covariance of public images and D that of the noise, S (S + D)^-1 (Wiener 1949), transposed. What is
    suppressed is noise without end, and is estimated from what is kept. Clamping is not taken into account. It is
    one factor (d, d), or (d, r) and (r, d) where that is less work.
    """
    flat = images.flatten(1)
    root = (flat - flat.mean(dim=0)) / len(flat) ** 0.5  # S = root^T root
    if len(root) > root.shape[1]:
        root = torch.linalg.qr(root).R
    precision = torch.where(cloak.kept, cloak.sigma**-2, torch.zeros_like(cloak.sigma)).flatten()
    weighed = root * precision
    inner = torch.linalg.solve(torch.eye(len(root), dtype=root.dtype) + weighed @ root.T, root)
    if 2 * len(root) < root.shape[1]:
        return weighed.T, inner
    return (weighed.T @ inner,)


def trained_reader(
    network: nn.Module, cloak: Cloak, images: Tensor, wanted: Tensor, training: Training, seed: int
) -> Reader:
    """Train a network, in place, to read the attribute ``wanted`` (n,) out of what is sent of public images."""
    stream = torch_stream(seed, "probe-reading")
    factors = tuple(factor.float() for factor in linear_filter(images, cloak)) if training.filtered else ()
    sent = cloak.hide(images, stream).float().flatten(1)
    scale = images.flatten(1).std(dim=0).square().mean().sqrt().float()
    reader = Reader(network.train(), sent.mean(dim=0), factors, scale)

    def loss(batch: Tensor, told: Tensor) -> Tensor:
        return functional.cross_entropy(reader.logits(cloak.hide(batch, stream)), told)

    descend(network.parameters(), loss, images, wanted, training.steps, training.batch, training.rate, stream)
    network.eval().requires_grad_(False)
    return reader


def right_rates(network: Network, cloak: Cloak, images: Tensor, wanted: Tensor, seed: int) -> Rates:
    """Return how often the largest logit is the wanted one, (n,), over draws that are the same for all compared."""
    stream = torch_stream(seed, "probe-sent")
    right = torch.zeros(len(images), dtype=torch.float64)
    for _ in range(DRAWS):
        right += outputs(network, cloak.hide(images, stream)).argmax(dim=1) == wanted
    return (right / DRAWS).numpy()


def mean_interval(values: Rates) -> Interval:
    """Return the mean of values, one an image, and its normal interval of 95 %; at least two images."""
    mean, reach = float(values.mean()), _TWO_SIDED * float(values.std(ddof=1)) / len(values) ** 0.5
    return Interval(mean, mean - reach, mean + reach, CONFIDENCE)


def equal_uniform(answers: Network, accuracy: float, images: Tensor, labels: Tensor, seed: int, clamped: bool) -> Cloak:
    """Return the strongest even noise with which answers stay as often right as wanted, by bisection."""

    def accurate(sigma: float) -> float:
        cloak = uniform_noise(images.shape[1:], sigma, clamped)
        return float(right_rates(answers, cloak, images, labels, seed).mean())

    wanted = min(accuracy, accurate(0.0)) - _FREE
    low, high = 0.0, _LARGEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if accurate(middle) >= wanted else (low, middle)
    return uniform_noise(images.shape[1:], low, clamped)


# The game that Cloak is judged by: what a curious endpoint reads, and how often its answer is correct.


ENOUGH, EQUAL = 0.02, 0.01
"""Points by which the adversary must stay below uniform noise, and by which accuracies may differ."""
_NO_THEOREM = "a heuristic: nothing is proven about what a cloaked image tells"
_BITS = (
    "itself an upper bound, of as many Gaussian channels, whatever the data (Cover and Thomas, section 9.4); the "
    "variances are those of public images"
)


@dataclass(frozen=True, eq=False)
class CloakTrial:
    """What one kind of noise came to, on images that nobody learnt from."""

    cloak: Cloak  # the noise
    answered: Rates  # how often the model's answer is correct, for each image
    read: Rates  # how often the adversary names the attribute, an image
    bits: float  # that a sent image tells of the image at most


@dataclass(frozen=True, eq=False)
class Game:
    """Who plays, and on which images."""

    answers: Network  # of the model: images as they are sent -> logits of its task
    public: Public  # images with the labels of the task; noise is learnt on them, and the adversary learns from them
    held: Public  # images that both are judged on
    wanted: tuple[Tensor, Tensor]  # the attribute of the public images (N,), and of those held (M,)
    network: Callable[[], nn.Module]  # an untrained network of the adversary's, images -> logits of the attribute
    training: Training  # of that network
    clamped: bool  # whether images are put back onto [0, 1] before they are sent
    seed: int  # of all draws

    @property
    def majority(self) -> float:
        """How often an endpoint is correct that looks at no image and names the most common label."""
        return float(self.held.labels.bincount().max()) / len(self.held.labels)

    @property
    def guess(self) -> float:
        """How often somebody is right who hears the task's label alone, and names what goes with it most often."""
        pairs = torch.stack([self.held.labels, self.wanted[1]], dim=1).unique(dim=0, return_counts=True)
        most = np.zeros(int(self.held.labels.max()) + 1)
        np.maximum.at(most, pairs[0][:, 0].numpy(), pairs[1].numpy())
        return float(most.sum()) / len(self.held.labels)

    def trial(self, cloak: Cloak) -> CloakTrial:
        """Train the adversary behind some noise, and judge both sides."""
        training = self.training if bool((cloak.sigma > 0).all()) else replace(self.training, filtered=False)
        reader = trained_reader(self.network(), cloak, self.public.images, self.wanted[0], training, self.seed)
        return CloakTrial(
            cloak,
            right_rates(self.answers, cloak, self.held.images, self.held.labels, self.seed),
            right_rates(reader.logits, cloak, self.held.images, self.wanted[1], self.seed),
            cloak.bits(self.public.images.var(dim=0)),
        )

    def untouched(self) -> CloakTrial:
        """What comes of images that are sent as they are."""
        return self.trial(uniform_noise(self.held.images.shape[1:], 0.0, self.clamped))

    def beside(self, trial: CloakTrial) -> CloakTrial:
        """What uniform noise comes to that costs the same accuracy."""
        accuracy = float(trial.answered.mean())
        return self.trial(
            equal_uniform(self.answers, accuracy, self.held.images, self.held.labels, self.seed, self.clamped)
        )


def substitute(scene: ProbeScene) -> tuple[Network, int]:
    """Return a copy of the model from its answers to mixed public images, and how many it took."""
    endpoint = scene.open()
    images = mixed_images(scene.known_public(), scene.budget, numpy_stream(scene.seed, "probe-substitute"))
    copy = trained_copy(scene, images, probabilities(endpoint.ask(images), scene.classes))
    return copy, endpoint.asked


def trial_figures(
    trials: Mapping[str, CloakTrial], clean: CloakTrial, guess: float, majority: float
) -> tuple[Figure, ...]:
    """Return what each kind of noise came to, in words -> trial, between a guess and images sent as they are."""
    read = [
        Figure(
            f"attribute read, {words}", mean_interval(trial.read), guess, float(clean.read.mean()), theorem=_NO_THEOREM
        )
        for words, trial in trials.items()
    ]
    answered = [
        Figure(
            f"right answers, {words}",
            mean_interval(trial.answered),
            majority,
            float(clean.answered.mean()),
            theorem="no theorem bounds the accuracy",
        )
        for words, trial in trials.items()
    ]
    bits = [
        Figure(f"bits, {words}", Interval(trial.bits, None, None), theorem=_BITS, unit="number")
        for words, trial in trials.items()
    ]
    return (*read, *answered, *bits)


def suppression_figures(cloak: Cloak, images: Tensor) -> tuple[Figure, ...]:
    """Return the shares of features that are the same in all images, and of those ever above 0; or nothing."""
    if bool(cloak.kept.all()):
        return ()
    lit = (images > 0).any(dim=0)
    shares = {
        "pixels suppressed": ~cloak.kept,
        "pixels suppressed, of those that are ever lit": ~cloak.kept[lit],
    }
    return tuple(
        Figure(words, Interval(float(part.double().mean()), None, None), theorem=_NO_THEOREM)
        for words, part in shares.items()
    )


def verdict(cloaked: CloakTrial, uniform: CloakTrial, majority: float) -> str:
    """Say whether learnt noise is better than uniform noise that costs the same accuracy."""
    costs, usual = float(cloaked.answered.mean()), float(uniform.answered.mean())
    sigma = f"sigma {float(uniform.cloak.sigma.max()):.3g}"
    if costs <= majority:
        return (
            f"Cloak is not better than uniform noise: {costs:.1%} of the answers are right, no more than by "
            f"always naming the commonest group ({majority:.1%})."
        )
    if abs(costs - usual) > EQUAL:
        return (
            f"Cloak is not compared: {costs:.1%} of the answers are right, and no uniform noise costs that; the "
            f"nearest, {sigma}, leaves {usual:.1%}."
        )
    less = mean_interval(uniform.read - cloaked.read)
    low, high = 100 * (less.low or 0), 100 * (less.high or 0)
    words = (
        f"At about the same accuracy ({costs:.1%}, and {usual:.1%} with uniform noise of {sigma}) the attribute is "
        f"read from {cloaked.read.mean():.1%} of the cloaked images and {uniform.read.mean():.1%} of the others "
        f"(difference {100 * less.value:.1f} points, 95 %: {low:.1f} to {high:.1f}; at least {100 * ENOUGH:g} count as "
        "better)."
    )
    if less.value < ENOUGH:
        return f"Cloak hides no more than uniform noise. {words}"
    if low <= 0:
        return f"Cloak is not shown to hide more than uniform noise. {words}"
    return f"Cloak hides more than uniform noise from this adversary. {words}"


_SHOWN = 3  # images in the report
_HEURISTIC = "Cloak is a heuristic: nothing is proven."


def _file(*parts: str) -> str:
    """A name of a picture, without spaces and signs."""
    return re.sub("[^a-z0-9.]+", "-", " ".join(parts).lower()) + ".png"


def _pictures(game: Game, cloaked: CloakTrial, uniform: CloakTrial, most: float) -> dict[tuple[str, str], Tensor]:
    """The first images held, as they are and as they are sent, and where the noise is: (kind, what) -> image."""
    images = game.held.images[:_SHOWN]
    sent = {
        "Original": images,
        "Cloaked": cloaked.cloak.hide(images, torch_stream(game.seed, "probe-shown")),
        "Uniform noise": uniform.cloak.hide(images, torch_stream(game.seed, "probe-shown")),
    }
    shots = {
        (kind, f"Test image {number + 1}"): image for number in range(len(images)) for kind, batch in sent.items()
        for image in [batch[number].clamp(0, 1)]
    }  # fmt: skip
    return {("Noise", "White: the most"): cloaked.cloak.sigma / most, **shots}


@PROBES.register
class CloakedQuestions(ModelAttack):
    """People learn noise for what they ask; whoever answers trains a network to read an attribute out of it."""

    name: ClassVar[str] = "cloak"
    title: ClassVar[str] = "Reading cloaked questions (Cloak)"
    reference: ClassVar[str] = (
        "Mireshghallah et al.: Not All Features Are Equal: Discovering Essential Features for Preserving Prediction "
        "Privacy, WWW 2021"
    )
    needs: ClassVar[tuple[Access, ...]] = (Access.QUESTIONS, Access.PUBLIC_DATA)
    adversary: ClassVar[str] = "curious-endpoint"

    attribute: Groups | None = Field(
        None, description="groups of the data set's classes, which the adversary tells apart; unset: every class"
    )
    gradient: Literal["model", "answers"] = Field(
        "model", description="what people learn noise with; answers: a copy of the model, trained on its answers"
    )
    weights: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        (3.0, 30.0), description="lambda: of the cross entropy against the noise; one variant for each"
    )
    least: Positive = Field(1e-3, description="m, of a deviation, in pixels from 0 to 1")
    most: Positive = Field(1.5, description="M, of a deviation")
    threshold: Positive = Field(0.75, description="T: pixels with larger deviations are suppressed")
    steps: Count = Field(600, description="in which noise is learnt, and then the constants")
    rate: Positive = Field(0.05, description="of these steps (Adam)")
    clamped: bool = Field(True, description="put images back onto [0, 1], as endpoints want them; false: as published")
    network: Annotated[str, Registered(MODELS)] = Field("strided", description="of the adversary, with its defaults")
    filtered: bool = Field(True, description="whether the adversary takes off noise by a linear filter first")
    training: Count = Field(400, description="steps of the adversary's network")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.least >= self.most:
            raise InputError(key="least", given=self.least, allowed=f"not below most = {self.most:g}")
        return self

    @override
    def refusal(self, scene: ProbeScene) -> str | None:
        if not scene.finer_classes:
            return (
                f"{self.name} needs an attribute other than the model's task: a run with data.groups, such as "
                "[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]], whose task is the group"
            )
        return None

    @override
    def run(self, scene: ProbeScene, referee: ProbeReferee) -> tuple[ProbeOutcome, ...]:
        """Play the game with each weight's noise, and with features suppressed where some are."""
        game = self._game(scene, referee)
        if self.gradient == "answers":
            teacher, asked = substitute(scene)
        elif scene.model is None:
            raise ValueError("the scene has no model")
        else:
            teacher, asked = scene.model, 0
        clean = game.untouched()
        *outcomes, last = (
            self._outcome(game, clean, words, trial, asked)
            for number, weight in enumerate(self.weights)
            for words, trial in self._trials(game, teacher, weight, number)
        )
        # Said once, and not of each variant.
        result = replace(last.result, sentences=(*last.result.sentences, _HEURISTIC))
        return (*outcomes, replace(last, result=result))

    def _game(self, scene: ProbeScene, referee: ProbeReferee) -> Game:
        """Who plays."""
        public, held = scene.known_public(), referee.held
        if public.finer is None or held.finer is None:
            raise ValueError("the images have no finer classes")
        classes = scene.finer_classes
        groups = self.attribute or tuple((label,) for label in range(classes))
        numbers = group_numbers(groups, classes, f"{self.name}.attribute")
        game = Game(
            referee.truth, public, held, (numbers[public.finer], numbers[held.finer]),
            lambda: build_model(MODELS[self.network](), scene.shape, len(groups), scene.seed),
            Training(self.training, self.filtered), self.clamped, scene.seed,
        )  # fmt: skip
        if game.guess == 1 or not len(torch.unique(game.wanted[1])) > 1:
            raise InputError(f"{self.name}.attribute follows from the model's task: there is nothing to hide")
        return game

    def _trials(self, game: Game, teacher: Network, weight: float, number: int) -> Iterator[tuple[str, CloakTrial]]:
        """The learnt noise, and the same with features suppressed where some are."""
        learning = Learning(weight, self.least, self.most, self.steps, self.rate, clamped=self.clamped)
        stream = torch_stream(game.seed, "probe-cloak", number)
        images, labels = game.public.images, game.public.labels
        learnt = learn_noise(teacher, images, labels, learning, stream)
        yield f"lambda {weight:g}", game.trial(learnt)
        few = suppress(learnt, self.threshold, teacher, images, labels, learning, stream)
        if not bool(few.kept.all()):
            yield f"lambda {weight:g}, suppressed above {self.threshold:g}", game.trial(few)

    def _outcome(self, game: Game, clean: CloakTrial, words: str, cloaked: CloakTrial, asked: int) -> ProbeOutcome:
        uniform = game.beside(cloaked)
        figures = trial_figures({"cloaked": cloaked, "uniform noise": uniform}, clean, game.guess, game.majority)
        figures += suppression_figures(cloaked.cloak, game.public.images)
        variant = words if self.gradient == "model" else f"{words}, learnt from answers"
        pictures = _pictures(game, cloaked, uniform, self.most)
        files = {_file(self.name, variant, *words): words for words in pictures}
        shown = tuple(Shown(file, *words) for file, words in files.items())
        images = {file: pictures[words] for file, words in files.items()}
        sentence = verdict(cloaked, uniform, game.majority)
        return self.outcome(asked, figures, sentence, variant=variant, pictures=images, shown=shown)
