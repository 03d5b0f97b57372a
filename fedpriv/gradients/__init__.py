"""Per-example gradients of a batch as one linear operator, without handing out the matrix."""

from fedpriv.gradients.calls import plain_gradient
from fedpriv.gradients.dense import DenseGradients, zero_gradients, zeros_like
from fedpriv.gradients.ghost import Route
from fedpriv.gradients.mixing import refuse_mixed_examples
from fedpriv.gradients.operator import DEFAULT_CHUNK_BYTES, Block, GradientOperator, Vector, flattened
from fedpriv.gradients.per_example import find_route, per_example_gradients
from fedpriv.gradients.stacked import StackedGradients

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Block",
    "DenseGradients",
    "GradientOperator",
    "Route",
    "StackedGradients",
    "Vector",
    "find_route",
    "flattened",
    "per_example_gradients",
    "plain_gradient",
    "refuse_mixed_examples",
    "zero_gradients",
    "zeros_like",
]
