"""Linear layers of a transformer: what goes into each of them, and which tokens that depends on.

The gradient of a Linear layer's weight is the sum of the outer products of its outputs' errors and its inputs, over all
positions of all sequences. Its rows are in the span of the inputs. Layers that get the very same input, as those of
queries, keys and values do, are one probe: their gradients are laid one below the other. A layer is linear if it
multiplies by a weight of its own, whatever its class: GPT-2's of the library transformers have it transposed.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedpriv.core.names import END
from fedpriv.gradients import Vector

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
    return [
        layer for layer in network.modules() if isinstance(layer, nn.Embedding) and layer.num_embeddings != vocabulary
    ]


def inputs_scaled(
    network: nn.Module, probe: ProbedLayers, tokens: Tensor, changes: Mapping[float, Sequence[nn.Module]]
) -> Tensor:
    """Return what goes into a probe, (B, T, n), where some layers give so many times what they do."""
    handles = [
        layer.register_forward_hook(lambda _, __, made, factor=factor: factor * made)
        for factor, layers in changes.items()
        for layer in layers
    ]
    try:
        return inputs_of(network, [probe], tokens)[probe.layer]
    finally:
        for handle in handles:
            handle.remove()


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
def _record(
    network: nn.Module,
    layers: Collection[str],
    tokens: Tensor,
    *,
    stop: bool = False,
) -> dict[str, Tensor]:
    """What goes into layers, by name, in the order in which they are called."""
    heard: dict[str, Tensor] = {}
    with _listening(network, layers, heard, stop=stop), suppress(_EnoughError):
        network(tokens)
    return heard


@contextmanager
def _listening(
    network: nn.Module,
    layers: Collection[str],
    heard: dict[str, Tensor],
    *,
    stop: bool,
) -> Iterator[None]:
    def hook(name: str) -> "torch.utils.hooks.RemovableHandle":
        def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            if given and isinstance(given[0], Tensor) and given[0].ndim == 3:  # DoRA gives it matrices, too
                heard[name] = given[0]
            if stop and len(heard) == len(layers):
                raise _EnoughError

        return network.get_submodule(name).register_forward_pre_hook(note)

    handles = [hook(name) for name in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
