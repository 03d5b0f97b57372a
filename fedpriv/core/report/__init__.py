"""Reports: one self-contained HTML file of a run, written from its folder.

The folder is read into a :class:`~fedpriv.core.report.view.View` (view.py), plotted (drawing.py) and rendered (page.py,
report.html, report.css). The same folder gives the same bytes. The report of an incomplete folder says what is missing.
"""

from fedpriv.core.report.page import render_card, render_page, reported, write_report
from fedpriv.core.report.view import load_view

__all__ = ["load_view", "render_card", "render_page", "reported", "write_report"]
