"""A Llama: RMS norms, rotary positions, grouped queries and a gated layer, with the names of the library transformers.

Touvron et al. 2023, arXiv 2302.13971; Shazeer 2020; Su et al. 2021; Ainslie et al. 2023. Rotary positions turn the
first half of a head with the second, as in that library; llama2.c, whose weights are read, turns neighbours, so that
rows of its queries and keys are put into another order.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from fedpriv.core.npz import read_arrays, require_headers
from fedpriv.models.machinery.transformer import last_tokens

_EPSILON, _BASE = 1e-5, 10_000.0  # of the RMS norms, and of the rotary positions
_LAYERS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "wq",
    "self_attn.k_proj": "wk",
    "self_attn.v_proj": "wv",
    "self_attn.o_proj": "wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "w1",
    "mlp.down_proj": "w2",
    "mlp.up_proj": "w3",
}
_ARRAYS = ("config", "tok_embeddings", *_LAYERS.values(), "norm")


@dataclass(frozen=True)
class _Sizes:
    """As in the file's ``config``; ``hidden`` of the gated layer, ``shared`` heads of keys and values."""

    width: int
    hidden: int
    depth: int
    heads: int
    shared: int
    vocabulary: int
    context: int


class _Attention(nn.Module):
    """Causal attention; each head of keys and values serves neighbouring heads of queries."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self._size = sizes.width // sizes.heads
        shared = sizes.shared * self._size
        self.q_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(sizes.width, shared, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self._serves = sizes.heads // sizes.shared

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (layer(x).unflatten(2, (-1, self._size)).transpose(1, 2) for layer in layers)
        query, key = _turned(query), _turned(key)
        key, value = (part.repeat_interleave(self._serves, dim=1) for part in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.width, eps=_EPSILON)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, eps=_EPSILON)
        self.mlp = _Gated(sizes.width, sizes.hidden)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Body(nn.Module):
    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.depth))
        self.norm = nn.RMSNorm(sizes.width, eps=_EPSILON)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """The network; its last layer is the embedding, or one of classes."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.model = _Body(sizes)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        self.vocabulary, self.context = sizes.vocabulary, sizes.context  # tokens that there are; the longest sequence
        self._is_next = True

    @staticmethod
    def read(path: Path) -> "Llama":
        """Return the network with the weights of stories260k.npz."""
        arrays = read_arrays(path, require_headers(path, _ARRAYS))
        sizes = _Sizes(*(int(number) for number in arrays["config"]))
        network = Llama(sizes)
        state = {"model.embed_tokens.weight": arrays["tok_embeddings"], "model.norm.weight": arrays["norm"]}
        for layer in range(sizes.depth):
            state |= {f"model.layers.{layer}.{ours}.weight": arrays[own][layer] for ours, own in _LAYERS.items()}
        parameters = dict(network.named_parameters())
        with torch.no_grad():
            for name, values in state.items():
                turned = _halves(values, sizes) if name.endswith(("q_proj.weight", "k_proj.weight")) else values
                parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(turned)))
        return network

    def classify(self, classes: int) -> None:
        """Put a new layer of classes in place of the last one; it reads the last token."""
        self.lm_head = nn.Linear(self.lm_head.in_features, classes)
        self._is_next = False

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to logits (B, T, V), or (B, K)."""
        x = self.model(tokens)
        return self.lm_head(x if self._is_next else last_tokens(x, tokens))


def _halves(weight: np.ndarray, sizes: _Sizes) -> np.ndarray:
    """Rows of each head in another order: the first numbers of all pairs, then the second ones."""
    size = sizes.width // sizes.heads
    return weight.reshape(-1, size // 2, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _turned(x: Tensor) -> Tensor:
    """Turn pairs (i, i + size / 2) of each head by their positions' angles: (B, heads, T, size)."""
    half = x.shape[3] // 2
    speeds = _BASE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)[:, None] * speeds
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=3)
