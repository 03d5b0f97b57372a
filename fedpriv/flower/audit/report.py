"""The report of ``fedpriv flower audit``."""

from pathlib import Path

from pydantic import TypeAdapter

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole
from fedpriv.core.finding import Picture, read_picture
from fedpriv.core.records import read_file
from fedpriv.core.report.filters import template
from fedpriv.flower.audit.records import Audit

_AUDIT = TypeAdapter(Audit)
_STATES = {"covered": "ok", "constant": "ok", "masked": "ok", "uncovered": "error", "raw data": "error"}


def write_audit_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of an audit and return its path; the same folder gives the same bytes."""
    from fedpriv.flower.audit.audit import RESULT

    audit = read_file(folder / RESULT, _AUDIT)
    if audit is None:
        raise InputError(f"{folder} is not the folder of an audit")
    pictures: list[tuple[str, Picture]] = [(name, read_picture(folder / name)) for name in audit.pictures]
    page = template("flower/audit/report.html").render(title=audit.app, audit=audit, pictures=pictures, states=_STATES)
    path = folder / "report.html"
    write_whole(path, page.encode())
    return path
