"""The trade-offs of one sweep side by side in one SVG: ``python -m studies.tradeoffs DIR --out FILE.svg``.

The plots are of one network and one data set; of a sweep over several networks, such as configs/paper/figure2.toml,
``--model`` names the one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedpriv.report.comparison import Setting, choose_attacks, settings_of
from fedpriv.report.drawing import LIGHT, to_svg
from fedpriv.report.tradeoffs import TRADEOFFS, draw_tradeoff
from studies.kept import records_of


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attack", default="", help="reconstruction attack; default: the strongest")
    parser.add_argument("--membership", default="", help="membership attack; default: the strongest")
    parser.add_argument("--model", default="", help="network; default: all trials are of one")
    asked = parser.parse_args()
    trials = records_of(asked.folder)
    records = [trial for trial in trials if asked.model in ("", trial.model)]
    if not records:
        names = ", ".join(sorted({trial.model for trial in trials}))
        parser.error(f"--model {asked.model}: the sweep's networks are {names}")
    settings = settings_of(records, choose_attacks(records, asked.attack, asked.membership))
    asked.out.write_bytes(to_svg(lambda _: _drawn(settings), LIGHT, transparent=False)[0])


def _drawn(settings: Sequence[Setting]) -> Figure:
    series = list(dict.fromkeys(setting.series for setting in settings))
    drawing = Figure(figsize=(13.5, 4.4), layout="constrained", facecolor="white")
    for axes, tradeoff in zip(drawing.subplots(1, 3, sharey=True), reversed(TRADEOFFS), strict=True):
        draw_tradeoff(axes, settings, tradeoff, series)
    labelled = [axes.get_legend_handles_labels() for axes in drawing.axes]
    handles = {label: handle for pair in labelled for handle, label in zip(*pair, strict=True)}
    drawing.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, labelcolor=LIGHT.text
    )
    return drawing


if __name__ == "__main__":
    main()
