"""torch's SGD and Adam as functions: the same bits, without the seconds that importing torch's compiler takes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8


def momentum_weights(steps: int, momentum: float) -> list[float]:
    """Return how much of each step's gradient is in the change that SGD makes, from the last step to the first."""
    weights = [1.0]
    for _ in range(steps - 1):
        weights.append(momentum * weights[-1] + 1)
    return weights


class Optimizer(ABC):
    """A rule for a step."""

    slots: tuple[str, ...]  # the names of what it remembers of each parameter

    def __init__(self, rate: float) -> None:
        # Slot -> one tensor for each parameter in their order; empty before the first step.
        self.memory: dict[str, list[Tensor]] = {}
        self._rate = rate

    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Move the parameters, in place; each time the same ones in the same order."""
        with torch.no_grad():
            self._step(list(parameters.values()), [gradients[name] for name in parameters])

    @abstractmethod
    def _step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None: ...


def make_optimizer(name: str, rate: float, momentum: float) -> Optimizer:
    """Return SGD or Adam as ``torch.optim`` has them, with the defaults that it has."""
    return _Adam(rate) if name == "adam" else _Sgd(rate, momentum)


class _Sgd(Optimizer):
    def __init__(self, rate: float, momentum: float) -> None:
        super().__init__(rate)
        self.slots = ("momentum_buffer",) if momentum else ()
        self._momentum = momentum

    def _step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        buffers: list[Tensor | None] = [*self.memory.get("momentum_buffer", [None] * len(parameters))]
        sgd(
            parameters,
            gradients,
            buffers,
            weight_decay=0.0,
            momentum=self._momentum,
            lr=self._rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if self._momentum:
            self.memory = {"momentum_buffer": [buffer for buffer in buffers if buffer is not None]}


class _Adam(Optimizer):
    slots = ("step", "exp_avg", "exp_avg_sq")

    def _step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not self.memory:
            self.memory = {
                "step": [torch.zeros(()) for _ in parameters],
                "exp_avg": [torch.zeros_like(value) for value in parameters],
                "exp_avg_sq": [torch.zeros_like(value) for value in parameters],
            }
        adam(
            parameters,
            gradients,
            self.memory["exp_avg"],
            self.memory["exp_avg_sq"],
            [],
            self.memory["step"],
            amsgrad=False,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            lr=self._rate,
            weight_decay=0.0,
            eps=ADAM_EPSILON,
            maximize=False,
        )
