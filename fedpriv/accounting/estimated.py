"""What an estimate of a table's bounds costs, beside the training that uses them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedpriv.core.records import Ceiling, DataRelease, Guarantee, Person

_THEOREM = (
    "geometric mechanism on counts, sensitivity 2 (Ghosh, Roughgarden and Sundararajan 2009); columns add up (Dwork et "
    "al. 2006); bounds are made of the noisy counts alone (Wilson et al. 2020)"
)
_ONCE = (
    "Estimated from all training rows, before the run, by somebody who holds them (fedpriv data --bounds); the figure "
    "is the one that the experiment file tells."
)
_UNTOLD = "Which of these bounds were estimated, and which are public, the experiment file does not tell."
_PLUS = "plus that of the bounds of the table's columns, by sequential composition (Dwork et al. 2006)"


def bounds_release(epsilon: float, columns: Sequence[str]) -> DataRelease:
    """Return the ledger's line of such an estimate."""
    some = "one or more of " if len(columns) > 1 else ""
    return DataRelease(
        what=f"bounds (low and high) of {some}{', '.join(columns)}",
        mechanism="geometric noise on histograms, with powers of two as edges and of equal bins",
        adjacency="replace-one",
        epsilon=epsilon,
        theorem=_THEOREM,
        notes=(_ONCE, _UNTOLD) if some else (_ONCE,),
    )


def with_bounds(guarantee: Guarantee, epsilon: float) -> Guarantee:
    """Return what is proven of the training and of the bounds together; where nothing is proven, nothing still is."""
    theorem = {
        name: f"{text}; {_PLUS}" if getattr(guarantee, name) is not None and name != "nominal_epsilon" else text
        for name, text in guarantee.theorem.items()
    }
    return replace(guarantee, **_more(guarantee, epsilon), theorem=theorem)


def person_with_bounds(person: Person, epsilon: float) -> Person:
    """Return the same of the training and of the bounds together, which each of a person's records costs once."""
    if not epsilon:
        return person
    more = _more(person, sum(person.records) * epsilon)
    return replace(person, **more, theorem=f"{person.theorem}; {_PLUS}")


def _more(proven: Guarantee | Person, epsilon: float) -> dict[str, Any]:
    """Its figures, where there are any, with so much added."""
    figures = {"pure_epsilon": proven.pure_epsilon, "epsilon": proven.epsilon}
    return {name: None if figure is None else figure + epsilon for name, figure in figures.items()}


def surer(k0: float, epsilon: float) -> float:
    """Return by Bayes' rule the best chance of a guess after a release of this pure epsilon, from k0 without it."""
    if epsilon == 0:
        return k0
    return 1 / (1 + (1 - k0) / k0 * math.exp(-epsilon))


def told_from(ceiling: Ceiling, k0: float, epsilon: float) -> Ceiling:
    """Return a ceiling that was computed for :func:`surer`, as one for k0."""
    return ceiling if epsilon == 0 else replace(ceiling, k0=k0, theorem=f"{ceiling.theorem}; {_BAYES}")


_BAYES = "the bounds of the table's columns raise the odds of a guess by exp(epsilon) at the most (Bayes)"
