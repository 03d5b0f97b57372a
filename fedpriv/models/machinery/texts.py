"""What the settings of networks for texts have in common: sequences in, logits out, and adapters on frozen weights."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.core.settings import Integer, Positive
from fedpriv.models.machinery.settings import ModelSettings, SequenceShape, Shape

if TYPE_CHECKING:
    from torch import nn


class TextModelSettings(ModelSettings):
    """The section of a network for sequences of tokens, int64 (B, T)."""

    lora_rank: Annotated[Integer, Field(ge=1, le=4096)] | None = Field(
        None, description="train adapters of this rank on frozen weights (LoRA) and the layer of a task's classes; "
        "unset: train all weights"
    )  # fmt: skip
    adapter: str = Field("", description="a file of the library peft, adapter_model.safetensors, to start from")
    lora_alpha: Positive = Field(16.0, description="an adapter's output is multiplied by this over its rank")
    lora_layers: tuple[str, ...] = Field(
        (), description="last names of the Linear layers that get adapters; none: those of queries and values"
    )

    @model_validator(mode="after")
    def _has_a_rank(self) -> Self:
        if self.adapter and self.lora_rank is None:
            raise ValueError("adapter is a file of adapters; lora_rank says that there are any")
        if self.lora_layers and self.lora_rank is None:
            raise ValueError("lora_layers says which layers get adapters; lora_rank says that there are any")
        return self

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        raise self.refusal("takes texts, and the data are images or rows of a table")

    @override
    @abstractmethod
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        """Return a new network for such sequences; else as :meth:`network`."""

    def check_fits(self, sequences: SequenceShape, context: int | None) -> None:
        """Refuse sequences that are longer than the network takes."""
        if context is not None and sequences.length > context:
            raise self.refusal(
                f"data.text.length = {sequences.length} is longer than the {context} tokens that it reads"
            )

    def check_heads(self, width: int, heads: int) -> None:
        """Refuse a width that heads cannot share."""
        if width % heads:
            raise self.refusal(f"width = {width} is no multiple of heads = {heads}")

    def adapted(self, network: "nn.Module", head: str) -> "nn.Module":
        """Return the network itself, or with adapters on frozen weights where the settings ask for that."""
        if self.lora_rank is None:
            return network
        from fedpriv.models.machinery.lora import with_adapters

        layers = self.lora_layers or ("query", "value", "q_proj", "v_proj")
        return with_adapters(network, self, layers, head)
