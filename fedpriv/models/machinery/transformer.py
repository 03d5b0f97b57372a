"""Parts of transformers, whose gradients have rules; positions are looked up for each example by itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from fedpriv.core.names import PAD


class EmbeddedTokens(nn.Module):
    """Tokens and their positions as vectors, added up."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        for table in (self.tokens, self.positions):
            # So that a last layer with the same weight begins with logits of about 1.
            nn.init.normal_(table.weight, std=width**-0.5)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to vectors (B, T, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        return self.tokens(tokens) + self.positions(positions)


class Attention(nn.Module):
    """Attention with several heads (Vaswani et al. 2017), written with Linear layers."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self._heads = heads
        self._causal = causal

    @override
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map (B, T, width) to the same shape; mask (B, 1, 1, T): true where a position is seen."""
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(2, (self._heads, -1)).transpose(1, 2) for layer in layers)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self._causal)
        return self.output(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a layer four times as wide, each normed before (Xiong et al. 2020) and added to its input."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T, width) to the same shape; mask as of :class:`Attention`."""
        x = x + self.attention(self.norm1(x), mask)
        inner: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + inner


def last_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """Return what stands at the last token that is one, (B, width), of x (B, T, width) and tokens (B, T)."""
    places = ((tokens != PAD).sum(dim=1) - 1).clamp(min=0)
    return x[torch.arange(len(x), device=x.device), places]


class Gpt(nn.Module):
    """A decoder."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int, classes: int | None) -> None:
        super().__init__()
        self.embedding = EmbeddedTokens(vocabulary, context, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary if classes is None else classes, bias=classes is not None)
        if classes is None:
            self.output.weight = self.embedding.tokens.weight
        self._is_next = classes is None

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to logits (B, T, V), or (B, K)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.output(x if self._is_next else last_tokens(x, tokens))


class Encoder(nn.Module):
    """An encoder; what pads a text is neither seen nor counted."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embedding = EmbeddedTokens(vocabulary, context, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(depth))
        self.last_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to logits (B, K)."""
        seen = tokens != PAD
        seen[:, 0] = True  # of an example without tokens something has to be seen
        x = self.norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, seen[:, None, None])
        x = self.last_norm(x)
        weights = seen[:, :, None].to(x.dtype)
        return self.output((x * weights).sum(dim=1) / weights.sum(dim=1))
