"""The game that Cloak is judged by: what a curious endpoint reads, and how often its answer is correct."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedpriv.attacks.endpoint.reading import (
    Rates,
    Training,
    equal_uniform,
    mean_interval,
    right_rates,
    trained_reader,
)
from fedpriv.attacks.endpoint.scene import Network, Public, Scene, probabilities
from fedpriv.cloak import Cloak, uniform_noise
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Interval, ProbeFigure

__all__ = ["Game", "Trial", "substitute", "suppression_figures", "trial_figures", "verdict"]

ENOUGH, EQUAL = 0.02, 0.01
"""Points by which the adversary must stay below uniform noise, and by which accuracies may differ."""
_NO_THEOREM = "a heuristic: nothing is proven about what a cloaked image tells"
_BITS = (
    "itself an upper bound, of as many Gaussian channels, whatever the data (Cover and Thomas, section 9.4); the "
    "variances are those of public images"
)


@dataclass(frozen=True, eq=False)
class Trial:
    """What one kind of noise came to, on images that nobody learnt from.

    Attributes:
        cloak: the noise.
        answered: how often the model's answer is correct, for each image.
        read: how often the adversary names the attribute, an image.
        bits: that a sent image tells of the image at most.
    """

    cloak: Cloak
    answered: Rates
    read: Rates
    bits: float


@dataclass(frozen=True, eq=False)
class Game:
    """Who plays, and on which images.

    Attributes:
        answers: of the model: images as they are sent -> logits of its task.
        public: images with the labels of the task; noise is learnt on them, and the adversary learns from them.
        held: images that both are judged on.
        wanted: the attribute of the public images (N,), and of those held (M,).
        network: an untrained network of the adversary's, images -> logits of the attribute.
        training: of that network.
        clamped: whether images are put back onto [0, 1] before they are sent.
        seed: of all draws.
    """

    answers: Network
    public: Public
    held: Public
    wanted: tuple[Tensor, Tensor]
    network: Callable[[], nn.Module]
    training: Training
    clamped: bool
    seed: int

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

    def trial(self, cloak: Cloak) -> Trial:
        """Train the adversary behind some noise, and judge both sides."""
        training = self.training if bool((cloak.sigma > 0).all()) else replace(self.training, filtered=False)
        reader = trained_reader(self.network(), cloak, self.public.images, self.wanted[0], training, self.seed)
        return Trial(
            cloak,
            right_rates(self.answers, cloak, self.held.images, self.held.labels, self.seed),
            right_rates(reader.logits, cloak, self.held.images, self.wanted[1], self.seed),
            cloak.bits(self.public.images.var(dim=0)),
        )

    def untouched(self) -> Trial:
        """What comes of images that are sent as they are."""
        return self.trial(uniform_noise(self.held.images.shape[1:], 0.0, self.clamped))

    def beside(self, trial: Trial) -> Trial:
        """What uniform noise comes to that costs the same accuracy."""
        accuracy = float(trial.answered.mean())
        return self.trial(
            equal_uniform(self.answers, accuracy, self.held.images, self.held.labels, self.seed, self.clamped)
        )


def substitute(scene: Scene) -> tuple[Network, int]:
    """Return a copy of the model from its answers to mixed public images, and how many it took.

    Raises:
        InputError: there are no public images.
    """
    from fedpriv.attacks.endpoint.copies import mixed_images, trained_copy

    endpoint = scene.open()
    images = mixed_images(scene.known_public(), scene.budget, numpy_stream(scene.seed, "probe-substitute"))
    copy = trained_copy(scene, images, probabilities(endpoint.ask(images), scene.classes))
    return copy, endpoint.asked


def trial_figures(trials: Mapping[str, Trial], clean: Trial, guess: float, majority: float) -> tuple[ProbeFigure, ...]:
    """Return what each kind of noise came to, in words -> trial, between a guess and images sent as they are.

    Args:
        trials: by what they are called.
        clean: without noise.
        guess: of the attribute.
        majority: of right answers, without a look at any image.
    """
    read = [
        ProbeFigure(
            f"attribute read, {words}", mean_interval(trial.read), guess, float(clean.read.mean()), theorem=_NO_THEOREM
        )
        for words, trial in trials.items()
    ]
    answered = [
        ProbeFigure(
            f"right answers, {words}",
            mean_interval(trial.answered),
            majority,
            float(clean.answered.mean()),
            theorem="no theorem bounds the accuracy",
        )
        for words, trial in trials.items()
    ]
    bits = [
        ProbeFigure(f"bits, {words}", Interval(trial.bits, None, None), theorem=_BITS, unit="number")
        for words, trial in trials.items()
    ]
    return (*read, *answered, *bits)


def suppression_figures(cloak: Cloak, images: Tensor) -> tuple[ProbeFigure, ...]:
    """Return the shares of features that are the same in all images: of all, and of those that are ever above 0.

    Nothing, where none is suppressed.

    Args:
        cloak: what people do to images.
        images: (n, C, H, W), public.
    """
    if bool(cloak.kept.all()):
        return ()
    lit = (images > 0).any(dim=0)
    shares = {
        "pixels suppressed": ~cloak.kept,
        "pixels suppressed, of those that are ever lit": ~cloak.kept[lit],
    }
    return tuple(
        ProbeFigure(words, Interval(float(part.double().mean()), None, None), theorem=_NO_THEOREM)
        for words, part in shares.items()
    )


def verdict(cloaked: Trial, uniform: Trial, majority: float) -> str:
    """Say whether learnt noise is better than uniform noise that costs the same accuracy.

    Args:
        cloaked: what learnt noise came to.
        uniform: the other one.
        majority: how often answers are right that name the commonest group.
    """
    costs, usual = float(cloaked.answered.mean()), float(uniform.answered.mean())
    sigma = f"sigma {float(uniform.cloak.sigma.max()):.3g}"
    if costs <= majority:
        return (
            f"Cloak is not better than uniform noise: {costs:.1%} of the answers are right, no more than of whoever "
            f"names the commonest group each time ({majority:.1%})."
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
