"""A pretrained Llama of 260,032 parameters: llama2.c's stories260K (Touvron et al. 2023; Karpathy 2023)."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import SequenceShape, TextModelSettings

if TYPE_CHECKING:
    from torch import nn

_FILE = "stories260k.npz"


@MODELS.register
class LlamaSettings(TextModelSettings):
    """Trained on children's stories; needs data.text.tokenizer = "llama", whose tokens it knows."""

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
        return Path(self.path) if self.path else folder / _FILE
