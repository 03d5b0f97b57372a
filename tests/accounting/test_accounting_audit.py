"""The small part of ``make audit``: figures against independent ones, and that a false one would be seen."""

from dataclasses import replace

import pytest

from tests.accounting import audit

SMALL = [row for row in audit.rows() if row.small]


SLOW = ("epsilon", "target epsilon over truth")
KINDS = sorted({row.kind for row in SMALL})


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS])
def test_no_figure_is_below_the_truth_or_far_above(kind: str) -> None:
    faults = [str(result) for result in (row.checked() for row in SMALL if row.kind == kind) if result.fault]
    assert not faults, "\n".join(faults)


def test_a_figure_below_the_truth_or_far_above_is_a_fault() -> None:
    row = next(row for row in SMALL if row.kind == "epsilon")
    truth = row.theirs()
    assert replace(row, ours=lambda: 0.99 * truth).checked().fault == "BELOW THE TRUTH"
    assert replace(row, ours=lambda: 1.5 * truth).checked().fault == "too loose"
    assert replace(row, ours=lambda: float("nan")).checked().fault == "BELOW THE TRUTH"
