"""Figures between a guess and a theorem: when a measurement refutes a claim, and how that is said."""

import pytest

from fedpriv.core.errors import RunFailedError
from fedpriv.core.figure import Figure, Interval, in_words, refuse_exceeded


def figure(low: float | None, ceiling: float | None, holds: bool | None = None, high: float | None = 0.9) -> Figure:
    return Figure("told", Interval(0.8, low, high), 0.5, ceiling=ceiling, theorem="a theorem", holds=holds)


@pytest.mark.parametrize(
    ("low", "ceiling", "holds", "exceeded"),
    [
        (0.7, 0.6, None, True),
        (0.7, 0.7, None, False),
        (0.7, None, None, False),
        (None, 0.6, None, False),
        (0.7, 0.6, True, False),
        (None, None, False, True),
    ],
)
def test_an_own_test_or_the_intervals_low_end_decides(
    low: float | None, ceiling: float | None, holds: bool | None, exceeded: bool
) -> None:
    assert figure(low, ceiling, holds).exceeded == exceeded


def test_what_is_refuted_is_said_in_one_line() -> None:
    refuse_exceeded([figure(0.5, 0.6), figure(0.7, None)])
    said = r"^told: 80\.0% \(70\.0% to 90\.0%\), claimed: at most 60\.0% \(a theorem\): the implementation"
    with pytest.raises(RunFailedError, match=said):
        refuse_exceeded([figure(0.5, 0.6), figure(0.7, 0.6)])
    assert figure(0.7, 0.6, high=None).refutation == "told of at least 70.0%, claimed: at most 60.0%"


@pytest.mark.parametrize(
    ("unit", "text"), [("share", "25.0%"), ("dB", "0.2 dB"), ("bits", "0.25 bits"), ("number", "0.25")]
)
def test_a_number_is_printed_in_its_unit(unit: str, text: str) -> None:
    shown = Figure("told", Interval(0.25, None, None), unit=unit)
    assert shown.text(shown.measured.value) == text
    assert shown.text(shown.ceiling, "nothing proven") == "nothing proven"


def test_one_wording_has_guess_measured_and_proven() -> None:
    told = Figure("sender of an upload", Interval(0.75, 0.6, 0.8), 0.5, ceiling=0.9, theorem="a theorem")
    nothing = Figure("bound", Interval(1.5, None, None), ceiling=None, theorem="no mechanism", unit="number")
    assert in_words([told, nothing]) == [
        ("Sender of an upload", "75.0% (60.0% to 80.0%); a guess 50.0%; proven: at most 90.0% (a theorem)"),
        ("Bound", "1.5; nothing is proven (no mechanism)"),
    ]
