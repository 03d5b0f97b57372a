"""The result of a run in words, which claim no more than the run showed."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from scipy.stats import binomtest

from fedpriv.attacks.settings import by_conduct, is_active
from fedpriv.attacks.threat import threat_model
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.config import Experiment
from fedpriv.core.finding import Found
from fedpriv.core.lab.attack_stage import Leakage, Refusal
from fedpriv.core.lab.results import attack_results
from fedpriv.core.names import AGAINST, NOTHING_PROVEN
from fedpriv.core.numbers import several
from fedpriv.core.records import (
    COMPLETED,
    AttackResult,
    Ceiling,
    Guarantee,
    LeakageRate,
    Ledger,
    Partition,
    Person,
    RoundRecord,
    RowResult,
    Score,
    Stop,
    best_rates,
    best_rows,
    last_evaluated,
    member_ranges,
    members_text,
    named_members,
    parts_read,
    recovered,
    shown_epsilon,
)
from fedpriv.core.settings import enumerated

_PACKAGES = ("fedpriv", "torch", "torchvision", "flwr", "ray", "numpy", "dp-accounting", "torchmetrics", "lpips")


# exp(20) is half a billion: odds that may change by that factor are no protection anybody would ask for.
_WEAK_EPSILON = 20.0

# So many reasons, and groups of clients with each, are told of clients that were left out.
_REASONS, _NAMED = 5, 8

# What chance alone does in fewer than one run of a hundred is worth a sentence.
_CHANCE = 0.01
_HALF = 0.5  # a class with more of the examples makes an accuracy look better than it is

_ENDINGS = {"failed": "failed", "interrupted": "was interrupted"}


@dataclass(frozen=True)
class Ending:
    """What is known of a run when it ends, or when more attacks were made on it."""

    experiment: Experiment
    status: str  # completed, failed or interrupted
    rounds: Sequence[RoundRecord]  # all of them
    worst: Guarantee | None  # what is proven about the worst client
    leakage: Leakage
    kind: str  # of the examples: image, signal, row or sentence
    stops: Sequence[Stop] = ()
    found: Sequence[Found] = ()
    about_accuracy: Sequence[str] = ()  # sentences of the algorithm's own
    is_next: bool = False  # whether the next token is predicted
    ledger: Ledger | None = None  # what is proven about the guess of a target ceiling, and about persons
    partition: Partition | None = None

    @cached_property
    def results(self) -> tuple[AttackResult, ...]:
        """The figures of each attack and guess."""
        scores, threshold = self.leakage.scores, self.experiment.adversary.success_ssim
        return attack_results(scores, threshold, self.leakage.lpips_reason, self.experiment.seed)

    @property
    def of_attacks(self) -> dict[str, Any]:
        """The fields of a summary that change when attacks are made again."""
        return {
            "attacks": self.results,
            "rates": self.leakage.rates,
            "verdict": verdict(self),
            "threat_model": threat_model(self.experiment.adversary, self.kind),
        }


def verdict(ending: Ending) -> tuple[str, ...]:
    """Say in a few sentences what the run showed: leakage, utility, proven privacy, and which clients stopped."""
    experiment, last = ending.experiment, last_evaluated(ending.rounds)
    finished = ending.status == COMPLETED
    sentences = _of_findings(ending.found, leads=True)
    if finished:
        sentences += _of_uploads(ending)
    else:
        sentences = [f"This run was not finished: it {_ENDINGS[ending.status]}."]
    if last is not None:
        sentences += [_utility(ending, last), *ending.about_accuracy]
    if ending.worst is not None:
        sentences += _proof(experiment, ending.worst)
    if ending.ledger is not None:
        sentences += _of_ceiling(experiment, ending.ledger.ceiling)
        sentences += _of_people(ending.ledger.people)
    sentences += _of_findings(ending.found, leads=False)
    if not experiment.adversary.attacks and not algorithm_of(experiment).protects:
        sentences.append(_NO_ATTACK)
    if ending.stops:
        sentences.append(_stopped(experiment, ending.stops))
    sentences += _left_out(ending.rounds)
    if finished and (reason := early_end(experiment, last, ending.stops)):
        sentences.append(f"{reason[0].upper()}{reason[1:]}.")
    return tuple(sentences)


def _of_uploads(ending: Ending) -> list[str]:
    """What attacks on uploads showed."""
    experiment, leakage = ending.experiment, ending.leakage
    adversary, scores, parts = experiment.adversary, leakage.scores, by_conduct(leakage.scores)
    listened = adversary.passive_attacks or any(score.upload != "none" for score in parts[False])
    sentences = _leakage(experiment, parts[False], ending.results) if listened or not adversary.crafts else []
    sentences += _active(experiment, parts[True]) if adversary.crafts else []
    sentences += _cells(ending.results)
    sentences += _tokens(ending.results)
    sentences += [_between(ties, ending.kind) for ties in _notable(leakage.rates, scores)]
    sentences += _about_the_figures(experiment, parts, leakage.unattacked)
    return sentences + _without_result(experiment, scores, leakage.refusals)


def _of_findings(found: Sequence[Found], *, leads: bool) -> list[str]:
    """What findings say before everything else, or after what is proven."""
    own = (each.finding.sentences(each.result) for each in found if each.finding.leads == leads)
    return [sentence for sentences in own for sentence in sentences]


def _left_out(rounds: Sequence[RoundRecord]) -> list[str]:
    """Name the clients whose answers were not used, of how many rounds, and why."""
    asked = Counter(client for record in rounds for client in record.clients)
    missed = Counter(failure.client for record in rounds for failure in record.failures)
    reasons = {failure.client: failure.reason for record in rounds for failure in record.failures}
    alike: dict[tuple[int, int, str], list[int]] = {}
    for client in sorted(missed):
        alike.setdefault((missed[client], asked[client], reasons[client]), []).append(client)
    parts = [
        f"{_clients(clients)} of {count} of {of} round{'s' * (of != 1)} ({reason})"
        for (count, of, reason), clients in list(alike.items())[:_REASONS]
    ]
    more = sum(map(len, list(alike.values())[_REASONS:]))
    return [f"Left out: {'; '.join(parts)}{f'; and {more} more clients' if more else ''}."] if parts else []


def _clients(clients: Sequence[int]) -> str:
    names = named_members(member_ranges(members_text(clients)), _NAMED)
    return f"client {names}" if len(clients) == 1 else f"clients {names}"


_NO_ATTACK = "No attack on uploads was run, so nothing is said about what they leak."


def _utility(ending: Ending, last: RoundRecord) -> str:
    rounds = several(last.round, "round")
    tested = ending.experiment.federation.evaluate_examples
    part = f"{tested} examples of " if tested is not None and tested == last.evaluated else ""
    if not ending.is_next:
        majority = ending.partition.majority if ending.partition else 0.0
        guess = f"; the most common class has {majority:.1%} of the training examples" if majority > _HALF else ""
        return f"After {rounds} the model classifies {last.accuracy:.1%} of {part}the test data correctly{guess}."
    return (
        f"After {rounds} the model predicts {part}the test texts at {last.loss:.3f} nats per token; its likeliest "
        f"token is the right one {last.accuracy:.1%} of the time."
    )


def early_end(experiment: Experiment, last: RoundRecord | None, stops: Sequence[Stop]) -> str | None:
    """Say why a run that came to its end has fewer rounds than were planned; ``None`` where it has them all."""
    federation = experiment.federation
    if last is None or last.round == federation.rounds or federation.clients - _count(stops) >= federation.min_clients:
        return None
    left = federation.clients - _count(stops)
    return (
        f"the run ended after round {last.round} of {federation.rounds} because the privacy budget is used up: "
        f"{left} of {federation.clients} clients may still take part, and federation.min_clients = "
        f"{federation.min_clients}"
    )


def _count(stops: Sequence[Stop]) -> int:
    return sum(stop.count for stop in stops)


def _stopped(experiment: Experiment, stops: Sequence[Stop]) -> str:
    rounds = [stop.round for stop in stops]
    first, last = min(rounds), max(rounds)
    when = f"after round {first}" if first == last else f"between rounds {first} and {last}"
    targets = [
        f"federation.{key} = {shown_epsilon(target)}"
        for key, target in experiment.federation.targets.items()
        if any(stop.target == key for stop in stops)
    ]
    return (
        f"{_count(stops)} of {experiment.federation.clients} clients stopped {when}: taking part once more would have "
        f"taken them above {enumerated(targets, 'or')}."
    )


def _leakage(experiment: Experiment, scores: Sequence[Score], results: Sequence[AttackResult]) -> list[str]:
    if not experiment.adversary.attacks:
        return []
    bare, protected = recovered(scores, "unprotected"), recovered(scores, "protected")
    mechanism = experiment.mechanism.name
    if bare is None and protected is None and any(score.picked for score in scores):
        return []  # nothing was reconstructed
    if bare is None and protected is None:
        threat = threat_model(experiment.adversary)
        if not threat.grants_uploads:
            return [
                f"The adversary of the threat model {threat.name} cannot read the uploads, so none was attacked, and "
                "nothing is said about what they leak to anyone who can."
            ]
        return ["No upload could be attacked, so nothing is said about what the uploads leak."]
    if mechanism == "none" and bare is not None:
        return [f"Without protection the eavesdropper recovers {bare}."]
    if experiment.hears_masked and protected is not None:
        return [
            f"From masked uploads (secure aggregation) the eavesdropper recovers {protected}; "
            "adversary.threat_model = 'secure-aggregation' attacks their sum."
        ]
    if bare is None and protected is not None:
        return [
            f"With {mechanism} the eavesdropper recovers {protected}; without "
            "adversary.counterfactual it is not known whether the mechanism is the reason."
        ]
    if bare is None or protected is None:
        return [
            f"Without protection the eavesdropper recovers {bare}. No upload with {mechanism} was attacked, so "
            "nothing is said about the mechanism."
        ]
    sentence = f"Without protection the eavesdropper recovers {bare}, with {mechanism} "
    sentence += f"{protected.images} of {protected.attacked}."
    if bare.images == 0 and (read := parts_read(results)):
        return [sentence, f"None is whole even without protection, so compare the {read} that are read."]
    if bare.images == 0:
        return [sentence, "The attacks fail even without protection, so this run says nothing about the mechanism."]
    named, victims = _labels_named(scores)
    labels = f" The labels of {named} of {victims} are still guessed correctly." if named else ""
    return [sentence + labels, "That holds for these attacks on these uploads; a stronger attack may do better."]


def _active(experiment: Experiment, scores: Sequence[Score]) -> list[str]:
    """What a server that lies found: in sentences of its own, which say that no listener could."""
    mechanism = experiment.mechanism.name
    kinds = {"unprotected": "without protection", "protected": f"with {mechanism}"}
    results = {kind: part for kind in kinds if (part := recovered(scores, kind)) is not None}
    name = experiment.adversary.active_attack
    if not results:
        return [f"The active server ({name}) could not attack any upload, so nothing is said about that worst case."]
    parts = [f"{part} {kinds[kind]}" for kind, part in results.items()]
    sentences = [
        f"Worst case, not eavesdropping: an active server that sends clients crafted parameters ({name}) "
        f"recovers {', '.join(parts)}."
    ]
    bare = results.get("unprotected")
    if mechanism != "none" and bare is None:
        sentences.append(
            "Without adversary.counterfactual it is not known whether the mechanism makes any difference to it."
        )
    if mechanism != "none" and bare is not None and bare.images == 0:
        sentences.append("It fails even without protection, so that says nothing about the mechanism.")
    sentences.append("The uploads of the clients that it deceived are not part of the trained model.")
    return sentences


_UPLOADS = {"unprotected": "without protection", "protected": "with the mechanism"}


def _cells(results: Sequence[AttackResult]) -> list[str]:
    """Of rows: the best attack's share of right categories and error of numbers, compared with the guess."""
    sentences = []
    for upload, how in _UPLOADS.items():
        if (read := best_rows(results, upload)) is not None:
            attack, best, guess = read
            sentences.append(f"Cells read {how}: {attack} {_cells_words(best)}; a guess {_cells_words(guess)}.")
    return sentences


def _tokens(results: Sequence[AttackResult]) -> list[str]:
    """Of sentences: the best attack's ROUGE and share of tokens in their places, compared with the best guess's."""
    read = [(result, result.sentences) for result in results if result.sentences is not None]
    guess = max((words.rouge1 for result, words in read if result.upload == "none"), default=0.0)
    sentences = []
    for upload, how in _UPLOADS.items():
        mine = [(words, result.attack) for result, words in read if result.upload == upload]
        if mine:
            best, attack = max(mine, key=lambda pair: (pair[0].rouge1, pair[0].share_right))
            sentences.append(
                f"Tokens read {how}: {attack} ROUGE-1 {best.rouge1:.3f}, {best.share_right:.1%} of the tokens in their "
                f"places; a guess ROUGE-1 {guess:.3f}."
            )
    return sentences


def _cells_words(result: RowResult) -> str:
    parts = []
    if result.share_right is not None:
        parts.append(f"{result.share_right:.1%} of the categories right")
    if result.median_error is not None:
        parts.append(f"numbers off by {result.median_error:.2%} of their range (median of rows)")
    return ", ".join(parts)


def _about_the_figures(experiment: Experiment, parts: Mapping[bool, Sequence[Score]], unattacked: int) -> list[str]:
    """What a reader must know with the numbers of recovered images."""
    sentences = []
    if any(score.clients > 1 for part in parts.values() for score in part):
        how = "was carried out" if experiment.federation.secure_aggregation else "is assumed here, not carried out"
        sentences.append(f"The adversary had only sums of uploads: secure aggregation {how}.")
    if unattacked:
        uploads = "1 observed upload" if unattacked == 1 else f"{unattacked} observed uploads"
        sentences.append(
            f"{uploads} could not be attacked: missed where victims are picked out, and in no other figure; "
            "the warnings say why."
        )
    return sentences


def _without_result(experiment: Experiment, scores: Sequence[Score], refusals: Sequence[Refusal]) -> list[str]:
    """Name the attacks that have no result, or none of one kind of upload, with the first reason."""
    made = {score.attack for score in scores}
    sentences = []
    for name in experiment.adversary.attacks:
        mine = [str(each) for each in refusals if each.attack == name and (each.void or name not in made)]
        sentences += [f"{text[0].upper()}{text[1:]}." for text in mine[:1]]
    return sentences


def _notable(rates: Sequence[LeakageRate], scores: Sequence[Score]) -> list[tuple[LeakageRate, ...]]:
    """How often originals are picked out: without a mechanism only if neither expected nor chance."""
    groups: dict[tuple[bool, str], list[LeakageRate]] = {}
    for rate in (rate for rate in rates if rate.event == "told" and rate.chance < 1):
        groups.setdefault((is_active(rate.attack), rate.upload), []).append(rate)
    best = [(best_rates(group), len(group)) for group in groups.values()]
    return [
        ties
        for ties, tried in best
        if ties[0].upload == "protected" or not (_goes_without_saying(ties[0], scores) or _is_chance(ties[0], tried))
    ]


def _goes_without_saying(rate: LeakageRate, scores: Sequence[Score]) -> bool:
    """Whether as many were recovered."""
    whole = recovered(by_conduct(scores)[is_active(rate.attack)], rate.upload)
    return whole is not None and rate.hits <= whole.images


def _is_chance(rate: LeakageRate, attacks: int) -> bool:
    """Whether a guess would do as well: the best of several attacks has as many chances to be lucky."""
    chance = binomtest(rate.hits, rate.images, rate.chance, alternative="greater").pvalue
    return bool(round(attacks * chance, 9) >= _CHANCE)


def _between(ties: tuple[LeakageRate, ...], kind: str) -> str:
    """Guess, measured, best decision and ceiling in one sentence; an attack without a success is not named."""
    rate = ties[0]
    by = f" ({', '.join(each.attack for each in ties)})" if rate.hits else ""
    figures = [f"a guess {rate.chance:.1%}", f"measured {rate.hits} of {rate.images}{by}"]
    if rate.best is not None:
        figures.append(f"the best decision on these {kind}s {rate.best.value:.1%}")
    if rate.ceiling is not None:
        figures.append(f"the ceiling for any attack {rate.ceiling:.1%}")
    return f"{rate.success[0].upper()}{rate.success[1:]}, {_UPLOADS[rate.upload]}: {', '.join(figures)}."


def _labels_named(scores: Sequence[Score]) -> tuple[int, int]:
    """Right labels from protected uploads by the attack that names the most, and the number of images."""
    right: dict[str, list[bool]] = {}
    for score in scores:
        if score.chosen and score.upload == "protected" and score.label_correct is not None:
            right.setdefault(score.attack, []).append(score.label_correct)
    best = max(right.values(), key=sum, default=[])
    return sum(best), len(best)


def _proof(experiment: Experiment, worst: Guarantee) -> list[str]:
    if claim := algorithm_of(experiment).about_claim(experiment, worst):
        return [claim]
    if not experiment.mechanism.protects:
        what = "is proven of whole examples" if experiment.prepares_data else "is proven"
        return [f"No mechanism, so no privacy {what}."]
    if experiment.mechanism.filters:
        return [f"{NOTHING_PROVEN} {experiment.mechanism.title} hides numbers and adds no noise: it is not privacy."]
    uses = "use" if worst.participations == 1 else "uses"
    unit = "an example" if experiment.mechanism.unit == "example" else "a client's upload"
    # Without a proof, a mechanism of a package need not have noise.
    noise = f"; noise: {experiment.noise}" if experiment.mechanism.has_proof() else ""
    whom = AGAINST[experiment.mechanism.noise_at]
    conditions = f"({worst.adjacency}; {worst.participations} {uses} of {unit}; worst client{whom}{noise})"
    if worst.epsilon is None:
        return [f"No finite epsilon is proven {conditions}: {worst.theorem.get('epsilon', 'no theorem applies')}."]
    sentence = f"Proven for the whole run: epsilon {shown_epsilon(worst.epsilon)} at delta {worst.delta:g} {conditions}"
    if worst.pure_epsilon is not None:
        sentence += f"; pure epsilon {shown_epsilon(worst.pure_epsilon)}"
    if worst.epsilon < _WEAK_EPSILON:
        return [sentence + "."]
    return [sentence + ".", "An epsilon this large guarantees almost nothing; rely on the measurement."]


def _of_ceiling(experiment: Experiment, ceiling: Ceiling | None) -> list[str]:
    if ceiling is None or ceiling.gamma is None:
        return []
    example = "one client's copy of an example" if experiment.data.overlaps else "an example"
    unit = example if experiment.mechanism.unit == "example" else "a client's upload"
    sampled = experiment.mechanism.protects_examples and experiment.training.sampling != "shuffled"
    drawn = "; whether or not a batch has the example" if sampled else ""
    return [
        f"Ceiling for the whole run: no attack picks {unit} out of candidates in more than {ceiling.gamma:.2%} of "
        f"cases, where a guess without any upload is right in {ceiling.k0:.2%} (worst client{drawn})."
    ]


def _of_people(people: Sequence[Person]) -> list[str]:
    if not people:
        return []
    worst, count = people[0], sum(each.count for each in people)
    among = f"the worst of {count:,} persons, with {worst.held}" if count > 1 else f"one person, with {worst.held}"
    if worst.epsilon is None:
        return [f"No finite epsilon is proven about a person over all clients ({among})."]
    return [
        f"Proven about a person over all clients that hold their records: epsilon {shown_epsilon(worst.epsilon)} at "
        f"delta {worst.delta:g} ({worst.adjacency}; {among})."
    ]


def versions() -> dict[str, str]:
    """The versions of what computed the figures."""
    there = [name for name in _PACKAGES if find_spec(name.replace("-", "_")) is not None]  # Ray need not be
    return {"python": platform.python_version(), **{name: version(name) for name in there}}
