"""The report of ``fedpriv icl``: its results, its ledger and its settings."""

from pathlib import Path

from fedpriv.core.config import describe
from fedpriv.core.figure import Figure
from fedpriv.core.files import write_whole
from fedpriv.core.numbers import figure, percent
from fedpriv.core.records import Interval
from fedpriv.prompts.folder import PromptFolder


def write_icl_report(path: Path) -> Path:
    """Write ``report.html`` into the folder of ``fedpriv icl`` and return its path; the same folder, the same bytes."""
    from fedpriv.core.report.filters import plain, template

    folder = PromptFolder.open(path)
    folder.check_settings()
    prompts, ledger = folder.prompts(), folder.ledger()
    page = template("prompts/report.html", leak_value=_leak_value).render(
        title=folder.settings.name,
        prompts=prompts,
        ledger=ledger,
        rows=_rows(folder),
        statements=list(dict.fromkeys(text for line in ledger.clients for text in line.theorem.values())),
        notes=list(dict.fromkeys(note for line in ledger.clients for note in line.notes)),
        settings=[(key, plain(value), value != usual, meaning) for key, value, usual, meaning in
                  describe(folder.settings)],
    )  # fmt: skip
    report = path / "report.html"
    write_whole(report, page.encode())
    return report


def _rows(folder: PromptFolder) -> list[tuple[str, str, str, str, str]]:
    """(answers, noise, right, interval, proven) of each row, from a guess to what nothing protects."""
    prompts = folder.prompts()
    rows = [
        ("Guess: the most common label", "", percent(prompts.majority), "", "needs no example"),
        ("Guess: the model without examples", "", *_shares(prompts.zero_shot), "needs no example"),
    ]
    for level in prompts.levels:
        if level.epsilon is None:
            rows.append(("Without noise", "none", *_shares(level.accuracy), "nothing proven"))
        else:
            proven = f"ε {figure(level.epsilon)} at δ {figure(prompts.delta)}{', released' if level.released else ''}"
            rows.append(("With noise", figure(level.sigma), *_shares(level.accuracy), proven))
    if prompts.one_prompt is not None:
        rows.append(("One prompt", "none", *_shares(prompts.one_prompt), "nothing proven"))
    return rows


def _shares(share: Interval) -> tuple[str, str]:
    ends = share.ends
    return percent(share.value), "" if ends is None else f"{percent(ends[0])} to {percent(ends[1])}"


def _leak_value(shown: Figure, value: float | None) -> str:
    if value is not None and shown.unit == "number":
        return f"{value:.3f}"  # areas, which are compared with each other
    return shown.text(value, "nothing proven")
