"""Errors of a model on examples: with a mechanism such an example counts as zero, and nobody notices.

An error, or a client that drops out, would tell of an example what no noise hides. So what a model raises on one must
change nothing for the others, wherever in the batch it stands and whatever is drawn at random there.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedpriv.core.errors import RefusedError

_LOG = logging.getLogger(__name__)
_SIGNALS = tuple(signal.valid_signals())
T = TypeVar("T")


class Sound(NamedTuple, Generic[T]):
    """What is computed of a batch."""

    result: T  # with stand-ins in the places of examples that are not sound
    sound: Tensor  # the examples on which nothing is raised, (B,)


def where_sound(compute: Callable[[Tensor], T], examples: int) -> Sound[T] | None:
    """Compute a batch on some of whose examples a model raises.

    Another example takes their places: a blank one, or one of the batch, on which the model raises nowhere. So batches
    keep their shape, and each example its place, its random numbers and its kernels; whether it is sound depends on it
    and its place alone. They are found by halving. That takes about log2 B batches for each of them, and up to B + 1 to
    find one to stand in.

    ``compute`` is given rows (B,) for the places of the batch; row B is the blank example. ``None`` is returned if the
    model raises on copies of each example, or mixes examples.
    """

    def works(rows: Tensor) -> bool:
        return unless_raised(lambda: compute(rows)) is not None

    copies = (torch.full((examples,), row) for row in reversed(range(examples + 1)))
    stand_ins = next(filter(works, copies), None)
    if stand_ins is None:
        return None
    rows, sound = torch.arange(examples), torch.ones(examples, dtype=torch.bool)
    sound[list(_raising(works, stand_ins, list(range(examples))))] = False
    result = unless_raised(lambda: compute(torch.where(sound, rows, stand_ins)))
    return None if result is None else Sound(result, sound)


def _raising(works: Callable[[Tensor], bool], stand_ins: Tensor, places: list[int]) -> Iterator[int]:
    """Those of some places whose examples a model raises on."""
    rows = stand_ins.clone()
    rows[places] = torch.tensor(places)
    if works(rows):
        return
    if len(places) == 1:
        yield places[0]
        return
    middle = len(places) // 2
    yield from _raising(works, stand_ins, places[:middle])
    yield from _raising(works, stand_ins, places[middle:])


def unless_raised(compute: Callable[[], T], *passed: type[BaseException], level: int = logging.DEBUG) -> T | None:
    """Return the result, or ``None`` where the model raises, be it ``SystemExit`` or ``KeyboardInterrupt``."""
    result = None
    with _watched_handlers() as interrupts:
        try:
            result = compute()
        except passed:
            raise
        except BaseException:  # noqa: BLE001 - a refusal would tell of an example what no noise hides
            _LOG.log(level, "the model raises", exc_info=True)
    if interrupts:
        raise interrupts[0]
    return result


@contextmanager
def discreet(client: int) -> Iterator[None]:
    """Say nothing of what goes wrong inside but in the client's own log."""
    failed = False
    with _watched_handlers() as interrupts:
        try:
            yield
        except RefusedError:
            raise
        except BaseException:  # noqa: BLE001 - it may depend on an example, and no noise protects a text or a class
            failed = True
            if not interrupts:
                _LOG.exception("client %d failed", client)
    if interrupts:
        raise interrupts[0]
    if failed:
        raise RuntimeError("failed; the client's own log says why") from None


@contextmanager
def _watched_handlers() -> Iterator[list[BaseException]]:
    """Collect what the handlers of signals raise inside the block; only the main thread runs them."""
    raised: list[BaseException] = []

    def watched(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                raised.append(error)
                raise

        return handle

    is_main = threading.current_thread() is threading.main_thread()
    present = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    handlers = {number: handler for number, handler in present.items() if callable(handler)}
    for number, handler in handlers.items():
        signal.signal(number, watched(handler))
    try:
        yield raised
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
