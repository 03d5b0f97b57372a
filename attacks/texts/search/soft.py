"""A network of texts that takes, in place of tokens, probabilities of tokens or any vectors.

So a text becomes a thing with derivatives, of shape (1, T, V) or (1, T, width): what attacks on images do with images
of one channel, they then do with texts. Where probabilities are 0 and 1 the gradients of all parameters are those of
the tokens, the table of vectors included.
"""

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.names import PAD

__all__ = ["Kind", "soft_network", "soft_targets", "table_name"]

Kind = Literal["probabilities", "vectors"]


class _Feed:
    """Hands what a network is given to its lookup, as two hooks of the network, which are copied with it."""

    def __init__(self, vocabulary: int, kind: Kind) -> None:
        self.given: Tensor | None = None
        self._vocabulary = vocabulary
        self._kind = kind

    def before(self, _: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        """Keep (B, 1, T, ...), and run the network on tokens (B, T), of which it is to see the padding alone."""
        self.given = arguments[0][:, 0]
        if self._kind == "probabilities":
            return (self.given.argmax(dim=2),)
        # A vector of nothing but zeros is nobody's: it pads.
        padded = (self.given == 0).all(dim=2)
        return (torch.where(padded, PAD, self._vocabulary - 1),)

    def after(self, _: nn.Module, __: tuple[Tensor], ___: Tensor) -> None:
        """Let go of what was given."""
        self.given = None


class _Lookup(nn.Module):
    """In place of an embedding: the mean vector of probabilities, or the vectors that are given."""

    def __init__(self, table: nn.Embedding, feed: _Feed, kind: Kind) -> None:
        super().__init__()
        self.weight = table.weight
        self._unmoved = table.padding_idx
        self._feed = feed
        self._kind = kind

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Return vectors (B, T, width); the tokens (B, T) say what pads a text."""
        given = self._feed.given
        if given is None:
            raise RuntimeError("the lookup is outside of the network that it was made for")
        if self._kind == "vectors":
            return torch.where((tokens == PAD)[:, :, None], self.weight[PAD].detach(), given)
        vectors = given @ self.weight
        if self._unmoved is None:
            return vectors
        row = self.weight[self._unmoved]
        return vectors - given[:, :, self._unmoved, None] * (row - row.detach())


def table_name(model: nn.Module, vocabulary: int) -> str:
    """Return the name of the table of the tokens' vectors: an embedding with a row for each.

    Raises:
        AttackRefused: there is none, or more than one.
    """
    found = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Embedding) and layer.num_embeddings == vocabulary
    ]
    if len(found) != 1:
        raise AttackRefused(
            f"the network has {len(found)} embeddings with a row for each of {vocabulary} tokens; one is wanted"
        )
    table: Any = model.get_submodule(found[0])
    if table.max_norm is not None or table.scale_grad_by_freq:
        raise AttackRefused(f"layer {found[0]} changes its vectors, or their gradients, while it looks them up")
    return f"{found[0]}.weight"


def soft_network(model: nn.Module, vocabulary: int, kind: Kind) -> Network:
    """Return the network for texts with derivatives.

    Args:
        model: maps tokens int64 (B, T) to logits; it is copied, with which parameters are trained.
        vocabulary: V.
        kind: probabilities: it takes (B, 1, T, V); those that pad a text have all on PAD. vectors: it takes
            (B, 1, T, width), zeros pad a text, and the table is not among its parameters.

    Returns:
        The network; its loss takes logits (B, K) with label probabilities (B, K), or logits (B, T, V) with those of the
        next token (B, T, V), zeros where nothing is predicted.

    Raises:
        AttackRefused: which layer looks up tokens is not clear.
    """
    name = table_name(model, vocabulary).removesuffix(".weight")
    soft = copy.deepcopy(model)
    feed = _Feed(vocabulary, kind)
    table: Any = soft.get_submodule(name)
    lookup = _Lookup(table, feed, kind)
    if kind == "vectors":
        lookup.weight.requires_grad_(False)
    parent, _, local = name.rpartition(".")
    setattr(soft.get_submodule(parent), local, lookup)
    soft.register_forward_pre_hook(feed.before)
    soft.register_forward_hook(feed.after)
    return Network(soft, _soft_losses)


def soft_targets(probabilities: Tensor) -> Tensor:
    """Return the next token's probabilities (..., L - 1, V) of those of sequences (..., L, V); zeros before padding."""
    following = probabilities[..., 1:, :]
    return following * (1 - following[..., PAD, None]).round()


def _soft_losses(logits: Tensor, labels: Tensor) -> Tensor:
    losses = -(labels * F.log_softmax(logits, dim=-1)).sum(dim=-1)
    if losses.ndim == 1:
        return losses
    return losses.sum(dim=1) / labels.sum(dim=2).round().sum(dim=1).clamp(min=1)
