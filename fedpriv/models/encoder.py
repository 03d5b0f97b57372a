"""A small encoder: a transformer in which every position sees all others (Devlin et al. 2019), for labels of texts."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.core.settings import Count
from fedpriv.models.machinery.settings import SequenceShape, TextModelSettings

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class EncoderSettings(TextModelSettings):
    """Labels are read off the mean of all tokens."""

    is_own = False

    name: Literal["encoder"] = Field("encoder", description="network")
    width: Count = Field(128, description="of the vectors; a multiple of heads")
    depth: Count = Field(2, description="number of blocks")
    heads: Count = Field(4, description="of attention")
    context: Count | None = Field(None, description="longest sequence; unset: as long as the data's")

    @override
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        from fedpriv.models.machinery.transformer import Encoder

        if sequences.is_next:
            raise self.refusal("sees the tokens that it would predict; data.text.task = 'next' is for gpt and llama")
        self.check_fits(sequences, self.context)
        self.check_heads(self.width, self.heads)
        context = self.context or sequences.length
        network = Encoder(sequences.vocabulary, context, self.width, self.depth, self.heads, sequences.classes)
        return self.adapted(network, "output")
