"""Reports: HTML files that need no network, of one run from its folder.

The folder is read into a :class:`~fedpriv.core.report.view.View` (view.py), drawn (figures.py) and put on a page
(page.py, report.html, report.css). The same folder gives the same bytes. A folder that is incomplete gives a report
that says what is missing.
"""

from fedpriv.core.report.page import render_card, render_page, reported, write_report
from fedpriv.core.report.view import View, load_view

__all__ = ["View", "load_view", "render_card", "render_page", "reported", "write_report"]
