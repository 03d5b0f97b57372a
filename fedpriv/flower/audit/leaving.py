"""Every record that leaves clients: what it is, and whether anything covers it."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedpriv.flower.arrays import MASKED, STATISTICS
from fedpriv.flower.audit.records import Answer, Leaving, ModAction

NOISING = ("LocalDpMod", "privatise")
"""Mods whose noise has a claim."""

_COUNTS = ("example", "sample", "norm_bit")  # of the data, even where they are the same in all answers


@dataclass
class _Row:
    """All of one key, over all answers."""

    kind: str
    cover: str = ""
    verdict: str = ""
    why: str = ""
    answers: int = 0
    values: set[str] = field(default_factory=set)


def leaving(answers: Sequence[Answer], weights: Collection[str] = ()) -> tuple[Leaving, ...]:
    """Return a line for each record of arrays, and for each key of metrics and configs; ``weights`` are counts."""
    rows: dict[tuple[str, str], _Row] = {}
    for answer in answers:
        kind = f"{answer.type}, {answer.stage}" if answer.stage else answer.type
        for name, row, value in _rows(answer, weights):
            kept = rows.setdefault((kind, name), row)
            kept.answers += 1
            kept.values.add(value)
            if row.verdict == "uncovered" and kept.verdict == "covered":  # one answer without noise is enough
                kept.cover, kept.verdict, kept.why = row.cover, row.verdict, row.why
    found = []
    for (kind, name), row in rows.items():
        verdict, why = row.verdict, row.why
        if verdict == "uncovered" and row.answers > 1 and len(row.values - {""}) == 1:
            same, counted = f"{next(iter(row.values))} in all answers", _is_count(name.rpartition(".")[2], weights)
            verdict, why = (verdict, f"{same}; {why}") if counted else ("constant", same)
        found.append(Leaving(kind, name, row.kind, row.answers, row.cover, verdict, why))
    return tuple(found)


def _rows(answer: Answer, weights: Collection[str]) -> Iterator[tuple[str, _Row, str]]:
    """(name, row, value) of all that is in one reply; of arrays the value is empty."""
    for name, values in answer.replied.items():
        if _is_arrays(values):
            yield from ((f"{name}{part}", row, "") for part, row in _of_arrays(answer, name, values))
            continue
        if name == MASKED:
            kind = ", ".join(values) or "nothing"
            yield name, _Row(kind, "secaggplus_mod", "masked", "keys, shares and masked vectors"), ""
            continue
        for key, value in values.items():
            yield f"{name}.{key}", _of_value(answer, name, key, value, weights), str(value)


def _is_arrays(values: dict[str, Any]) -> bool:
    """Arrays are described by type and shape."""
    return all(isinstance(value, str) and value.endswith(")") and " (" in value for value in values.values())


def _of_arrays(answer: Answer, name: str, values: dict[str, Any]) -> Iterator[tuple[str, _Row]]:
    if not values:
        yield "", _Row("no arrays", "", "constant", "it is empty")
        return
    kind = f"{len(values)} arrays" if len(values) > 1 else next(iter(values.values()))
    sent = [record for record in answer.sent.values() if _is_arrays(record)]
    update = answer.trains and any(_shapes(values) == _shapes(record) for record in sent)
    outer = _noising(answer)
    if name in answer.echoed:
        yield "", _Row(kind, "", "constant", "it is sent back unchanged")
    elif any(name in action.lets_out for action in answer.actions):
        yield "", _Row(kind, "", "raw data" if not update else "uncovered", "privatise.pass lets it out")
    elif any("uint8" in value or "object" in value for value in values.values()):
        yield "", _Row(kind, "", "raw data", "bytes, such as trees, whose thresholds are values of the data")
    elif outer is not None and outer.mod == "privatise":
        yield "", _Row(kind, "privatise", "covered", "clipped and noised, and counted in a ledger")
    elif not update:
        yield "", _Row(kind, "", "raw data", "not an update of what the server sent")
    else:
        yield from _of_update(answer, kind, values, outer)


def _of_update(
    answer: Answer, kind: str, values: dict[str, Any], outer: ModAction | None
) -> Iterator[tuple[str, _Row]]:
    """An update; what noise leaves out has a line of its own."""
    statistics = [key for key in values if key.rpartition(".")[2] in STATISTICS]
    if answer.stage:
        yield "", _Row(kind, "secaggplus_mod", "masked", "the server sees only the sum")
    elif outer is not None:
        yield "", _Row(kind, outer.mod, "covered", "clipped and noised at the client")
        if outer.kept:
            yield (
                f" ({', '.join(outer.kept[:4])})",
                _Row(f"{len(outer.kept)} arrays", "", "uncovered", "left out of the noise"),
            )
    elif answer.engines:
        yield "", _Row(kind, "Opacus", "covered", "trained with noisy gradients")
        if statistics:
            yield (
                f" ({', '.join(statistics[:4])})",
                _Row(f"{len(statistics)} arrays", "", "uncovered", "no gradient moves them"),
            )
    else:
        yield "", _Row(kind, "", "uncovered", _unnoised(answer))


def _unnoised(answer: Answer) -> str:
    """What mods without a claim of noise did to an update."""
    changed = [action.mod for action in answer.actions if action.noised]
    if changed:
        return f"{changed[-1]} changed it; whether that is noise is not known"
    clipped = [action.mod for action in answer.actions if action.norm and (action.left or 0.0) < 0.999 * action.norm]
    return f"clipped by {clipped[-1]}, without noise" if clipped else "an unchanged update of training"


def _noising(answer: Answer) -> ModAction | None:
    """The outermost mod with noise that acted on a reply."""
    acted = (action for action in reversed(answer.actions) if action.mod in NOISING)
    return next((action for action in acted if action.noised or action.mod == "privatise"), None)


def _is_count(key: str, weights: Collection[str]) -> bool:
    """Whether a number says how many examples a client has, or how many of something."""
    return key in weights or any(word in key for word in _COUNTS)


def _of_value(answer: Answer, name: str, key: str, value: Any, weights: Collection[str]) -> _Row:
    kind = "a number" if isinstance(value, (int, float)) else type(value).__name__
    if isinstance(value, str) and value.endswith(" bytes"):
        return _Row(value, "", "raw data", "bytes, such as a model of trees")
    if isinstance(value, list) and len(value) > 1:
        return _Row(f"{len(value)} values", "", "raw data", "values as they are")
    if any(action.mod == "privatise" for action in answer.actions) and not _let_out(answer, name, key):
        return _Row(kind, "privatise", "covered", "it is 1 for all, or has noise of its own")
    if key == "norm_bit":
        return _Row(kind, "", "uncovered", "whether the update was clipped")
    if _is_count(key, weights):
        return _Row(kind, "", "uncovered", "how many examples the client has")
    return _Row(kind, "", "uncovered", "computed from data")


def _let_out(answer: Answer, name: str, key: str) -> bool:
    kinds = (name, key, answer.type, answer.type.split(".")[0])
    return any(each in action.lets_out for action in answer.actions for each in kinds)


def _shapes(values: dict[str, Any]) -> list[str]:
    """Shapes alone: strategies return whole numbers and halves as other types."""
    shapes: defaultdict[str, int] = defaultdict(int)
    for value in values.values():
        shapes[value.partition(" ")[2]] += 1
    return sorted(f"{shape} x {count}" for shape, count in shapes.items())
