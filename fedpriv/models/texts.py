"""Networks for sequences of tokens: transformers of your size, and a small pretrained one."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.core.settings import Count
from fedpriv.models.machinery.settings import SequenceShape, TextModelSettings

if TYPE_CHECKING:
    from torch import nn


class TransformerSettings(TextModelSettings):
    """The section of a transformer whose sizes are yours."""

    width: Count = Field(128, description="of the vectors; a multiple of heads")
    depth: Count = Field(4, description="number of blocks")
    heads: Count = Field(4, description="of attention")
    context: Count | None = Field(None, description="longest sequence; unset: as long as the data's")

    def sizes(self, sequences: SequenceShape) -> tuple[int, int, int, int, int]:
        """Return the vocabulary, context, width, depth and heads, which fit each other and the data."""
        self.check_fits(sequences, self.context)
        if self.width % self.heads:
            raise self.refusal(f"width = {self.width} is no multiple of heads = {self.heads}")
        return sequences.vocabulary, self.context or sequences.length, self.width, self.depth, self.heads


@MODELS.register
class EncoderSettings(TransformerSettings):
    """Every position sees all others (Devlin et al. 2019); labels are read off the mean of all tokens."""

    is_own = False

    name: Literal["encoder"] = Field("encoder", description="network")
    depth: Count = Field(2, description="number of blocks")

    @override
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        from fedpriv.models.machinery.transformer import Encoder

        if sequences.is_next:
            why = f"sees the tokens that it would predict, and the data are {sequences.task}; use gpt or llama"
            raise self.refusal(why)
        return self.adapted(Encoder(*self.sizes(sequences), sequences.classes), "output")


@MODELS.register
class GptSettings(TransformerSettings):
    """A transformer that reads from left to right (Radford et al. 2019).

    For the next token the last layer is the embedding; for labels there is one at the last token.
    """

    is_own = False

    name: Literal["gpt"] = Field("gpt", description="network")

    @override
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        from fedpriv.models.machinery.transformer import Gpt

        classes = None if sequences.is_next else sequences.classes
        return self.adapted(Gpt(*self.sizes(sequences), classes), "output")


@MODELS.register
class LlamaSettings(TextModelSettings):
    """llama2.c's stories260K, of 260,032 parameters (Touvron et al. 2023; Karpathy 2023).

    Trained on children's stories; needs data.text.tokenizer = "llama", whose tokens it knows.
    """

    is_own = False

    name: Literal["llama"] = Field("llama", description="network")
    path: str = Field("", description="of stories260k.npz; empty: in the folder of the data sets")

    @override
    def files(self, folder: Path) -> tuple[Path, ...]:
        return (self._weights(folder), *super().files(folder))

    @override
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        from fedpriv.models.machinery.llama import Llama

        if sequences.tokenizer != "llama":
            raise self.refusal(f"it knows the tokens of data.text.tokenizer = 'llama'; given {sequences.tokenizer!r}")
        network = Llama.read(self._weights(sequences.folder))
        if sequences.vocabulary != network.vocabulary:
            raise self.refusal(f"it knows {network.vocabulary} tokens; the data have {sequences.vocabulary}")
        self.check_fits(sequences, network.context)
        if not sequences.is_next:
            network.classify(sequences.classes)
        return self.adapted(network, "lm_head")

    def _weights(self, folder: Path) -> Path:
        return Path(self.path) if self.path else folder / "stories260k.npz"
