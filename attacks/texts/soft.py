"""A text network that takes token probabilities or arbitrary vectors in place of tokens.

So a text becomes a thing with derivatives, of shape (1, T, V) or (1, T, width): what attacks on images do with images
of one channel, they then do with texts. Where probabilities are 0 and 1 the gradients of all parameters are those of
the tokens, the table of vectors included.

What a token becomes is computed by the network's own layer, whose output is replaced: a subclass may scale the rows of
its table (Gemma, MBart), an adapter adds to them, and a table may be registered under several names (as in PEFT) or
looked up by several layers (T5, BART). Tokens are the numbers of places, from the vocabulary's size on: a network may
transpose them, shift them, or add others of its own, before it looks them up.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.core.names import PAD
from fedpriv.data.tokenizers import next_targets

Kind = Literal["probabilities", "vectors"]

WRAPPED = ".base_layer"  # as which adapters of peft hold the layer that they add to
SPARE = (8, 128)  # rows that a table may have to spare: an eighth of the tokens, and as many as fill a block
ROUNDING = 1e-5  # of the largest number of a table, computed in float32


class _Feed:
    """Hands what a network is given to its lookups, as hooks of both, which are copied with them."""

    def __init__(self, vocabulary: int, kind: Kind) -> None:
        self.given: Tensor | None = None
        self._places: Tensor | None = None
        self._vocabulary = vocabulary
        self._kind = kind

    def before(self, _: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        """Keep (B, 1, T, ...), and run the network on the numbers of places (B, T), of padding where there is some."""
        self.given = arguments[0][:, 0]
        # A vector of nothing but zeros is nobody's: it pads.
        is_vector = self._kind == "vectors"
        padded = (self.given == 0).all(dim=2) if is_vector else self.given.argmax(dim=2) == PAD
        places = torch.arange(padded.numel(), device=padded.device).view(padded.shape)
        return (torch.where(padded, PAD, self._vocabulary + places),)

    def asked(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the places of which a layer is to look up the tokens, and give it tokens that it knows."""
        if self.given is None:
            return None
        self._places = arguments[0]
        return (self._places.clamp(max=self._vocabulary - 1), *arguments[1:])

    def found(self, lookup: nn.Module, arguments: tuple[Any, ...], vectors: Tensor) -> Tensor:
        """Return in place of what was looked up the mean vector of probabilities, or the vectors that are given."""
        given, places = self.given, self._places
        if given is None or places is None:
            return vectors
        table = _all_vectors(lookup, self._vocabulary, vectors.device)
        fed, own = (given, table.detach()) if self._kind == "vectors" else (given @ table, table)
        is_place = places >= self._vocabulary
        chosen = F.embedding(torch.where(is_place, places - self._vocabulary, 0), fed.flatten(0, 1))
        return torch.where(is_place[..., None], chosen, F.embedding(torch.where(is_place, PAD, places), own))

    def after(self, _: nn.Module, __: tuple[Tensor], ___: Tensor) -> None:
        """Let go of what was given."""
        self.given = self._places = None


def _all_vectors(lookup: nn.Module, vocabulary: int, device: torch.device) -> Tensor:
    """What a lookup makes of each token, (V, width); its hooks are not called."""
    vectors: Tensor = lookup.forward(torch.arange(vocabulary, device=device)[None])
    return vectors[0]


def token_tables(model: nn.Module, vocabulary: int) -> dict[str, nn.Embedding]:
    """The embeddings with a row for each token, by name; where none has as many rows, those with few to spare."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Embedding)}
    for most in (vocabulary, vocabulary + vocabulary // SPARE[0] + SPARE[1]):
        if found := {name: layer for name, layer in layers.items() if vocabulary <= layer.num_embeddings <= most}:
            return found
    return {}


def _tables(model: nn.Module, vocabulary: int) -> list[str]:
    """The names of the layers that hold the table of the tokens' vectors, one table alone."""
    found = token_tables(model, vocabulary)
    bags = [name for name, layer in model.named_modules() if isinstance(layer, nn.EmbeddingBag)]
    if bags and not found:
        raise AttackRefused(
            f"layer {bags[0]} (EmbeddingBag) hands on sums of tokens' vectors, which no attack here takes apart; the "
            "rows of its gradient that are not zero still tell which tokens occur"
        )
    if len({layer.weight for layer in found.values()}) != 1:
        raise AttackRefused(
            f"the network has {len(found)} embeddings with a row for each of {vocabulary} tokens; expected one"
        )
    for name, layer in found.items():
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise AttackRefused(f"layer {name} changes its vectors, or their gradients, while it looks them up")
    return list(found)


def table_name(model: nn.Module, vocabulary: int) -> str:
    """Return the name of the table of the tokens' vectors: an embedding with a row for each, and maybe spare ones."""
    return f"{_tables(model, vocabulary)[0]}.weight"


def lookup_layers(model: nn.Module, vocabulary: int) -> list[nn.Module]:
    """The layers that turn tokens into vectors: those of the table, with what an adapter adds to it."""
    names = _tables(model, vocabulary)
    return list(dict.fromkeys(model.get_submodule(name.removesuffix(WRAPPED)) for name in names))


def token_vectors(model: nn.Module, vocabulary: int) -> Tensor:
    """Return the vectors (V, width) that the network's own layer makes of all tokens."""
    lookup = lookup_layers(model, vocabulary)[0]
    return _all_vectors(lookup, vocabulary, next(lookup.parameters()).device).detach()


def table_factor(model: nn.Module, vocabulary: int) -> float | None:
    """Return by what the rows of the table are multiplied; ``None``: its layer does something else to them."""
    table = model.get_parameter(table_name(model, vocabulary)).detach()[:vocabulary].double()
    vectors = token_vectors(model, vocabulary).double()
    if torch.equal(table, vectors):
        return 1.0
    if table.shape != vectors.shape:
        return None
    factor = float((table * vectors).sum() / table.square().sum())
    is_multiple = float((vectors - factor * table).abs().max()) <= ROUNDING * float(vectors.abs().max())
    return factor if is_multiple and factor else None


def lookup_parameters(model: nn.Module, vocabulary: int) -> tuple[str, ...]:
    """Return the names of the parameters from which tokens' vectors are computed."""
    own = {id(value) for lookup in lookup_layers(model, vocabulary) for value in lookup.parameters()}
    return tuple(name for name, value in model.named_parameters() if id(value) in own)


def soft_network(model: nn.Module, vocabulary: int, kind: Kind) -> Network:
    """Return the network for texts with derivatives, of one from tokens int64 (B, T) to logits, which is copied.

    With ``probabilities`` it takes (B, 1, T, V); those that pad a text have all on PAD. With ``vectors`` it takes
    (B, 1, T, width), zeros pad a text, and what vectors are looked up from is not among its parameters. Its loss takes
    logits (B, K) with label probabilities (B, K), or logits (B, T, V) with those of the next token (B, T, V), zeros
    where nothing is predicted.
    """
    soft = copy.deepcopy(model)
    feed = _Feed(vocabulary, kind)
    for lookup in lookup_layers(soft, vocabulary):
        if kind == "vectors":
            lookup.requires_grad_(False)
        lookup.register_forward_pre_hook(feed.asked)
        lookup.register_forward_hook(feed.found)
    soft.register_forward_pre_hook(feed.before)
    soft.register_forward_hook(feed.after)
    return Network(soft, _soft_losses)


def soft_targets(probabilities: Tensor, mark: Sequence[int] = (), until: Sequence[int] = ()) -> Tensor:
    """Return the next token's probabilities (..., L - 1, V) of those of sequences (..., L, V); zeros where is none."""
    return probabilities[..., 1:, :] * (next_targets(probabilities.argmax(dim=-1), mark, until) >= 0)[..., None]


def _soft_losses(logits: Tensor, labels: Tensor) -> Tensor:
    losses = -(labels * F.log_softmax(logits, dim=-1)).sum(dim=-1)
    if losses.ndim == 1:
        return losses
    return losses.sum(dim=1) / labels.sum(dim=2).round().sum(dim=1).clamp(min=1)
