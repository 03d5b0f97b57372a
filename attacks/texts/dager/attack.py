"""DAGER, put together: probes, row spaces, tokens, sentences, and the whole gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Progress
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.dager.decoding import grow
from fedpriv.attacks.texts.dager.probes import Probe, find_probes, inputs_of
from fedpriv.attacks.texts.dager.searching import search
from fedpriv.attacks.texts.dager.spans import Span, Unusable, span_of
from fedpriv.attacks.texts.dager.tokens import Kept, kept_tokens
from fedpriv.attacks.texts.dager.weighing import MOST_COLUMNS, Weighed, weigh
from fedpriv.attacks.texts.scene import Reading, Sentences, TextScene, padded
from fedpriv.core.names import END, START

__all__ = ["Limits", "read"]

_SAMPLES = 4  # inputs for each dimension, that say how many dimensions inputs have
_OWN = 20240513  # seed of the adversary's own sequence, on which probes are tried
_SEEN = 1e-2  # share outside the row space up to which a position counts as seen
CERTIFIED = 1e-3  # of the upload's length: what a batch that is right may leave unexplained, by rounding
_NOTHING = 0.99  # left unexplained by sentences that are none of the batch's

_STEPS = 3  # tokens, sentences, weights
_DRIFT = 0.1  # of the largest move of an input: what of it leaves the span, on average over steps (measured)
_USED = 1  # row spaces of these, by which sentences are put together
_LAYERS = 8  # that see more than single tokens, and are tried: those of the first two blocks

Sentence = tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Settings that bound the work.

    Attributes:
        most_tokens: kept at one position.
        most_sentences: beginnings kept at one position.
        starts: random sentences of the search in encoders, for each length.
    """

    most_tokens: int
    most_sentences: int
    starts: int


@dataclass(frozen=True, eq=False)
class _Found:
    """Sentences that row spaces hold; ``inner``: beginnings of them; ``how``: for the note."""

    whole: Sequence[Sentence]
    inner: Sequence[Sentence]
    how: str


def read(
    scene: TextScene, victim: Victim, limits: Limits, stream: torch.Generator, progress: Progress | None
) -> Reading:
    """Read the sentences behind one upload; what cannot be read is refused with the reason.

    Raises:
        AttackRefused: the network has no such layers, or their gradients' rank or noise leaves nothing to test by.
    """
    network = scene.with_parameters(victim.parameters)
    first, deeper, trouble = _spans(scene, victim, network)
    kept = kept_tokens(network, first, scene.format.vocabulary, scene.length, limits.most_tokens, scene.opening)
    _tell(progress, 1)
    found = _sentences(network, victim, kept, deeper, trouble, limits, stream)
    _tell(progress, 2)
    if not found.whole:
        raise AttackRefused(f"{found.how}: the row space of {deeper[0].probe.layer} holds no sentence")
    weighed = _weighed(scene, victim, found)
    if not first[0].noisy and _NOTHING <= weighed.unexplained < math.inf:
        raise AttackRefused(f"{found.how}: the sentences found explain nothing of the upload")
    _tell(progress, 3)
    tokens = padded(weighed.sentences, scene.length)
    note = "; ".join([_about(first[0]), found.how, _certificate(scene, weighed, noisy=first[0].noisy)])
    return Reading((Sentences(tokens, torch.tensor(weighed.labels), weighed.unexplained, _STEPS),), note)


def _tell(progress: Progress | None, step: int) -> None:
    if progress is not None:
        progress(step, _STEPS, float("nan"))


def _spans(scene: TextScene, victim: Victim, network: nn.Module) -> tuple[list[Span], list[Span], str]:
    """Row spaces of what sees single tokens, at least one; of what sees more; and why there are none of these."""
    probes = find_probes(network, scene.names, scene.length, scene.format.vocabulary)
    probes = [*(each for each in probes if each.reach == "token"), *_deeper(probes)]
    if not probes or probes[0].reach != "token":
        raise AttackRefused("no trained Linear layer of the network gets single tokens, by which they could be tested")
    samples, drifts = _samples(scene, network, probes), _drifts(scene, victim, network, probes)
    first: list[Span] = []
    deeper: list[Span] = []
    failures: dict[bool, list[Unusable]] = {True: [], False: []}
    for probe in probes:
        sees_one = probe.reach == "token"
        if not sees_one and len(deeper) == _USED:
            break
        gradient = torch.cat([victim.gradient[name] for name in probe.weights])
        about = drifts.get(probe.layer, 0.0), samples[probe.layer]
        span = _proven(scene, victim, network, span_of(probe, gradient, _deviation(victim, probe), *about), about[1])
        if isinstance(span, Unusable):
            failures[sees_one].append(span)
        else:
            (first if sees_one else deeper).append(span)
    if not first:
        raise AttackRefused(_worst(failures[True]))
    return first, deeper, _worst(failures[False])


def _deeper(probes: Sequence[Probe]) -> list[Probe]:
    """The first of those that see more than single tokens, up to the second attention.

    Those of queries, keys and values come first, which the residual stream reaches: what others get is harder to tell
    apart.
    """
    seeing = [probe for probe in probes if probe.reach != "token"][:_LAYERS]
    return sorted(seeing, key=lambda probe: -len(probe.weights))


def _worst(failures: Sequence[Unusable]) -> str:
    """The reason that says most: noise before rank before a gradient of zero; empty where there is none."""
    order = ("noise", "rank", "zero")
    return min(failures, key=lambda failure: order.index(failure.kind)).reason if failures else ""


def _samples(scene: TextScene, network: nn.Module, probes: Sequence[Probe]) -> dict[str, Tensor]:
    """Inputs (M, n) of random sequences, enough to say how many dimensions inputs have."""
    count = 1 + _SAMPLES * max(probe.width for probe in probes) // scene.length
    tokens = torch.randint(
        scene.format.vocabulary, (count, scene.length), generator=torch.Generator().manual_seed(_OWN)
    )
    return {layer: inputs.flatten(0, 1) for layer, inputs in inputs_of(network, probes, tokens).items()}


def _deviation(victim: Victim, probe: Probe) -> float:
    """The largest deviation of the mechanism's noise in the probe's gradients; 0: there is none."""
    variance = max(victim.noise.variances, default=0.0)
    deviations = victim.model.mechanism.deviations(probe.weights)
    return max(math.sqrt(variance * float(deviations[name].square().mean())) for name in probe.weights)


def _drifts(scene: TextScene, victim: Victim, network: nn.Module, probes: Sequence[Probe]) -> dict[str, float]:
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
    length = min(scene.length, max(2, min(span.dimensions, span.probe.rows) // 2))
    stream = torch.Generator().manual_seed(_OWN)
    inner = torch.randint(END + 1, scene.format.vocabulary, (length - 1,), generator=stream)
    tokens = padded([[START, *inner.tolist()]], scene.length).to(scene.device)
    labels = scene.targets(tokens) if scene.is_next else torch.zeros(1, dtype=torch.int64, device=scene.device)
    if scene.is_next:
        labels[0, length - 1] = END
    gradients = scene.gradient(victim.parameters, tokens, labels)
    gradient = torch.cat([gradients[name] for name in span.probe.weights])
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


def _sentences(
    network: nn.Module,
    victim: Victim,
    kept: Kept,
    deeper: Sequence[Span],
    trouble: str,
    limits: Limits,
    stream: torch.Generator,
) -> _Found:
    """Put tokens together."""
    counts = f"{sum(map(len, kept.tokens))} tokens kept at {sum(map(bool, kept.tokens))} positions"
    reach = deeper[0].probe.reach if deeper else "none"
    if reach == "prefix":
        grown = grow(network, deeper, kept, limits.most_sentences)
        return _Found(grown.whole, grown.inner, f"{counts}, beginnings tried: {grown.tried}")
    if kept.placed and all(len(tokens) <= 1 for tokens in kept.tokens):
        return _Found([tuple(tokens[0] for tokens in kept.before_end)], [], f"{counts}: one sentence")
    if reach == "none":
        why = trouble or "no deeper layer is trained"
        raise AttackRefused(f"{counts}, and no deeper layer tells which belong together: {why}")
    if not kept.placed:
        raise AttackRefused(f"{counts}, in no order: the network has no positions, and all of them see each other")
    found, tried = search(network, deeper, kept, victim.model.examples, limits.starts, stream)
    if not found:
        raise AttackRefused(f"{counts}: of {tried} sentences that were tried the row spaces hold none")
    return _Found(found, [], f"{counts}, {tried} sentences tried")


def _weighed(scene: TextScene, victim: Victim, found: _Found) -> Weighed:
    """Repeated sentences, beginnings that are sentences as well, and labels, by the whole gradient."""
    wanted, labels = victim.model.examples, 1 if scene.is_next else scene.classes
    inner = found.inner if len(found.whole) < wanted else ()
    if (len(found.whole) + len(inner)) * labels > MOST_COLUMNS:
        inner = ()
    if len(found.whole) * labels > MOST_COLUMNS:
        return Weighed(tuple(found.whole), (-1,) * len(found.whole), math.inf)
    return weigh(scene, victim, found.whole, inner, wanted)


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
