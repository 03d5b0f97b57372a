"""Values and gradients of an attack's loss, evaluated many times at the same shapes; compiled where that pays."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedpriv.attacks.reconstruction.errors import is_lack_of_memory
from fedpriv.attacks.reconstruction.matching.memory import keep_freed_memory
from fedpriv.gradients.operator import first_line

__all__ = ["Compiling", "Evaluator", "Losses"]

Losses = Callable[..., Tensor]
"""(variables...) -> losses (N,), one a row, that can be differentiated."""

Compiling = Literal["auto", "always", "never"]

# Compiling takes ten seconds to a minute and saves a tenth to a half: in a job of so many seconds it pays.
LONG = 300.0


class Evaluator:
    """Evaluates a loss and its gradients.

    With ``compiling = "auto"`` the first evaluations run in eager mode and are timed. Where all would take long,
    the whole computation, derivatives included, is traced and compiled (``torch.compile``), and kept if it is faster.
    Results are the same up to rounding. Where it cannot be compiled, for example without a C++ compiler, ``note`` says
    so, which belongs into the attack's notes, and everything runs in eager mode.

    Args:
        losses: the loss; rows must not depend on each other.
        evaluations: how many are to come.
        compiling: auto, always (at the first evaluation, kept in any case) or never.

    Attributes:
        note: why it could not be compiled although that would have paid; may be empty.
        compiled: whether compiled code is in use.
        compile_seconds: what compiling took.
    """

    def __init__(self, losses: Losses, evaluations: int, compiling: Compiling = "auto") -> None:
        self.note = ""
        self.compiled = False
        self.compile_seconds = 0.0
        self._losses = losses
        self._evaluations = evaluations
        self._compiling = compiling
        self._run: Callable[..., tuple[Tensor, ...]] = self._eager
        self._seconds: list[float] = []
        self._settled = compiling == "never"
        keep_freed_memory()

    def __call__(self, *variables: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return losses (N,), detached, and the gradients of their sum with respect to each variable."""
        values = tuple(value.detach() for value in variables)
        if not self._settled:
            self._settle(values)
        loss, *gradients = self._run(*values)
        return loss, tuple(gradients)

    def _eager(self, *variables: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in variables]
            losses = self._losses(*leaves)
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        return losses.detach(), *gradients

    def _settle(self, variables: Sequence[Tensor]) -> None:
        """Decide whether to compile: at once, or after two evaluations of which the second is typical."""
        if self._compiling == "auto":
            self._seconds.append(_seconds(self._eager, variables))
            if len(self._seconds) < 2:
                return
            if self._seconds[-1] * self._evaluations < LONG:
                self._settled = True
                return
        self._settled = True
        began = time.perf_counter()
        try:
            run = _compiled(self._eager, variables)
        except RuntimeError as error:
            if is_lack_of_memory(error):
                raise
            # No compiler, or an operator that cannot be traced: the numbers are the same without, only later.
            self.note = f"not compiled: {first_line(error)}"
            return
        self.compile_seconds = time.perf_counter() - began
        if self._compiling == "auto" and _seconds(run, variables) > self._seconds[-1]:
            return
        self._run, self.compiled = run, True


def _compiled(run: Callable[..., tuple[Tensor, ...]], variables: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Trace a computation with its derivatives into one graph of plain operators, and compile that."""
    run(*variables)  # what is prepared at the first call is no part of the graph
    graph = make_fx(run)(*variables)
    compiled = torch.compile(graph, dynamic=False)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            results: tuple[Tensor, ...] = tuple(compiled(*values))
        return results

    call(*variables)
    return call


def _seconds(run: Callable[..., Any], variables: Sequence[Tensor]) -> float:
    began = time.perf_counter()
    result = run(*variables)
    if result[0].device.type == "cuda":
        torch.cuda.synchronize(result[0].device)
    return time.perf_counter() - began
