"""Layers whose outputs for an example depend on more than the example: on its batch, or on chance."""

from torch import nn


class RandomLayer(nn.Module):
    """A layer of ours that draws random numbers in every forward pass of training."""

    @property
    def draws(self) -> bool:
        """Whether it draws, apart from whether it is training."""
        return True


def coupled_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that mix the examples of a batch: BatchNorm and its family."""
    return tuple(name for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))


def dropout_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that are random while training: dropout with a probability above 0, and noise."""
    return tuple(name for name, layer in model.named_modules() if _drops(layer))


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, RandomLayer):
        return layer.draws
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    return isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0
