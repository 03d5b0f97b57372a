"""The network of ``model.name = "gpt"``."""

from torch import Tensor, nn
from typing_extensions import override

from fedpriv.models.machinery.transformer import Block, EmbeddedTokens, last_tokens


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
        logits: Tensor = self.output(x if self._is_next else last_tokens(x, tokens))
        return logits
