"""A text network that takes token probabilities or arbitrary vectors in place of tokens.

So a text becomes a thing with derivatives, of shape (1, T, V) or (1, T, width): what attacks on images do with images
of one channel, they then do with texts. Where probabilities are 0 and 1 the gradients of all parameters are those of
the tokens, the table of vectors included.

What a token becomes is computed by the network's own layer, whose output is replaced: a subclass may scale the rows of
its table (Gemma, MBart), an adapter adds to them, and a table may be registered under several names (as in PEFT).
"""

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.core.names import PAD

Kind = Literal["probabilities", "vectors"]

WRAPPED = ".base_layer"  # as which adapters of peft hold the layer that they add to
ROUNDING = 1e-5  # of the largest number of a table, computed in float32


class _Feed:
    """Hands what a network is given to its lookup, as hooks of both, which are copied with them."""

    def __init__(self, vocabulary: int, kind: Kind) -> None:
        self.given: Tensor | None = None
        self._vocabulary = vocabulary
        self._kind = kind

    def before(self, _: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        """Keep (B, 1, T, ...), and run the network on tokens (B, T), of which it is to see the padding alone."""
        self.given = arguments[0][:, 0]
        # A vector of nothing but zeros is nobody's: it pads.
        is_vector = self._kind == "vectors"
        padded = (self.given == 0).all(dim=2) if is_vector else self.given.argmax(dim=2) == PAD
        return (torch.where(padded, PAD, self._vocabulary - 1),)

    def found(self, lookup: nn.Module, arguments: tuple[Tensor], vectors: Tensor) -> Tensor:
        """Return in place of what was looked up the mean vector of probabilities, or the vectors that are given."""
        tokens = arguments[0]
        if self.given is None:
            return vectors
        table = _all_vectors(lookup, self._vocabulary, vectors.device)
        if self._kind == "probabilities":
            return self.given @ table
        return torch.where((tokens == PAD)[:, :, None], table[PAD].detach(), self.given)

    def after(self, _: nn.Module, __: tuple[Tensor], ___: Tensor) -> None:
        """Let go of what was given."""
        self.given = None


def _all_vectors(lookup: nn.Module, vocabulary: int, device: torch.device) -> Tensor:
    """What a lookup makes of each token, (V, width); its hooks are not called."""
    vectors: Tensor = lookup.forward(torch.arange(vocabulary, device=device)[None])
    return vectors[0]


def table_name(model: nn.Module, vocabulary: int) -> str:
    """Return the name of the table of the tokens' vectors: an embedding with a row for each."""
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


def _lookup(model: nn.Module, vocabulary: int) -> nn.Module:
    """The layer that turns tokens into vectors: the table's, with what an adapter adds to it."""
    name = table_name(model, vocabulary).removesuffix(".weight")
    return model.get_submodule(name.removesuffix(WRAPPED))


def token_vectors(model: nn.Module, vocabulary: int) -> Tensor:
    """Return the vectors (V, width) that the network's own layer makes of all tokens."""
    lookup = _lookup(model, vocabulary)
    return _all_vectors(lookup, vocabulary, next(lookup.parameters()).device).detach()


def table_factor(model: nn.Module, vocabulary: int) -> float | None:
    """Return by what the rows of the table are multiplied; ``None``: its layer does something else to them."""
    table = model.get_parameter(table_name(model, vocabulary)).detach().double()
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
    own = {id(value) for value in _lookup(model, vocabulary).parameters()}
    return tuple(name for name, value in model.named_parameters() if id(value) in own)


def soft_network(model: nn.Module, vocabulary: int, kind: Kind) -> Network:
    """Return the network for texts with derivatives.

    Args:
        model: maps tokens int64 (B, T) to logits; it is copied, with which parameters are trained.
        kind: probabilities: it takes (B, 1, T, V); those that pad a text have all on PAD. vectors: it takes
            (B, 1, T, width), zeros pad a text, and what vectors are looked up from is not among its parameters.

    Returns:
        The network; its loss takes logits (B, K) with label probabilities (B, K), or logits (B, T, V) with those of the
        next token (B, T, V), zeros where nothing is predicted.
    """
    soft = copy.deepcopy(model)
    lookup = _lookup(soft, vocabulary)
    feed = _Feed(vocabulary, kind)
    if kind == "vectors":
        lookup.requires_grad_(False)
    lookup.register_forward_hook(feed.found)
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
