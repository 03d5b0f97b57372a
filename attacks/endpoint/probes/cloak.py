"""What a curious endpoint reads out of cloaked questions, beside uniform noise that costs the same accuracy."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.attacks.access import Access
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.errors import InputError
from fedpriv.core.registry import MODELS, PROBES
from fedpriv.core.settings import Count, Groups, Positive, Registered

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.attacks.endpoint.cloak import CloakTrial, Game, Learning
    from fedpriv.attacks.scene import Network, ProbeReferee, ProbeScene

_SHOWN = 3  # images in the report
_HEURISTIC = "Cloak is a heuristic: nothing is proven."


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
    def refusal(self, scene: "ProbeScene") -> str | None:
        if not scene.finer_classes:
            return (
                f"{self.name} needs an attribute other than the model's task: a run with data.groups, such as "
                "[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]], whose task is the group"
            )
        return None

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        from fedpriv.attacks.endpoint.cloak import substitute

        game = self._game(scene, referee)
        if self.gradient == "answers":
            teacher, asked = substitute(scene)
        elif scene.model is None:
            raise ValueError("the scene has no model")
        else:
            teacher, asked = scene.model, 0
        clean = game.untouched()
        *pictures, last = (
            self._finding(game, clean, words, trial, asked)
            for number, weight in enumerate(self.weights)
            for words, trial in self._trials(game, teacher, weight, number)
        )
        # Said once, and not of each variant.
        result = replace(last.result, sentences=(*last.result.sentences, _HEURISTIC))
        return (*pictures, replace(last, result=result))

    def _game(self, scene: "ProbeScene", referee: "ProbeReferee") -> "Game":
        """Who plays."""
        import torch

        from fedpriv.attacks.endpoint.cloak import Game, Training
        from fedpriv.core.errors import InputError
        from fedpriv.data.datasets import group_numbers
        from fedpriv.models.machinery.build import build_model

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

    def _trials(
        self, game: "Game", teacher: "Network", weight: float, number: int
    ) -> "Iterator[tuple[str, CloakTrial]]":
        """The learnt noise, and the same with features suppressed where some are."""
        from fedpriv.attacks.endpoint.cloak import learn_noise, suppress
        from fedpriv.core.randomness import torch_stream

        learning, stream = self._learning(weight), torch_stream(game.seed, "probe-cloak", number)
        images, labels = game.public.images, game.public.labels
        learnt = learn_noise(teacher, images, labels, learning, stream)
        yield f"lambda {weight:g}", game.trial(learnt)
        few = suppress(learnt, self.threshold, teacher, images, labels, learning, stream)
        if not bool(few.kept.all()):
            yield f"lambda {weight:g}, suppressed above {self.threshold:g}", game.trial(few)

    def _learning(self, weight: float) -> "Learning":
        from fedpriv.attacks.endpoint.cloak import Learning

        return Learning(weight, self.least, self.most, self.steps, self.rate, clamped=self.clamped)

    def _finding(
        self, game: "Game", clean: "CloakTrial", words: str, cloaked: "CloakTrial", asked: int
    ) -> ProbeOutcome:
        from fedpriv.attacks.endpoint.cloak import suppression_figures, trial_figures, verdict
        from fedpriv.attacks.probing import Shown

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


def _file(*parts: str) -> str:
    """A name of a picture, without spaces and signs."""
    return re.sub("[^a-z0-9.]+", "-", " ".join(parts).lower()) + ".png"


def _pictures(
    game: "Game", cloaked: "CloakTrial", uniform: "CloakTrial", most: float
) -> "dict[tuple[str, str], Tensor]":
    """The first images held, as they are and as they are sent, and where the noise is: (kind, what) -> image."""
    from fedpriv.core.randomness import torch_stream

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
