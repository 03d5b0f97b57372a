"""The attack ``text_map``: see :mod:`~fedpriv.attacks.texts.search.climb`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from fedpriv.attacks.methods.text_map import TextMapSettings
from fedpriv.attacks.reconstruction.posterior import misfit
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Progress
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.scene import Reading, TextScene
from fedpriv.attacks.texts.search.climb import Climb, Reached, Tell
from fedpriv.attacks.texts.search.ground import Ground
from fedpriv.attacks.texts.search.language import Language
from fedpriv.attacks.texts.search.scoring import Texts

__all__ = ["most_probable"]


def most_probable(
    scene: TextScene, victim: Victim, config: TextMapSettings, seed: int, progress: Progress | None
) -> Reading:
    """Read the sentences behind one upload; the first start is at what the tables show, if they show anything.

    Raises:
        AttackRefused: the noise went through Adam's steps, of which no density is known, or there is no prior.
    """
    model = victim.model
    if model.training is not None and model.training.optimizer == "adam" and model.protects_examples:
        raise AttackRefused(
            "what is most probable follows from the distribution of the upload, and that of noise behind Adam's steps "
            "is not known"
        )
    language = Language.of(scene, config.language_model)
    ground = Ground.of(scene, victim)
    climb = Climb(scene, victim, ground.soft, misfit, language)

    def tell(done: int, loss: float) -> None:
        if progress is not None:
            progress(done, config.iterations, loss)

    labels = ground.labels.clamp(min=0)  # where none is told, the search begins with the first
    attempts = []
    for restart in range(config.restarts):
        stream = scene.stream(seed, config.name, victim, restart)
        starts = [climb.at(Texts(ground.drawn(lengths, language, stream), labels)) for lengths in ground.starts]
        if restart == 0 and ground.lookup is not None and ground.lookup.places is not None:
            read = ground.lookup.sentences(scene, model.examples, language)
            starts[-1] = _better(starts[-1], climb.at(Texts(read, labels)))
        ended = climb.climb(_most_promising(climb, starts, config.iterations // 4, tell), config.iterations, tell)
        for _ in range(config.kicks):
            if ended.rounds >= config.iterations:
                break
            again = climb.climb(climb.kicked(ended, stream), config.iterations, tell)
            ended = replace(_better(ended, again), rounds=again.rounds)
        attempts.append(ground.sentences(ended.texts, ended.loss, ended.rounds))
    return Reading(tuple(attempts), language.title)


def _better(one: Reached, other: Reached) -> Reached:
    return min(one, other, key=lambda reached: reached.loss)


def _most_promising(climb: Climb, starts: Sequence[Reached], rounds: int, tell: Tell) -> Reached:
    """Where the best of several starts is after their shares of so many rounds; the only one stays where it is."""
    if len(starts) == 1:
        return starts[0]
    made = [climb.climb(start, rounds // len(starts), tell) for start in starts]
    return replace(reduce(_better, made), rounds=0)
