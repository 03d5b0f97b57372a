"""Run one file of ``fedpriv icl``: ask, vote, add noise, score, account, attack."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.aggregators import ROUNDED
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.figure import Interval
from fedpriv.core.files import locked, writing
from fedpriv.core.names import Adjacency
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import Secret, numpy_stream
from fedpriv.core.records import Guarantee, Ledger, LedgerLine
from fedpriv.core.threads import cpu_threads
from fedpriv.data.source import data_folder
from fedpriv.mechanisms.machinery.whole_numbers import least_survivors
from fedpriv.prompts.classify import Classifier, VoteNoise, answers, noise_of, together
from fedpriv.prompts.folder import PromptFolder, PromptLeak, PromptLevel, Prompts, PromptVotes, Synthetic
from fedpriv.prompts.generate import Writer, noise_of_label
from fedpriv.prompts.language import LanguageModel, open_language
from fedpriv.prompts.leaks import candidates, membership_leak, repeating
from fedpriv.prompts.masked import noisy_counts
from fedpriv.prompts.settings import IclConfig, Prompting
from fedpriv.prompts.texts import Example, PromptTexts, Wording, load_texts

_PARTICIPATION = "A participation is a question or a token, for which prompts are drawn afresh by a secret."
_SEEN = "The claim is against anyone who sees what is released; the model, and anyone who runs it, reads the examples."


def start_icl(settings: Prompting, path: Path, progress: Progress) -> Prompts:
    """Carry out a file of settings in a new folder, and return what is written to icl.json."""
    began = time.monotonic()
    texts = load_texts(settings.data, settings.seed)
    bench = _bench(settings, texts, Secret.of_seed(settings.seed))
    folder = PromptFolder.create(path, settings, texts)
    with locked(folder.path):
        return _finish(replace(bench, secret=folder.secret()), folder, began, progress)


def resume_icl(path: Path, progress: Progress) -> Prompts:
    """Finish a run that was interrupted; one that is finished is scored again from the same votes."""
    began = time.monotonic()
    folder = PromptFolder.open(path)
    with locked(folder.path):
        texts = load_texts(folder.settings.data, folder.settings.seed)
        folder.check_unchanged(texts)
        return _finish(_bench(folder.settings, texts, folder.secret()), folder, began, progress)


@dataclass(frozen=True)
class _Bench:
    """What a run works with."""

    settings: Prompting  # of the run
    texts: PromptTexts  # private examples and public questions
    questions: tuple[Example, ...]  # those that are asked
    language: LanguageModel  # the model
    noises: tuple[VoteNoise, ...]  # of each level, by falling noise; or, where examples are generated, of each label
    secret: Secret  # draws noise and prompts

    @property
    def classifier(self) -> Classifier:
        """Who answers from the private examples."""
        return Classifier(self.language, self.wording, self.settings.icl, self.secret, self.settings.seed)

    @property
    def wording(self) -> Wording:
        """How prompts look."""
        return Wording(self.texts, self.settings.data.words)

    @property
    def truth(self) -> NDArray[np.int64]:
        """The labels of the questions."""
        return np.array([question.label for question in self.questions])

    def zero_shot(self) -> list[int]:
        """How the model answers each question without examples."""
        return [int(self.classifier.zero_shot(question.text).argmax()) for question in self.questions]

    def right(self, said: Sequence[int] | NDArray[np.int64]) -> Interval:
        """The share of questions that are answered correctly."""
        return rate_interval(int((np.asarray(said) == self.truth).sum()), len(self.truth))


def _bench(settings: Prompting, texts: PromptTexts, secret: Secret) -> _Bench:
    wanted = settings.icl.queries
    if wanted > len(texts.questions):
        raise settings.wrong("icl.queries", f"{texts.source} has {len(texts.questions)} test texts")
    # Anyone who asks more questions asks these first.
    chosen = numpy_stream(settings.seed, "icl-questions").permutation(len(texts.questions))[:wanted]
    language = open_language(settings.model, data_folder(settings.data.root))
    # Says now whether the model can tell the labels apart, and whether it can be asked.
    language.check(Wording(texts, 1).candidates)
    language.next_token(["Label:"], Wording(texts, 1).candidates)
    questions = tuple(texts.questions[number] for number in chosen)
    bench = _Bench(settings, texts, questions, language, _noises(settings.icl, texts), secret)
    if settings.leaks.pairs and settings.icl.mode == "classify":
        candidates(bench.classifier, settings.leaks.pairs)  # says now whether there are enough
    return bench


def _noises(icl: IclConfig, texts: PromptTexts) -> tuple[VoteNoise, ...]:
    if icl.mode == "classify":
        return tuple(noise_of(icl, len(texts.examples), epsilon) for epsilon in icl.levels)
    return tuple(noise_of_label(icl, texts, label) for label in range(len(texts.labels)))


def _finish(bench: _Bench, folder: PromptFolder, began: float, progress: Progress) -> Prompts:
    with cpu_threads(bench.settings.model.threads), writing(folder.to_resume):
        results, ledger = _way(bench.settings.icl)(bench, folder, progress)
        leaks, refusals = _attacked(bench, progress)
        results = results.model_copy(update={"leaks": leaks, "refusals": refusals, "seconds": time.monotonic() - began})
        folder.write_json("ledger.json", ledger.to_json())
        folder.write(results)
    return results


def _way(icl: IclConfig) -> Callable[[_Bench, PromptFolder, Progress], tuple[Prompts, Ledger]]:
    if icl.mode == "generate":
        return _generated
    return _masked if icl.noise_at == "clients" else _classified


# ---- answers by vote -------------------------------------------------------------------------------------------------


def _classified(bench: _Bench, folder: PromptFolder, progress: Progress) -> tuple[Prompts, Ledger]:
    icl, classifier, noises = bench.settings.icl, bench.classifier, bench.noises
    votes, zero_shot = _votes(bench, folder, classifier, progress)
    labels = len(bench.texts.labels)
    levels = []
    for level, noise in enumerate(noises):
        said = answers(votes, labels, noise.sigma, bench.secret, level)
        released = noise.epsilon == icl.target_epsilon
        levels.append(PromptLevel(noise.epsilon, noise.sigma, bench.right(said), released))
        if released:
            _release(bench, folder, said)
    plain = answers(votes, labels, 0.0, bench.secret, 0)
    levels.append(PromptLevel(None, 0.0, bench.right(plain)))
    one_prompt = (votes == bench.truth[:, None]).mean(axis=1)
    results = _result(
        bench,
        zero_shot=bench.right(zero_shot),
        one_prompt=_mean_interval(one_prompt),
        levels=tuple(levels),
        together=together(icl, len(bench.texts.examples), noises).epsilon if len(noises) > 1 else None,
    )
    (own,) = [noise for noise in noises if noise.epsilon == icl.target_epsilon]
    return results, _ledger_of_clients(bench, own)


def _masked(bench: _Bench, folder: PromptFolder, progress: Progress) -> tuple[Prompts, Ledger]:
    """Answers from the sum of the clients' noisy counts, which is all that the server gets."""
    texts, (noise,) = bench.texts, bench.noises
    summed = folder.counts(len(bench.questions), len(texts.labels))
    if summed is None:
        progress.stage(f"{bench.settings.icl.clients} clients vote on {len(bench.questions)} texts, with masked counts")
        summed = noisy_counts(bench.classifier, [question.text for question in bench.questions], noise.sigma)
        folder.keep_counts(summed)
    said = np.array(summed.counts).argmax(axis=1)
    _release(bench, folder, said)
    progress.stage(f"asking {bench.language.title} without examples")
    results = _result(
        bench,
        zero_shot=bench.right(bench.zero_shot()),
        levels=(PromptLevel(noise.epsilon, noise.sigma, bench.right(said), released=True),),
        noise_at="clients",
        voted=len(summed.clients),
        failures=summed.failures,
    )
    return results, _ledger_of_clients(bench, noise)


def _release(bench: _Bench, folder: PromptFolder, said: NDArray[np.int64]) -> None:
    lines = zip(bench.questions, said.tolist(), strict=True)
    folder.write_jsonl(
        "answers.jsonl", [{"question": one.text, "answer": bench.texts.labels[label]} for one, label in lines]
    )


def _ledger_of_clients(bench: _Bench, noise: VoteNoise) -> Ledger:
    sizes = [len(share) for share in bench.classifier.shares]
    return _ledger(bench, [(number, size, noise) for number, size in enumerate(sizes)])


def _votes(
    bench: _Bench, folder: PromptFolder, classifier: Classifier, progress: Progress
) -> tuple[NDArray[np.int64], list[int]]:
    """What every prompt votes for, (questions, voters), and the answers without examples."""
    icl = bench.settings.icl
    known = folder.votes(len(bench.questions), icl.prompts * icl.clients, len(bench.texts.labels))
    folder.keep_votes(known)
    progress.stage(f"asking {bench.language.title} about {len(bench.questions) - len(known)} texts")
    for number, question in list(enumerate(bench.questions))[len(known) :]:
        votes = tuple(classifier.votes(number, question.text).tolist())
        line = PromptVotes(number, votes, int(classifier.zero_shot(question.text).argmax()))
        folder.add_votes(line)
        known.append(line)
        progress.advanced("texts", len(known), len(bench.questions))
    return np.array([line.votes for line in known]), [line.zero_shot for line in known]


# ---- synthetic examples ----------------------------------------------------------------------------------------------


def _generated(bench: _Bench, folder: PromptFolder, progress: Progress) -> tuple[Prompts, Ledger]:
    icl, texts = bench.settings.icl, bench.texts
    noises = bench.noises
    own, plain = (_written(bench, sigmas, progress) for sigmas in ([noise.sigma for noise in noises], None))
    folder.write_jsonl("synthetic.jsonl", [{"label": texts.labels[row.label], "text": row.text} for row in own])
    progress.stage(f"asking about {len(bench.questions)} texts with synthetic examples in the prompt")
    zero_shot = bench.right(bench.zero_shot())
    worst = max(noises, key=lambda noise: noise.sigma)
    results = _result(
        bench,
        zero_shot=zero_shot,
        levels=(
            PromptLevel(icl.target_epsilon, worst.sigma, _served(bench, own), released=True),
            PromptLevel(None, 0.0, _served(bench, plain)),
        ),
        synthetic=tuple(Synthetic(texts.labels[row.label], row.text) for row in own),
    )
    sizes = [sum(example.label == label for example in texts.examples) for label in range(len(texts.labels))]
    return results, _ledger(bench, [(label, sizes[label], noise) for label, noise in enumerate(noises)])


def _written(bench: _Bench, sigmas: Sequence[float] | None, progress: Progress) -> list[Example]:
    """Synthetic examples of each label in turn; with ``None`` without noise."""
    icl = bench.settings.icl
    writer = Writer(bench.language, bench.wording, icl, bench.secret)
    progress.stage(f"writing synthetic examples {'with' if sigmas else 'without'} noise")
    return [
        writer.example(label, number, sigmas[label] if sigmas else 0.0)
        for number in range(icl.synthetic)
        for label in range(len(bench.texts.labels))
    ]


def _served(bench: _Bench, written: Sequence[Example]) -> Interval:
    """How many questions are answered correctly behind synthetic examples."""
    classifier = bench.classifier
    prefix = classifier.wording.prefix(written)
    return bench.right([int(classifier.scores([prefix], question.text).argmax()) for question in bench.questions])


# ---- results ---------------------------------------------------------------------------------------------------------


def _attacked(bench: _Bench, progress: Progress) -> tuple[tuple[PromptLeak, ...], tuple[str, ...]]:
    leaks, classifier, refusals = bench.settings.leaks, bench.classifier, []
    measured: list[PromptLeak] = []
    if leaks.pairs and bench.settings.icl.mode == "classify":
        progress.stage(f"membership inference on 1-shot prompts, {leaks.pairs} pairs")
        measured.append(membership_leak(classifier, leaks, bench.noises))
    elif leaks.pairs:
        refusals.append("membership of a 1-shot prompt is about answers by vote (icl.mode = 'classify')")
    if leaks.repeats:
        progress.stage(f"prompts that repeat, {leaks.repeats}")
        measured.append(repeating(classifier, leaks))
    return tuple(measured), tuple(refusals)


def _result(bench: _Bench, **figures: object) -> Prompts:
    """What both modes have in common, with these figures."""
    icl, texts = bench.settings.icl, bench.texts
    return Prompts.model_validate(
        {
            "mode": icl.mode,
            "model": bench.language.title,
            "is_language_model": bench.language.is_language_model,
            "source": texts.source,
            "examples": len(texts.examples),
            "labels": texts.labels,
            "queries": len(bench.questions),
            "majority": float(np.bincount(bench.truth).max() / len(bench.truth)),
            "delta": icl.delta,
            "clients": icl.clients,
            "seconds": 0.0,
            **figures,
        }
    )


def _ledger(bench: _Bench, lines: Sequence[tuple[int, int, VoteNoise]]) -> Ledger:
    """The ledger of (client or label, its examples, its noise)."""
    icl = bench.settings.icl
    parameters = {"sigma": max(noise.sigma for _, _, noise in lines), "prompts": icl.prompts, "shots": icl.shots,
                  "noise": bench.settings.noise}  # fmt: skip
    if icl.mode == "generate":
        parameters |= {"tokens": icl.tokens, "synthetic": icl.synthetic}
    return Ledger.of(
        icl.unit,
        "prompts (votes, normal noise)" if icl.mode == "classify" else "prompts (noisy next tokens)",
        parameters,
        [LedgerLine.of(number, size, _guarantee(bench, noise), noise=noise.sigma) for number, size, noise in lines],
    )


def _guarantee(bench: _Bench, noise: VoteNoise) -> Guarantee:
    """What the noise proves, in the words of prompts."""
    own = replace(noise.guarantee, notes=tuple(_notes(bench, noise)))
    if bench.settings.icl.unit == "client":
        return own
    other = "any other of its label" if bench.settings.icl.mode == "generate" else "any other"
    return replace(own, adjacency=Adjacency.REPLACE_ONE.worded(f"one example is replaced by {other}"))


def _notes(bench: _Bench, noise: VoteNoise) -> Iterator[str]:
    icl = bench.settings.icl
    yield from noise.guarantee.notes
    yield _PARTICIPATION if icl.unit == "example" else "A participation is a question, in which every client votes."
    if icl.noise_at == "clients":
        yield from _masked_notes(icl)
    else:
        yield _SEEN
    if icl.unit == "client" and icl.noise_at == "server":
        yield "The server sees every vote, and so does anyone who listens to it."
    if icl.mode == "generate":
        yield "Labels and how many examples each has are public; a line is a label, whose examples are its own."
    else:
        yield "Which labels there are, and how many examples, counts as public."
    if bench.settings.noise == "reproducible":
        yield "noise = 'reproducible': anyone who knows the seed can subtract the noise."


def _masked_notes(icl: IclConfig) -> Iterator[str]:
    yield (
        "The claim holds against a server that follows the protocol, too: secure aggregation leaves it the sum of "
        "noisy counts. The language model, and anyone who runs it, reads the examples."
    )
    yield (
        f"Each client adds a share of the noise, which is whole with {least_survivors(icl.clients)} of {icl.clients} "
        "in the sum; no sum of fewer is unmasked. A client that gives its share away takes it from the others."
    )
    yield ROUNDED


def _mean_interval(values: NDArray[np.float64]) -> Interval:
    """A mean and its normal interval."""
    mean = float(values.mean())
    reach = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Interval(mean, max(0.0, mean - reach), min(1.0, mean + reach))
