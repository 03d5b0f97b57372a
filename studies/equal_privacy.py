"""Gaussian and directional noise at the same proven privacy, by batch size.

``python -m studies equal_privacy docs/results/equal-privacy.csv.gz --plot docs/images/equal-privacy.svg`` prints a row
for each batch size, mechanism and rate: the noise, what is proven, and test accuracy. It reads the folder of
``configs/paper/equal-privacy.toml`` or of ``configs/paper/equal-privacy-rates.toml``, or what is kept of them.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedpriv.core.errors import InputError
from fedpriv.core.report.drawing import LIGHT, level, panel, styled, to_svg
from fedpriv.sweep.comparison import Chosen, Setting, settings_of
from fedpriv.sweep.page import series_name
from studies.arguments import StudyParser
from studies.blocks import curve
from studies.kept import beside_noise, records_of
from studies.results import Table, with_interval

HEAD = ("batch", "mechanism", "kappa or sigma", "proven ε", "rate", "accuracy, %")
ASKED = {"training.batch_size", "training.learning_rate"}


def main() -> None:
    """Print the table as CSV, and draw it if asked."""
    parser = StudyParser("studies.equal_privacy", __doc__)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    with parser.parsed() as asked:
        settings = of_batches(asked.kept)
        print(table(settings), end="")
        if asked.plot:
            asked.plot.write_bytes(to_svg(drawn(settings), transparent=False)[0])


def of_batches(path: Path) -> list[Setting]:
    """The settings of a sweep: by batch size, largest first, then mechanism and rate."""
    found = settings_of(records_of(path), Chosen())
    if not found or any(beside_noise(setting.first) != ASKED for setting in found):
        raise InputError(f"{path} has no trials over batch sizes and rates alone, as configs/paper/equal-privacy.toml")
    return sorted(found, key=lambda setting: (-_batch(setting), setting.series, _rate(setting)))


def _batch(setting: Setting) -> int:
    return int(setting.first.settings["training.batch_size"])


def _rate(setting: Setting) -> float:
    return float(setting.first.settings["training.learning_rate"])


def table(settings: Sequence[Setting]) -> Table:
    """One row a setting."""
    return Table(HEAD, map(_row, settings))


def _row(setting: Setting) -> tuple[str, ...]:
    return (
        f"{_batch(setting)}",
        series_name(setting.series),
        "" if setting.first.noise is None else f"{setting.first.noise:.4g}",
        "" if setting.epsilon is None else f"{setting.epsilon:.4g}",
        f"{_rate(setting):g}",
        with_interval(setting.accuracy),
    )


@styled()
def drawn(settings: Sequence[Setting]) -> Figure:
    """Draw accuracy over the size of batches, a line for each mechanism."""
    drawing, axes = panel((7.5, 4.2))
    places = {batch: place for place, batch in enumerate(sorted({_batch(setting) for setting in settings}))}
    noisy = sorted({setting.series for setting in settings if setting.epsilon is not None})
    for number, series in enumerate(noisy):
        points = {places[_batch(each)]: each.accuracy for each in settings if each.series == series and each.accuracy}
        curve(axes, number, dict(sorted(points.items())), series_name(series), factor=100)
    for setting in settings:
        if setting.epsilon is None and setting.accuracy is not None:
            name = f"no mechanism, batches of {_batch(setting)}"
            level(axes, 100 * setting.accuracy.value, name)
    axes.set_xticks(list(places.values()), [f"{batch}" for batch in places])
    axes.set_xlabel("images in a batch", color=LIGHT.muted)
    axes.set_title("test accuracy, %, at the same proven ε", fontsize=10)
    axes.legend(frameon=False, labelcolor=LIGHT.text, loc="center right")
    return drawing


if __name__ == "__main__":
    main()
