"""Examples on which a model raises are found one by one, whatever the others are."""

import signal
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.clients.model_errors import Sound, discreet, unless_raised, where_sound
from tests.cases import in_one_test

EXAMPLES = 7


def computed(raising: np.ndarray) -> Callable[[Tensor], list[int]]:
    """A batch that raises if one of its rows does in its place, as ``raising`` (rows, places) says."""

    def compute(rows: Tensor) -> list[int]:
        if raising[rows.numpy(), np.arange(len(rows))].any():
            raise ValueError("odd")
        return rows.tolist()

    return compute


@pytest.mark.parametrize("share", [0.02, 0.1, 0.9])
def test_an_example_is_sound_if_nothing_is_raised_on_it_in_its_place(share: float) -> None:
    """Whatever is raised elsewhere, as long as anything can stand in for it."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        raising = rng.random((EXAMPLES + 1, EXAMPLES)) < share
        raising[rng.integers(EXAMPLES + 1)] = False
        found = where_sound(computed(raising), EXAMPLES)
        assert isinstance(found, Sound)
        assert found.sound.tolist() == (~np.diagonal(raising)).tolist()
        assert [row for row, sound in zip(found.result, found.sound, strict=True) if sound] == torch.nonzero(
            found.sound
        ).flatten().tolist()


def test_nothing_can_stand_in() -> None:
    assert where_sound(computed(np.eye(EXAMPLES + 1, EXAMPLES, dtype=bool) | True), EXAMPLES) is None


def test_few_raising_examples_take_few_batches() -> None:
    calls = []
    raising = np.zeros((1025, 1024), bool)
    raising[300] = True

    def compute(rows: Tensor) -> list[int]:
        calls.append(rows)
        return computed(raising)(rows)

    found = where_sound(compute, 1024)
    assert found is not None
    assert torch.nonzero(~found.sound).tolist() == [[300]]
    assert len(calls) <= 3 + 2 * 10


ERRORS = [ValueError, MemoryError, torch.OutOfMemoryError, SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration]


@in_one_test("error", ERRORS)
def test_whatever_the_model_raises_is_no_refusal(error: type[BaseException]) -> None:
    def model() -> None:
        raise error

    assert unless_raised(model) is None
    with pytest.raises(error):
        unless_raised(model, error)


@in_one_test("error", ERRORS)
def test_an_error_around_the_model_is_told_in_words_that_say_nothing(error: type[BaseException]) -> None:
    """Neither its text nor its class, both of which would be in the error that the server gets."""
    with pytest.raises(BaseException) as caught, discreet(3):
        raise error("example 5 is odd")
    assert type(caught.value) is RuntimeError and str(caught.value) == "failed; the client's own log says why"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


@pytest.fixture
def _heard() -> Iterator[None]:
    """A shell has the processes that it starts in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
@in_one_test("made_of_it", ["raised on", "another error", "nothing"])
def test_ctrl_c_ends_the_run(made_of_it: str) -> None:
    """Whatever the model makes of the error that its handler raises."""

    def model() -> str:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if made_of_it == "raised on":
                raise
            if made_of_it == "another error":
                raise ValueError("interrupted") from None
        return "done"

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        unless_raised(model)
    with pytest.raises(KeyboardInterrupt), discreet(3):
        model()
    assert signal.getsignal(signal.SIGINT) is handler


def test_signals_are_left_alone_in_other_threads() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(unless_raised(lambda: signal.getsignal(signal.SIGINT))))
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
