"""The network of ``model.name = "encoder"``."""

from torch import Tensor, nn
from typing_extensions import override

from fedpriv.core.names import PAD
from fedpriv.models.machinery.transformer import Block, EmbeddedTokens


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
        logits: Tensor = self.output((x * weights).sum(dim=1) / weights.sum(dim=1))
        return logits
