"""What a process has done whose children run commands: what the first of each kind takes, all would take again."""

from matplotlib.figure import Figure

from fedpriv.core import registry
from fedpriv.core.report import drawing, page
from fedpriv.data.sets.digits import Digits

for kinds in vars(registry).values():
    if isinstance(kinds, registry.Registry):
        tuple(kinds)
with drawing.styled():
    drawn = Figure(layout="constrained")
    axes = drawn.subplots()
    axes.semilogy([1, 10], label="letters and numbers")
    axes.legend()
    drawing.plot(drawn, "")
page._template()
Digits.arrays()
