"""What would be uploaded for random data by a model and a loss that are given, as a client that trains them would."""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.observation import PublicSettings
from fedpriv.attacks.own_model.loss import Criterion
from fedpriv.attacks.own_model.tensors import trained
from fedpriv.attacks.simulation import Sent
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.randomness import generator_states, seeded_generators, torch_stream
from fedpriv.gradients import Vector


class OwnClient:
    """See :class:`fedpriv.attacks.simulation.Client`.

    Args:
        model: in the mode in which the upload was computed; it is copied.
        loss: of logits and label probabilities.
        sums: whether the loss adds the examples of a batch up.
        public: how uploads come about.
    """

    def __init__(self, model: nn.Module, loss: Criterion, sums: bool, public: PublicSettings) -> None:
        self._model = model
        self._loss = loss
        self._sums = sums
        self._public = public

    def __call__(self, parameters: Vector, batches: Sequence[tuple[Tensor, Tensor]], draw: int) -> Sent:
        """Train a copy of the model, which draws its own random numbers."""
        first = next(iter(parameters.values()))
        model = copy.deepcopy(self._model).to(first.device, first.dtype)
        own = trained(model)
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(parameters[name])
        seed = torch_stream(0, "simulation-draw", draw).initial_seed()
        with seeded_generators(seed, first.device), torch.enable_grad():
            start = generator_states(first.device)
            upload = self._upload(model, own, parameters, batches)
            return Sent(upload, generator_states(first.device) != start)

    def _upload(
        self, model: nn.Module, own: Vector, before: Vector, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> Vector:
        public = self._public
        if public.algorithm == "fedsgd":
            return self._gradient(model, own, *batches[0])
        optimizer = make_optimizer(public.optimizer, public.learning_rate, public.momentum)
        for inputs, labels in batches:
            optimizer.step(own, self._gradient(model, own, inputs, labels))
        return {name: value.detach() - before[name] for name, value in own.items()}

    def _gradient(self, model: nn.Module, own: Vector, inputs: Tensor, labels: Tensor) -> Vector:
        probabilities = F.one_hot(labels, self._public.classes).to(inputs)
        loss = self._loss(model(inputs), probabilities) / (len(inputs) if self._sums else 1)
        gradients = torch.autograd.grad(loss, list(own.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(own, gradients, strict=True))
