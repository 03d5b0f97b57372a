"""The routes by which gradients of dummy batches are computed, and which of them a network allows.

They give the same numbers: *ghost* keeps the inputs and output gradients of Linear layers and convolutions, *vmap*
writes out the gradients of any network, and ordinary autograd serves a single batch.
"""

import copy
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fedpriv.attacks.reconstruction.dummy_gradients.dummies import DummyGradients
from fedpriv.attacks.reconstruction.dummy_gradients.factors import Factor, Written
from fedpriv.attacks.reconstruction.dummy_gradients.layers import RULES, Entry
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.gradients import Vector
from fedpriv.gradients.ghost import Entangled, ghost_gradients
from fedpriv.gradients.operator import first_line

__all__ = ["dummy_gradients", "ghost_dummies", "ghost_obstacle", "plain_dummies", "written_dummies"]

# Up to so many parameters the gradient of a single dummy batch is computed by ordinary autograd, without any batching.
SMALL = 2**18
PROBE = 20240301  # the seed of the images and parameters that a network is tried with; it decides nothing else
PROBED = 11  # images in one such batch: a prime that is no usual length of an axis
COMPARED = 3  # of them are also gone through one at a time
TOLERANCE = 1e-6  # of gradients in float64, relative to the largest number of a tensor


def dummy_gradients(
    network: Network,
    parameters: Vector,
    images: Tensor,
    labels: Tensor,
    *,
    each: bool,
    autocast: torch.dtype | None = None,
) -> DummyGradients:
    """Gradients of the loss for many dummy batches with the same parameters, by the route that is open.

    Args:
        network: the network.
        parameters: of it, shared by all rows.
        images: (N, B, C, H, W), normalised.
        labels: probabilities (N, B, classes).
        each: whether each example is a unit; else the mean over the batch is the only one.
        autocast: the type in which the network itself runs, where it is not that of the parameters; the ghost route
            only, ``vmap`` does without.

    Raises:
        AttackRefused: the network cannot be differentiated this way.
    """
    alone = len(images) * (images.shape[1] if each else 1) == 1
    if alone and autocast is None and network.size <= SMALL:
        return plain_dummies(network, parameters, images, labels)
    if not ghost_obstacle(network, images.shape[2:], labels.shape[2]):
        return ghost_dummies(network, parameters, images, labels, each=each, autocast=autocast)
    return written_dummies(network, parameters, images, labels, each=each)


def ghost_obstacle(network: Network, shape: torch.Size, classes: int) -> str:
    """Find out, by trying it, why gradients of images (C, H, W) cannot be computed layer by layer; empty if they can.

    The ghost route needs every parameter to be used once, by its own Linear or convolution, and every image to go
    through on its own. That is read off what the network does with random images and parameters, and the numbers are
    compared with those of ordinary autograd, one image at a time.
    """
    key = (shape, classes)
    if key not in network.obstacles:
        network.obstacles[key] = _obstacle(network, shape, classes)
    return network.obstacles[key]


def written_dummies(
    network: Network, parameters: Vector, images: Tensor, labels: Tensor, *, each: bool
) -> DummyGradients:
    """Compute the gradients by ``vmap``: N * U * K numbers, for any network that ``vmap`` can take.

    Args:
        network: the network.
        parameters: shared by all rows.
        images: (N, B, C, H, W), normalised.
        labels: probabilities (N, B, classes).
        each: whether each example is a unit; else the mean over the batch is the only one.

    Raises:
        AttackRefused: the network cannot be differentiated this way.
    """
    gradients = network.gradients(parameters, images, labels, shared=True, each=each)
    return DummyGradients({name: Written(value if each else value[:, None]) for name, value in gradients.items()})


def plain_dummies(network: Network, parameters: Vector, images: Tensor, labels: Tensor) -> DummyGradients:
    """Compute the gradient of a single dummy batch by ordinary autograd: for a small network nothing costs less.

    Args:
        network: the network.
        parameters: of it.
        images: (1, B, C, H, W), normalised.
        labels: probabilities (1, B, classes).
    """
    with torch.enable_grad():
        leaves = {name: parameters[name].detach().requires_grad_() for name in network.names}
        loss = network.loss_alone(leaves, images[0], labels[0])
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
        joined = torch.cat([value.reshape(-1) for value in gradients])
    factors = {name: Written(value.view(1, 1, *value.shape)) for name, value in zip(leaves, gradients, strict=True)}
    return DummyGradients(factors, Written(joined.view(1, 1, -1)))


def ghost_dummies(
    network: Network,
    parameters: Vector,
    images: Tensor,
    labels: Tensor,
    *,
    each: bool,
    autocast: torch.dtype | None = None,
) -> DummyGradients:
    """Compute the gradients layer by layer; right for networks whose ``route`` says so.

    Args:
        network: the network.
        parameters: shared by all rows.
        images: (N, B, C, H, W), normalised.
        labels: probabilities (N, B, classes).
        each: whether each example is a unit; else the mean over the batch is the only one.
        autocast: the type in which the network runs, where it is not that of the parameters.
    """
    rows, examples = images.shape[:2]
    units = (rows, examples if each else 1)
    lower = nullcontext() if autocast is None else torch.autocast(images.device.type, dtype=autocast)
    # Errors are derivatives with respect to the layers' outputs, which are in a graph only if their images are.
    images = images if images.requires_grad else images.detach().requires_grad_()
    with torch.enable_grad(), lower:
        logits, entries = network.follow(parameters, images.flatten(0, 1))
    with torch.enable_grad():
        total = network.losses(logits.to(images.dtype), labels.flatten(0, 1)).sum()
        trained = [entry for entry in entries if not set(_names(entry)).isdisjoint(network.names)]
        outputs = [entry.output for entry in trained]
        mean = total if each else total / examples
        errors = torch.autograd.grad(mean, outputs, create_graph=True, allow_unused=True)
        factors: dict[str, Factor] = {}
        for entry, error in zip(trained, errors, strict=True):
            felt = torch.zeros_like(entry.output) if error is None else error
            made = RULES[type(entry.layer)].factors(entry.layer, entry.kept, felt.to(images.dtype), units)
            factors |= dict(zip(_names(entry), made, strict=True))
    unused = {name: parameters[name] for name in network.names if name not in factors}
    factors |= {name: Written(value.new_zeros(*units, *value.shape)) for name, value in unused.items()}
    return DummyGradients({name: factors[name] for name in network.names})


def _names(entry: Entry) -> tuple[str, str]:
    prefix = f"{entry.name}." if entry.name else ""
    return f"{prefix}weight", f"{prefix}bias"


def _obstacle(network: Network, shape: torch.Size, classes: int) -> str:
    if network.coupled:
        return f"{network.coupled[0]} mixes the examples of a batch"
    wide = torch.float32 if network.device.type == "mps" else torch.float64
    network = network.cast(wide)
    generator = torch.Generator().manual_seed(PROBE)
    images = torch.randn(PROBED, *shape, generator=generator).to(network.device, wide)
    labels = torch.randn(PROBED, classes, generator=generator).softmax(dim=1).to(network.device, wide)
    model = copy.deepcopy(network.trainable)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator).to(value)
            value.add_(noise, alpha=0.1 if value.requires_grad else 0.0)
    try:
        gradients = ghost_gradients(model, network.losses, images, labels)
    except RuntimeError as error:
        return f"the network cannot be followed: {first_line(error)}"
    if isinstance(gradients, Entangled):
        return gradients.reason
    for name, route in gradients.routes.items():
        method, _, kind = route.partition(": ")
        if method == "dense" or (method == "ghost" and kind not in {layer.__name__ for layer in RULES}):
            return f"{name or 'the model'} ({kind}) has no rule"
    try:
        return _disagreement(network, model, images[:COMPARED], labels[:COMPARED])
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"the network cannot be differentiated twice: {first_line(error)}"


def _disagreement(network: Network, model: nn.Module, images: Tensor, labels: Tensor) -> str:
    """Compare the gradients of single images with those of ordinary autograd; the reason if they differ."""
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    single, targets = images[:, None], labels[:, None]
    ghost = ghost_dummies(network, parameters, single, targets, each=False).rows()
    alone = [plain_dummies(network, parameters, single[[k]], targets[[k]]).rows() for k in range(len(images))]
    for name, value in ghost.items():
        wanted = torch.cat([rows[name] for rows in alone]).detach()
        scale = float(wanted.abs().max())
        tolerance = (TOLERANCE if wanted.dtype == torch.float64 else 1e-3) * scale
        if not float((value.detach() - wanted).abs().max()) <= tolerance:
            return f"the gradients of {name} do not follow from its layer's input and output alone"
    return ""
