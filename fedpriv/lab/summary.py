"""The result of a run in one object, and in words.

The sentences claim no more than the run showed: an attack that fails without protection too says nothing about the
mechanism, and a proven epsilon never stands without its adjacency, participations and delta.
"""

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from attacks.referee import Score
from attacks.threat import ThreatModel
from fedpriv.accounting import Guarantee
from fedpriv.budget import Stop
from fedpriv.config import Experiment
from fedpriv.runs import RoundRecord

__all__ = ["AttackResult", "Summary", "attack_results", "verdict", "versions"]

_PACKAGES = ("fedpriv", "torch", "torchvision", "flwr", "ray", "numpy", "dp-accounting", "torchmetrics", "lpips")


# exp(20) is half a billion: odds that may change by that factor are no protection anybody would ask for.
_WEAK_EPSILON = 20.0

_ENDINGS = {"failed": "failed", "interrupted": "was interrupted"}


@dataclass(frozen=True)
class AttackResult:
    """One attack (or guess) on one kind of upload, over all its victims: medians and counts.

    Attributes:
        attack: the attack's name, or guess-mean, guess-grey.
        upload: protected, unprotected, or none for a guess.
        victims: images attacked.
        recovered: how many of them count as recovered.
    """

    attack: str
    upload: str
    victims: int
    recovered: int
    success_ssim: float
    mse: float
    mse_normalised: float
    psnr: float
    ssim: float
    lpips: float | None
    lpips_reason: str | None
    label_accuracy: float | None


@dataclass(frozen=True)
class Summary:
    """summary.json."""

    name: str
    status: str
    reason: str | None
    rounds: int
    test_accuracy: float | None
    test_loss: float | None
    ledger: Guarantee | None
    stops: tuple[Stop, ...]
    attacks: tuple[AttackResult, ...]
    seconds: float
    verdict: tuple[str, ...]
    warnings: tuple[str, ...]
    versions: Mapping[str, str]
    data: Mapping[str, str]
    model: Mapping[str, Any]
    threat_model: ThreatModel
    device: str
    engine: str
    command: str

    def to_json(self) -> dict[str, Any]:
        """Return the object as JSON types."""
        return asdict(self)


def attack_results(scores: Iterable[Score], success_ssim: float, lpips_reason: str | None) -> tuple[AttackResult, ...]:
    """Condense the chosen reconstructions' scores, one row for each attack and kind of upload."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        if score.chosen:
            groups.setdefault((score.attack, score.upload), []).append(score)
    return tuple(_condense(key, group, success_ssim, lpips_reason) for key, group in groups.items())


def _condense(
    key: tuple[str, str], group: Sequence[Score], success_ssim: float, lpips_reason: str | None
) -> AttackResult:
    perceptual = [score.lpips for score in group if score.lpips is not None]
    labels = [score.label_correct for score in group if score.label_correct is not None]
    return AttackResult(
        attack=key[0],
        upload=key[1],
        victims=len(group),
        recovered=sum(score.recovered for score in group),
        success_ssim=success_ssim,
        mse=statistics.median(score.mse for score in group),
        mse_normalised=statistics.median(score.mse_normalised for score in group),
        psnr=statistics.median(score.psnr for score in group),
        ssim=statistics.median(score.ssim for score in group),
        lpips=statistics.median(perceptual) if perceptual else None,
        lpips_reason=None if perceptual else lpips_reason,
        label_accuracy=sum(labels) / len(labels) if labels else None,
    )


def verdict(
    experiment: Experiment,
    status: str,
    last: RoundRecord | None,
    worst: Guarantee | None,
    scores: Sequence[Score],
    stops: Sequence[Stop] = (),
) -> tuple[str, ...]:
    """Say in a few sentences what the run showed: leakage, utility, proven privacy, and who stopped because of it."""
    finished = status == "completed"
    sentences = _leakage(experiment, scores) if finished else [f"This run was not finished: it {_ENDINGS[status]}."]
    if last is not None:
        rounds = f"{last.round} round" + ("s" if last.round != 1 else "")
        sentences.append(f"After {rounds} the model classifies {last.accuracy:.1%} of the test data rightly.")
    if worst is not None:
        sentences += _proof(experiment, worst)
    if stops:
        sentences.append(_stopped(experiment, stops))
    if finished and (reason := early_end(experiment, last, stops)):
        sentences.append(f"{reason[0].upper()}{reason[1:]}.")
    return tuple(sentences)


def early_end(experiment: Experiment, last: RoundRecord | None, stops: Sequence[Stop]) -> str | None:
    """Say why a run that came to its end has fewer rounds than were planned; ``None`` where it has them all."""
    federation = experiment.federation
    if last is None or last.round == federation.rounds or federation.clients - len(stops) >= federation.min_clients:
        return None
    left = federation.clients - len(stops)
    return (
        f"the run ended after round {last.round} of {federation.rounds} because the privacy budget is used up: "
        f"{left} of {federation.clients} clients may still take part, and federation.min_clients = "
        f"{federation.min_clients}"
    )


def _stopped(experiment: Experiment, stops: Sequence[Stop]) -> str:
    rounds = [stop.round for stop in stops]
    first, last = min(rounds), max(rounds)
    when = f"after round {first}" if first == last else f"between rounds {first} and {last}"
    return (
        f"{len(stops)} of {experiment.federation.clients} clients stopped {when}: taking part once more would have "
        f"taken them above federation.target_epsilon = {_figure(experiment.federation.target_epsilon or 0.0)}."
    )


def _leakage(experiment: Experiment, scores: Sequence[Score]) -> list[str]:
    if not experiment.adversary.attacks:
        return ["No attack was run, so nothing is said about what the uploads leak."]
    bare, protected = _recovered(scores, "unprotected"), _recovered(scores, "protected")
    mechanism = experiment.mechanism.name
    if bare is None and protected is None:
        return ["No upload could be attacked, so nothing is said about what the uploads leak."]
    if mechanism == "none" and bare is not None:
        return [f"Without protection the eavesdropper recovers {bare[0]} of {bare[1]} images."]
    if bare is None and protected is not None:
        return [
            f"With {mechanism} the eavesdropper recovers {protected[0]} of {protected[1]} images; without "
            "adversary.counterfactual it is not known whether that is the mechanism's merit."
        ]
    if bare is None or protected is None:
        return ["The attacks on the protected uploads did not finish, so nothing is said about the mechanism."]
    sentence = (
        f"Without protection the eavesdropper recovers {bare[0]} of {bare[1]} images, "
        f"with {mechanism} {protected[0]} of {protected[1]}."
    )
    if bare[0] == 0:
        return [sentence, "The attacks fail even without protection, so this run says nothing about the mechanism."]
    named, victims = _labels_named(scores)
    labels = f" The labels of {named} of {victims} are still guessed rightly." if named else ""
    return [sentence + labels, "That holds for these attacks on these uploads; a stronger attack may do better."]


def _recovered(scores: Sequence[Score], upload: str) -> tuple[int, int] | None:
    """(recovered by any attack, attacked) for one kind of upload; ``None`` where there was none."""
    if not any(score.chosen and score.upload == upload for score in scores):
        return None
    # Every true image has lines of the guesses; one that an attack offered nothing for is one that it did not recover.
    images = {(score.round, score.client, score.image): False for score in scores}
    for score in scores:
        if score.chosen and score.upload == upload:
            key = (score.round, score.client, score.image)
            images[key] = images[key] or score.recovered
    return sum(images.values()), len(images)


def _labels_named(scores: Sequence[Score]) -> tuple[int, int]:
    """Right labels from protected uploads by the attack that names the most, and the number of images."""
    right: dict[str, list[bool]] = {}
    for score in scores:
        if score.chosen and score.upload == "protected" and score.label_correct is not None:
            right.setdefault(score.attack, []).append(score.label_correct)
    best = max(right.values(), key=sum, default=[])
    return sum(best), len(best)


def _proof(experiment: Experiment, worst: Guarantee) -> list[str]:
    if experiment.mechanism.name == "none":
        return ["No mechanism, so no privacy is proven."]
    uses = "use" if worst.participations == 1 else "uses"
    unit = "an example" if experiment.mechanism.unit == "example" else "a client's upload"
    conditions = f"({worst.adjacency}; {worst.participations} {uses} of {unit}; worst client)"
    if worst.epsilon is None:
        return [f"No finite epsilon is proven {conditions}: {worst.theorem.get('epsilon', 'no theorem applies')}."]
    sentence = f"Proven for the whole run: epsilon {_figure(worst.epsilon)} at delta {worst.delta:g} {conditions}"
    if worst.pure_epsilon is not None:
        sentence += f"; pure epsilon {_figure(worst.pure_epsilon)}"
    if worst.epsilon < _WEAK_EPSILON:
        return [sentence + "."]
    return [sentence + ".", "So large an epsilon guarantees next to nothing; what was measured is the evidence here."]


def _figure(epsilon: float) -> str:
    return f"{epsilon:,.0f}" if epsilon >= 1000 else f"{epsilon:.4g}"


def versions() -> dict[str, str]:
    """The versions of what computed the figures."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
