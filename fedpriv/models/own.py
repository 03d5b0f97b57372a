"""A network of your own: what ``module:function`` returns, in the working folder or among what is installed."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.core.errors import some_of
from fedpriv.core.own_code import own_object
from fedpriv.core.registry import MODELS
from fedpriv.models.machinery.settings import MODEL, OpenModelSettings, SequenceShape, Shape

_LIBRARIES = ("torchvision", "timm", "transformers")  # whose networks have names of their own, beginning with these


@MODELS.register
class OwnSettings(OpenModelSettings):
    """``function(shape=(C, H, W), classes=N)`` returns the network; for texts ``(length=, vocabulary=, classes=)``."""

    is_code: ClassVar[bool] = True

    name: str = Field(
        MODEL.open_name,
        pattern=":",
        json_schema_extra={"not": {"pattern": f"^({'|'.join(_LIBRARIES)}):"}},
        description="network of your own, 'package.module:function'",
    )

    @property
    @override
    def module(self) -> str:
        return self.name.partition(":")[0]

    @override
    def built(self, shape: Shape, classes: int) -> Any:
        network = self._called(shape=shape, classes=classes, num_classes=classes)
        self.load(network, classes)
        return network

    @override
    def text_built(self, sequences: SequenceShape) -> Any:
        sizes = {"length": sequences.length, "vocabulary": sequences.vocabulary}
        network = self._called(**sizes, classes=sequences.classes, num_classes=sequences.classes)
        self.load(network, sequences.classes)
        return network

    def _called(self, **sizes: Any) -> Any:
        """Call the function with the sizes that it takes: torchvision's takes num_classes alone."""
        function = own_object(self.name, "model.name")
        is_network = hasattr(function, "named_parameters") and not isinstance(function, type)
        if is_network or not callable(function):
            raise self.refusal(f"expected a function or a class that makes the network, not {type(function).__name__}")
        more = {} if self.arguments is None else self.arguments.plain()
        given = {name: sizes[name] for name in _taken(function, set(sizes))} | more
        needed = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty and parameter.kind not in _REST and parameter.name not in given
        ]
        if needed:
            names = f"given by their names are {some_of(list(sizes))}, and those of model.arguments"
            raise self.refusal(f"takes {some_of(needed)} as well; {names}")
        return function(**given)


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _taken(function: Callable[..., Any], sizes: set[str]) -> set[str]:
    """Return which sizes a function is told; those of torchvision and timm take num_classes, at times unnamed."""
    parameters, usual = inspect.signature(function).parameters, sizes - {"num_classes"}
    if "num_classes" in parameters:
        return usual & parameters.keys() - {"classes"} | {"num_classes"}
    if parameters.keys() & {"weights", "pretrained"} and not parameters.keys() & usual:
        return {"num_classes"}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return usual if takes_any else usual & parameters.keys()
