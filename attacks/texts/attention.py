"""Linear layers of a transformer: what goes into each, on which tokens that depends, what the first attention tells.

The gradient of a Linear layer's weight is the sum of the outer products of its outputs' errors and its inputs, over all
positions of all sequences. Its rows are in the span of the inputs. Layers that get the very same input, as those of
queries, keys and values do, are one probe: their gradients are laid one below the other. A layer is linear if it
multiplies by a weight of its own, whatever its class: GPT-2's of the library transformers have it transposed.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.scene import TextScene, padded
from fedpriv.attacks.texts.soft import lookup_layers, token_tables
from fedpriv.core.names import END, START
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied, until_the_end

Reach = Literal["token", "prefix", "sequence"]

_CHANGED = 1e-5  # relative difference from which an input depends on a token
_TOKENS = 1 << 16  # that go through the network at once
_SEED = 20240513  # of the random tokens on which dependence is tried; it decides nothing


@dataclass(frozen=True)
class ProbedLayers:
    """Linear layers with one input."""

    layer: str  # the name of the first of them, in the order in which they are called
    weights: tuple[str, ...]  # the names of their weights, as far as these are trained
    width: int  # n, of an input
    rows: int  # of all their gradients
    # what an input depends on: token (and its position), prefix (the token and those before it) or sequence
    reach: Reach
    transposed: frozenset[str] = frozenset()  # the names of weights whose rows are an input's numbers

    def gradient(self, gradients: Vector) -> Tensor:
        """The gradients of the weights, one below the other, (rows, n)."""
        return torch.cat([self.rows_of(name, gradients) for name in self.weights])

    def rows_of(self, name: str, gradients: Vector) -> Tensor:
        """The gradient of one of the weights, (rows, n)."""
        return gradients[name].T if name in self.transposed else gradients[name]


class _EnoughError(Exception):
    """The layers that were asked about have been called: what follows them need not be computed."""


def find_probes(network: nn.Module, names: Sequence[str], length: int, vocabulary: int) -> list[ProbedLayers]:
    """Return the probes of a network in the order in which it calls them, first those that see single tokens."""
    layers = _matrices(network, names)
    stream = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(min(END + 1, vocabulary - 1), vocabulary, (1, length), generator=stream)
    device = next(network.parameters()).device
    heard = _record(network, layers, tokens.to(device))
    first, last = (_record(network, layers, _changed(tokens, place, vocabulary).to(device)) for place in (0, -1))
    groups: list[tuple[Tensor, list[str]]] = []
    transposed = set()
    for layer, given in heard.items():
        if given.shape[:2] != (1, length) or given.ndim != 3:
            continue
        way = _way(network.get_submodule(layer), given)
        if way is None:
            continue
        if way:
            transposed.add(layers[layer])
        same = next((members for seen, members in groups if seen is given), None)
        if same is None:
            groups.append((given, [layer]))
        else:
            same.append(layer)
    sizes = {name: value.numel() for name, value in network.named_parameters()}
    probes = []
    for given, members in groups:
        weights = tuple(layers[layer] for layer in members)
        rows = sum(sizes[name] for name in weights) // given.shape[2]
        reach = _reach(given[0], first[members[0]][0], last[members[0]][0])
        turned = frozenset(transposed.intersection(weights))
        probes.append(ProbedLayers(members[0], weights, given.shape[2], rows, reach, turned))
    return sorted(probes, key=lambda probe: probe.reach != "token")


def inputs_of(network: nn.Module, probes: Sequence[ProbedLayers], tokens: Tensor) -> dict[str, Tensor]:
    """Return what goes into each probe, (B, T, n), by its layer, of tokens (B, T) on any device."""
    device = next(network.parameters()).device
    parts: dict[str, list[Tensor]] = {probe.layer: [] for probe in probes}
    for chunk in tokens.split(max(1, _TOKENS // tokens.shape[1])):
        heard = _record(network, parts, chunk.to(device), stop=True)
        for layer, found in parts.items():
            found.append(heard[layer])
    return {layer: torch.cat(found) for layer, found in parts.items()}


SMALLER = 0.03  # a vector, next to which a norm's epsilon is not nothing


def position_layers(network: nn.Module, vocabulary: int) -> list[nn.Module]:
    """Return the embeddings that are not of tokens: of positions, and of kinds of tokens."""
    tables = token_tables(network, vocabulary).values()
    return [layer for layer in network.modules() if isinstance(layer, nn.Embedding) and layer not in tables]


def inputs_scaled(
    network: nn.Module, probe: ProbedLayers, tokens: Tensor, changes: Mapping[float, Sequence[nn.Module]]
) -> Tensor:
    """Return what goes into a probe, (B, T, n), where some layers give so many times what they do."""
    handles = [
        layer.register_forward_hook(lambda _, __, made, factor=factor: factor * made)
        for factor, layers in changes.items()
        for layer in layers
    ]
    with until_the_end(handles):
        return inputs_of(network, [probe], tokens)[probe.layer]


def _matrices(network: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The trained weights, by their layers, that are matrices of one layer and no embedding's."""
    known = {id(value): name for name, value in network.named_parameters() if name in names and value.ndim == 2}
    holders = Counter(id(value) for layer in network.modules() for value in layer._parameters.values())
    weights = {
        name: id(layer._parameters.get("weight"))
        for name, layer in network.named_modules()
        if not isinstance(layer, nn.Embedding)
    }
    return {layer: known[weight] for layer, weight in weights.items() if weight in known and holders[weight] == 1}


@torch.no_grad()
def _way(layer: Any, given: Tensor) -> bool | None:
    """Whether a layer multiplies inputs (1, T, n) by its weight (n, m), not by (m, n); ``None``: it does neither."""
    made = layer.forward(given)
    bias = getattr(layer, "bias", None)
    for transposed in (False, True):
        weight = layer.weight if transposed else layer.weight.T
        if len(weight) == given.shape[2]:
            wanted = given @ weight + (0 if bias is None else bias)
            if made.shape == wanted.shape and torch.allclose(
                made, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())
            ):
                return transposed
    return None


def _changed(tokens: Tensor, place: int, vocabulary: int) -> Tensor:
    """Tokens (1, T) with another one in a place."""
    other = tokens.clone()
    other[0, place] = END + 1 + (int(tokens[0, place]) - END) % max(vocabulary - END - 1, 1)
    return other


def _reach(given: Tensor, first: Tensor, last: Tensor) -> Reach:
    """What inputs (T, n) depend on, by the same with another first token, and with another last one."""
    differs_behind, differs_before = (
        (given - changed).norm(dim=1) > _CHANGED * given.norm(dim=1) for changed in (first, last)
    )
    if bool(differs_before[:-1].any()):
        return "sequence"
    return "prefix" if bool(differs_behind[1:].any()) else "token"


@torch.no_grad()
def _record(network: nn.Module, layers: Collection[str], tokens: Tensor, *, stop: bool = False) -> dict[str, Tensor]:
    """What goes into layers, by name, in the order in which they are called."""
    heard: dict[str, Tensor] = {}

    def note(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given and isinstance(given[0], Tensor) and given[0].ndim == 3:  # DoRA gives it matrices, too
            heard[name] = given[0]
        if stop and len(heard) == len(layers):
            raise _EnoughError

    hooks = [network.get_submodule(name).register_forward_pre_hook(partial(note, name)) for name in layers]
    with until_the_end(hooks), suppress(_EnoughError):
        network(tokens)
    return heard


# Sentences of encoders from the gradients of the first attention's queries and keys, in closed form, without noise.
#
# What goes into the first attention is a sum of a part of the token and a part of its position. So the gradient of the
# query's weight gives, for each token, the error of its query, and that of the key's weight the error of its key. The
# error of a query is a sum of the keys of its own sentence, that of a key a sum of queries, in each head by itself, and
# keys and queries of all tokens at all positions are known. A token that occurs in one sentence only thus names all
# others of its sentence (sparse Bayesian learning, as for tokens). The parts of tokens and positions have the same
# coefficients, which tells where each token stood.
#
# DAGER searches for these sentences instead, and needs the row space of a deeper layer, which batches soon fill.


HOLDS = 1e-3  # relative error up to which equations hold
PLACED = 1e-2  # relative difference of the coefficients of a token and of its positions
FITS = 1e-7  # of an input, up to which it is a sum of the parts
ITERATIONS = 100  # of the fixed point, at most
SETTLED = 1e-3  # change of the strengths, of the largest
FLOOR = 1e-10  # of the largest strength: rounding
WEAK = 1e-4  # of the largest strength, below which a token is not in the sentence
REPEATED = 12  # positions of tokens that a sentence has several times, at most
OWN = 3  # tokens of the adversary's own sequence


def attended_sentences(
    scene: TextScene, victim: Victim, network: nn.Module, probe: ProbedLayers, tokens: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return sentences of these tokens; none, where the network or the batch is not of the kind."""
    network = copied(network).double()
    layers = _layers(scene, victim, network, probe) if scene.opening and len(tokens) > 1 else None
    parts = None if layers is None else _parts(scene, network, probe, tokens)
    if layers is None or parts is None:
        return []
    inverse = torch.linalg.pinv(parts.basis.mT)
    query, key = (inverse @ probe.rows_of(name, victim.gradient).double().mT for name in (layers.query, layers.key))
    errors = torch.cat([_by_head(query, layers.heads), _by_head(key, layers.heads)])
    known = torch.cat([_by_head(made, layers.heads) for made in _keys_and_queries(network, layers, parts.basis)])
    found: dict[tuple[int, ...], None] = {}
    for number, token in enumerate(tokens):
        if not any(token in sentence for sentence in found):
            sentence = _sentence(parts, errors[:, number], known)
            if sentence:
                found[START, *(tokens[each] for each in sentence)] = None
    return list(found)


@dataclass(frozen=True)
class _Layers:
    """The weights of the first attention's queries and keys, and the number of its heads."""

    query: str
    key: str
    heads: int


def _layers(scene: TextScene, victim: Victim, network: nn.Module, probe: ProbedLayers) -> _Layers | None:
    """What is query and key, tried on a sequence of the adversary's own; ``None``: nothing is."""
    tokens = padded([[START, *range(END + 1, END + 1 + OWN)]], scene.length).to(scene.device)
    gradient = scene.gradient(victim.parameters, tokens, torch.zeros(1, dtype=torch.int64, device=scene.device))
    inputs = inputs_of(network, [probe], tokens)[probe.layer][0, : 1 + OWN]
    inverse = torch.linalg.pinv(inputs.mT)
    for query, key in itertools.permutations(probe.weights, 2):
        errors, keys = inverse @ probe.rows_of(query, gradient).double().mT, _outputs(network, key, inputs)
        for heads in range(1, errors.shape[1] // len(inputs)):
            if errors.shape != keys.shape or errors.shape[1] % heads:
                continue
            own, others = _by_head(errors, heads), _by_head(keys, heads)
            if float((own - own @ torch.linalg.pinv(others) @ others).norm()) < HOLDS * float(own.norm()):
                return _Layers(query, key, heads)
    return None


def _outputs(network: nn.Module, weight: str, inputs: Tensor) -> Tensor:
    """What a Linear layer makes of inputs (N, n)."""
    layer = network.get_submodule(weight.rpartition(".")[0])
    with torch.no_grad():
        made: Tensor = layer(inputs)
    return made


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Numbers (N, out) of each head, (heads, N, out / heads)."""
    return values.unflatten(1, (heads, -1)).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _Parts:
    """What inputs of the first attention are sums of."""

    # (nt + T - 1 + ..., n), linearly independent: of each token, of each position but the first, of the first one with
    # its token, and what all inputs may have
    basis: Tensor
    of_token: Tensor  # (nt, T - 1), the coefficient of each token's own part, at each position but the first
    of_position: Tensor  # (nt, T - 1), the same of the position's


def _parts(scene: TextScene, network: nn.Module, probe: ProbedLayers, tokens: Sequence[int]) -> _Parts | None:
    """Take inputs apart; ``None``: they are no such sums."""
    size = scene.format.vocabulary
    lookups, others = lookup_layers(network, size), position_layers(network, size)
    laid = torch.tensor([*tokens, START])[:, None].expand(-1, scene.length)
    whole = inputs_of(network, [probe], laid)[probe.layer]
    nothing = inputs_scaled(network, probe, laid[:1], {0.0: [*lookups, *others]})[0, 0]
    of_tokens = inputs_scaled(network, probe, laid[:-1], {0.0: others})[:, 1] - nothing
    of_positions = inputs_scaled(network, probe, laid[:1], {0.0: lookups})[0, 1:] - nothing
    smaller = inputs_scaled(network, probe, laid[:2], {0.0: others, SMALLER: lookups})[:, 1] - nothing
    pairs = [torch.stack([nothing, of_tokens[number], smaller[number]]) for number in (0, 1)]
    basis = torch.cat([of_tokens, of_positions, whole[-1, :1], _common(*pairs)])
    inputs = whole[:-1, 1:].flatten(0, 1)
    outside = inputs - inputs @ torch.linalg.pinv(basis) @ basis
    fits = float(outside.norm()) < FITS * float(inputs.norm())
    if not fits or int(torch.linalg.matrix_rank(basis, rtol=FITS)) < len(basis):
        return None
    shares = (inputs @ torch.linalg.pinv(basis)).unflatten(0, (len(tokens), -1))
    numbers, places = torch.arange(len(tokens)), torch.arange(scene.length - 1)
    return _Parts(basis, shares[numbers, :, numbers], shares[:, places, len(tokens) + places])


def _common(one: Tensor, other: Tensor) -> Tensor:
    """What the spans of two tokens' vectors (3, n) have in common, (m, n): biases of norms."""
    spans = []
    for vectors in (one, other):
        _, sizes, directions = torch.linalg.svd(vectors, full_matrices=False)
        spans.append(directions[sizes > FITS * max(float(sizes[0]), float(other.norm()))])
    left, cosines, _ = torch.linalg.svd(spans[0] @ spans[1].mT)
    return left[:, : len(cosines)][:, cosines > 1 - FITS].mT @ spans[0]


def _keys_and_queries(network: nn.Module, layers: _Layers, basis: Tensor) -> tuple[Tensor, Tensor]:
    """What keys and queries are sums of, (N + 1, out); the last is the queries' bias, and zero for keys.

    Errors of a query's scores add up to zero, so that the keys' bias has no part in them.
    """
    zero = torch.zeros_like(basis[:1])
    biases = [_outputs(network, weight, zero) for weight in (layers.key, layers.query)]
    key, query = (
        _outputs(network, weight, basis) - bias for weight, bias in zip((layers.key, layers.query), biases, strict=True)
    )
    return torch.cat([key, 0 * biases[0]]), torch.cat([query, biases[1]])


def _sentence(parts: _Parts, errors: Tensor, known: Tensor) -> list[int] | None:
    """Which tokens stood with one, by its errors (G, d), each a sum of known vectors (G, N, d)."""
    count, places = parts.of_token.shape
    sizes = errors.norm(dim=1, keepdim=True)
    if not bool((sizes > 0).all()):
        return None
    scaled, ever = (errors / sizes)[:, None], known[:, count:]
    outside = torch.eye(errors.shape[1], dtype=errors.dtype) - torch.linalg.pinv(ever) @ ever
    strengths = _strengths(scaled @ outside, known[:, :count] @ outside)
    chosen = (strengths > WEAK * strengths.max()).nonzero().flatten()
    if not 0 < len(chosen) <= errors.shape[1] - ever.shape[1]:
        return None
    used = torch.cat([known[:, chosen], ever], dim=1)
    weights = scaled @ torch.linalg.pinv(used)
    if float((weights @ used - scaled).norm()) > HOLDS * float(scaled.norm()):
        return None
    own, theirs = weights[:, 0, : len(chosen)], weights[:, 0, len(chosen) : len(chosen) + places]
    is_there, is_filled = (each.norm(dim=0) > HOLDS * each.norm(dim=0).max() for each in (own, theirs))
    own, chosen, length = own[:, is_there], chosen[is_there], int(is_filled.sum())
    if not bool(is_filled[:length].all()):
        return None
    # What each token would add to its own coefficient, if it stood at each position.
    offered = (parts.of_token[chosen] / parts.of_position[chosen])[:, :length] * theirs[:, None, :length]
    placed = _placed(own, offered)
    return None if placed is None else chosen[placed].tolist()


def _strengths(errors: Tensor, vectors: Tensor) -> Tensor:
    """How strong each of the vectors (G, N, d) is in sums (G, 1, d), the same in all of these: few are not zero."""
    eye, strengths = torch.eye(vectors.shape[2], dtype=vectors.dtype), vectors.new_ones(vectors.shape[1])
    for _ in range(ITERATIONS):
        covariance = vectors.mT @ (strengths[:, None] * vectors) + FLOOR * float(strengths.max()) * eye
        whitened = torch.linalg.solve(covariance, vectors.mT)
        along = (errors @ whitened)[:, 0].square().sum(dim=0)
        moved = strengths * (along / (vectors.mT * whitened).sum(dim=(0, 1))).sqrt()
        change = float((moved - strengths).abs().max() / moved.max())
        strengths = moved
        if change < SETTLED:
            break
    return strengths


def _placed(own: Tensor, offered: Tensor) -> list[int] | None:
    """Which token stands at each position: coefficients (G, S) are sums of those offered (G, S, L) at its positions."""
    lengths = own.norm(dim=0)
    fits = (offered - own[:, :, None]).norm(dim=0) < PLACED * lengths[:, None]
    made = {place: token for token, place in fits.nonzero().tolist()}
    left = [place for place in range(offered.shape[2]) if place not in made]
    if len(left) > REPEATED:
        return None
    subsets = torch.tensor(list(itertools.product((0, 1), repeat=len(left)))).to(own)
    for token in {*range(len(lengths))} - {*made.values()}:
        apart = (subsets @ offered[:, token, left].mT - own[:, token]).norm(dim=1)
        best = int(apart.argmin())
        if float(apart[best]) > PLACED * float(lengths[token]):
            return None
        made |= {left[place]: token for place in subsets[best].nonzero().flatten().tolist()}
    return [made[place] for place in range(offered.shape[2])] if len(made) == offered.shape[2] else None
