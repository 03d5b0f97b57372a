"""Networks of transformers: of a local folder, or of a type with a configuration."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.names import PAD
from fedpriv.core.registry import MODELS, suggestion
from fedpriv.core.settings import Table
from fedpriv.models.machinery.library import MOST_SUGGESTED, LibraryModelSettings
from fedpriv.models.machinery.settings import SequenceShape, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class TransformersSettings(LibraryModelSettings):
    """A network of transformers, from a local folder or of a type with a configuration."""

    library = "transformers"

    name: str = Field(
        "transformers:FOLDER", pattern="^transformers:", description="network of transformers: its folder or its type"
    )
    config: Table | None = Field(None, description="the configuration, for a type; sizes of the data are added")

    @override
    def built(self, shape: Shape, classes: int) -> Any:
        sizes = {"num_channels": shape[0], "image_size": shape[1] if shape[1] == shape[2] else list(shape[1:])}
        return self._built("ImageClassification", {**sizes, "num_labels": classes})

    @override
    def text_built(self, sequences: SequenceShape) -> Any:
        sizes = {"vocab_size": sequences.vocabulary, "pad_token_id": PAD, "num_labels": sequences.classes}
        network = self._built("CausalLM" if sequences.is_next else "SequenceClassification", sizes)
        self.check_fits(sequences, getattr(network.config, "max_position_embeddings", None))
        return network

    def _built(self, task: str, sizes: dict[str, Any]) -> "nn.Module":
        self.check_library()
        import transformers

        config = self._configuration(transformers, sizes)
        kind = getattr(transformers, f"AutoModelFor{task}")
        if type(config) not in kind._model_mapping:
            raise self.refusal(f"transformers has no {config.model_type} for {task}")
        network: nn.Module = kind.from_config(config, **self.keywords)
        return network.float()

    def _configuration(self, transformers: Any, sizes: dict[str, Any]) -> Any:
        """Return the configuration of the folder or type, with the sizes of the data that it knows."""
        if Path(self.architecture).is_dir():
            config = transformers.AutoConfig.from_pretrained(self.architecture, local_files_only=True)
            known = {key: value for key, value in sizes.items() if hasattr(config, key)}
            return type(config).from_dict({**config.to_dict(), **known})
        self.check_name(list(transformers.CONFIG_MAPPING))
        usual = transformers.AutoConfig.for_model(self.architecture)
        given = {} if self.config is None else self.config.plain()
        for key in given:
            if not hasattr(usual, key):
                close = suggestion(key, [name for name in vars(usual) if not name.startswith("_")], most=MOST_SUGGESTED)
                raise InputError(f"model.config: {self.architecture} has no key {key}{close}")
        known = {key: value for key, value in sizes.items() if hasattr(usual, key)}
        return transformers.AutoConfig.for_model(self.architecture, **{**known, **given})
