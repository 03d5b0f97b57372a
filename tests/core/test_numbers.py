import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.core import numbers
from fedpriv.core.records import shown_epsilon


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12.3456, "12.35"),
        (100, "100"),
        (0.1, "0.1"),
        (0.17391, "0.1739"),
        (9999.6, "10,000"),
        (158_260, "158,300"),
        (1e-5, "10⁻⁵"),
        (2.5e-6, "2.5 × 10⁻⁶"),
        (0.00099996, "0.001"),
        (9.9994e-4, "9.999 × 10⁻⁴"),
        (9_999_600, "10⁷"),
        (1e7, "10⁷"),
        (-0.5, "−0.5"),
        (-3.21e-9, "−3.21 × 10⁻⁹"),
    ],
)
def test_figure_has_four_significant_digits(value: float, text: str) -> None:
    assert numbers.figure(value) == text


@pytest.mark.parametrize(("value", "text"), [(9_999, "10⁴"), (1_000, "1,000"), (1e4, "10⁴"), (2e6, "2 × 10⁶")])
def test_figure_is_a_power_from_the_largest_on(value: float, text: str) -> None:
    assert numbers.figure(value, 2, 1e4) == text


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_figure_reads_back_as_the_rounded_number(value: float) -> None:
    text = numbers.figure(value).replace(",", "")
    mantissa, power = re.fullmatch(r"(.*?)(?:(?: × |^)10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?", text).groups()  # type: ignore[union-attr]
    exponent = (power or "⁰").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    assert math.isclose(float(f"{mantissa or 1}e{exponent}"), value, rel_tol=5.01e-4)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (7.26, "7.3 s"),
        (125, "2 min 5 s"),
        (3600, "1 h 0 min"),
        (12_060, "3 h 21 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (12_600_000, "12.6 MB"),
        (10**18, "1000000.0 TB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert numbers.bytes_text(size) == text


def test_a_negative_zero_loses_its_sign() -> None:
    assert numbers.decimal(-0.0001) == "0.000"
    assert numbers.decimal(-0.26) == "−0.260"
    assert numbers.decibel(-0.01) == "0.0 dB"


def test_only_one_is_singular() -> None:
    assert [numbers.several(value, "round") for value in (0, 1, 1797)] == ["0 rounds", "1 round", "1,797 rounds"]


def test_an_epsilon_that_means_nothing_does_not_fill_the_page() -> None:
    shown = [shown_epsilon(value) for value in (1.23456, 61_476.3, 9.99e14, 1e300, math.inf)]
    assert shown == ["1.235", "61,476", "999,000,000,000,000", "10³⁰⁰", "inf"]
