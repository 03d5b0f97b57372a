"""Reference models: the target's training repeated on other data, many models at once.

Each reference is a whole federation of its own: the same clients, rounds, batch sizes, optimisers and the same
mechanism, with a noise stream of its own for each model. Only the data and the seed differ. What one model would
compute alone is what it computes here, up to rounding.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedpriv.accounting.response import Response
from fedpriv.core.algorithm import ModelRelease, algorithm_of
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.federated import batch_loss, client_weights, example_losses, train_locally, upload_sign, weighted_sum
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.plan import Plan, participants
from fedpriv.core.preparation import preparation_of
from fedpriv.core.randomness import NoiseStream, Secret
from fedpriv.core.world import World, tracked_buffers, trained_parameters
from fedpriv.gradients import DenseGradients, GradientOperator, Vector
from fedpriv.gradients.calls import coupled_layers, dropout_layers
from fedpriv.gradients.dense import FactoredGradients
from fedpriv.gradients.factors import Dyads, Factor, Memory, Rows

# Many copies of one network, each with numbers of its own, computed at once (``torch.func.stack_module_state``).
#
# A stack has M models; their parameters are tensors (M, *shape). Where a network is a chain of Linear layers and
# elementwise functions each layer is one batched product, and the gradients follow from the layers' inputs and output
# gradients, as in the operator of one model; any other network goes through autograd, and for per-example gradients one
# example at a time, vectorised.


# What acts on each number alone does so on a stack, too.
_ELEMENTWISE = (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh)


class Pair(NamedTuple):
    """What makes up a Linear layer's gradients: its inputs (M, B, in) and its outputs' gradients (M, B, out)."""

    inputs: Tensor
    errors: Tensor


class StackedNetwork:
    """A network whose numbers are given with every call."""

    def __init__(
        self, model: nn.Module, memory: int, tilt: float | None = None, forward: Response | None = None
    ) -> None:
        _refuse_unsuited(model)
        self._base = copy.deepcopy(model).train()
        self._memory, self._tilt, self._forward = memory, tilt, forward
        self._shapes = {name: value.shape for name, value in trained_parameters(model).items()}
        self._chain = _chain(self._base)

    def outputs(self, parameters: Vector, x: Tensor) -> Tensor:
        """Return every model's outputs (M, B, classes) for the same inputs (B, ...)."""
        with torch.no_grad():
            run = vmap(lambda numbers, image: functional_call(self._base, numbers, (image,)), in_dims=(0, None))
            logits: Tensor = run(parameters, x)
        return logits

    def gradients(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor) -> Vector:
        """Return each model's gradient of the objective of its batch, name -> (M, *shape).

        ``x``: (M, B, ...), each model's own batch; ``y``: (M, B); ``weights``: (M, B).
        """
        if self._chain:
            gradients_of: Vector = {}
            for name, pair in self._pairs(parameters, x, y, weights).items():
                gradients_of[f"{name}.weight"] = torch.bmm(pair.errors.mT, pair.inputs)
                gradients_of[f"{name}.bias"] = pair.errors.sum(dim=1)
            return {name: gradients_of[name] for name in self._shapes}
        tracked = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        outputs = vmap(lambda numbers, image: functional_call(self._base, numbers, (image,)))(tracked, x)
        total = self._loss(outputs, y, weights)
        gradients = torch.autograd.grad(total, tuple(tracked.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(tracked, gradients, strict=True))

    def descend(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor, rate: float) -> None:
        """Take one step of plain gradient descent in place; the arguments are those of :meth:`gradients`.

        Linear layers are moved by the product itself: no gradient is written out and read again, which is what most of
        the time of a small network's step goes into.
        """
        if not self._chain:
            for name, value in self.gradients(parameters, x, y, weights).items():
                parameters[name].sub_(value, alpha=rate)
            return
        for name, pair in self._pairs(parameters, x, y, weights).items():
            parameters[f"{name}.weight"].baddbmm_(pair.errors.mT, pair.inputs, alpha=-rate)
            if f"{name}.bias" in parameters:
                parameters[f"{name}.bias"].sub_(pair.errors.sum(dim=1), alpha=rate)

    def operators(self, parameters: Vector, x: Tensor, y: Tensor, sizes: Sequence[int]) -> Iterator[GradientOperator]:
        """Return for one model after the other the operator of its per-example gradients, for a mechanism.

        ``x``: (M, B, ...); ``y``: (M, B); ``sizes``: (M,), how many of the first examples of its batch count for a
        model.
        """
        ones = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device)
        if self._chain:
            pairs = self._pairs(parameters, x, y, ones)
            for number, size in enumerate(sizes):
                own = {name: Pair(pair.inputs[number], pair.errors[number]) for name, pair in pairs.items()}
                yield self._factored(own, size) if size else self._none(x)
            return
        one_gradient = grad(self._one_loss)
        of_batch = vmap(vmap(one_gradient, in_dims=(None, 0, 0)))
        rows = of_batch(parameters, x, y)
        for number, size in enumerate(sizes):
            yield DenseGradients({name: value[number, :size] for name, value in rows.items()}, "stacked models")

    def _loss(self, outputs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """The sum over models of the objective of each one's batch, for outputs (M, B, classes)."""
        each = example_losses(outputs.flatten(0, 1), y.flatten(), self._forward)
        if self._tilt is None:
            return torch.dot(each, weights.flatten())
        return batch_loss(each.view(y.shape), weights, self._tilt).sum()

    def _one_loss(self, parameters: Vector, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(self._base, parameters, (x.unsqueeze(0),))
        return example_losses(outputs, y.unsqueeze(0), self._forward).squeeze(0)

    def _pairs(self, parameters: Vector, x: Tensor, y: Tensor, weights: Tensor) -> dict[str, Pair]:
        """Run forward and back to the outputs of the Linear layers; what their weights get is not multiplied out."""
        inputs: Vector = {}
        outputs: Vector = {}
        value = x
        for name, layer in self._chain:
            if isinstance(layer, nn.Linear):
                inputs[name] = value.detach()
                value = _linear(value, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
                outputs[name] = value if value.requires_grad else value.requires_grad_()
            else:
                value = value.flatten(2) if isinstance(layer, nn.Flatten) else layer(value)
        errors = torch.autograd.grad(self._loss(value, y, weights), tuple(outputs.values()))
        return {name: Pair(inputs[name], error) for name, error in zip(outputs, errors, strict=True)}

    def _factored(self, pairs: dict[str, Pair], size: int) -> FactoredGradients:
        scratch = Memory(self._memory).scratch
        factors: dict[str, Factor] = {}
        for name, pair in pairs.items():
            bias = Rows(pair.errors[:size], scratch, side=True)
            factors |= {f"{name}.weight": Dyads(pair.inputs[:size], bias, scratch), f"{name}.bias": bias}
        first = next(iter(pairs.values())).errors
        ordered = {name: factors[name] for name in self._shapes}
        routes = dict.fromkeys(pairs, "ghost, stacked models")
        return FactoredGradients(ordered, size, dict(self._shapes), first.dtype, first.device, routes, self._memory)

    def _none(self, like: Tensor) -> DenseGradients:
        empty = {
            name: torch.zeros(0, *shape, dtype=like.dtype, device=like.device) for name, shape in self._shapes.items()
        }
        return DenseGradients(empty, "the batch is empty")


def _chain(base: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Return the layers, by name, of a network that is nothing but Flatten, Linear and elementwise layers, else ().

    A weight that is frozen, or shared by layers, makes it none: all that is trained has to be of one Linear layer each.
    """
    if type(base) is not nn.Sequential or any(_is_peculiar(module) for module in base.modules()):
        return ()
    # Not named_children(), which leaves out a layer's second place.
    layers = tuple((name, layer) for name, layer in base._modules.items() if layer is not None)
    kinds = [type(layer) for _, layer in layers if type(layer) not in _ELEMENTWISE]
    owned = [f"{name}.{own}" for name, layer in layers for own, _ in layer.named_parameters()]
    if kinds != [nn.Flatten] + [nn.Linear] * (len(kinds) - 1) or owned != list(trained_parameters(base)):
        return ()
    return layers if len(kinds) > 1 else ()


def _is_peculiar(module: nn.Module) -> bool:
    """Whether a layer does more than its kind says, flattens otherwise, or writes over what its neighbour keeps."""
    flattens = isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1)
    return bool(flattens or module._forward_hooks or module._forward_pre_hooks or getattr(module, "inplace", False))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(M, B, in), (M, out, in) and (M, out) to (M, B, out)."""
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _refuse_unsuited(model: nn.Module) -> None:
    for what, names in (
        ("mixes the examples of a batch", coupled_layers(model)),
        ("is random while training", dropout_layers(model)),
        ("keeps running numbers", tuple(tracked_buffers(model))),
    ):
        if names:
            raise InputError(
                f"reference models: {names[0]} of the network {what}, and such models are not trained together; "
                "allowed: networks without BatchNorm, dropout and noise"
            )


# Parameters, gradients, a client's copy and the optimiser's state: what a model takes while it is trained, in copies.
COPIES = 6


@dataclass(frozen=True, eq=False)
class Pool:
    """The examples that references are trained on."""

    images: Tensor  # (N, C, H, W), normalised, in the network's numbers and on its device
    labels: Tensor  # (N,), int64, on the same


def build_pool(world: World) -> Pool:
    """Return the training data, then the test data, as the network is fed.

    Where clients change labels, those of the test data are changed likewise: in a reference an outsider takes part.
    """
    images = torch.cat([world.dataset.x_train, world.dataset.x_test])
    labels = torch.cat([world.dataset.y_train, _outsiders_labels(world)])
    return Pool(world.network_input(images), labels.to(world.device))


def _outsiders_labels(world: World) -> Tensor:
    labels, preparation = world.dataset.y_test, preparation_of(world.experiment)
    if preparation is None:
        return labels
    return preparation.changed(world, labels, Secret.of_seed(world.experiment.seed).stream("labels of outsiders"))


@dataclass(frozen=True, eq=False)
class Reference:
    """What one reference model is trained with."""

    seed: int  # of its batches and its noise
    # for each client the rows of the pool that it holds, as many as the target's client holds examples
    shares: Sequence[np.ndarray]


def usual_schedule(experiment: Experiment) -> dict[int, tuple[int, ...]]:
    """Return round -> the clients whose uploads are averaged, if no client fails or stops."""
    return {number: participants(experiment, number) for number in range(1, experiment.federation.rounds + 1)}


def train_references(
    world: World,
    pool: Pool,
    references: Sequence[Reference],
    schedule: Mapping[int, Sequence[int]],
    keep: Collection[int],
    at_once: int | None = None,
) -> dict[int, Vector]:
    """Train reference models from the target's initial numbers; return round -> the models, name -> (R, *shape)."""
    _check(world, references, schedule, keep)
    memory = world.experiment.engine.gradient_bytes
    network = StackedNetwork(world.model, memory, world.experiment.training.tilt, world.corrected)
    together = at_once or _fitting(world, memory)
    parts = [
        _Federation(world, pool, references[start : start + together], network).run(schedule, keep)
        for start in range(0, len(references), together)
    ]
    return {
        number: {name: torch.cat([part[number][name] for part in parts]) for name in parts[0][number]}
        for number in sorted(keep)
    }


class _Federation:
    """A stack of M federations in the same round."""

    def __init__(self, world: World, pool: Pool, references: Sequence[Reference], network: StackedNetwork) -> None:
        self._world, self._experiment = world, world.experiment
        self._pool = pool
        self._references = references
        self._network = network
        self._plans = [[replace(plan, seed=reference.seed) for reference in references] for plan in world.plans]
        count, like = len(references), pool.images
        self._globals = {
            name: value.to(like.device).expand(count, *value.shape).clone()
            for name, value in world.initial.parameters.items()
        }
        federation = self._experiment.federation
        self._server = make_optimizer(
            federation.server_optimizer, self._experiment.server_learning_rate, federation.server_momentum
        )

    def run(self, schedule: Mapping[int, Sequence[int]], keep: Collection[int]) -> dict[int, Vector]:
        """Run all rounds; return the models after those that are wanted."""
        kept = {}
        for number in sorted(schedule):
            self._round(number, schedule[number])
            if number in keep:
                kept[number] = {name: value.clone() for name, value in self._globals.items()}
        return kept

    def _round(self, number: int, clients: Sequence[int]) -> None:
        federation = self._experiment.federation
        examples = [self._plans[client][0].sampling.examples for client in clients]
        uploads = (self._upload(client, number) for client in clients)
        mean = weighted_sum(uploads, client_weights(examples, federation.weighting))
        self._add_later_noise(mean, number, len(clients))
        sign = upload_sign(federation.algorithm)
        self._server.step(self._globals, {name: sign * value for name, value in mean.items()})
        for value in self._globals.values():
            if not torch.isfinite(value).all():
                raise RunFailedError(f"reference models: one diverged in round {number}")

    def _add_later_noise(self, mean: Vector, number: int, clients: int) -> None:
        """Add to each mean the noise that clients leave to the sum; normal, whatever its law is in the run."""
        federation, config = self._experiment.federation, self._world.plans[0].config
        divisor = federation.asked if config.noise_at == "server" else max(clients, 1)
        deviation = config.noise_on_mean(clients, divisor)
        if config.noise_at == "server":
            # Central noise is on a sum that is divided by the public number of clients.
            for value in mean.values():
                value.mul_(clients / divisor)
        if not deviation:
            return
        for index, reference in enumerate(self._references):
            stream = Secret.of_seed(reference.seed).stream("noise-on-sum", number).numpy()
            for value in mean.values():
                value[index] += torch.from_numpy(stream.normal(0.0, deviation, tuple(value[index].shape))).to(value)

    def _upload(self, client: int, number: int) -> Vector:
        """What a client of each federation uploads, name -> (M, *shape), after the mechanism."""
        plans = self._plans[client]
        algorithm = algorithm_of(self._experiment)
        if isinstance(algorithm, ModelRelease):
            return self._models(algorithm, client, number)
        local = {name: value.clone() for name, value in self._globals.items()}
        training = self._experiment.training

        def gradient(step: int) -> Vector:
            return self._gradient(client, step, local)

        def descend(step: int) -> None:
            self._network.descend(local, *self._batches(client, step)[:3], training.learning_rate)

        plain = training.optimizer == "sgd" and not training.momentum and not plans[0].config.protects_examples
        plain = plain and not training.weight_decay
        steps = plans[0].steps(number)
        upload = train_locally(self._experiment, steps, self._globals, local, gradient, descend if plain else None)
        if not plans[0].config.protects_updates:
            return upload
        released = [
            plan.release_update({name: value[index] for name, value in upload.items()}, _noise(plan, number))
            for index, plan in enumerate(plans)
        ]
        return {name: torch.stack([update[name] for update in released]) for name in upload}

    def _models(self, algorithm: ModelRelease, client: int, number: int) -> Vector:
        """Where clients release models: each federation's own, minus what its clients were sent."""
        released = []
        for plan, reference in zip(self._plans[client], self._references, strict=True):
            rows = torch.from_numpy(reference.shares[client]).to(self._pool.images.device)
            noise = _noise(plan, number) if plan.config.protects else None
            examples = self._pool.images[rows], self._pool.labels[rows]
            released.append(algorithm.released_model(self._world, client, *examples, plan, noise))
        return {
            name: torch.stack([model[name] for model in released]).to(value) - value
            for name, value in self._globals.items()
        }

    def _gradient(self, client: int, step: int, parameters: Vector) -> Vector:
        """Each model's mean gradient of its own batch, after the mechanism where its unit is the example."""
        x, y, weights, sizes = self._batches(client, step)
        plans = self._plans[client]
        if not plans[0].config.protects_examples:
            return self._network.gradients(parameters, x, y, weights)
        released: Vector = {name: torch.empty_like(value) for name, value in parameters.items()}
        operators = self._network.operators(parameters, x, y, sizes)
        for index, (plan, operator) in enumerate(zip(plans, operators, strict=True)):
            for name, value in plan.release_gradient(operator, _noise(plan, step)).items():
                released[name][index] = value
        return released

    def _batches(self, client: int, step: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Images (M, B, ...), labels (M, B), weights (M, B), sizes (M,); short batches are filled up with weight 0."""
        plans = self._plans[client]
        drawn = [plan.batch(step) for plan in plans]
        sizes = [len(batch) for batch in drawn]
        rows = np.zeros((len(plans), max(1, *sizes)), dtype=np.int64)
        for index, (reference, batch) in enumerate(zip(self._references, drawn, strict=True)):
            rows[index, : len(batch)] = reference.shares[client][batch]
        flat = torch.from_numpy(rows.reshape(-1)).to(self._pool.images.device)
        x = self._pool.images.index_select(0, flat).view(*rows.shape, *self._pool.images.shape[1:])
        y = self._pool.labels.index_select(0, flat).view(rows.shape)
        counted = np.arange(rows.shape[1]) < np.array(sizes)[:, None]
        weights = torch.from_numpy(counted / plans[0].sampling.batch_size).to(x)
        return x, y, weights, sizes


def _noise(plan: Plan, index: int) -> NoiseStream:
    """The noise of a reference model follows from the model's seed: it protects no data."""
    return Secret.of_seed(plan.seed).stream("noise", plan.client, index)


def _fitting(world: World, memory: int) -> int:
    """How many models fit, at least one; networks with other layers than Linear write out per-example gradients."""
    numbers = sum(value.numel() for value in world.initial.parameters.values())
    size = next(iter(world.initial.parameters.values())).element_size()
    rows = world.experiment.training.batch_size if world.plans[0].config.protects_examples else 0
    return max(1, memory // ((COPIES + rows) * numbers * size))


def _check(
    world: World, references: Sequence[Reference], schedule: Mapping[int, Sequence[int]], keep: Collection[int]
) -> None:
    federation = world.experiment.federation
    if federation.rule.needs_each:
        raise InputError(
            key="federation.aggregation",
            given=federation.aggregation,
            allowed="reference models average uploads by the mean only",
        )
    if not references:
        raise InputError("at least one reference model is wanted")
    sizes = tuple(len(rows) for rows in world.partitions)
    for number, reference in enumerate(references):
        held = tuple(len(rows) for rows in reference.shares)
        if held != sizes:
            raise InputError(f"reference {number}: clients hold {held} examples; the target's hold {sizes}")
    if missing := sorted(set(keep) - set(schedule)):
        raise InputError(f"models after round {missing[0]} are wanted, and nobody took part in it")
