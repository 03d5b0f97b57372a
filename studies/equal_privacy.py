"""The equal-privacy comparison as a table: ``python -m studies.equal_privacy sweeps/equal-privacy-small``.

One row a mechanism, target and rate: accuracy, the reconstruction's MSE and images recovered, the AUC of membership
inference, and the empirical lower bound on epsilon, at the same proven (epsilon, delta).
"""

import argparse
from pathlib import Path

from fedpriv.records import Interval
from fedpriv.report.comparison import Setting, choose_attacks, settings_of
from fedpriv.report.tradeoffs import series_name
from studies.kept import records_of

HEAD = (
    "proven ε", "mechanism", "m", "kappa or sigma", "rate", "accuracy, %", "{0}: MSE", "{0}: recovered", "{1}: AUC",
    "ε measured",
)  # fmt: skip


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attack", default="", help="reconstruction attack; default: the strongest on average")
    asked = parser.parse_args()
    records = records_of(asked.folder)
    chosen = choose_attacks(records, asked.attack)
    print(f"| {' | '.join(HEAD)} |".format(chosen.reconstruction, chosen.membership))
    print(f"|{' --- |' * len(HEAD)}")
    for setting in sorted(settings_of(records, chosen), key=_order):
        print(_row(setting, chosen.reconstruction))


def _order(setting: Setting) -> tuple[float, tuple[str, str], float]:
    rate = setting.first.settings.get("training.learning_rate", 0.0)
    return round(setting.epsilon or 0.0), setting.series, rate


def _row(setting: Setting, attack: str) -> str:
    first = setting.first
    lines = [line for record in setting.records for line in record.reconstruction if line.attack == attack]
    cells = [
        "" if setting.epsilon is None else f"{setting.epsilon:.4g}",
        series_name(setting.series),
        "" if first.draws is None else f"{first.draws:,}",
        "" if first.noise is None else f"{first.noise:.4g}",
        f"{first.settings.get('training.learning_rate', '')}",
        with_interval(setting.accuracy, 100, 1),
        with_interval(setting.mse, 1, 3),
        f"{sum(line.recovered for line in lines)} of {sum(line.victims for line in lines)}" if lines else "",
        with_interval(setting.auc, 1, 3),
        "" if setting.bound is None else f"{setting.bound:.2g}",
    ]
    return f"| {' | '.join(cells)} |"


def with_interval(estimate: Interval | None, factor: float, places: int) -> str:
    """Return an estimate times a factor, with its interval where there is one; empty without an estimate."""
    if estimate is None:
        return ""
    text = f"{factor * estimate.value:.{places}f}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({factor * estimate.low:.{places}f} to {factor * estimate.high:.{places}f})"


if __name__ == "__main__":
    main()
