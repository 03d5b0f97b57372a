"""Membership attacks: functions of signals that score candidates, higher for likely members; told no member.

Signals are the confidence of models in an example's label, computed once and stored. Most attacks need one number: the
logit of the probability of the right label, phi = log(p / (1 - p)) (Carlini et al. 2022, Section V.A). The loss is
log(1 + exp(-phi)) and the probability 1 / (1 + exp(-phi)), so that neither loses digits where p is near 1. Shadow
models are also shown the probabilities of the other classes.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from scipy.special import log_expit, logsumexp
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
    return -log_expit(logits)


def write_signals(path: Path, signals: Signals) -> None:
    """Write signals as .npz without pickled objects; the file appears whole."""
    _write_arrays(path, {field.name: getattr(signals, field.name) for field in fields(signals)})


def write_scores(path: Path, scores: Mapping[str, Floats], members: NDArray[np.bool_]) -> None:
    """Write each attack's scores of the candidates, by its name, and which of them are members."""
    _write_arrays(path, {**scores, "members": members})


def _write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type] # numpy's stubs take a key for allow_pickle
    write_whole(path, content.getvalue())


# Shadow models (Shokri, Stronati, Song and Shmatikov 2017): an attack that learns what members' predictions look like.
#
# The references are the shadows: of each it is known with which candidates it was trained, so their predictions are
# labelled examples of "in" and "out". A classifier is trained on those and applied to the target's predictions.


# As in the paper: one hidden layer of 64 units.
HIDDEN = 64
# More predictions teach one small network next to nothing; these are drawn at random where there are more.
MOST_RECORDS = 50_000
# The attack is a function of the signals: the seed of the network and of the draw is no setting.
SEED = 0


def shadow_models(signals: Signals) -> Floats:
    """Learn on the references' final predictions which were trained with an example, and judge the target's.

    The paper trains one classifier a class on whole prediction vectors. Here one serves all classes, since a class may
    have few candidates: it sees the right label's logit and the other classes' log-probabilities in order of size
    (as Salem et al. 2019, ML-Leaks, Section III).

    It returns (N,), the log-odds of "in".
    """
    need_references(signals.inside, 1, "trained with it")
    need_references(~signals.inside, 1, "trained without it")
    records = predictions(signals.references[:, -1], signals.reference_others)
    return judged(records, signals.inside, predictions(signals.target[-1], signals.others))


def judged(records: Floats, inside: NDArray[np.bool_], asked: Floats) -> Floats:
    """Learn what predictions (R, N, F) on members look like, and return the log-odds of "in" of others, (M, F)."""
    from sklearn.neural_network import MLPClassifier  # a second to import, and only an audit needs it
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    flat, answers = records.reshape(-1, records.shape[-1]), inside.ravel()
    chosen = np.random.default_rng(SEED).permutation(len(flat))[:MOST_RECORDS]
    network = MLPClassifier((HIDDEN,), early_stopping=True, max_iter=200, random_state=SEED)
    classifier = make_pipeline(StandardScaler(), network).fit(flat[chosen], answers[chosen])
    with np.errstate(divide="ignore"):  # where it is certain the odds are infinite, and rank as such
        logs = classifier.predict_log_proba(asked)
    return logs[:, 1] - logs[:, 0]


def predictions(labels: Floats, others: Floats) -> Floats:
    """Return right labels' logits (..., N) and other classes' log-probabilities (..., N, K) as (..., N, 1 + K)."""
    return np.concatenate([labels[..., None], others], axis=-1)


Bools = NDArray[np.bool_]

# Carlini et al. 2022, Section VI.B: with fewer references than this, one variance for all examples is the better guess.
ENOUGH_FOR_OWN_VARIANCE = 64

# Zarifzadeh et al. 2024, Section 3 and Appendix B.2: what they use where nothing is tuned.
GAMMA, OFFLINE_SLOPE = 2.0, 0.3

# Relative to the mean variance; keeps the covariance of rounds that hardly differ invertible.
RIDGE = 1e-6

# A width and a variance above zero where all references agree.
SMALLEST = 1e-12


def attack_p(target: Floats, population: Floats) -> Floats:
    """Attack-P (Ye et al. 2022, Section 4.2): one minus the p-value of the loss among the population's."""
    others = population[:, None]
    above = (others > target).sum(axis=0) + 0.5 * (others == target).sum(axis=0)
    return (above + 0.5) / (len(population) + 1)


def attack_r(target: Floats, references: Floats, inside: Bools, bandwidth: float | None = None) -> Floats:
    """Attack-R, MIA-R (Ye et al. 2022, Section 4.3): the loss against those under models trained without the example.

    The share of reference losses above the target's is smoothed, since a few references would make most candidates
    tie: each reference counts as a normal distribution around its logit, of which losses are a decreasing function.
    It returns log(share / (1 - share)), which also tells shares near 1 apart.
    """
    need_references(~inside, 2, "trained without it")
    if bandwidth is None:
        _, residuals = _centred(references, ~inside)
        freedom = (~inside).sum() - inside.shape[1]
        deviation = np.sqrt((residuals**2).sum() / freedom)
        bandwidth = max(1.06 * float(deviation) * float((~inside).sum(axis=0).mean()) ** -0.2, SMALLEST)
    steps = (target - references) / bandwidth
    below, above = (_log_mean(scipy.stats.norm.logcdf(sign * steps), ~inside) for sign in (1, -1))
    return below - above


def lira_online(target: Floats, references: Floats, inside: Bools) -> Floats:
    """LiRA with references trained with and without each example (Carlini et al. 2022, Algorithm 1).

    Two normal distributions are fitted to each candidate's logits, with and without it. With several rounds they
    are multivariate, with one covariance of the rounds for all candidates with and one for those without it. It
    returns log-likelihood ratios (N,) of logits (T, N) at T rounds.
    """
    need_references(inside, 2, "trained with it")
    need_references(~inside, 2, "trained without it")
    return _log_density(target, references, inside) - _log_density(target, references, ~inside)


def lira_offline(target: Floats, references: Floats, inside: Bools) -> Floats:
    """LiRA with references trained without each example (Carlini et al. 2022, Section IV.C).

    It returns the log of the probability that a model trained without it is less confident than the target.
    """
    need_references(~inside, 2, "trained without it")
    mean, residuals = _centred(references, ~inside)
    return scipy.stats.norm.logcdf((target - mean) / np.sqrt(_variance(residuals, ~inside)))


def rmia_online(signals: Signals, gamma: float = GAMMA) -> Floats:
    """RMIA: the share (N,) of the population that the candidate beats (Zarifzadeh et al. 2024, Section 3)."""
    inside = signals.inside
    need_references(inside, 1, "trained with it")
    need_references(~inside, 1, "trained without it")
    logs = log_expit(signals.references[:, -1])
    average = np.logaddexp(_log_mean(logs, inside), _log_mean(logs, ~inside)) - np.log(2)
    return _beaten(signals, average, _population_average(signals), gamma)


def rmia_offline(signals: Signals, gamma: float = GAMMA) -> Floats:
    """RMIA with references trained without each example (Zarifzadeh et al. 2024, Appendix B.2).

    The average probability over all models is guessed from that over models trained without the example as
    ((1 + slope) p + (1 - slope)) / 2, for candidates and population alike.
    """
    need_references(~signals.inside, 1, "trained without it")
    average = _log_mean(log_expit(signals.references[:, -1]), ~signals.inside)
    others = _population_average(signals)
    return _beaten(signals, _stretched(average), _stretched(others), gamma)


ATTACKS: Mapping[str, Callable[[Signals], Floats]] = {
    "attack-p": lambda signals: attack_p(losses(signals.target[-1]), losses(signals.population[-1])),
    "attack-r": lambda signals: attack_r(signals.target[-1], signals.references[:, -1], signals.inside),
    "lira-online": lambda signals: lira_online(signals.target[-1:], signals.references[:, -1:], signals.inside),
    "lira-offline": lambda signals: lira_offline(signals.target[-1], signals.references[:, -1], signals.inside),
    "rmia-online": rmia_online,
    "rmia-offline": rmia_offline,
    "shadow": shadow_models,
    "lira-rounds": lambda signals: lira_online(signals.target, signals.references, signals.inside),
}
"""Name -> attack. All but ``lira-rounds`` look at the final model alone; that one at every round's."""


def _centred(logits: Floats, kept: Bools) -> tuple[Floats, Floats]:
    """The mean over the kept references, (N,), and what the kept ones differ from it, (R, N), the others 0."""
    weights = kept / kept.sum(axis=0)
    mean = (weights * logits).sum(axis=0)
    return mean, np.where(kept, logits - mean, 0.0)


def _variance(residuals: Floats, kept: Bools) -> Floats:
    """Unbiased variances: each candidate's own, or one for all where references are few."""
    freedom = kept.sum(axis=0) - 1
    own = (residuals**2).sum(axis=0)
    shared = own.sum() / freedom.sum()
    if kept.sum(axis=0).min() < ENOUGH_FOR_OWN_VARIANCE / 2:
        own = np.full(own.shape, own.sum())
        freedom = np.full(own.shape, freedom.sum())
    return own / freedom + RIDGE * shared + SMALLEST


def _log_density(target: Floats, references: Floats, kept: Bools) -> Floats:
    """The log density of the target's logits (T, N) under normal distributions fitted to the kept references."""
    parts = [_centred(references[:, number], kept) for number in range(len(target))]
    differences = target - np.array([mean for mean, _ in parts])
    if len(target) == 1:
        variance = _variance(parts[0][1], kept)
        return _normal(differences[0] ** 2 / variance, np.log(variance))
    residuals = np.array([residual for _, residual in parts]).reshape(len(target), -1)
    covariance = residuals @ residuals.T / (kept.sum(axis=0) - 1).sum()
    covariance += (RIDGE * np.trace(covariance) / len(target) + SMALLEST) * np.eye(len(target))
    squared = (differences * np.linalg.solve(covariance, differences)).sum(axis=0)
    return _normal(squared, np.full(len(squared), np.linalg.slogdet(covariance)[1]))


def _normal(squared: Floats, log_variance: Floats) -> Floats:
    """Log densities up to the constant that both hypotheses share."""
    return -(squared + log_variance) / 2


def _log_mean(logs: Floats, kept: Bools) -> Floats:
    """The log of the mean over the kept references of exp(logs), (N,)."""
    return logsumexp(np.where(kept, logs, -np.inf), axis=0) - np.log(kept.sum(axis=0))


def _population_average(signals: Signals) -> Floats:
    logs = log_expit(signals.reference_population[:, -1])
    return _log_mean(logs, np.ones(logs.shape, dtype=np.bool_))


def _stretched(log_average: Floats) -> Floats:
    return np.log(((1 + OFFLINE_SLOPE) * np.exp(log_average) + (1 - OFFLINE_SLOPE)) / 2)


def _beaten(signals: Signals, average: Floats, others: Floats, gamma: float) -> Floats:
    """The share of the population whose ratio p(z | target) / p(z) is at most a gamma-th of the candidate's."""
    if gamma < 1:
        raise InputError(key="gamma", given=gamma, allowed="at least 1")
    ratios = log_expit(signals.target[-1]) - average
    sorted_others = np.sort(log_expit(signals.population[-1]) - others)
    return np.searchsorted(sorted_others, ratios - np.log(gamma), side="right") / len(sorted_others)
