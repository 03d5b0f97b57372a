"""Recurrent layers as the functions of torch that they are made of, in which parameters are seen one at a time.

torch computes LSTM, GRU and plain recurrent layers in one function each, which shows only what comes out at the end.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

State = tuple[Tensor, ...]
"""What a cell keeps from step to step, (B, width) each; what it hands out comes first."""


class Weights(NamedTuple):
    """The parameters of one layer in one direction."""

    inputs: Tensor  # (gates, input)
    state: Tensor  # (gates, width)
    inputs_bias: Tensor | None = None
    state_bias: Tensor | None = None
    projection: Tensor | None = None  # (projected, width), of an LSTM

    def step(self, cell: "Cell", seen: Tensor, state: State) -> State:
        """Return the next state from what the inputs give, (B, gates)."""
        first, *others = cell(seen, linear(state[0], self.state, self.state_bias), state)
        return (first if self.projection is None else linear(first, self.projection), *others)


Cell = Callable[[Tensor, Tensor, State], State]
"""(what the inputs give (B, gates), what the state gives (B, gates), state) -> the next state."""


def _lstm(seen: Tensor, kept: Tensor, state: State) -> State:
    """Hochreiter and Schmidhuber 1997, with the gates in torch's order."""
    enter, forget, new, leave = (seen + kept).chunk(4, dim=1)
    cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(seen: Tensor, kept: Tensor, state: State) -> State:
    """Cho et al. 2014, with the gates in torch's order."""
    (reset, update, new), (own_reset, own_update, own_new) = seen.chunk(3, dim=1), kept.chunk(3, dim=1)
    share = (update + own_update).sigmoid()
    made = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return (made + share * (state[0] - made),)


def _tanh(seen: Tensor, kept: Tensor, state: State) -> State:
    return ((seen + kept).tanh(),)


def _relu(seen: Tensor, kept: Tensor, state: State) -> State:
    return ((seen + kept).relu(),)


def _layers(cell: Cell) -> Callable[..., Callable[[], tuple[Tensor, ...]] | None]:
    """A function of torch that goes through layers, directions and steps; packed sequences are left to torch."""

    def rewrite(
        input: Tensor,  # (T, B, input), or (B, T, input)
        hx: Tensor | Sequence[Tensor],  # (layers directions, B, width) each
        params: Sequence[Tensor],
        has_biases: Any,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Callable[[], tuple[Tensor, ...]] | None:
        if not isinstance(has_biases, bool):  # packed: lengths come second, and the weights in this place
            return None
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        directions = 2 if bidirectional else 1
        each = len(params) // (num_layers * directions)
        weights = [_weights(params[first : first + each], has_biases) for first in range(0, len(params), each)]

        def rewritten() -> tuple[Tensor, ...]:
            values = input.transpose(0, 1) if batch_first else input
            last: list[State] = []
            for first in range(0, len(weights), directions):
                if first and dropout:
                    values = torch.dropout(values, dropout, train)
                sides: list[Tensor] = []
                for own in weights[first : first + directions]:
                    side, end = _through(values, own, cell, [state[len(last)] for state in states], bool(sides))
                    sides.append(side)
                    last.append(end)
                values = torch.cat(sides, dim=2) if len(sides) > 1 else sides[0]
            ends = [torch.stack(each) for each in zip(*last, strict=True)]
            return (values.transpose(0, 1) if batch_first else values, *ends)

        return rewritten

    return rewrite


def _weights(params: Sequence[Tensor], has_biases: bool) -> Weights:
    inputs, state, *others = params
    inputs_bias, state_bias = others[:2] if has_biases else (None, None)
    return Weights(inputs, state, inputs_bias, state_bias, others[-1] if len(params) % 2 else None)


def _through(
    values: Tensor, weights: Weights, cell: Cell, start: Sequence[Tensor], backwards: bool
) -> tuple[Tensor, State]:
    """Go along the first axis of values (T, B, input); return what was handed out (T, B, width), and the last state."""
    seen = linear(values, weights.inputs, weights.inputs_bias).unbind()
    state: State = tuple(start)
    made = []
    for one in reversed(seen) if backwards else seen:
        state = weights.step(cell, one, state)
        made.append(state[0])
    return torch.stack(made[::-1] if backwards else made), state


def _one_cell(cell: Cell, kept: int) -> Callable[..., Callable[[], Any]]:
    """A function of torch that makes one step."""

    def rewrite(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Callable[[], Any]:
        def rewritten() -> Any:
            state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
            made = Weights(w_ih, w_hh, b_ih, b_hh).step(cell, linear(input, w_ih, b_ih), state)
            return made if kept > 1 else made[0]

        return rewritten

    return rewrite


RECURRENT: dict[Any, Callable[..., Callable[[], Any] | None]] = {
    torch.lstm: _layers(_lstm),
    torch.gru: _layers(_gru),
    torch.rnn_tanh: _layers(_tanh),
    torch.rnn_relu: _layers(_relu),
    torch.lstm_cell: _one_cell(_lstm, 2),
    torch.gru_cell: _one_cell(_gru, 1),
    torch.rnn_tanh_cell: _one_cell(_tanh, 1),
    torch.rnn_relu_cell: _one_cell(_relu, 1),
}
"""Functions of torch -> what they are made of, given the same arguments; ``None``: they stay as they are."""
