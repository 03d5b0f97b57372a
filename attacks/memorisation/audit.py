"""What the model of a finished run remembers of its texts: exposure of canaries, and extraction by sampling.

Extraction (Carlini et al. 2021, Extracting Training Data from Large Language Models): the model writes texts from their
beginning. They are put in order by how much likelier it finds them than the model before training did, and searched for
sequences of tokens that stand in the training data and not in the public test data. What of the test data alone is
found the same way shows how often a text is right by chance.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedpriv.accounting.memorisation import (
    Statement,
    among_others,
    exposure_ceiling,
    guessed_exposure,
    of_copies,
    rank_ceiling,
)
from fedpriv.attacks.memorisation.report import CanaryGroup, CanaryResult, ExtractedTexts, Memorisation
from fedpriv.core.config.data import CanaryConfig
from fedpriv.core.config.rules import refuse_texts
from fedpriv.core.errors import InputError
from fedpriv.core.files import writing
from fedpriv.core.finished import completed_summary, final_state, rebuilt_world
from fedpriv.core.names import END, PAD, START
from fedpriv.core.progress import Progress
from fedpriv.core.randomness import numpy_stream, torch_stream
from fedpriv.core.records import Ledger, LedgerLine
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import cpu_threads
from fedpriv.core.world import State, World
from fedpriv.data.canaries import Canaries, Numbers, canary_rows, drawn_canaries
from fedpriv.data.datasets import Dataset
from fedpriv.data.tokenizers import TextFacts, next_targets

# Exposure of secrets (Carlini et al. 2019, The Secret Sharer): the rank of a secret among all possible ones.
#
# The log-perplexity of a secret is what the model takes for its tokens, in nats, behind the public prefix. Its rank is
# its place among all secrets that could have been drawn, and exposure is log2 |R| - log2 rank (Definition 4). Where
# there are too many secrets to ask the model about each, log-perplexities of random ones are fitted by a skew-normal
# distribution, and the exposure is -log2 of its share below the secret's (Section 4.3); what that says far beyond the
# random ones is an extrapolation.


Network = Callable[[Tensor], Tensor]
"""Tokens (B, T), int64, to logits (B, T, V)."""

Floats = NDArray[np.float64]

MOST_ENUMERATED = 100_000
"""Up to so many secrets the model is asked about each."""

_SAMPLED = 2048  # random secrets that the distribution is fitted to
_AT_ONCE = 256  # sequences


@dataclass(frozen=True)
class Exposure:
    """What the model remembers of a secret."""

    log_perplexity: float  # in nats
    rank: int | None  # from 1; `None` where it is extrapolated
    bits: float  # the exposure, from 0 to log2 |R|


def exposures(
    network: Network, canaries: Canaries, length: int, rng: np.random.Generator
) -> tuple[tuple[Exposure, ...], float | None]:
    """Return each secret's exposure, and the p-value of the fit; ``None`` where all secrets were ranked."""
    if canaries.space <= MOST_ENUMERATED:
        everything = enumerated(network, canaries, length)
        places = len(canaries.alphabet) ** np.arange(canaries.secrets.shape[1])[::-1]
        return tuple(ranked(everything, int(place)) for place in canaries.secrets @ places), None
    return _extrapolated(network, canaries, length, rng)


def enumerated(network: Network, canaries: Canaries, length: int) -> Floats:
    """Return the log-perplexity of every secret, (|R|,), in order, common beginnings asked together."""
    alphabet = torch.from_numpy(canaries.alphabet)
    contexts, total = torch.from_numpy(canaries.start)[None], torch.zeros(1, dtype=torch.float64)
    for _ in range(canaries.secrets.shape[1]):
        following = torch.cat([logs[:, -1, alphabet] for _, logs in log_probabilities(network, contexts, length)])
        total = (total[:, None] - following).flatten()
        repeated = contexts.repeat_interleave(len(alphabet), dim=0)
        contexts = torch.cat([repeated, alphabet.repeat(len(contexts))[:, None]], dim=1)
    return total.numpy()


def ranked(everything: Floats, place: int) -> Exposure:
    """Return the exposure of one of all secrets; those that are as likely come before it."""
    own = float(everything[place])
    rank = int(np.count_nonzero(everything <= own)) or len(everything)  # NaN has the last rank
    return Exposure(own, rank, math.log2(len(everything)) - math.log2(rank))


def log_perplexities(network: Network, canaries: Canaries, secrets: Numbers, length: int) -> Floats:
    """Return the log-perplexities, (N,), of secrets, numbers in the alphabet (N, n)."""
    chosen, begin = torch.from_numpy(canaries.alphabet[secrets]), len(canaries.start)
    tokens = torch.cat([torch.from_numpy(canaries.start).expand(len(chosen), -1), chosen], dim=1)
    parts = [
        -logs[:, begin - 1 : -1].gather(2, part[:, begin:, None]).sum(dim=(1, 2))
        for part, logs in log_probabilities(network, tokens, length)
    ]
    return torch.cat(parts).numpy()


def log_probabilities(network: Network, tokens: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through sequences (N, m) with log-probabilities (n, m, V) of what comes next, float64, on the CPU."""
    for part in tokens.split(_AT_ONCE):
        logits = network(functional.pad(part, (0, length - part.shape[1]), value=PAD))
        yield part, logits[:, : part.shape[1]].cpu().double().log_softmax(dim=2)


def _extrapolated(
    network: Network, canaries: Canaries, length: int, rng: np.random.Generator
) -> tuple[tuple[Exposure, ...], float]:
    from scipy import stats  # a second to import, and only long secrets need it

    drawn = rng.integers(len(canaries.alphabet), size=(2 * _SAMPLED, canaries.secrets.shape[1]))
    fitted, other = np.split(log_perplexities(network, canaries, drawn, length), 2)
    law = stats.skewnorm(*stats.skewnorm.fit(fitted))
    most = math.log2(canaries.space)
    own = log_perplexities(network, canaries, canaries.secrets, length)
    bits = np.clip(np.nan_to_num(-law.logcdf(own) / math.log(2), nan=0.0), 0.0, most)
    found = tuple(Exposure(float(nats), None, float(each)) for nats, each in zip(own, bits, strict=True))
    return found, float(stats.kstest(other, law.cdf).pvalue)


# A ceiling is refuted where what was measured has, under it, at most this probability, all canaries together.
_IMPOSSIBLE = 1e-3


def audit_memorisation(folder: RunFolder, samples: int, tokens: int, progress: Progress) -> Memorisation:
    """Measure what a run's final model remembers. It returns what is written to memorisation.json."""
    summary = completed_summary(folder)
    experiment = folder.experiment()
    world = rebuilt_world(folder, experiment)
    if not world.dataset.is_next:
        refuse_texts(experiment, "an audit of anything but the next token (data.text.task)")
    length, config = world.dataset.shape[-1], experiment.data.canaries
    if not 1 <= tokens < length:
        raise InputError(
            key="--tokens", given=tokens, allowed=f"a sequence of this run has {length}; allowed: 1 to {length - 1}"
        )
    final = final_state(folder, world, "audit")
    with cpu_threads(experiment.engine.threads), torch.no_grad():
        progress.stage(f"writing {samples} texts")
        network = _network(world, final)
        stream = torch_stream(experiment.seed, "extraction")
        written = sampled(network, samples, length, stream, _public_prompts(world.dataset))
        exposed = Memorisation(
            theorem="the run has no canaries, and nothing is proven of texts",
            extraction=_extracted(world, written, _gains(world, final, written), tokens),
        )
        if config is not None:
            progress.stage("ranking canaries")
            exposed = _with_canaries(exposed, world, _network(world, final), config, folder.ledger(), written)
    with writing():
        folder.write(exposed)
        folder.write_summary(summary.with_found({"memorisation": exposed}))
    return exposed


def _network(world: World, state: State) -> Network:
    """The model, which has these numbers until it gets others, in evaluation mode."""
    state.load_into(world.model)
    world.model.eval()

    def logits(tokens: Tensor) -> Tensor:
        with world.autocast():
            found: Tensor = world.model(tokens.to(world.device))
        return found

    return logits


def _gains(world: World, final: State, written: Tensor) -> Tensor:
    """How much likelier each text became by training, in nats per token."""
    facts = _text(world.dataset)
    before, after = (
        mean_losses(_network(world, state), written, facts.mark, facts.until_mark) for state in (world.initial, final)
    )
    return before - after


def _public_prompts(dataset: Dataset) -> Tensor | None:
    """The test texts up to their responses, (M, T); ``None``: the loss counts whole texts."""
    mark, tokens = _text(dataset).mark, dataset.x_test.flatten(1).long()
    learnt = functional.pad(next_targets(tokens, mark) >= 0, (1, 0))
    return tokens.masked_fill(learnt, PAD)[learnt.any(dim=1)] if mark else None


def _text(dataset: Dataset) -> TextFacts:
    if dataset.text is None:
        raise TypeError("no texts")
    return dataset.text


def _extracted(world: World, written: Tensor, gains: Tensor, tokens: int) -> ExtractedTexts:
    """What was written of the clients' texts; secrets are counted for themselves."""
    dataset, config = world.dataset, world.experiment.data.canaries
    rows = np.unique(np.concatenate([world.partitions[client] for client in range(len(world.partitions))]))
    if config is not None:
        rows = np.setdiff1d(rows, canary_rows(world.partitions, config, world.experiment.seed))
    train, test = dataset.x_train[torch.from_numpy(rows)].flatten(1), dataset.x_test.flatten(1)
    begun = _public_prompts(dataset)
    given = () if begun is None else begun.numpy()
    figures, found = extraction(written.numpy(), gains.numpy(), train.numpy(), test.numpy(), tokens, given)
    return replace(figures, texts=tuple(_text(dataset).tokenizer.decode(each.tolist()) for each in found))


def _with_canaries(
    nothing: Memorisation, world: World, network: Network, config: CanaryConfig, ledger: Ledger | None, written: Tensor
) -> Memorisation:
    """Fill in what is said of canaries."""
    seed, dataset = world.experiment.seed, world.dataset
    canaries = drawn_canaries(config, dataset, seed)
    exposed, fit = exposures(network, canaries, dataset.shape[-1], numpy_stream(seed, "canary-references"))
    told = written_secrets(written.numpy(), canaries).tolist()
    copies = [*canaries.copies.tolist(), *[0] * canaries.inserted]
    results = tuple(
        CanaryResult(number, one.log_perplexity, one.rank, one.bits, wrote)
        for number, one, wrote in zip(copies, exposed, told, strict=True)
    )
    line, unit = _line(ledger, config.client), "" if ledger is None else ledger.unit
    proven = {number: _proven(line, unit, number) for number in sorted(set(copies))}
    return nothing.model_copy(
        update={
            "bits": math.log2(canaries.space),
            "guess": guessed_exposure(canaries.space),
            "client": config.client,
            "canaries": results,
            "groups": tuple(
                _group([one for one in results if one.copies == number], statements, canaries)
                for number, statements in proven.items()
            ),
            "fit": fit,
            "theorem": _theorem(line, unit),
            "refuted": fit is None and _refuted(results, proven, canaries),
        }
    )


def _line(ledger: Ledger | None, client: int) -> LedgerLine | None:
    """The line of a client; ``None`` where it says nothing of (epsilon, delta)."""
    lines = () if ledger is None else ledger.clients
    line = next((line for line in lines if any(client in each for each in line.ranges)), None)
    return line if line is not None and (line.epsilon, line.pure_epsilon) != (None, None) else None


def _proven(line: LedgerLine | None, unit: str, copies: int) -> tuple[Statement, ...]:
    """What is proven of all copies of a secret, which one client holds; empty: nothing."""
    if not copies:
        return (Statement(0.0, 0.0),)  # nobody trained on it
    if line is None:
        return ()
    proven = [(line.epsilon, line.delta), (line.pure_epsilon, 0.0)]
    together = 1 if unit == "update" else copies
    return tuple(of_copies(Statement(epsilon, delta), together) for epsilon, delta in proven if epsilon is not None)


def _among_all(statements: Sequence[Statement], canaries: Canaries) -> list[Statement]:
    """The same with ranks among all secrets, though all that are drawn are different."""
    return [among_others(each, canaries.space, len(canaries.secrets) - 1) for each in statements]


def _group(results: Sequence[CanaryResult], statements: Sequence[Statement], canaries: Canaries) -> CanaryGroup:
    among = _among_all(statements, canaries)
    first = rank_ceiling(among, math.log2(canaries.space), canaries.space)
    least = min(statements, default=None)
    return CanaryGroup(
        copies=results[0].copies,
        canaries=len(results),
        exposure=statistics.fmean(one.exposure for one in results),
        first=None if any(one.rank is None for one in results) else sum(one.rank == 1 for one in results),
        ceiling=exposure_ceiling(among, canaries.space),
        first_ceiling=first if first < 1 else None,
        written=sum(one.written for one in results),
        epsilon=None if least is None else least.epsilon,
        delta=None if least is None else least.delta,
    )


def _refuted(results: Sequence[CanaryResult], proven: Mapping[int, Sequence[Statement]], canaries: Canaries) -> bool:
    """Whether an exposure is next to impossible: by the union bound, however canaries depend on each other."""
    chances = [
        rank_ceiling(_among_all(proven[one.copies], canaries), one.exposure, canaries.space)
        for one in results
        if one.copies
    ]
    return len(chances) * min(chances) < _IMPOSSIBLE


def _theorem(line: LedgerLine | None, unit: str) -> str:
    if line is None:
        return "nothing of the client that holds the canaries"
    group = "all copies are its data" if unit == "update" else "c copies are a group of c examples (Vadhan 2017)"
    return (
        "P[rank <= k] <= e^epsilon k / |R| + delta for a secret drawn at random, by the ledger's (epsilon, delta) of "
        f"the client that holds it ({line.adjacency}; {line.sampling}; participations: {line.participations}); {group}"
    )


_RANKED = 10  # a tenth of the samples comes first
_SHOWN = 5


def sampled(
    network: Network, count: int, length: int, generator: torch.Generator, begun: Tensor | None = None
) -> Tensor:
    """Let a model write texts, or go on with begun ones (M, T), each token drawn from what it says comes next."""
    tokens = torch.full((count, length), PAD, dtype=torch.int64)
    tokens[:, 0] = START
    if begun is not None:
        tokens = begun[torch.randint(len(begun), (count,), generator=generator)]
    given = tokens != PAD
    for place in range(1, length):
        logits = torch.cat([network(part)[:, place - 1].cpu() for part in tokens.split(_AT_ONCE)])
        drawn = torch.multinomial(logits.double().softmax(dim=1), 1, generator=generator)[:, 0]
        over = (tokens[:, place - 1] == END) | (tokens[:, place - 1] == PAD)
        tokens[:, place] = torch.where(given[:, place], tokens[:, place], drawn.masked_fill(over, PAD))
    return tokens


def mean_losses(network: Network, tokens: Tensor, mark: Sequence[int] = (), until: Sequence[int] = ()) -> Tensor:
    """Return what a model takes for each text (N, T), in nats per token, (N,), in float64, on the CPU."""
    parts = []
    for part, logs in log_probabilities(network, tokens, tokens.shape[1]):
        following = next_targets(functional.pad(part, (0, 1), value=PAD), mark, until)
        counted = following >= 0
        losses = -logs.gather(2, following.clamp(min=0)[:, :, None])[:, :, 0] * counted
        parts.append(losses.sum(dim=1) / counted.sum(dim=1).clamp(min=1))
    return torch.cat(parts)


def windows(texts: Iterable[Numbers], tokens: int) -> set[bytes]:
    """Return all different sequences of so many tokens in texts, each (T,), padding left out."""
    found: set[bytes] = set()
    for text in texts:
        kept = text[text != PAD].astype(np.int32)
        found.update(kept[start : start + tokens].tobytes() for start in range(len(kept) - tokens + 1))
    return found


def written_secrets(written: Numbers, canaries: Canaries) -> NDArray[np.bool_]:
    """Return whether each secret, (2 N,), stands behind its prefix in one of the texts (M, T) that a model wrote."""
    begin = np.repeat(canaries.start[None, 1:], len(canaries.secrets), axis=0)
    wanted = np.concatenate([begin, canaries.alphabet[canaries.secrets]], axis=1).astype(np.int32)
    found = windows(written, wanted.shape[1])
    return np.array([row.tobytes() in found for row in wanted])


def extraction(
    written: Numbers, gains: Numbers, train: Numbers, test: Numbers, tokens: int, given: Iterable[Numbers] = ()
) -> tuple[ExtractedTexts, list[Numbers]]:
    """Search what a model wrote, ordered by ``gains`` (how much likelier training made it), for its training data.

    Texts go on with ``given`` beginnings of public texts, whose sequences the model has not written.
    """
    ours, public = windows(train, tokens), windows(test, tokens)
    secret, other = ours - public, public - ours - windows(given, tokens)
    each = [windows([text], tokens) for text in written]
    hits = np.array([bool(own & secret) for own in each], dtype=bool)
    everything = set().union(*each)
    found = sorted(everything & secret)
    first = np.argsort(-gains, kind="stable")[: max(1, len(written) // _RANKED)]
    figures = ExtractedTexts(
        samples=len(written),
        tokens=tokens,
        found=len(found),
        of_train=len(secret),
        control=len(everything & other),
        of_test=len(other),
        with_found=int(hits.sum()),
        ranked=len(first),
        ranked_found=int(hits[first].sum()),
    )
    return figures, [np.frombuffer(one, dtype=np.int32).astype(np.int64) for one in found[:_SHOWN]]
