"""The attack ``lamp``: Adam over vectors, in turn with the same vectors in another order."""

import torch
from torch import Tensor

from fedpriv.attacks.methods.lamp import LampSettings
from fedpriv.attacks.reconstruction.matching import angle
from fedpriv.attacks.reconstruction.scene import Progress
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.scene import Reading, Sentences, TextScene
from fedpriv.attacks.texts.search.descent import Penalty, Vectors
from fedpriv.attacks.texts.search.ground import Ground
from fedpriv.attacks.texts.search.language import Language
from fedpriv.attacks.texts.search.mismatch import squared_and_absolute, tensor_angle

__all__ = ["reordered", "vectors_and_orders"]

FALL, FALLS = 0.89, 50  # the learning rate is multiplied by the first each so many steps


def vectors_and_orders(
    scene: TextScene, victim: Victim, config: LampSettings, seed: int, progress: Progress | None
) -> Reading:
    """Read the sentences behind one upload.

    Raises:
        AttackRefused: the next token is predicted, or there is no language model.
    """
    language = Language.of(scene, config.language_model)
    ground = Ground.of(scene, victim)
    attempts = tuple(
        _attempt(ground, language, config, scene.stream(seed, config.name, victim, restart), progress)
        for restart in range(config.restarts)
    )
    return Reading(attempts, language.title)


def _attempt(
    ground: Ground, language: Language, config: LampSettings, stream: torch.Generator, progress: Progress | None
) -> Sentences:
    objectives = {"cosine": tensor_angle, "whole": angle, "distance": squared_and_absolute(config.alpha)}
    objective = objectives[config.objective]
    vectors = Vectors(ground, objective, _length(ground.table, config.length), stream)
    loss, done = float("inf"), 0

    def tell(step: int, now: float) -> None:
        if progress is not None:
            progress(done + step + 1, config.iterations, now)

    def rate(step: int) -> float:
        return config.learning_rate * FALL ** ((done + step) // FALLS)

    while done < config.iterations:
        steps = min(config.every, config.iterations - done)
        vectors.descend(steps, rate, tell)
        done += steps
        loss = _reorder(vectors, language, config, stream)
    return ground.sentences(vectors.texts(vectors.now), loss, done)


def _reorder(vectors: Vectors, language: Language, config: LampSettings, stream: torch.Generator) -> float:
    """Take the best of some orders by mismatch and language model, or the order as it is; return its loss."""
    now = vectors.now
    lengths = (now != 0).any(dim=2).sum(dim=1).tolist()
    tried = torch.stack([now, *(reordered(now, lengths, stream) for _ in range(config.orders))])
    with torch.no_grad():
        losses = vectors.losses(tried)
    for number, batch in enumerate(tried):
        tokens = vectors.texts(batch).tokens
        losses[number] += config.language * float(language.surprise(tokens).sum()) / sum(lengths)
    best = int(losses.nan_to_num(torch.inf).argmin())
    vectors.now = tried[best].clone()
    return float(losses[best])


def reordered(vectors: Tensor, lengths: list[int], stream: torch.Generator) -> Tensor:
    """Return vectors (B, T, width) with two of one sentence exchanged, or one, or some in a row, moved elsewhere.

    Args:
        vectors: the first of each sentence stays where it is.
        lengths: of the B sentences.
        stream: of random numbers.
    """
    made = vectors.clone()
    one = int(torch.randint(len(lengths), (), generator=stream))
    if lengths[one] < 3:
        return made
    kind, first, second, third = (int(torch.randint(1, top, (), generator=stream)) for top in (4, *[lengths[one]] * 3))
    order = list(range(lengths[one]))
    if kind == 1:
        order[first], order[second] = order[second], order[first]
    else:
        begin, end = sorted((first, third)) if kind == 3 else (first, first)
        taken, rest = order[begin : end + 1], order[:begin] + order[end + 1 :]
        place = min(second, len(rest))
        order = rest[:place] + taken + rest[place:]
    made[one, : lengths[one]] = vectors[one, torch.tensor(order, device=vectors.device)]
    return made


def _length(table: Tensor, weight: float) -> Penalty:
    """The squared distance of the vectors' mean length from that of all tokens', as a share of the latter."""
    usual = table.norm(dim=1).mean()

    def penalty(vectors: Tensor) -> Tensor:
        filled = (vectors != 0).any(dim=3)
        lengths = vectors.square().sum(dim=3).clamp(min=1e-20).sqrt() * filled
        mean = lengths.sum(dim=(1, 2)) / filled.sum(dim=(1, 2))
        away: Tensor = mean / usual - 1
        return weight * away.square().double()

    return penalty
