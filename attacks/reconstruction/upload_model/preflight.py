"""What makes an attack mean less than it seems to, said before it runs."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from fedpriv.attacks.observation import PublicSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import (
    Loss,
    Network,
    soft_cross_entropy,
    twice_differentiable,
)
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.upload_model.model import refusal
from fedpriv.gradients.coupled import coupled_layers
from fedpriv.gradients.operator import first_line
from fedpriv.registry import ATTACKS

__all__ = ["preflight", "whole_numbers"]

KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid)


def preflight(
    model: nn.Module, settings: PublicSettings, attacks: Sequence[str], loss: Loss = soft_cross_entropy
) -> tuple[str, ...]:
    """Return one line for each thing that makes these attacks on such uploads misleading.

    Args:
        model: the network, with the parameters that will be attacked, its layers in the mode (training or evaluation)
            in which the uploads are computed.
        settings: what the adversary would know.
        attacks: names of the attacks.
        loss: what the clients minimise, of each example.

    Raises:
        AttackRefused: no attack can be made on such uploads.
    """
    if not attacks:
        return ()
    is_text = settings.text is not None
    reason = refusal(settings) or (None if is_text else whole_numbers(model))
    if reason is not None:
        raise AttackRefused(reason)
    if is_text:
        return tuple(_about_layers(model, attacks))
    return (*_about_layers(model, attacks), *_about_examples(settings), *_about_gradient(model, settings, loss))


def whole_numbers(model: nn.Module) -> str | None:
    """Say why a network whose input is tokens cannot be attacked, or return ``None``."""
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            return (
                f"layer {name or 'the model'} ({type(layer).__name__}) takes whole numbers, such as tokens; "
                "the attacks move the values of images little by little, which such an input does not allow"
            )
    return None


def _about_layers(model: nn.Module, attacks: Sequence[str]) -> list[str]:
    lines = []
    coupled = coupled_layers(model)
    kinked = [name for name, layer in model.named_modules() if isinstance(layer, KINKED)]
    mixing = model.get_submodule(coupled[0]) if coupled else None
    if mixing is not None and (mixing.training or getattr(mixing, "running_mean", None) is None):
        lines.append(
            f"layer {coupled[0]} (BatchNorm) mixes the examples of a batch; the attacks use the statistics of their "
            "dummy batch, as the client does in training"
        )
    smooth = [name for name in attacks if name in ATTACKS and ATTACKS[name].smooth]
    if kinked and smooth:
        kind = type(model.get_submodule(kinked[0])).__name__
        made = "is made" if len(smooth) == 1 else "are made"
        lines.append(
            f"layer {kinked[0]} ({kind}) has a second derivative of zero; {' and '.join(smooth)} {made} for smooth "
            "activations such as sigmoid and may fail for that reason alone"
        )
    return lines


def _about_examples(settings: PublicSettings) -> list[str]:
    lines = []
    count = settings.examples if settings.batch_size is not None else 0
    if count > settings.classes:
        lines.append(
            f"{count} examples behind one upload are more than the {settings.classes} classes: labels repeat and are "
            "hard to tell from the last layer, and pictures of one class blend"
        )
    if settings.algorithm == "fedavg" and settings.local_steps > 1:
        lines.append(
            f"{settings.local_steps} local steps: attacks train on their dummies in an order of their own, because it "
            "is not known which example was in which batch"
        )
    elif settings.algorithm == "fedavg" and settings.optimizer == "adam":
        lines.append("the first step of Adam keeps little more of a gradient than the signs: attacks get weaker")
    return lines


@twice_differentiable()
def _about_gradient(model: nn.Module, settings: PublicSettings, loss: Loss) -> list[str]:
    """Try the gradient at random images: a network that passes nothing on to its input cannot be attacked."""
    network = Network(model, loss)
    trained = dict(model.named_parameters())
    parameters = {name: trained[name].detach() for name in network.names}
    reference = next(iter(parameters.values()))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 2, *settings.shape, generator=generator).to(reference).requires_grad_()
    labels = F.one_hot(torch.arange(2) % settings.classes, settings.classes).to(reference)[None]
    gradients = network.gradients(parameters, images, labels, shared=True, each=False)
    if not any(bool(value.any()) for value in gradients.values()):
        return ["the gradient at random images is zero: uploads say nothing"]
    squares = torch.stack([value.square().sum() for value in gradients.values()]).sum()
    try:
        (felt,) = torch.autograd.grad(squares, images, allow_unused=True) if squares.requires_grad else (None,)
    except RuntimeError as error:
        return [f"the network cannot be differentiated twice, which nearly all attacks need: {first_line(error)}"]
    if felt is None or not bool(felt.any()):
        return ["the gradient does not depend on the image (a zero last layer, or dead units): attacks cannot start"]
    return []
