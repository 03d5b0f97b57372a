"""Batches whose positions cancel, for every layer rule: half of the positions take back what the others gave.

What is left of a gradient is ``difference`` of what is summed to make it, or rounding errors alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fedpriv.gradients import DEFAULT_CHUNK_BYTES, GradientOperator, per_example_gradients, rules

EXAMPLES = 3
CHUNK_BYTES = {True: DEFAULT_CHUNK_BYTES, False: 1}


@dataclass(frozen=True)
class Layer:
    """A layer, the shape of one input, and how positions repeat."""

    make: Callable[[], nn.Module]  # builds it
    shape: tuple[int, ...]  # of one input; of words, the number of positions
    axis: int = 1  # of the input (the batch is axis 0), of an even length; its second half repeats the first
    edge: int = 0  # the last outputs of a half see both halves, and get no gradient


class OwnLinear(nn.Linear):
    """A layer without a rule."""


LAYERS = {
    "linear": Layer(lambda: nn.Linear(4, 3), (2, 4)),
    "linear-pair": Layer(lambda: nn.Linear(48, 40), (2, 48)),
    "linear-long": Layer(lambda: nn.Linear(2, 2), (130, 2)),
    "linear-grid": Layer(lambda: nn.Linear(4, 5), (4, 2, 4)),
    "linear-wide": Layer(lambda: nn.Linear(24, 16), (8, 24)),
    "conv1d": Layer(lambda: nn.Conv1d(2, 4, 3), (2, 12), 2, 2),
    "conv1d-groups": Layer(lambda: nn.Conv1d(4, 6, 3, groups=2, dilation=2), (4, 16), 2, 4),
    "conv1d-stride": Layer(lambda: nn.Conv1d(2, 4, 3, stride=2), (2, 16), 2, 1),
    "conv2d": Layer(lambda: nn.Conv2d(2, 4, 3), (2, 5, 12), 3, 2),
    "conv2d-groups": Layer(lambda: nn.Conv2d(4, 4, (2, 3), groups=4, dilation=(2, 1)), (4, 5, 12), 3, 2),
    "conv2d-stride": Layer(lambda: nn.Conv2d(2, 4, 3, stride=(1, 2), padding=(1, 0)), (2, 5, 16), 3, 1),
    "conv2d-circular": Layer(lambda: nn.Conv2d(2, 4, 3, padding=(1, 0), padding_mode="circular"), (2, 5, 12), 3, 2),
    "embedding": Layer(lambda: nn.Embedding(4, 3), (8,)),
    "embedding-padding": Layer(lambda: nn.Embedding(4, 3, padding_idx=1), (8,)),
    "layer-norm": Layer(lambda: nn.LayerNorm(4), (8, 4)),
    "layer-norm-2": Layer(lambda: nn.LayerNorm((2, 4)), (6, 2, 4)),
    "rms-norm": Layer(lambda: nn.RMSNorm(4), (8, 4)),
    "group-norm": Layer(lambda: nn.GroupNorm(2, 4), (4, 8), 2),
    "dense": Layer(lambda: OwnLinear(4, 3), (6, 4)),
}


def _repeated(half: Tensor, axis: int, difference: float) -> Tensor:
    again = half * (1 + difference * torch.randn(half.shape, dtype=half.dtype)) if difference else half
    return torch.cat([half, again], dim=axis)


def cancelling(
    name: str,
    difference: float,
    input_size: float = 1.0,
    error_size: float = 1.0,
    *,
    written: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    examples: int = EXAMPLES,
    spoil: Callable[[Tensor, Tensor], None] = lambda x, errors: None,
) -> GradientOperator:
    """Make the gradients of a layer alone, whose outputs get chosen errors; the same numbers for a seed.

    Args:
        name: of the layer.
        difference: of the second half from the first, relative.
        input_size: factor of the inputs (not of words).
        error_size: factor of the errors.
        written: whether weight matrices may be written out; if not, they are kept as sums of outer products.
        dtype: of all numbers.
        seed: of all numbers.
        examples: B.
        spoil: changes inputs and errors in place before they are used.
    """
    layer = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = layer.make().to(dtype)
        if name.startswith("embedding"):
            words = torch.randint(4, (examples, layer.shape[0] // 2))
            x = torch.cat([words, words], dim=1)
        else:
            half = torch.randn(examples, *layer.shape, dtype=dtype).chunk(2, layer.axis)[0]
            x = _repeated(half, layer.axis, difference) * input_size
        with torch.no_grad():
            shape = model(x).shape
        # The outputs of the halves, without those between them, which see both.
        axis = min(layer.axis, len(shape) - 1)
        count = (shape[axis] - layer.edge) // 2
        back = torch.randn(shape, dtype=dtype).narrow(axis, 0, count)
        taken = -back * (1 + difference * torch.randn(back.shape, dtype=dtype)) if difference else -back
        gap = torch.zeros(shape, dtype=dtype).narrow(axis, 0, layer.edge)
        errors = torch.cat([back, gap, taken], dim=axis) * error_size
    spoil(x, errors)
    with patch.object(rules, "_write_out", rules._write_out if written else lambda *_: False):
        return per_example_gradients(model, _Inner(errors), x, torch.arange(examples), chunk_bytes=CHUNK_BYTES[written])


class _Inner:
    """The loss whose gradient with respect to the outputs of example i is ``errors[i]``."""

    def __init__(self, errors: Tensor) -> None:
        self._errors = errors

    def __call__(self, outputs: Tensor, examples: Tensor) -> Tensor:
        return (outputs * self._errors[examples]).flatten(1).sum(dim=1)
