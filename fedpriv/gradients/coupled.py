"""Layers whose outputs for an example depend on more than the example: on its batch, or on chance."""

from torch import nn

__all__ = ["coupled_layers", "dropout_layers"]


def coupled_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that mix the examples of a batch: BatchNorm and its family."""
    return tuple(name for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))


def dropout_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that drop at random while training, those with probability 0 left out."""
    return tuple(name for name, layer in model.named_modules() if _drops(layer))


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    return isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0
