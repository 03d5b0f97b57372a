"""Several uploads of one and the same batch, attacked as one victim: noise is drawn anew, the images stay.

Uploads that started from the same parameters have the same expectation, whatever the mechanism, and noise of their own:
they are averaged, and the noise's variance falls with their number. Uploads that started from other parameters, as in
later rounds, cannot be averaged. They are matched at once: one dummy batch, and the sum of the mismatches over the
uploads, each with its own parameters (for likelihoods that is the joint likelihood).

Uploads of other mini-batches in each round, of one client's images, are neither. But the gradients of a first Linear
layer are combinations of these images in all rounds: stacked, they show them together (:class:`OtherBatches`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["Heard", "OtherBatches", "join", "other_batches", "stack", "stackable", "uploads_of"]


MOST = 128  # images of a client that its rounds show together


@dataclass(frozen=True)
class OtherBatches:
    """Uploads of one client in several rounds, of other mini-batches of its images.

    Attributes:
        observations: at least two.
    """

    observations: tuple[Observation, ...]


Heard = Observation | tuple[Observation, ...] | OtherBatches
"""One upload, several of the very same batch, or several of other batches of one client's images."""


def uploads_of(heard: Heard) -> tuple[Observation, ...]:
    """Return the uploads."""
    if isinstance(heard, OtherBatches):
        return heard.observations
    return heard if isinstance(heard, tuple) else (heard,)


def stackable(observations: Sequence[Observation]) -> bool:
    """Whether these uploads are of other mini-batches of one client's images, by what is public.

    Of several images each, for single ones are read without the other rounds, and of at most :data:`MOST` in all.
    """
    first = observations[0].settings
    alike = all(
        other.client == observations[0].client and replace(other.settings, mechanism={}) == replace(first, mechanism={})
        for other in observations[1:]
    )
    if len(observations) < 2 or not alike or first.clients > 1 or first.batch_size is None:
        return False
    return 1 < first.batch_size * first.local_steps < first.client_examples <= MOST


def other_batches(observations: Sequence[Observation]) -> str | None:
    """Say why these uploads cannot be told to be of one batch by what is public, or return ``None``.

    They are where one client uses all its examples in every round.
    """
    first = observations[0]
    for other in observations[1:]:
        if (other.client, other.settings.clients) != (first.client, first.settings.clients):
            return f"{other.title} and {first.title} are not of the same client"
        if replace(other.settings, mechanism={}) != replace(first.settings, mechanism={}):
            return f"the client's settings differ between {first.title} and {other.title}"
    public = first.settings
    if public.batch_size is None:
        return f"{first.title}: the batch size is withheld, so it is not known whether rounds use the same examples"
    if public.clients > 1:
        return f"{first.title}: which of the clients' examples are in a sum is not known to be the same in other rounds"
    if public.batch_size * public.local_steps < public.client_examples:
        return (
            f"client {first.client} uses {public.batch_size * public.local_steps} of its {public.client_examples} "
            "examples in a round, and others in the next; only closed_form can attack such uploads together, "
            f"of at most {MOST} examples"
        )
    return None


def join(victims: Sequence[Victim]) -> Victim:
    """Make one victim of uploads of the same batch.

    Args:
        victims: of one client's batch, whose uploads came about in the same way.

    Returns:
        The first, with averages where the parameters are the same, and the other uploads in ``more``.

    Raises:
        AttackRefused: they are not of one client, or not all made in the same way.
    """
    if len(victims) == 1:
        return victims[0]
    _refuse_different(victims)
    alike: dict[int, list[Victim]] = {}
    for victim in victims:
        alike.setdefault(id(victim.parameters), []).append(victim)
    first, *others = [_average(members) for members in alike.values()]
    rounds = ", ".join(str(number) for number in sorted({victim.round for victim in victims}))
    note = f"{len(victims)} uploads of the same examples were attacked together (round {rounds})"
    return replace(first, more=tuple(others), note="; ".join(text for text in (first.note, note) if text))


def stack(victims: Sequence[Victim], images: int) -> Victim:
    """Make one victim of uploads of other batches of one client's images.

    Args:
        victims: of one client, whose uploads came about in the same way.
        images: how many the client has.

    Raises:
        AttackRefused: they are not of one client, or not all made in the same way.
    """
    first, *others = victims
    _refuse_strangers(victims)
    rounds = ", ".join(str(victim.round) for victim in victims)
    note = f"{len(victims)} uploads of other batches of {images} images were stacked (round {rounds})"
    note = "; ".join(text for text in (first.note, note) if text)
    return replace(first, more=tuple(others), note=note, labels=None, pool=images)


def _refuse_different(victims: Sequence[Victim]) -> None:
    _refuse_strangers(victims)
    first = victims[0]
    for victim in victims[1:]:
        known = (None if member.labels is None else member.labels.tolist() for member in (first, victim))
        if len({tuple(labels or ()) for labels in known}) > 1:
            where = f"client {first.client}, rounds {first.round} and {victim.round}"
            raise AttackRefused(f"{where}: other labels are known of each upload, so they are not of one batch")


def _refuse_strangers(victims: Sequence[Victim]) -> None:
    first = victims[0]
    for victim in victims[1:]:
        where = f"client {first.client}, rounds {first.round} and {victim.round}"
        if victim.client != first.client:
            raise AttackRefused(f"uploads of clients {first.client} and {victim.client} are not of one batch")
        if victim.model != first.model:
            raise AttackRefused(f"{where}: the uploads came about in different ways (batch, steps, or mechanism)")


def _average(victims: Sequence[Victim]) -> Victim:
    """One upload in place of several with the same parameters: their mean, of as many times more releases."""
    first, count = victims[0], len(victims)
    if count == 1:
        return first
    gradient = {name: torch.stack([victim.gradient[name] for victim in victims]).mean(dim=0) for name in first.gradient}
    return replace(first, gradient=gradient, model=replace(first.model, releases=count * first.model.releases))
