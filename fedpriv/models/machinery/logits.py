"""Networks that return more than logits, as those of the library transformers do."""

from typing import Any

from torch import Tensor, nn
from typing_extensions import override

__all__ = ["LogitsOf"]


class LogitsOf(nn.Module):
    """A network of texts of which the logits are taken: what it returns, or what is called so in it.

    Args:
        network: takes tokens (B, T).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @staticmethod
    def of(network: Any) -> Any:
        """Return such a network, or what was given where it is none."""
        return LogitsOf(network) if isinstance(network, nn.Module) else network

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to logits."""
        returned = self.network(tokens)
        logits: Tensor = getattr(returned, "logits", returned)
        return logits
