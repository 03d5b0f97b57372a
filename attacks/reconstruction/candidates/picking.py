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


@dataclass(frozen=True, eq=False)
class _Pick:
    """What is picked for one upload: numbers of records (B,), and for each of them how probable it is (B,)."""

    records: Tensor
    labels: Tensor
    probabilities: Tensor


def run_candidates(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: CandidateSettings, report: Report
) -> Outcome:
    """Return the records that are picked, and minus the logarithm of how probable they are.

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
    losses = torch.stack([-pick.probabilities.log().sum() for pick in picks])
    report(1, losses)
    return Outcome(
        images=(torch.stack(chosen).to(scene.mean) - scene.mean) / scene.std,
        labels=torch.stack([pick.labels for pick in picks]),
        losses=losses,
        iterations=torch.ones(len(rows), dtype=torch.int64),
        notes=tuple(_note(pick, victim) for victim, pick in zip(rows, picks, strict=True)),
    )


def _pick(scene: Scene, victim: Victim, config: CandidateSettings) -> _Pick:
    candidates = _candidates(scene, victim)
    images = (candidates.images.to(scene.mean) - scene.mean) / scene.std
    # For each record and class: how likely the upload is, and how probable the class was before.
    prior = _label_prior(scene, victim, candidates, config)
    numbers, classes = (prior > -torch.inf).nonzero(as_tuple=True)
    if len(numbers) == 0:
        raise AttackRefused("no record has a label that is among those of the upload")
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
    probabilities = listed.log_softmax(dim=1).exp().gather(1, picked[:, None])[:, 0]
    return _Pick(picked, each[picked].argmax(dim=1), probabilities)


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
        raise AttackRefused(f"{len(candidates.lists)} lists of records for an upload of {examples} images")
    if int(candidates.labels.min()) < 0 or int(candidates.labels.max()) >= scene.classes:
        raise AttackRefused(f"the records' labels are not all from 0 to {scene.classes - 1}")
    return candidates


def _note(pick: _Pick, victim: Victim) -> str:
    shares = ", ".join(f"{value:.2g}" for value in pick.probabilities.tolist()[:8])
    more = ", ..." if len(pick.probabilities) > 8 else ""
    others = "; the other examples of the batch stand in as a normal distribution" if victim.model.examples > 1 else ""
    return f"picked out of a list, nothing was reconstructed; probability of the picks {shares}{more}{others}"
