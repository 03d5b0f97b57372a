"""DAGER (Petrov et al., NeurIPS 2024): sentences from the row spaces of gradients of Linear layers in a transformer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import scipy
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.first_layer.batch import Spectrum, take_apart
from fedpriv.attacks.reconstruction.posterior import misfit
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Progress, counted, time_is_up
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.attention import (
    SMALLER,
    ProbedLayers,
    attended_sentences,
    find_probes,
    inputs_of,
    inputs_scaled,
    position_layers,
)
from fedpriv.attacks.texts.lookup import Lookup
from fedpriv.attacks.texts.scene import Reading, Sentences, TextScene, padded
from fedpriv.attacks.texts.scoring import Language, Texts
from fedpriv.attacks.texts.search import Climb, Ground
from fedpriv.attacks.texts.soft import lookup_layers
from fedpriv.attacks.texts.uploads.gradients import DagerSettings
from fedpriv.core.names import END, PAD, START
from fedpriv.data.tokenizers import NO_TARGET, next_targets
from fedpriv.gradients.calls import dropout_layers

# Row spaces of gradients, and whether a vector lies in one: the test that tells tokens of the batch from others.
#
# Let the gradient have R singular values above the noise's edge (``Spectrum``), of n dimensions that inputs
# have. What an input of the batch has outside the R right singular vectors is noise: to first order its length is
# chi-distributed with n - R degrees of freedom times ``deviation |S^-1 V^T x|`` (perturbation of singular subspaces,
# Stewart 1990). Of any other input it is that of a random direction, whose squared share follows Beta((n - R) / 2, R /
# 2). Both together give a tolerance and say whether the test can tell the two at all.


FALSE_TOKENS = 1e-2  # other tokens, of all that are tried, that a test may take for one of the batch's
MISSED = 1e-6  # chance that a token of the batch is missed, if the noise is as it is taken to be
NEAR = 0.5  # other inputs share parts with those of the batch, as positions, and are nearer than random ones
ROUNDED = 1e-2  # of an input that rounding alone puts outside
SLACK = 4.0  # rounding errors are no independent noise


@dataclass(frozen=True)
class Unusable:
    """Why a probe tells nothing."""

    kind: str  # zero, noise or rank
    reason: str  # in one line


@dataclass(frozen=True, eq=False)
class Span:
    """The row space of one probe's gradient."""

    probe: ProbedLayers  # whose it is
    spectrum: Spectrum  # of the gradient
    null: Tensor  # (n, n - R) orthonormal columns outside the row space
    weighted: Tensor  # (n, R), right singular vectors over their values times the noise's deviation
    dimensions: int  # that inputs have
    noisy: bool  # whether noise of a mechanism, or of several steps, is in the gradient
    sees_first: bool = True  # whether the first position of a sequence is in it

    @property
    def free(self) -> int:
        """Dimensions that inputs have, and the row space has not."""
        return self.dimensions - self.spectrum.examples

    def residuals(self, inputs: Tensor) -> Tensor:
        """The share (...,) of inputs (..., n) that lies outside the row space, from 0 to 1."""
        lengths = inputs.norm(dim=-1).clamp(min=torch.finfo(inputs.dtype).tiny)
        return (inputs @ self.null.to(inputs)).norm(dim=-1) / lengths

    def holds(self, inputs: Tensor, tried: int) -> Tensor:
        """Whether each of the inputs (..., n) lies in the row space, (...,), where so many are tried."""
        share = self.residuals(inputs)
        least = self.tolerance(tried)
        lengths = inputs.norm(dim=-1).clamp(min=torch.finfo(inputs.dtype).tiny)
        error = (inputs @ self.weighted.to(inputs)).norm(dim=-1) / lengths
        quantile = SLACK * math.sqrt(float(scipy.stats.chi2.ppf(1 - MISSED, self.free)))
        # Inputs themselves are computed with rounding errors.
        rounding = SLACK * self.null.shape[0] ** 0.5 * torch.finfo(inputs.dtype).eps
        return share <= (quantile * error + rounding).clamp(max=least if self.noisy else min(least, ROUNDED))

    def tolerance(self, tried: int) -> float:
        """The largest share outside that an input may have, such that hardly another one of so many has as little."""
        share = scipy.stats.beta.ppf(
            min(FALSE_TOKENS / max(tried, 1), 0.5), self.free / 2, max(self.spectrum.examples, 1) / 2
        )
        return NEAR * math.sqrt(float(share))


def span_of(probe: ProbedLayers, gradient: Tensor, deviation: float, floor: float, samples: Tensor) -> Span | Unusable:
    """Return the row space of a gradient, with the dimensions of any tokens' inputs, or why it tells nothing."""
    if not bool(gradient.any()):
        return Unusable("zero", f"the gradient of {probe.layer} is zero")
    rows, width = gradient.shape
    largest = float(torch.linalg.matrix_norm(gradient.double(), 2))
    other = floor * largest / (rows**0.5 + width**0.5)
    spectrum = take_apart(gradient, max(deviation, other), min(rows, width))
    dimensions = int(torch.linalg.matrix_rank(samples.double(), rtol=1e-6))
    if spectrum.examples == 0:
        return Unusable(
            "noise",
            f"noise edge: no singular value of the gradient of {probe.layer} is above what noise alone shows "
            f"({spectrum.edge:.3g}; the largest is {largest:.3g})",
        )
    if spectrum.examples >= min(dimensions, rows):
        of = f"{dimensions} dimensions" if dimensions <= rows else f"{rows} rows"
        return Unusable(
            "rank",
            f"rank: the gradient of {probe.layer} fills all its {of}: the batch has at least as many positions, or "
            "there is noise that is not public",
        )
    null = torch.linalg.qr(spectrum.right.T, mode="complete").Q[:, spectrum.examples :]
    weighted = spectrum.right.T / spectrum.values * spectrum.deviation
    return Span(probe, spectrum, null, weighted, dimensions, max(deviation, other) > 0)


# The first step: which tokens may stand at each position, by the row spaces of what sees single tokens.


_CHUNK = 512  # tokens of which inputs are held at once
_UNLIKE = 1e-5  # relative difference from which an input depends on its position


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Tokens that may stand at each position."""

    tokens: tuple[tuple[int, ...], ...]  # of each position, those nearest to the row space first
    placed: bool  # whether inputs depend on the position: else all positions have the same tokens

    @property
    def before_end(self) -> tuple[tuple[int, ...], ...]:
        """Those of positions before the first that has none."""
        return tuple(takewhile(bool, self.tokens))

    @property
    def counts(self) -> str:
        """How many there are, for the note."""
        return f"{sum(map(len, self.tokens))} tokens kept at {sum(map(bool, self.tokens))} positions"


def kept_tokens(
    network: nn.Module,
    spans: Sequence[Span],
    vocabulary: int,
    length: int,
    most: int,
    opening: tuple[int, ...],
    progress: Progress,
) -> KeptTokens:
    """Try all tokens at all positions but padding; a first position that no span sees may have any."""
    tried = vocabulary * length
    probes = [span.probe for span in spans]
    found: list[list[tuple[float, int]]] = [[] for _ in range(length)]
    placed = False
    unseeing = torch.tensor([not span.sees_first for span in spans])
    for numbers in torch.arange(vocabulary).split(_CHUNK):
        inputs = inputs_of(network, probes, numbers[:, None].expand(-1, length))
        shares = torch.stack([span.residuals(inputs[span.probe.layer]) for span in spans])
        passed = torch.stack([span.holds(inputs[span.probe.layer], tried) for span in spans])
        shares[unseeing, :, 0], passed[unseeing, :, 0] = 0.0, True
        placed = placed or any(map(_is_placed, inputs.values()))
        for row, place in passed.all(dim=0).nonzero().tolist():
            token = int(numbers[row])
            if token != PAD:
                found[place].append((float(shares[:, row, place].max()), token))
        progress(int(numbers[-1]) + 1, vocabulary, math.nan)
    if bool(unseeing.any()) and opening:
        found[0] = [(0.0, opening[0])]
    tokens = tuple(tuple(token for _, token in sorted(each)) for each in found)
    if not tokens[0]:
        why = "noise edge" if any(span.noisy for span in spans) else "rank"
        drawn = ", and the client drops numbers at random" if dropout_layers(network) else ""
        raise AttackRefused(f"{why}: no token at the first position is in the row space of {probes[0].layer}{drawn}")
    tested = range(int(unseeing.all()), length)
    crowded = max(tested, key=lambda place: len(tokens[place]))
    if len(tokens[crowded]) > most:
        raise AttackRefused(
            f"rank: at position {crowded} {len(tokens[crowded])} tokens are in the row space of {probes[0].layer}, "
            f"which has {spans[0].free} dimensions less than inputs; adversary.dager.most_tokens = {most} at most"
        )
    return KeptTokens(tokens, placed)


def _is_placed(inputs: Tensor) -> bool:
    differences = (inputs - inputs[:, :1]).norm(dim=2)
    return bool((differences > _UNLIKE * inputs.norm(dim=2)).any())


# The second step for decoders: sentences grow from left to right, while a deeper row space holds their prefixes.


@dataclass(frozen=True)
class Grown:
    """Sentences, as tokens."""

    whole: tuple[tuple[int, ...], ...]  # those that no token extends
    inner: tuple[tuple[int, ...], ...]  # their beginnings, each of which may be a sentence of the batch as well
    tried: int  # prefixes that were run through the network


def grow(network: nn.Module, spans: Sequence[Span], kept: KeptTokens, most: int, progress: Progress) -> Grown:
    """Extend each prefix by each token of the next position, and keep what the row spaces hold.

    Without positions a first token that is repeated attends to nothing new, and cannot be told from itself: it is not
    repeated. First tokens that no span sees are not tested, and are no sentences by themselves.
    """
    prefixes: list[tuple[int, ...]] = [()]
    whole: list[tuple[int, ...]] = []
    inner: list[tuple[int, ...]] = []
    tried = 0
    blind = not any(span.sees_first for span in spans)
    for place, tokens in enumerate(kept.tokens):
        longer = [(*prefix, token) for prefix in prefixes for token in tokens if kept.placed or {*prefix} != {token}]
        tried += len(longer)
        passed = _passed(network, spans, longer) if longer else []
        extended = {prefix[:-1] for prefix in passed}
        whole += [prefix for prefix in prefixes if len(prefix) > blind and prefix not in extended]
        inner += [prefix for prefix in prefixes if prefix in extended and len(prefix) > 1]
        if len(passed) > most and place >= blind:
            raise AttackRefused(
                f"rank: {len(passed)} beginnings of {place + 1} tokens are in the row space of {spans[0].probe.layer}, "
                f"which has {spans[0].free} dimensions less than inputs; adversary.dager.most_sentences = {most} at "
                "most"
            )
        prefixes = passed
        progress(place + 1, len(kept.tokens), math.nan)
        if not prefixes or time_is_up():
            break
    return Grown((*whole, *prefixes), tuple(inner), tried)


def _passed(network: nn.Module, spans: Sequence[Span], prefixes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    inputs = inputs_of(network, [span.probe for span in spans], torch.tensor(prefixes))
    tried = len(prefixes)
    seeing = [span for span in spans if span.sees_first or len(prefixes[0]) > 1]
    if not seeing:
        return list(prefixes)
    held = torch.stack([span.holds(inputs[span.probe.layer][:, -1], tried) for span in seeing]).all(dim=0)
    return [prefix for prefix, passes in zip(prefixes, held.tolist(), strict=True) if passes]


# The second step for encoders: in them all positions see each other, and sentences are found by changing tokens.
#
# Where every position has one token there is nothing to be found. Else many sentences are changed at once, one position
# after the other, to the token with which a deeper row space holds them best. What it holds is a sentence of the batch;
# what the search does not find is not there.


Sentence = tuple[int, ...]

_TOGETHER = 16  # sentences that are changed at once


def search(
    network: nn.Module,
    spans: Sequence[Span],
    kept: KeptTokens,
    wanted: int,
    starts: int,
    stream: torch.Generator,
    progress: Progress,
) -> tuple[list[Sentence], int]:
    """Return sentences that the row spaces hold, at most so many, and how many were run through the network."""
    found: dict[Sentence, None] = {}
    lengths, tried = _lengths(kept), 0
    trials = [length for _ in range(0, starts, _TOGETHER) for length in lengths]
    for number, length in enumerate(trials, 1):
        current = padded([_drawn(kept.tokens[:length], stream) for _ in range(_TOGETHER)], len(kept.tokens))
        current, more = _settled(network, spans, current, kept.tokens[:length])
        tried += more
        held = _held(network, spans, current, length)
        found |= {tuple(row[:length]): None for row, passes in zip(current.tolist(), held, strict=True) if passes}
        if len(found) >= wanted or time_is_up():
            break
        progress(number, len(trials), math.nan)
    return list(found), tried


def _settled(
    network: nn.Module, spans: Sequence[Span], current: Tensor, choices: Sequence[Sequence[int]]
) -> tuple[Tensor, int]:
    """Change sentences (N, T) until no other token at one place is better; return them and how many were tried."""
    tried = 0
    while True:
        before = current
        for place, tokens in enumerate(choices):
            if len(tokens) > 1:
                current, more = _changed_sentences(network, spans, current, len(choices), place, tokens)
                tried += more
        if torch.equal(current, before) or time_is_up():
            return current.unique(dim=0), tried


def _lengths(kept: KeptTokens) -> list[int]:
    """Those that sentences may have, at least one token each.

    First those after which fewer tokens are known than before, the longest of them first: there a sentence ends.
    """
    counts = [len(tokens) for tokens in (*kept.before_end, ())]
    return sorted(range(1, len(counts)), key=lambda length: (counts[length] >= counts[length - 1], -length))


def _drawn(choices: Sequence[Sequence[int]], stream: torch.Generator) -> list[int]:
    return [tokens[int(torch.randint(len(tokens), (1,), generator=stream))] for tokens in choices]


def _changed_sentences(
    network: nn.Module, spans: Sequence[Span], current: Tensor, length: int, place: int, tokens: Sequence[int]
) -> tuple[Tensor, int]:
    """Put the best token at one place of each sentence; the one that is there stays where none is better."""
    variants = current[:, None].repeat(1, len(tokens), 1)
    variants[:, :, place] = torch.tensor(tokens)
    flat = variants.flatten(0, 1)
    shares = _shares(network, spans, flat, length).view(len(current), len(tokens))
    best = shares.argmin(dim=1)
    return variants[torch.arange(len(current)), best], len(flat)


def _shares(network: nn.Module, spans: Sequence[Span], tokens: Tensor, length: int) -> Tensor:
    """How far sentences are from the row spaces, (N,): the sum over positions and spans of squared shares."""
    inputs = inputs_of(network, [span.probe for span in spans], tokens)
    each = [span.residuals(inputs[span.probe.layer][:, :length]).square().sum(dim=1) for span in spans]
    return torch.stack(each).sum(dim=0)


def _held(network: nn.Module, spans: Sequence[Span], tokens: Tensor, length: int) -> list[bool]:
    inputs = inputs_of(network, [span.probe for span in spans], tokens)
    tried = tokens.numel()
    passed = [span.holds(inputs[span.probe.layer][:, :length], tried).all(dim=1) for span in spans]
    return torch.stack(passed).all(dim=0).tolist()


# The last step: which sentences, how often and with which labels, by the whole gradient.
#
# The gradient of a batch is a sum of its sequences' own with weights of at least 0: they are found by least squares
# (Lawson and Hanson 1974), over all candidates and labels at once. Repeated sentences get their number, beginnings of
# others that are no sentences get nothing.


MOST_COLUMNS = 512  # sentences times labels of which gradients are computed
NUMBERS = 1 << 19  # of a gradient that are looked at
_HALF = 0.5  # of a sentence's weight in the batch, from which it is there, or there once more


@dataclass(frozen=True, eq=False)
class Weighed:
    """What explains an upload best."""

    sentences: tuple[Sentence, ...]  # those that count, each as often as it is in the batch; the heaviest first
    labels: tuple[int, ...]  # of each, or -1
    unexplained: float  # the length of what is left over that of the upload


def weigh(
    scene: TextScene, victim: Victim, whole: Sequence[Sentence], inner: Sequence[Sentence], wanted: int
) -> Weighed:
    """Choose among sentences, and name their labels."""
    names, sentences = _looked_at(scene, victim), [*whole, *inner]
    labels = [-1] if scene.is_next else list(range(scene.classes))
    columns = [_column(scene, victim, sentence, label, names) for sentence in sentences for label in labels]
    heard = torch.cat([victim.gradient[name].flatten() for name in names]).double()
    weights, unexplained = _weights(torch.stack(columns, dim=1), heard)
    left = weights.reshape(len(sentences), len(labels)) * wanted
    sure = [number for number in range(len(whole)) if len(whole) <= wanted or left[number].max() >= _HALF]
    chosen = [(number, int(left[number].argmax())) for number in sure]
    for pair in chosen:
        left[pair] -= 1
    # The largest shares that remain, each taken down by one when its sentence is chosen again.
    while len(chosen) < wanted and left.max() >= _HALF:
        number, label = divmod(int(left.argmax()), len(labels))
        chosen.append((number, label))
        left[number, label] -= 1
    return Weighed(
        tuple(sentences[number] for number, _ in chosen), tuple(labels[label] for _, label in chosen), unexplained
    )


def _looked_at(scene: TextScene, victim: Victim) -> list[str]:
    """The smallest tensors, together at most so many numbers; one in any case."""
    sizes = sorted((victim.gradient[name].numel(), name) for name in scene.names)
    totals = np.cumsum([size for size, _ in sizes])
    return [name for (_, name), total in zip(sizes, totals, strict=True) if total <= NUMBERS] or [sizes[0][1]]


def _column(scene: TextScene, victim: Victim, sentence: Sentence, label: int, names: Sequence[str]) -> Tensor:
    labels = torch.tensor([label], device=scene.device)
    if scene.is_next:
        labels = _next_targets(scene, [*sentence, END][: scene.length])  # what follows a full sequence is not known
        if bool((labels == NO_TARGET).all()):
            labels[0, -1] = END
    tokens = padded([sentence], scene.length).to(scene.device)
    gradient = scene.gradient(victim.parameters, tokens, labels)
    return torch.cat([gradient[name].flatten() for name in names]).double()


def _next_targets(scene: TextScene, sentence: Sequence[int]) -> Tensor:
    """The targets (1, T) of a text of at most T + 1 tokens."""
    tokens = padded([sentence], scene.length + 1)
    return next_targets(tokens, scene.format.mark, scene.format.until).to(scene.device)


def _weights(columns: Tensor, heard: Tensor) -> tuple[np.ndarray, float]:
    """Weights of at least 0 of columns (K, C) whose sum is nearest to a vector (K,), and what is left of its length."""
    # Orthonormal coordinates of the columns' span: what is outside of it no weights explain.
    basis, triangle = torch.linalg.qr(columns)
    inside = basis.T @ heard
    weights, rest = nnls(triangle.cpu().numpy(), inside.cpu().numpy(), maxiter=50 * columns.shape[1])
    outside = float((heard.square().sum() - inside.square().sum()).clamp(min=0))
    length = float(heard.norm())
    return weights, ((rest**2 + outside) ** 0.5 / length if length else 1.0)


_SAMPLES = 4  # inputs for each dimension, that say how many dimensions inputs have
_OWN = 20240513  # seed of the adversary's own sequence, on which probes are tried
_SEEN = 1e-2  # share outside the row space up to which a position counts as seen
CERTIFIED = 1e-3  # of the upload's length: what a batch that is right may leave unexplained, by rounding
_NOTHING = 0.99  # left unexplained by sentences that are none of the batch's

_STEPS = 3  # tokens, sentences, weights
_DRIFT = 0.1  # of the largest move of an input: what of it leaves the span, on average over steps (measured)
_USED = 1  # row spaces of these, by which sentences are put together
_LAYERS = 8  # that see more than single tokens, and are tried: those of the first two blocks


@dataclass(frozen=True, eq=False)
class _Task:
    """To read one upload."""

    scene: TextScene
    victim: Victim
    network: nn.Module  # with the parameters that the client was sent
    config: DagerSettings
    stream: torch.Generator
    progress: Progress


@dataclass(frozen=True, eq=False)
class _Found:
    """Sentences that row spaces hold; ``inner``: beginnings of them; ``how``: for the note."""

    whole: Sequence[Sentence]
    inner: Sequence[Sentence]
    how: str


def row_spaces(scene: TextScene, victim: Victim, config: DagerSettings, seed: int, progress: Progress) -> Reading:
    """Read the sentences behind one upload; what cannot be read is refused with the reason."""
    network = scene.with_parameters(victim.parameters)
    stream = scene.stream(seed, config.name, victim, 0)
    try:
        return _by_row_spaces(_Task(scene, victim, network, config, stream, progress))
    except AttackRefused as refusal:
        tokens = likely_tokens(scene, victim, network)
        if tokens is None or not _are_usable(scene, victim, network, tokens):
            raise
        reading = read_in_order(scene, victim, tokens, config.rounds, progress)
        return replace(reading, note=f"{refusal}; {reading.note}")


def _are_usable(scene: TextScene, victim: Victim, network: nn.Module, tokens: Tensor) -> bool:
    """Whether a search can order tokens: with a table of positions, those of one sentence, neither few nor many."""
    if not position_layers(network, scene.format.vocabulary):
        return True
    return victim.model.examples == 1 and BY_CHANCE < len(tokens) <= scene.length


def likely_tokens(scene: TextScene, victim: Victim, network: nn.Module) -> Tensor | None:
    """Tokens by the likelihood of a gradient, where inputs are sums of a token's part and others; ``None``: none is."""
    if victim.model.training is not None or victim.more:
        return None
    probes = find_probes(network, scene.names, scene.length, scene.format.vocabulary)
    for probe in (each for each in probes if each.reach == "token"):
        gradient, deviation = probe.gradient(victim.gradient), _deviation(victim, probe)
        if not bool(gradient.any()) or not bool(torch.isfinite(gradient).all()):
            continue
        parts = _token_parts(scene, network, probe)
        if parts is None:
            continue
        vectors, ever = parts
        outside = torch.eye(probe.width).to(ever) - torch.linalg.pinv(ever, rtol=PARTS) @ ever
        found = present_tokens(gradient.double() @ outside, vectors.double() @ outside, deviation)
        if len(found):
            return found
    return None


def _token_parts(scene: TextScene, network: nn.Module, probe: ProbedLayers) -> tuple[Tensor, Tensor] | None:
    """The part of inputs that each token has, (V, n), and what they have of positions and biases, float64 (m, n).

    Zero for tokens that nothing is to be found of; ``None``: inputs are no such sums.
    """
    size, allowed = scene.format.vocabulary, scene.inner.clone()
    everything = torch.arange(size)[:, None]
    if not _is_placed(inputs_of(network, [probe], everything[END:_CHUNK].expand(-1, 2))[probe.layer]):
        allowed[list(scene.opening)] = True
        vectors = inputs_of(network, [probe], everything)[probe.layer][:, 0]
        return vectors * allowed[:, None], vectors.new_zeros(1, probe.width).double()
    if not scene.opening:
        return None
    lookups, others = lookup_layers(network, size), position_layers(network, size)
    laid = everything.expand(-1, scene.length)
    vectors = torch.cat([inputs_scaled(network, probe, some, {0.0: others})[:, 1] for some in laid.split(_CHUNK)])
    silent: list[dict[float, list[nn.Module]]] = [{0.0: lookups}, {0.0: lookups, SMALLER: others}]
    ever = [inputs_scaled(network, probe, laid[:1], each)[0] for each in (*silent, {0.0: [*lookups, *others]})]
    ever.append(inputs_of(network, [probe], laid[START, None])[probe.layer][0, :1])
    tried = inputs_of(network, [probe], laid[-1:])[probe.layer][0]
    known = torch.cat([*(each[: scene.length] for each in ever), vectors[-1:]]).double()
    outside = tried - tried.double() @ torch.linalg.pinv(known, rtol=PARTS) @ known
    if float(outside.norm()) > PARTS * float(tried.norm()):
        return None
    return vectors * allowed[:, None], known[:-1]


def _by_row_spaces(task: _Task) -> Reading:
    """Read the sentences by what the row spaces hold."""
    scene, victim, network = task.scene, task.victim, task.network
    first, deeper, trouble = _spans(scene, victim, network)
    size, opening = scene.format.vocabulary, scene.opening
    kept = kept_tokens(network, first, size, scene.length, task.config.most_tokens, opening, task.progress)
    found = _told_alone(task, kept, deeper) or _put_together(task, kept, first[0], deeper, trouble)
    if not found.whole:
        reason = f"{found.how}: the row space of {deeper[0].probe.layer} holds no sentence"
        held, wanted = (spans[0].spectrum.examples for spans in (deeper, first))
        if held < wanted:
            reason = f"rank: {reason}: it has {held} dimensions, and positions fill {wanted}; too few errors reach it"
        raise AttackRefused(reason)
    weighed = _weighed(scene, victim, found.whole, found.inner)
    if not first[0].noisy and _NOTHING <= weighed.unexplained < math.inf:
        raise AttackRefused(f"{found.how}: the sentences found explain nothing of the upload")
    tokens = padded(weighed.sentences, scene.length)
    note = "; ".join([_about(first[0]), found.how, _certificate(scene, weighed, noisy=first[0].noisy)])
    return Reading(
        (Sentences(tokens, torch.tensor(weighed.labels, dtype=torch.int64), weighed.unexplained, _STEPS),), note
    )


def _spans(scene: TextScene, victim: Victim, network: nn.Module) -> tuple[list[Span], list[Span], str]:
    """Row spaces of what sees single tokens, at least one; of what sees more; and why there are none of these."""
    probes = find_probes(network, scene.names, scene.length, scene.format.vocabulary)
    probes = [*(each for each in probes if each.reach == "token"), *_deeper(probes)]
    if not probes or probes[0].reach != "token":
        raise AttackRefused(
            "no trained linear layer of the network gets single tokens, laid out as (sentences, positions, width)"
        )
    samples, drifts = _samples(scene, network, probes), _drifts(scene, victim, network, probes)
    first: list[Span] = []
    deeper: list[Span] = []
    failures: dict[bool, list[Unusable]] = {True: [], False: []}
    for probe in probes:
        sees_one = probe.reach == "token"
        if not sees_one and len(deeper) == _USED:
            break
        gradient = probe.gradient(victim.gradient)
        about = drifts.get(probe.layer, 0.0), samples[probe.layer]
        span = _proven(scene, victim, network, span_of(probe, gradient, _deviation(victim, probe), *about), about[1])
        if isinstance(span, Unusable):
            failures[sees_one].append(span)
        else:
            (first if sees_one else deeper).append(span)
    if not first:
        raise AttackRefused(_worst(failures[True]))
    return first, deeper, _worst(failures[False])


def _deeper(probes: Sequence[ProbedLayers]) -> list[ProbedLayers]:
    """The first of those that see more than single tokens, up to the second attention.

    Those of queries, keys and values come first, three layers or one three times as tall, which the residual stream
    reaches: what others get is harder to tell apart.
    """
    seeing = [probe for probe in probes if probe.reach != "token"][:_LAYERS]
    return sorted(seeing, key=lambda probe: -len(probe.weights) if probe.rows != 3 * probe.width else -3)


def _worst(failures: Sequence[Unusable]) -> str:
    """The reason that says most: noise before rank before a gradient of zero; empty where there is none."""
    order = ("noise", "rank", "zero")
    return min(failures, key=lambda failure: order.index(failure.kind)).reason if failures else ""


def _samples(scene: TextScene, network: nn.Module, probes: Sequence[ProbedLayers]) -> dict[str, Tensor]:
    """Inputs (M, n) of random sequences, enough to say how many dimensions inputs have."""
    count = 1 + _SAMPLES * max(probe.width for probe in probes) // scene.length
    tokens = torch.randint(
        scene.format.vocabulary, (count, scene.length), generator=torch.Generator().manual_seed(_OWN)
    )
    return {layer: inputs.flatten(0, 1) for layer, inputs in inputs_of(network, probes, tokens).items()}


def _deviation(victim: Victim, probe: ProbedLayers) -> float:
    """The largest deviation of the mechanism's noise in the probe's gradients; 0: there is none."""
    return max(map(victim.noise_in, probe.weights))


def _drifts(scene: TextScene, victim: Victim, network: nn.Module, probes: Sequence[ProbedLayers]) -> dict[str, float]:
    """By how much of their length inputs moved while a client made several steps: the upload itself tells."""
    if victim.model.training is None:
        return {}
    factor = victim.model.signed * victim.model.step
    after = scene.with_parameters(
        {name: victim.parameters[name] + factor * victim.gradient[name] for name in scene.names}
    )
    size, length = scene.format.vocabulary, scene.length
    tokens = torch.arange(length * (-(-size // length))).remainder(size).view(-1, length)
    start, end = (inputs_of(each, probes, tokens) for each in (network, after))
    moves = {layer: (end[layer] - start[layer]).norm(dim=2) / start[layer].norm(dim=2) for layer in start}
    return {layer: _DRIFT * float(shares.max()) for layer, shares in moves.items()}


def _proven(
    scene: TextScene, victim: Victim, network: nn.Module, span: Span | Unusable, samples: Tensor
) -> Span | Unusable:
    """The same, if a gradient of the adversary's own, of one random sequence, has all its positions in such a span."""
    if isinstance(span, Unusable):
        return span
    mark = scene.format.mark
    length = min(scene.length, max(3 + len(mark), min(span.dimensions, span.probe.rows) // 2))
    stream = torch.Generator().manual_seed(_OWN)
    inner = torch.randint(END + 1, scene.format.vocabulary, (length - 1,), generator=stream)
    sentence = [START, *inner.tolist()]
    prompt = (length - len(mark)) // 2
    sentence[prompt : prompt + len(mark)] = mark
    tokens = padded([sentence], scene.length).to(scene.device)
    labels = _next_targets(scene, [*sentence, END]) if scene.is_next else tokens.new_zeros(1)
    gradients = scene.gradient(victim.parameters, tokens, labels)
    gradient = span.probe.gradient(gradients)
    own = span_of(span.probe, gradient, 0.0, 0.0, samples)
    if isinstance(own, Unusable):
        return own
    seen = own.residuals(inputs_of(network, [span.probe], tokens)[span.probe.layer][0, :length]) <= _SEEN
    if not bool(seen[1:].all()):
        return Unusable(
            "zero",
            f"the gradient of {span.probe.layer} does not span all positions of a sequence, as in a last block",
        )
    return replace(span, sees_first=bool(seen[0]))


def _told_alone(task: _Task, kept: KeptTokens, deeper: Sequence[Span]) -> _Found | None:
    """Sentences that grow token by token, as each beginning is in a row space; or the only one that there is."""
    is_single = kept.placed and all(len(tokens) <= 1 for tokens in kept.tokens)
    if deeper and deeper[0].probe.reach == "prefix":
        grown = grow(task.network, deeper, kept, task.config.most_sentences, task.progress)
        if grown.whole or not is_single:
            return _Found(grown.whole, grown.inner, f"{kept.counts}, beginnings tried: {grown.tried}")
    if is_single:
        return _Found([tuple(tokens[0] for tokens in kept.before_end)], [], f"{kept.counts}: one sentence")
    return None


def _put_together(task: _Task, kept: KeptTokens, first: Span, deeper: Sequence[Span], trouble: str) -> _Found:
    """Sentences by the first attention, and where these do not explain all, by a search in deeper row spaces."""
    scene, victim = task.scene, task.victim
    attended: list[Sentence] = []
    if not scene.is_next and not first.noisy:
        tokens = sorted({token for each in kept.tokens[1:] for token in each})
        attended = _attended(scene, victim, task.network, first.probe, tokens)
    if attended and (not deeper or _weighed(scene, victim, attended).unexplained <= CERTIFIED):
        return _Found(attended, [], f"{kept.counts}, put together by the first attention")
    if not deeper:
        why = trouble or "no deeper layer is trained"
        raise AttackRefused(f"{kept.counts}, and no deeper layer tells which belong together: {why}")
    if not kept.placed:
        raise AttackRefused(f"{kept.counts}, in no order: the network has no positions, and all of them see each other")
    starts = task.config.starts
    found, tried = search(task.network, deeper, kept, victim.model.examples, starts, task.stream, task.progress)
    both = list(dict.fromkeys([*attended, *found]))
    if not both:
        raise AttackRefused(f"{kept.counts}: of {tried} sentences that were tried the row spaces hold none")
    return _Found(both, [], f"{kept.counts}, {tried} sentences tried")


def _attended(
    scene: TextScene, victim: Victim, network: nn.Module, probe: ProbedLayers, tokens: Sequence[int]
) -> list[Sentence]:
    """Sentences by the first attention, then those in what the ones before leave of the upload, and so on."""
    found: list[Sentence] = []
    left = victim
    while len(found) < victim.model.examples:
        more = [each for each in attended_sentences(scene, left, network, probe, tokens) if each not in found]
        if not more:
            break
        found += more
        labels = torch.tensor(_weighed(scene, victim, found).labels[: len(found)], device=scene.device)
        own = scene.gradient(victim.parameters, padded(found, scene.length).to(scene.device), labels.clamp(min=0))
        share = len(found) / victim.model.examples
        left = replace(left, gradient={name: value - share * own[name] for name, value in victim.gradient.items()})
    return found


def _weighed(
    scene: TextScene, victim: Victim, whole: Sequence[Sentence], beginnings: Sequence[Sentence] = ()
) -> Weighed:
    """Repeated sentences, beginnings that are sentences as well, and labels, by the whole gradient."""
    wanted, labels = victim.model.examples, 1 if scene.is_next else scene.classes
    inner = beginnings if len(whole) < wanted else ()
    if (len(whole) + len(inner)) * labels > MOST_COLUMNS:
        inner = ()
    if len(whole) * labels > MOST_COLUMNS:
        return Weighed(tuple(whole), (-1,) * len(whole), math.inf)
    return weigh(scene, victim, whole, inner, wanted)


def _about(span: Span) -> str:
    edge = "noise edge" if span.noisy else "rounding"
    return (
        f"{span.spectrum.examples} of {span.dimensions} dimensions of {span.probe.layer} are above the {edge} "
        f"({span.spectrum.edge / span.spectrum.largest:.1e} of the largest singular value)"
    )


def _certificate(scene: TextScene, weighed: Weighed, *, noisy: bool) -> str:
    """How much of the upload the sentences explain, and what that means."""
    if weighed.unexplained == math.inf:
        return "too many labels to weigh: nothing certifies the sentences but the row spaces"
    text = f"the sentences leave {weighed.unexplained:.1e} of the upload's length unexplained"
    if noisy or weighed.unexplained <= CERTIFIED:
        return text
    if scene.is_next and any(len(sentence) == scene.length for sentence in weighed.sentences):
        return f"{text} (what follows a full sequence is not known)"
    return f"{text}: a sentence or a label is missing or wrong"


# The gradient of a layer that sees single tokens is ``C X`` plus noise, X the inputs of all tokens and C zero for those
# that do not occur. With low-rank adapters it has fewer rows than tokens occurred, and with noise every token lies a
# little outside its row space. What is sought is the few rows of C that make the gradient most probable (sparse
# Bayesian learning for several measurements, Wipf and Rao 2007). A search then puts the tokens in order by the whole
# gradient.


ITERATIONS = 200  # of the fixed point, at most
SETTLED = 1e-3  # change of the strengths, of the largest
FLOOR = 1e-12  # of the largest strength: rounding alone
MOST = 4096  # tokens that are weighed together, those nearest to the gradient
FALSE = 1.0  # tokens that did not occur, of all that are tried, that count as found
BY_CHANCE = 3  # tokens, more of which are found in noise alone in 2 % of uploads
PARTS = 1e-4  # of inputs: what counts as rounding where they are taken apart
BEAM = 32  # beginnings that are kept while tokens are put in a usual order


def present_tokens(gradient: Tensor, inputs: Tensor, deviation: float) -> Tensor:
    """Return the tokens of a gradient (rows, n) of noise of this deviation, those that explain most first."""
    heard, atoms = gradient.double(), torch.nn.functional.normalize(inputs.double(), dim=1)
    rows, width = heard.shape
    names = (heard @ atoms.mT).square().sum(dim=0).topk(min(MOST, len(atoms))).indices
    names = names[atoms[names].any(dim=1)]
    atoms = atoms[names].mT
    strengths = torch.full((len(names),), float(heard.square().sum()) / (rows * len(names))).to(heard)
    eye = torch.eye(width, dtype=heard.dtype, device=heard.device)

    def seen(strengths: Tensor) -> tuple[Tensor, Tensor]:
        """What the inverse covariance of a row leaves of each token, and of the gradient along it."""
        noise = max(deviation**2, FLOOR * float(strengths.max()))
        whitened = torch.linalg.solve(noise * eye + (atoms * strengths) @ atoms.mT, atoms)
        return (atoms * whitened).sum(dim=0), (heard @ whitened).square().sum(dim=0)

    for _ in range(ITERATIONS):
        own, along = seen(strengths)
        moved = strengths * (along / (rows * own)).sqrt()
        change = float((moved - strengths).abs().max() / moved.max())
        strengths = moved
        if change < SETTLED:
            break
    own, along = seen(strengths)
    # With the token itself left out of the covariance, chi-squared for one that does not occur.
    surprise = along / (own * (1 - strengths * own).clamp(min=1e-12))
    threshold = float(scipy.stats.chi2.isf(min(FALSE / len(names), 0.5), rows))
    strengths = torch.where(surprise > threshold, strengths, 0.0)
    return names[strengths.argsort(descending=True, stable=True)[: int((strengths > 0).sum())]]


def read_in_order(scene: TextScene, victim: Victim, tokens: Tensor, rounds: int, progress: Progress) -> Reading:
    """Put tokens in the order, and as often, as the whole upload and a language model of public texts say.

    Without noise the tokens are certain; with noise the search may exchange them.
    """
    language = Language.of(scene, "")
    ground = Ground.of(scene, victim)
    climb = Climb(scene, victim, ground.soft, misfit, language, None if victim.model.mechanism.protects else tokens)
    labels = ground.labels.clamp(min=0)
    count = victim.model.examples
    laid = Lookup(tokens, None, None).sentences(scene, count, language)
    usual = torch.stack([_usual_order(row, language, len(scene.opening)) for row in laid])
    starts = [climb.at(Texts(ground.marked(made), labels)) for made in (laid, usual)]
    ended = climb.climb(min(starts, key=lambda start: start.loss), rounds, counted(progress, 0, rounds))
    note = f"{len(tokens)} tokens by the likelihood of the gradient, {ended.rounds} rounds of search; {language.title}"
    return Reading((ground.sentences(ended.texts, ended.loss, ended.rounds),), note)


def _usual_order(sentence: Tensor, language: Language, known: int) -> Tensor:
    """The tokens of a sentence (L,) in the order that is most usual, by a beam over positions."""
    tokens = sentence[sentence != PAD].tolist()
    start = max(known, 1)
    beams = [(0.0, tokens[:start], tokens[start:])]
    while beams[0][2]:
        chances = language.chances(torch.tensor([made for _, made, _ in beams], device=sentence.device))[:, -1]
        longer = [
            (loss - float(chances[number, token]), [*made, token], _one_less(rest, token))
            for number, (loss, made, rest) in enumerate(beams)
            for token in dict.fromkeys(rest)
        ]
        beams = sorted(longer, key=lambda beam: beam[0])[:BEAM]
    ordered = sentence.clone()
    ordered[: len(tokens)] = torch.tensor(beams[0][1], device=sentence.device)
    return ordered


def _one_less(tokens: list[int], token: int) -> list[int]:
    place = tokens.index(token)
    return tokens[:place] + tokens[place + 1 :]
