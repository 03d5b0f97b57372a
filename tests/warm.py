"""What a process has done whose children run commands: what the first of each kind takes, all would take again."""

from matplotlib.figure import Figure

from fedpriv.core import registry
from fedpriv.core.report import drawing, page
from fedpriv.data.sets.digits import Digits


def _drawn(theme: drawing.Theme) -> Figure:
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.semilogy([1, 10], label="letters and numbers")
    axes.legend()
    return figure


for kinds in vars(registry).values():
    if isinstance(kinds, registry.Registry):
        tuple(kinds)
drawing.plot(_drawn, "")
page._template()
Digits.arrays()
