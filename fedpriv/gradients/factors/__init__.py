"""The per-example gradients of one parameter, kept in the form in which the layer's backward pass makes them.

A factor answers the operator's questions for one parameter. Which form is cheapest depends on the layer: the gradient
of a Linear weight is the outer product of the output's gradient and the input, and need never be multiplied out.
"""

from fedpriv.gradients.factors.dyads import Dyads
from fedpriv.gradients.factors.factor import Factor, Inputs, Memory
from fedpriv.gradients.factors.lookup import Lookup
from fedpriv.gradients.factors.outer import Outer
from fedpriv.gradients.factors.products import CACHE_BYTES, rows_are_cheaper, slices
from fedpriv.gradients.factors.rows import Rows
from fedpriv.gradients.factors.stacked import Stacked
from fedpriv.gradients.factors.tied import Tied
from fedpriv.gradients.factors.zero import Zero

__all__ = [
    "CACHE_BYTES",
    "Dyads",
    "Factor",
    "Inputs",
    "Lookup",
    "Memory",
    "Outer",
    "Rows",
    "Stacked",
    "Tied",
    "Zero",
    "rows_are_cheaper",
    "slices",
]
