"""Pick each image of an upload out of a list: by the mechanism's own likelihood, which no decision can beat.

For a single example the likelihood is exact, and several uploads of it add up. In a batch the other examples are not
known: see the module ``surrogate``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks.candidates import Candidates
from fedpriv.attacks.methods.candidate import CandidateSettings
from fedpriv.attacks.reconstruction.candidates.expected import misfits
from fedpriv.attacks.reconstruction.candidates.surrogate import batch_log_likelihoods
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["run_candidates"]

# Less likely than anything that is possible, and finite, so that an assignment exists.
IMPOSSIBLE = -1e300
# Of a batch: records whose inner products are decomposed in seconds, and numbers of their expected uploads, 8 GiB.
MOST_RECORDS, MOST_NUMBERS = 4000, 2**31


@dataclass(frozen=True, eq=False)
class _Pick:
    """What is picked for one upload.

    Attributes:
        records: their numbers, (B,).
        labels: their classes, (B,).
        log_likelihoods: of the upload with each of them behind it, but for a constant, (B,).
        probability: of the pick, where the upload is of one image; ``None`` for a batch, of which the attack knows only
            how probable each record is by itself.
    """

    records: Tensor
    labels: Tensor
    log_likelihoods: Tensor
    probability: float | None

    @property
    def loss(self) -> Tensor:
        """What the attack minimises."""
        if self.probability is None:
            return -self.log_likelihoods.sum()
        return -torch.tensor(self.probability, dtype=torch.float64).log()


def run_candidates(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: CandidateSettings, report: Report
) -> Outcome:
    """Return the records that are picked, and minus the logarithm of how probable the pick is, or of its likelihood.

    Args:
        scene: what is public.
        rows: the victims.
        images: not read: nothing is optimised.
        logits: not read.
        config: whether the records' labels are known.
        report: told at the end.

    Raises:
        AttackRefused: there is no list of records, it does not fit, or the upload is of a batch and not one gradient.
    """
    picks = [_pick(scene, victim, config) for victim in rows]
    chosen = [_candidates(scene, victim).images[pick.records] for victim, pick in zip(rows, picks, strict=True)]
    losses = torch.stack([pick.loss for pick in picks])
    report(1, losses)
    return Outcome(
        images=(torch.stack(chosen).to(scene.mean) - scene.mean) / scene.std,
        labels=torch.stack([pick.labels for pick in picks]),
        losses=losses,
        iterations=torch.ones(len(rows), dtype=torch.int64),
        notes=tuple(map(_note, picks)),
    )


def _pick(scene: Scene, victim: Victim, config: CandidateSettings) -> _Pick:
    candidates = _candidates(scene, victim)
    images = (candidates.images.to(scene.mean) - scene.mean) / scene.std
    # For each record and class: how likely the upload is, and how probable the class was before.
    prior = _label_prior(scene, victim, candidates, config)
    numbers, classes = (prior > -torch.inf).nonzero(as_tuple=True)
    if len(numbers) == 0:
        raise AttackRefused("no record has a label that is among those of the upload")
    _refuse_size(victim, len(numbers))
    if victim.model.examples == 1:
        heard = -misfits(scene, victim, images[numbers, None], classes[:, None]).double()
    else:
        heard = batch_log_likelihoods(scene, victim, images[numbers], classes)
    each = torch.full_like(prior, -torch.inf)
    each[numbers, classes] = heard + prior[numbers, classes]
    return _decided(candidates, each.cpu())


def _decided(candidates: Candidates, each: Tensor) -> _Pick:
    """The records that make the upload most probable, one for each image and none twice; each (M, classes)."""
    records = each.logsumexp(dim=1)
    listed = torch.full((len(candidates.lists), len(records)), IMPOSSIBLE, dtype=torch.float64)
    listed.scatter_(1, candidates.lists, records[candidates.lists].clamp(min=IMPOSSIBLE / 2))
    _, columns = linear_sum_assignment(listed.numpy(), maximize=True)
    picked = torch.from_numpy(columns)
    probability = float(listed[0].softmax(dim=0)[picked[0]]) if len(listed) == 1 else None
    return _Pick(picked, each[picked].argmax(dim=1), records[picked], probability)


def _refuse_size(victim: Victim, records: int) -> None:
    """In a batch all expected uploads are held at once, and compared with each other."""
    if victim.model.examples == 1:
        return
    numbers = records * sum(value.numel() for value in victim.gradient.values())
    if records > MOST_RECORDS or numbers > MOST_NUMBERS:
        raise AttackRefused(
            f"{records} records, one for each class that it may have, in a batch of {victim.model.examples} images "
            f"need {4 * numbers / 2**30:.1f} GiB; allowed are {MOST_RECORDS} and {4 * MOST_NUMBERS / 2**30:g} GiB"
        )


def _label_prior(scene: Scene, victim: Victim, candidates: Candidates, config: CandidateSettings) -> Tensor:
    """The logarithm of how probable each class of each record is without the upload, (M, classes), not normalised."""
    known = torch.zeros(len(candidates.labels), scene.classes, dtype=torch.float64)
    if config.labels == "given":
        known = torch.full_like(known, -torch.inf).scatter(1, candidates.labels[:, None], 0.0)
    if victim.labels is not None:
        absent = [label for label in range(scene.classes) if label not in victim.labels.tolist()]
        known[:, absent] = -torch.inf
    return known.to(scene.network.device)


def _candidates(scene: Scene, victim: Victim) -> Candidates:
    candidates, examples = victim.candidates, victim.model.examples
    if candidates is None:
        raise AttackRefused("it needs for each image a list of records, one of which it is; none is given")
    if candidates.images.shape[1:] != scene.shape:
        raise AttackRefused(
            f"the records have the shape {tuple(candidates.images.shape[1:])}, the upload's images {scene.shape}"
        )
    if len(candidates.lists) != examples:
        raise AttackRefused(
            f"{len(candidates.lists)} lists of records for an upload of {examples} images, as settings say; where the "
            "size of batches varies, it is refused"
        )
    if candidates.lists.unique().numel() < examples:
        raise AttackRefused(f"{candidates.lists.unique().numel()} records for {examples} images: there are too few")
    if int(candidates.labels.min()) < 0 or int(candidates.labels.max()) >= scene.classes:
        raise AttackRefused(f"the records' labels are not all from 0 to {scene.classes - 1}")
    return candidates


def _note(pick: _Pick) -> str:
    what = "picked out of a list, nothing was reconstructed; "
    if pick.probability is not None:
        return f"{what}probability of the pick {pick.probability:.2g}"
    return f"{what}the other examples of the batch stand in as a normal distribution"
