"""Signals of membership attacks: the confidence of models in an example's label, computed once and stored.

Most attacks need one number: the logit of the probability of the right label, phi = log(p / (1 - p)) (Carlini et al.
2022, Section V.A). The loss is log(1 + exp(-phi)) and the probability 1 / (1 + exp(-phi)), so that neither loses digits
where p is near 1. Shadow models are also shown the probabilities of the other classes.
"""

import io
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_expit
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole

Floats = NDArray[np.float64]

# So many of the other classes are kept: with ten classes all, with more those that the network holds likeliest.
MOST_OTHERS = 9


@dataclass(frozen=True, eq=False)
class Signals:
    """The logits of the right labels, float64: of N candidates, Z population examples, R references; no members."""

    target: Floats  # (T, N), of the target at T rounds, the last of them the final model
    references: Floats  # (R, T, N), of the reference models at the same rounds
    inside: NDArray[np.bool_]  # (R, N), whether a reference was trained with a candidate
    population: Floats  # (T, Z), of the target on examples that are known to be nobody's training data
    reference_population: Floats  # (R, T, Z), of the references on the same
    rounds: NDArray[np.int64]  # (T,), which rounds, ascending
    others: Floats  # (N, K), the target's wrong_log_probabilities at the final model
    reference_others: Floats  # (R, N, K), of the references at theirs

    def __post_init__(self) -> None:
        (rounds, candidates), models, people = self.target.shape, len(self.references), self.population.shape[-1]
        others = self.others.shape[-1]
        wanted = {
            "references": (models, rounds, candidates),
            "inside": (models, candidates),
            "population": (rounds, people),
            "reference_population": (models, rounds, people),
            "rounds": (rounds,),
            "others": (candidates, others),
            "reference_others": (models, candidates, others),
        }
        for name, shape in wanted.items():
            given = getattr(self, name).shape
            if given != shape:
                raise ValueError(f"{name} has the shape {given}; {shape} fits the rest")
        for name in ("target", "references", "population", "reference_population", "others", "reference_others"):
            if np.isnan(getattr(self, name)).any():
                raise ValueError(f"{name} holds NaN")


def label_logits(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return log(p / (1 - p)), (..., B), float64, of the right label's probability p in logits (..., B, classes)."""
    precise = outputs.double()
    right = labels.expand(precise.shape[:-1]).unsqueeze(-1)
    others = precise.scatter(-1, right, -torch.inf)
    return precise.gather(-1, right).squeeze(-1) - others.logsumexp(-1)


def wrong_log_probabilities(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithms of wrong labels' probabilities, (..., B, at most 9), the largest first."""
    logs = outputs.double().log_softmax(-1)
    wrong = logs.scatter(-1, labels.expand(logs.shape[:-1]).unsqueeze(-1), -torch.inf)
    return wrong.topk(min(outputs.shape[-1] - 1, MOST_OTHERS), dim=-1).values


def need_references(wanted: NDArray[np.bool_], least: int, kind: str) -> None:
    """Refuse candidates with fewer references of a kind than an attack needs."""
    counts = wanted.sum(axis=0)
    if len(counts) and counts.min() < least:
        first = int(counts.argmin())
        raise InputError(
            f"candidate {first} has {counts[first]} reference models {kind}, and at least {least} are needed; "
            "train more of them"
        )


def losses(logits: Floats) -> Floats:
    """Return the cross entropies that belong to :func:`label_logits`."""
    entropies: Floats = -log_expit(logits)
    return entropies


def write_signals(path: Path, signals: Signals) -> None:
    """Write signals as .npz without pickled objects; the file appears whole."""
    content = io.BytesIO()
    np.savez(content, **{field.name: getattr(signals, field.name) for field in fields(signals)})
    write_whole(path, content.getvalue())
