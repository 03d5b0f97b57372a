"""The report of ``fedpriv icl``: its results, its ledger and its settings."""

from pathlib import Path

from fedpriv.core.config import describe
from fedpriv.core.files import write_whole
from fedpriv.prompts.folder import PromptFolder


def write_icl_report(path: Path) -> Path:
    """Write ``report.html`` into the folder of ``fedpriv icl`` and return its path; the same folder, the same bytes."""
    from fedpriv.core.report.filters import template

    folder = PromptFolder.open(path)
    folder.check_settings()
    ledger = folder.ledger()
    page = template("prompts/report.html").render(
        title=folder.settings.name,
        prompts=folder.prompts(),
        ledger=ledger,
        statements=list(dict.fromkeys(text for line in ledger.clients for text in line.theorem.values())),
        notes=list(dict.fromkeys(note for line in ledger.clients for note in line.notes)),
        settings=list(describe(folder.settings)),
    )
    report = path / "report.html"
    write_whole(report, page.encode())
    return report
