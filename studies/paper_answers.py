"""The tables of docs/paper-answers.md: ``python -m studies paper_answers sweeps/convexified-location-small``.

They are read from the folder of the sweep ``configs/paper/convexified-location.toml`` or ``-mnist.toml``, a row for
trials that differ in their seed only. ``python -m studies paper_answers --tilted`` instead measures how far one example
moves a convex model with the tilted loss, beside the proven bound for the mean of the losses. FEDPRIV_DATA names the
data.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from fedpriv.core.config import DataConfig
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import numpy_stream
from fedpriv.data.datasets import load_dataset
from fedpriv.service.answer_sources import pixels, pooled_features
from fedpriv.service.proof import head_sensitivity
from fedpriv.service.report import ServedColumns
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.record import TrialRecord
from studies.arguments import StudyParser
from studies.results import Table

Array = NDArray[np.float64]

# What --tilted measures with: MNIST, 14 x 14 averages of length 1.
EXAMPLES, POOLED, REGULARISATION, REPLACED, RISKS = 10_000, 14, 0.01, 6, (1.0, 5.0, 10.0)


def main() -> None:
    """Print the table of a sweep, or the tilted loss's."""
    parser = StudyParser("studies.paper_answers", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", nargs="?", type=Path)
    what.add_argument("--tilted", action="store_true")
    with parser.parsed() as asked:
        print(tilted_table() if asked.tilted else table(SweepFolder.open(asked.folder).records()), end="")


def table(records: Sequence[TrialRecord]) -> Table:
    """The rows of a sweep of endpoints: means over seeds, and the smallest and largest share of exact vectors."""
    heads = ("policy", "answers", "noise", "claimed, each", "proven, all", "right, exact", "right, answered",
             "accuracy loss",
             "epsilon of one answer at least", "exact vectors")  # fmt: skip
    rows: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.status == "completed" and record.of(ServedColumns).answers_exact is not None:
            rows.setdefault(_row(record), []).append(record)
    if not rows:
        raise InputError(f"none of {len(records)} trials answers, as those of configs/paper/convexified-location.toml")
    return Table(heads, map(_cells, rows.values()))


def _row(record: TrialRecord) -> str:
    return repr(sorted(record.settings.items()))


def _cells(records: Sequence[TrialRecord]) -> list[str]:
    first, served = records[0], [record.of(ServedColumns) for record in records]
    exact, answered = _mean([each.answers_exact for each in served]), _mean([each.answers_right for each in served])
    recovered = [each.answers_recovered for each in served if each.answers_recovered is not None]
    bounds = [each.answers_bound for each in served if each.answers_bound is not None]
    said = [str(first.settings[key]) for key in ("training.loss", "service.voters") if key in first.settings]
    name = ", ".join([f"`{served[0].answers}`", *said])
    return [
        name,
        f"{served[0].answers_planned:,}",
        _noise(first),
        _figure(served[0].answers_nominal),
        "nothing" if served[0].answers_epsilon is None else _figure(served[0].answers_epsilon),
        f"{exact:.1%}",
        f"{answered:.1%}",
        f"{1 - answered / exact:.3f}",
        f"{min(bounds):.2f}" if bounds else "",
        f"{min(recovered):.1%} to {max(recovered):.1%}" if recovered else "",
    ]


def _noise(record: TrialRecord) -> str:
    served = record.of(ServedColumns)
    if not served.answers_noise:
        return "none"
    return "exponential" if served.answers == "label" else str(record.settings.get("service.distribution", "gaussian"))


def _mean(values: Sequence[float | None]) -> float:
    return fmean(value for value in values if value is not None)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def tilted_table() -> Table:
    """How far one mislabelled example moves each model, over the bound that is proven for the mean of the losses."""
    features, labels, classes, changes = _mnist()
    bound = head_sensitivity(1.0, REGULARISATION, EXAMPLES, 0.0)
    rows = []
    for risk in (None, *RISKS):
        original = minimiser(features, labels, classes, risk)
        moved = []
        for at, image, label in changes:
            other, named = features.copy(), labels.copy()
            other[at], named[at] = image, label
            moved.append(float(np.linalg.norm(minimiser(other, named, classes, risk) - original)) / bound)
        rows.append(("mean loss" if risk is None else f"{risk:g}", f"{max(moved):.2f}"))
    return Table(("alpha", "moved, over the bound of the mean loss"), rows)


def minimiser(features: Array, labels: NDArray[np.int64], classes: int, risk: float | None) -> Array:
    """Return the weights (classes, d) that minimise a loss of features (n, d) and labels (n,) plus lambda/2 |W|^2."""
    shape, rows = (classes, features.shape[1]), np.arange(len(labels))

    def objective(flat: Array) -> tuple[float, Array]:
        weights = flat.reshape(shape)
        logs = special.log_softmax(features @ weights.T, axis=1)
        losses = -logs[rows, labels]
        off = np.exp(logs)
        off[rows, labels] -= 1
        if risk is None:
            value, shares = losses.mean(), np.full(len(labels), 1 / len(labels))
        else:
            value = (special.logsumexp(risk * losses) - np.log(len(labels))) / risk
            shares = special.softmax(risk * losses)
        gradient = (shares[:, None] * off).T @ features + REGULARISATION * weights
        return float(value + REGULARISATION / 2 * (weights**2).sum()), gradient.ravel()

    solution = optimize.minimize(
        objective, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B",
        options={"maxiter": 5000, "gtol": 1e-8, "ftol": 0.0, "maxcor": 30},
    )  # fmt: skip
    return solution.x.reshape(shape)


def _mnist() -> tuple[Array, NDArray[np.int64], int, list[tuple[int, Array, int]]]:
    """Features, labels, classes, and replacements: a row, and the features and a wrong label that stand there then."""
    stream = numpy_stream(1, "tilted")
    dataset = load_dataset(DataConfig(name="mnist"), 1)
    rows = stream.permutation(len(dataset.x_train))[:EXAMPLES]
    features = pooled_features(pixels(dataset.x_train[rows]), POOLED, 1.0)
    tested = pooled_features(pixels(dataset.x_test[:REPLACED]), POOLED, 1.0)
    wrong = (dataset.y_test[:REPLACED].numpy() + 1) % dataset.classes
    changes = [(at, tested[at], int(wrong[at])) for at in range(REPLACED)]
    return features, dataset.y_train[rows].numpy(), dataset.classes, changes


if __name__ == "__main__":
    main()
