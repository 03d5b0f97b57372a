"""Secrets in shares, against interpolation in exact fractions."""

import os
from fractions import Fraction
from itertools import combinations
from math import prod

import numpy as np
import pytest
from scipy.stats import chisquare

from fedpriv.algorithms.secure_aggregation.secrets import PRIME, combined, shares


def interpolated(points: dict[int, int], x: int) -> int:
    """The value at ``x``, modulo 65,537, of the polynomial of least degree through the points."""
    terms = [y * prod((Fraction(x - b, a - b) for b in points if b != a), start=Fraction(1)) for a, y in points.items()]
    total = sum(terms, start=Fraction(0))
    return total.numerator * pow(total.denominator, -1, PRIME) % PRIME


def test_any_so_many_shares_give_the_secret() -> None:
    secret = os.urandom(32)
    given = shares(secret, 3, 5)
    for size in (3, 4, 5):
        for places in combinations(range(1, 6), size):
            assert combined(places, [given[place - 1] for place in places]) == secret
    for places in combinations(range(1, 6), 2):
        with pytest.raises(ValueError, match="not of one secret"):
            combined(places, [given[place - 1] for place in places])


def test_shares_are_values_of_a_polynomial_whose_value_at_zero_is_the_secret() -> None:
    secret = os.urandom(32)
    words = np.stack([np.frombuffer(share, dtype="<u4") for share in shares(secret, 4, 7)]).tolist()
    for column, expected in enumerate(np.frombuffer(secret, dtype="<u2").tolist()):
        points = {place: words[place - 1][column] for place in (1, 2, 5, 7)}
        assert interpolated(points, 0) == expected
        assert [interpolated(points, place) for place in (3, 4, 6)] == [words[place - 1][column] for place in (3, 4, 6)]


@pytest.mark.parametrize("secret", [bytes(32), bytes([255]) * 32])
def test_shares_of_any_secret_are_uniform_one_by_one_and_in_pairs(secret: bytes) -> None:
    """Two of three that are needed say nothing: all pairs of remainders by 8 are as likely (false alarm: 10^-6)."""
    pairs = np.zeros((8, 8))
    for _ in range(400):
        left, right = (np.frombuffer(share, dtype="<u4")[:16] % 8 for share in shares(secret, 3, 3)[:2])
        np.add.at(pairs, (left, right), 1)
    assert chisquare(pairs.ravel()).pvalue > 1e-6


def test_what_does_not_belong_together_is_found_out() -> None:
    one, other = shares(os.urandom(32), 2, 3), shares(os.urandom(32), 2, 3)
    mixed: list[tuple[list[int], list[bytes]]] = [
        ([1, 2], [one[0], other[1]]),
        ([1, 3], one[:2]),
        ([1, 2], [one[0], bytes(80)]),
    ]
    for places, given in mixed:
        with pytest.raises(ValueError, match="not of one secret"):
            combined(places, given)
    unfit: list[tuple[list[int], list[bytes]]] = [([1, 1], one[:2]), ([1], one[:2]), ([1, 2], [one[0], b"s"]), ([], [])]
    for places, given in unfit:
        with pytest.raises(ValueError, match="one length and a place each"):
            combined(places, given)
    for secret, needed, count in ((b"odd", 1, 2), (b"even", 3, 2), (b"even", 0, 2), (b"even", 1, PRIME)):
        with pytest.raises(ValueError, match="cannot split"):
            shares(secret, needed, count)
