"""A network of your own: what ``module:function`` returns, in the working folder or among what is installed."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from fedpriv.core.errors import reason_of
from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import MODEL, ModelSettings, SequenceShape, Shape

if TYPE_CHECKING:
    from torch import nn


@MODELS.register
class OwnSettings(ModelSettings):
    """``function(shape=(C, H, W), classes=N)`` returns the network; for texts ``(length=, vocabulary=, classes=)``."""

    name: str = Field(MODEL.open_name, pattern=":", description="network of your own, 'package.module:function'")

    @property
    @override
    def module(self) -> str:
        return self.name.partition(":")[0]

    @override
    def network(self, shape: Shape, classes: int) -> "nn.Module":
        network: nn.Module = self._builder()(shape=shape, classes=classes)
        return network

    @override
    def text_network(self, sequences: SequenceShape) -> "nn.Module":
        from fedpriv.models.machinery.logits import LogitsOf

        sizes = {"length": sequences.length, "vocabulary": sequences.vocabulary, "classes": sequences.classes}
        network: nn.Module = LogitsOf.of(self._builder()(**sizes))
        return network

    def _builder(self) -> Callable[..., Any]:
        folder = str(Path.cwd())
        if folder not in sys.path:
            sys.path.append(folder)  # for good: the network's own code may import more later
        importlib.invalidate_caches()
        try:
            imported = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name and (self.module == error.name or self.module.startswith(f"{error.name}.")):
                raise self.refusal(f"no module {error.name} in {folder} or among what is installed") from None
            raise self.refusal(f"module {self.module} cannot be imported: {reason_of(error)}") from error
        except (Exception, SystemExit) as error:
            raise self.refusal(f"module {self.module} cannot be imported: {reason_of(error)}") from error
        function = self.name.partition(":")[2]
        build: Callable[..., Any] | None = getattr(imported, function, None)
        if build is None or not callable(build):
            raise self.refusal(f"module {self.module} has no function {function!r}")
        return build
