"""Sentences of encoders from the gradients of the first attention's queries and keys, in closed form, without noise.

What goes into the first attention is a sum of a part of the token and a part of its position. So the gradient of the
query's weight gives, for each token, the error of its query, and that of the key's weight the error of its key. The
error of a query is a sum of the keys of its own sentence, that of a key a sum of queries, in each head by itself, and
keys and queries of all tokens at all positions are known. A token that occurs in one sentence only thus names all
others of its sentence (sparse Bayesian learning, as for tokens). The parts of tokens and positions have the same
coefficients, which tells where each token stood.

DAGER searches for these sentences instead, and needs the row space of a deeper layer, which batches soon fill.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.texts.probes import SMALLER, ProbedLayers, inputs_of, inputs_scaled, position_layers
from fedpriv.attacks.texts.scene import TextScene, padded
from fedpriv.attacks.texts.soft import lookup_layers
from fedpriv.core.names import END, START
from fedpriv.gradients.calls import copied

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
    made: Tensor = values.unflatten(1, (heads, -1)).transpose(0, 1)
    return made


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
    shared: Tensor = left[:, : len(cosines)][:, cosines > 1 - FITS].mT @ spans[0]
    return shared


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
