"""Reports: HTML files that need no network, of one run from its folder, and of many from their records.

The folder is read into a :class:`~fedpriv.core.report.view.View` (view.py), drawn (figures.py) and put on a page
(page.py, report.html, report.css). The same folder gives the same bytes. A folder that is incomplete gives a report
that says what is missing. Many runs are condensed in comparison.py, drawn by tradeoffs.py and put on a page by
comparison_page.py and comparison.html.
"""

from fedpriv.core.report.comparison_page import write_comparison, write_sweep_report
from fedpriv.core.report.page import render_page, reported, write_report
from fedpriv.core.report.view import View, load_view

__all__ = ["View", "load_view", "render_page", "reported", "write_comparison", "write_report"]
__all__ += ["write_sweep_report"]
