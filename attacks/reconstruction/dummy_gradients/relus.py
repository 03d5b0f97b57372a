"""The ReLUs of a network, wherever they are called: what they get, and what stands in for them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.gradients import Vector

__all__ = ["ReluMode", "kink_inputs"]

KINKED = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)


class ReluMode(TorchFunctionMode, ABC):
    """Within this context every ReLU, of a layer or a function, is :meth:`relu`."""

    @abstractmethod
    def relu(self, inputs: Tensor) -> Tensor:
        """Return what stands in for the ReLU of these inputs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in KINKED:
            return self.relu(args[0] if args else (kwargs or {})["input"])
        return func(*args, **(kwargs or {}))


class _Watched(ReluMode):
    """Within this context what ReLUs get is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    @override
    def relu(self, inputs: Tensor) -> Tensor:
        self.inputs.append(inputs.clone())
        return torch.relu(inputs)


def kink_inputs(network: Network, parameters: Vector, images: Tensor) -> list[Tensor]:
    """What the ReLUs get for images (R, C, H, W), tensors (R, ...) in the order of the calls; empty without ReLUs."""
    with torch.no_grad(), _Watched() as watched:
        network.logits(parameters, images)
    inputs: list[Tensor] = watched.inputs
    return inputs
