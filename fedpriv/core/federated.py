"""FedSGD uploads one batch's mean gradient, FedAvg parameters after minus before (McMahan et al. 2017)."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.accounting.response import Response
from fedpriv.core.config import Experiment
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.plan import Plan
from fedpriv.core.randomness import NoiseStream
from fedpriv.core.threads import keep_freed_memory
from fedpriv.gradients import Vector


def upload_sign(algorithm: str) -> int:
    """Return by what an upload is multiplied to point along the gradient: 1 for fedsgd, -1 for fedavg."""
    return 1 if algorithm == "fedsgd" else -1


def example_losses(outputs: Tensor, labels: Tensor, forward: Response | None = None) -> Tensor:
    """Return the cross entropy of each example (B,), in float32 at least; of a sequence, its targets' mean."""
    precise = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if labels.ndim > 1:
        losses = functional.cross_entropy(precise.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return losses.sum(dim=1) / (labels >= 0).sum(dim=1).clamp(min=1)
    losses = functional.cross_entropy(precise, labels, reduction="none")
    if forward is None:
        return losses
    told, floor = math.log(forward.keep - forward.other), torch.full_like(losses, math.log(forward.other))
    return -torch.logaddexp(floor, told - losses)


def batch_loss(losses: Tensor, weights: Tensor, tilt: float | None) -> Tensor:
    """Return the objective of a batch from cross entropies (..., B) and weights that sum to 1 for a full batch."""
    if tilt is None:
        return (losses * weights).sum(dim=-1)
    total = weights.sum(dim=-1)
    # An empty batch has no loss; shares of nothing would make its gradient NaN.
    shares = torch.where(total > 0, weights.mT, torch.ones_like(weights.mT)).mT if weights.ndim > 1 else weights
    tilted = torch.logsumexp(tilt * losses + shares.log(), dim=-1) - shares.sum(dim=-1).log()
    return total * tilted / tilt


def client_weights(examples: Sequence[int], weighting: str) -> list[float]:
    """Return each client's weight in the mean: by its number of examples, or uniform. They sum to 1."""
    counts = _counts(examples, weighting)
    return [count / sum(counts) for count in counts]


def masked_weights(examples: Sequence[int], weighting: str) -> list[float]:
    """Return by what each client multiplies the upload that it masks: the weights in the mean over the largest one."""
    counts = _counts(examples, weighting)
    return [count / max(counts) for count in counts]


def weighted_sum(vectors: Iterable[Vector], weights: Sequence[float]) -> Vector:
    """Add up vectors of the same tensors, each times its weight, in their order; at least one."""
    total: Vector = {}
    for vector, weight in zip(vectors, weights, strict=True):
        total = total or {name: torch.zeros_like(value) for name, value in vector.items()}
        for name, value in vector.items():
            total[name].add_(value, alpha=weight)
    return total


def train_locally(
    experiment: Experiment,
    steps: range,
    before: Vector,
    parameters: Vector,
    gradient: Callable[[int], Vector],
    descend: Callable[[int], None] | None = None,
) -> Vector:
    """Do a client's work of one round, and return the upload; an optimiser starts afresh."""
    keep_freed_memory()
    training = experiment.training
    if experiment.federation.algorithm == "fedsgd":
        return decayed(gradient(steps[0]), parameters, training.weight_decay)
    optimizer = make_optimizer(training.optimizer, training.learning_rate, training.momentum)
    for step in steps:
        if descend is None:
            optimizer.step(parameters, decayed(gradient(step), parameters, training.weight_decay))
        else:
            descend(step)
    return {name: value.detach().to(before[name].device) - before[name] for name, value in parameters.items()}


def train_stack(
    experiment: Experiment,
    plans: Sequence[Plan],
    round_number: int,
    parameters: tuple[Vector, Vector],
    gradient: Callable[[int], Vector],
    descend: Callable[[int], None],
    noise: Callable[[int], NoiseStream],
) -> Vector:
    """Do the work of M clients that take the same steps, as :func:`train_locally`, with parameters (M, *shape)."""
    training, config = experiment.training, plans[0].config
    plain = training.optimizer == "sgd" and not training.momentum and not training.weight_decay
    plain = plain and not config.protects_examples
    steps = plans[0].steps(round_number)
    updates = train_locally(experiment, steps, *parameters, gradient, descend if plain else None)
    if not config.protects_updates:
        return updates
    released = [
        plan.release_update({name: value[row] for name, value in updates.items()}, noise(row))
        for row, plan in enumerate(plans)
    ]
    return {name: torch.stack([update[name] for update in released]) for name in updates}


def stack_objective(
    weights: Tensor, tilt: float | None, forward: Response | None, outputs: Tensor, labels: Tensor
) -> Tensor:
    """Return the sum over M models of the objective of each one's batch, with weights (M, B), of outputs (M B, K)."""
    losses = example_losses(outputs, labels, forward)
    if tilt is None:
        return torch.dot(losses, weights.flatten())
    return batch_loss(losses.view(weights.shape), weights, tilt).sum()


def decayed(gradient: Vector, parameters: Vector, decay: float) -> Vector:
    """Return the gradient with that of decay/2 |W|^2; the same numbers where there is none."""
    if not decay:
        return gradient
    return {name: value + decay * parameters[name].detach() for name, value in gradient.items()}


def _counts(examples: Sequence[int], weighting: str) -> list[float]:
    return [float(count) if weighting == "examples" else 1.0 for count in examples]
