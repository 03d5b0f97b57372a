"""A small GPT: a transformer that reads from left to right (Radford et al. 2019)."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.core.settings import Count
from fedpriv.models.machinery.settings import SequenceShape, TextModelSettings

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class GptSettings(TextModelSettings):
    """For the next token with the embedding as last layer; for labels with one at the last token."""

    is_own = False

    name: Literal["gpt"] = Field("gpt", description="network")
    width: Count = Field(128, description="of the vectors; a multiple of heads")
    depth: Count = Field(4, description="number of blocks")
    heads: Count = Field(4, description="of attention")
    context: Count | None = Field(None, description="longest sequence; unset: as long as the data's")

    @override
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        from fedpriv.models.machinery.transformer import Gpt

        self.check_fits(sequences, self.context)
        self.check_heads(self.width, self.heads)
        context = self.context or sequences.length
        classes = None if sequences.is_next else sequences.classes
        return self.adapted(Gpt(sequences.vocabulary, context, self.width, self.depth, self.heads, classes), "output")
