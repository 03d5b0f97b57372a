"""The leakage table as text: a line a cell, and Markdown tables between two marks of a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy.stats import binomtest

from fedpriv.core.errors import InputError
from fedpriv.core.numbers import decimal, figure, percent
from fedpriv.core.records import CONFIDENCE, AttackResult
from fedpriv.core.registry import ATTACKS
from studies.leakage_cells import GUESS, Row

BEGIN, END = "<!-- leakage: begin -->", "<!-- leakage: end -->"
CHANCE = 0.01  # what chance does more rarely than this counts as identified

Group = tuple[str, str, str]
"""(data, model, network)."""


def line(row: Row) -> str:
    """Return a row for a terminal."""
    cell = row.cell
    where = " ".join(name for name in (cell.data, cell.model, cell.network, cell.mechanism, cell.attack) if name)
    if row.result is None:
        return f"{where}: failed: {row.failure}"
    result = row.result
    said = f"{where}: PSNR {decimal(result.psnr, 1)} dB, MSE {result.mse:.3g}, SSIM {decimal(result.ssim, 2)}"
    said += f", recovered {result.recovered} of {result.victims}, identified {result.identified} of {result.victims}"
    return f"{said}, {row.seconds:.0f} s" + (f"; {row.failure}" if row.failure else "")


def groups(rows: Sequence[Row]) -> dict[Group, list[Row]]:
    """The rows of each data set, model and network, without the guesses."""
    members: dict[Group, list[Row]] = {}
    for row in sorted(rows, key=lambda row: _order(row.cell.mechanism)):
        if row.cell.model:
            members.setdefault((row.cell.data, row.cell.model, row.cell.network), []).append(row)
    return dict(sorted(members.items()))


def _order(mechanism: str) -> tuple[bool, str, float]:
    """No mechanism first, then each kind from little noise to much."""
    kind, _, strength = mechanism.partition(":")
    noise = float(strength or 0)
    return kind != "none", kind, -noise if kind.startswith("vmf") else noise


def strongest(rows: Sequence[Row]) -> dict[str, Row | None]:
    """For each mechanism the row that recovers most, then identifies most, then has the lowest median MSE.

    The MSE alone would prefer the mean of all images to a picture that shows whose it is. ``None``: all attacks failed.
    """
    best: dict[str, Row | None] = {}
    for row in rows:
        other = best.setdefault(row.cell.mechanism, None)
        if (
            row.result is not None
            and not row.result.picked
            and (other is None or other.result is None or _strength(row.result) > _strength(other.result))
        ):
            best[row.cell.mechanism] = row
    return best


def _strength(result: AttackResult) -> tuple[int, int, float]:
    return result.recovered, result.identified or 0, -result.error


def write_page(path: Path, rows: Sequence[Row]) -> None:
    """Write the tables between the page's marks, in place of what stands there."""
    try:
        before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{path}: the marks {BEGIN} and {END} are wanted")
    path.write_text(f"{before}{BEGIN}\n{tables(rows)}\n{END}{after}", encoding="utf-8")


def tables(rows: Sequence[Row]) -> str:
    """Return what stands between the marks: terms, strongest attacks, what they mean, and every cell."""
    guessed = {(row.cell.data, row.cell.victims, row.cell.seed): row.result for row in rows if row.cell.attack == GUESS}
    by_group = groups(rows)
    parts = ["## Terms", _terms(rows), "## The strongest attack behind each mechanism", _summary(by_group, guessed)]
    parts += ["## Picked out of 100", _picked(by_group), "## What stops attacks that reconstruct pictures"]
    by_group = {group: [row for row in cells if not _picks(row)] for group, cells in by_group.items()}
    parts += [_outcomes(by_group), "## Every cell"]
    parts += [_details(group, cells, guessed) for group, cells in by_group.items()]
    return "\n\n".join(["", *parts, ""])


def _terms(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.result is not None]
    dates, commits = sorted({row.date for row in measured}), sorted({row.commit for row in measured})
    programs = {"Python": "python", "torch": "torch", "NumPy": "numpy"}
    versions = [
        f"{name} {', '.join(sorted({row.versions[key] for row in measured}))}" for name, key in programs.items()
    ]
    terms = {
        "measured": f"{_span(dates)} with {', '.join(versions)}, commits {', '.join(commits)}",
        "figures": f"medians over the victims, in brackets their {CONFIDENCE:.0%} bootstrap intervals",
        "cosine": "between what was sent and the gradient itself",
        "epsilon": "proven at delta 1e-5 for this upload (replace-one, one participation, no amplification; "
        "[theorems](privacy.md))",
        "guess": "the PSNR of the mean of the public images",
        "recovered": "SSIM of 0.6 or more and a lower MSE than every guess",
        "identified": "of 100 images the original is the nearest to the picture; chance is 1 in 100. Before 2026-11-23 "
        "the others included test images",
        "by pictures": "identified by the strongest attack that reconstructs",
        "by `candidate`": "the attack that holds the 100 images and their labels, and picks the most probable",
        "best decision": "how often the best decision on these images is right; no attack is right more often "
        "([ceilings](ceilings.md))",
        "ceiling": "no attack exceeds it, on any network",
        "strongest": "the attack that recovers most images; among equals the one that identifies most, then the one "
        "with the lowest MSE",
        "steps": "iterations x restarts of the attack",
    }
    return "\n".join([*_head("term", "meaning"), *(_line(*term) for term in terms.items())])


def _span(dates: Sequence[str]) -> str:
    if not dates:
        return "never"
    return f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"


def _summary(
    by_group: Mapping[Group, Sequence[Row]], guessed: Mapping[tuple[str, int, int], AttackResult | None]
) -> str:
    lines = _head("data", "network", "mechanism", "cosine", "epsilon", "strongest", "PSNR, dB", "guess", *_COUNTS)
    for group, cells in by_group.items():
        for mechanism, row in strongest(cells).items():
            if row is None or row.result is None:
                lines.append(_line(group[0], _network(group), mechanism, "", "", "every attack failed", *[""] * 5))
                continue
            guess = guessed.get((row.cell.data, row.cell.victims, row.cell.seed))
            lines.append(
                _line(
                    group[0],
                    _network(group),
                    mechanism,
                    "" if row.cosine is None else decimal(row.cosine, 3),
                    "none" if row.epsilon is None else figure(row.epsilon, 3),
                    row.cell.attack,
                    _interval(row.result, "psnr", 1),
                    "" if guess is None else decimal(guess.psnr, 1),
                    *_counts(row.result),
                )
            )
    return "\n".join(lines)


def _details(group: Group, cells: Sequence[Row], guessed: Mapping[tuple[str, int, int], AttackResult | None]) -> str:
    lines = _head("mechanism", "attack", "steps", "MSE", "PSNR, dB", "SSIM", *_COUNTS, "seconds")
    for key in dict.fromkeys((row.cell.data, row.cell.victims, row.cell.seed) for row in cells):
        if (guess := guessed.get(key)) is not None:
            lines.append(_line("", "public mean", "", *_figures(guess), *_counts(guess), ""))
    order = list(dict.fromkeys(row.cell.mechanism for row in cells))
    for row in sorted(cells, key=lambda row: order.index(row.cell.mechanism)):
        named = (row.cell.mechanism, row.cell.attack, _steps(row))
        if row.result is None:
            lines.append(_line(*named, f"failed: {row.failure}", *[""] * 6))
        else:
            lines.append(_line(*named, *_figures(row.result), *_counts(row.result), f"{row.seconds:.0f}"))
    accuracy = next((row.accuracy for row in cells if row.accuracy is not None), None)
    title = f"{group[0]}, {_network(group)}" + ("" if accuracy is None else f", test accuracy {percent(accuracy)}")
    return f"### {title}\n\n" + "\n".join(lines)


def _picks(row: Row) -> bool:
    return row.cell.attack in ATTACKS and bool(ATTACKS[row.cell.attack].picks())


def _picked(by_group: Mapping[Group, Sequence[Row]]) -> str:
    """One line a mechanism: guess, what pictures identify and ``candidate`` picks, the best decision, the ceiling."""
    lines = _head("data", "network", "mechanism", "guess", "by pictures", "by `candidate`", "best decision", "ceiling")
    for group, cells in by_group.items():
        pictures = strongest(cells)
        for row in cells:
            if not _picks(row) or row.result is None:
                continue
            shown = pictures.get(row.cell.mechanism)
            lines.append(
                _line(
                    group[0],
                    _network(group),
                    row.cell.mechanism,
                    percent(1 / (row.result.candidates or 1)),
                    "" if shown is None or shown.result is None else _counts(shown.result)[1],
                    _counts(row.result)[1],
                    "" if row.best is None else percent(row.best.value),
                    "none" if row.ceiling is None else percent(row.ceiling),
                )
            )
    return "\n".join(lines)


def _outcomes(by_group: Mapping[Group, Sequence[Row]]) -> str:
    lines = _head(
        "data",
        "network",
        "images are recovered",
        "not recovered, but identified more often than by chance",
        "counted as recovered, but identified no more often than by chance",
        "neither",
        "every label is inferred",
    )
    return "\n".join(lines + [_outcome(group, cells) for group, cells in by_group.items()])


def _outcome(group: Group, cells: Sequence[Row]) -> str:
    """One line a network: behind which mechanisms any of the attacks recovers or identifies images."""
    attacks = len({row.cell.attack for row in cells})
    columns: list[list[str]] = [[], [], [], [], []]
    for mechanism in dict.fromkeys(row.cell.mechanism for row in cells):
        results = [row.result for row in cells if row.cell.mechanism == mechanism and row.result is not None]
        known = [result for result in results if _is_identified(result, attacks)]
        recovers, recovers_known = (any(result.recovered for result in scored) for scored in (results, known))
        if results:
            columns[(recovers_known, bool(known), recovers, True).index(True)].append(mechanism)
        if any(result.label_accuracy == 1 for result in results):
            columns[4].append(mechanism)
    return _line(group[0], _network(group), *map(_names, columns))


def _is_identified(result: AttackResult, attacks: int) -> bool:
    """Whether more originals are identified than by chance; each of several attacks has its own chance to be lucky."""
    if result.identified is None or result.candidates is None:
        return False
    chance = binomtest(result.identified, result.victims, 1 / result.candidates, alternative="greater").pvalue
    return bool(attacks * chance < CHANCE)


_COUNTS = ("recovered", "identified", "labels")


def _counts(result: AttackResult) -> tuple[str, str, str]:
    identified = "" if result.identified is None else f"{result.identified} of {result.victims}"
    labels = "" if result.label_accuracy is None else percent(result.label_accuracy)
    missing = f" ({result.missing} failed)" if result.missing else ""
    return f"{result.recovered} of {result.victims}{missing}", identified, labels


def _figures(result: AttackResult) -> tuple[str, str, str]:
    low_high = result.intervals.get("mse")
    interval = "" if low_high is None else f" ({low_high[0]:.2g} to {low_high[1]:.2g})"
    return f"{result.mse:.2g}{interval}", _interval(result, "psnr", 1), _interval(result, "ssim", 2)


def _interval(result: AttackResult, name: str, places: int) -> str:
    value = decimal(getattr(result, name), places)
    if name not in result.intervals:
        return value
    low, high = (decimal(end, places) for end in result.intervals[name])
    return f"{value} ({low} to {high})"


def _steps(row: Row) -> str:
    settings = dict(part.split("=") for part in row.cell.settings.split(",") if part)
    if "iterations" not in settings:
        return ""
    restarts = settings.get("restarts", "1")
    return settings["iterations"] + (f" x {restarts}" if restarts != "1" else "")


def _network(group: Group) -> str:
    return f"{group[1]}, {group[2]}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _head(*names: str) -> list[str]:
    return [_line(*names), _line(*["---"] * len(names))]


def _line(*values: str) -> str:
    return f"| {' | '.join(value.replace('|', '/') for value in values)} |"
