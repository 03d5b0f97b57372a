"""Audit an app: run a copy of it, list what leaves, attack it, and compare what is claimed with what is proven."""

import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedpriv.core.errors import InputError
from fedpriv.core.files import as_json, is_empty, write_whole, writing
from fedpriv.core.finding import Picture, read_picture
from fedpriv.core.numbers import several
from fedpriv.core.progress import Progress
from fedpriv.core.reading import read_file
from fedpriv.core.report.filters import template
from fedpriv.flower.arrays import MASKED, STATISTICS
from fedpriv.flower.attack import TappedSummary, attack_tapped, checked_settings
from fedpriv.flower.audit.claims import claims
from fedpriv.flower.audit.records import Answer, Audit, Leaving, ModAction
from fedpriv.flower.audit.simulation import RUN, Simulated, app_name, copied, simulate
from fedpriv.flower.folder import ABOUT, read_exchanges, read_tapped
from fedpriv.flower.noise import Noise

RESULT, TAPPED = "audit.json", f"tap-{RUN}"
_QUICK = ("adversary.iga.iterations=400",)


def audit_app(
    app: Path,
    out: Path,
    clients: int,
    overrides: str,
    attacks: tuple[Sequence[str], Sequence[str]],
    progress: Progress,
) -> Audit:
    """Audit the app in a folder, none of whose files is touched, and write audit.json."""
    name, start = app_name(app), time.monotonic()
    if out.exists() and not is_empty(out):
        raise InputError(key="--out", given=str(out), allowed="it is there already")
    names, settings = attacks
    checked_settings(settings, names)  # a wrong one is told before the simulation, not after it
    with _gone_if_interrupted(out), copied(app) as copy:
        progress.stage(f"{name} in Flower's simulation, {several(clients, 'client')}")
        run, answers = simulate(copy, out, clients, overrides)
        attacked = _attacked(out, attacks, progress)
    _point_at(app.resolve(), out / TAPPED)
    audit = summed_up(name, run, answers, attacked, out)
    for text in audit.warnings:
        progress.warn(text)
    warned = (*audit.warnings, *(attacked.warnings if attacked is not None else ()))
    audit = replace(audit, warnings=warned, clients=clients, seconds=time.monotonic() - start)
    with writing(""):
        write_whole(out / RESULT, as_json(audit))
    return audit


@contextmanager
def _gone_if_interrupted(out: Path) -> Iterator[None]:
    """Remove a folder that is half written: it can't be read, and the audit can't be gone on with."""
    try:
        yield
    except KeyboardInterrupt:
        shutil.rmtree(out, ignore_errors=True)
        raise


def summed_up(name: str, run: Simulated, answers: Sequence[Answer], attacked: TappedSummary | None, out: Path) -> Audit:
    """Return what an audit finds in what was observed."""
    per_client = Counter((answer.client, answer.type, answer.stage) for answer in answers if not answer.error)
    claimed = claims(answers, run.layers, run.rounds, out)
    return Audit(
        app=name,
        clients=len({answer.client for answer in answers}),
        rounds=len(run.rounds) or max(per_client.values(), default=0),
        messages=len(answers),
        strategies=tuple(layer.name for layer in run.layers),
        mods=run.mods,
        leaving=leaving(
            [answer for answer in answers if not answer.error], {layer.weight for layer in run.layers if layer.weight}
        ),
        claims=claimed,
        attacks=attacked.verdict if attacked is not None else (),
        pictures=tuple(f"{TAPPED}/{picture}" for picture in (attacked.pictures if attacked is not None else ())),
        warnings=tuple(_warnings(run, answers)),
        seconds=0.0,
    )


def _warnings(run: Simulated, answers: Sequence[Answer]) -> Iterator[str]:
    """Mods that undo each other, wrappers without their mods, and clients that fail."""
    yield from dict.fromkeys(text for answer in answers for text in _undone(answer))
    wrapped = [layer.wraps for layer in run.layers if "ClientSide" in layer.wraps]
    if wrapped and not {"fixedclipping_mod", "adaptiveclipping_mod"} & set(run.mods):
        yield f"{wrapped[0]} is used, but no client has the mod that clips for it"
    noised = [mod for mod in run.mods if mod in NOISING]
    if noised and any(layer.wraps for layer in run.layers):
        yield f"noise is added by {noised[0]} at the client and by the server's wrapper: each claim holds by itself"
    if not run.layers:
        yield "no strategy of Flower's was seen: the server's own code asks clients and aggregates"
    failed = [answer for answer in answers if answer.error]
    if failed:
        kinds = ", ".join(f"{count} to {kind}" for kind, count in Counter(answer.type for answer in failed).items())
        yield f"{len(failed)} of {len(answers)} messages failed ({kinds}), the first with: {failed[0].error}"
        others = [answer.error for answer in failed if not answer.trains]
        for mod in dict.fromkeys((*run.mods, "LocalDpMod")):  # which an app's own mod may call
            if any(error.startswith(f"{mod} ") for error in others):
                yield f"{mod} fails on messages other than train: give it to that alone, @app.train(mods=[...])"


def _undone(answer: Answer) -> Iterator[str]:
    """Which mods act on noise that another one has added to a reply."""
    acted = [action for action in answer.actions if action.norm is not None]
    for place, inner in enumerate(acted):
        if inner.mod not in NOISING or not inner.noised:
            continue
        for outer in acted[place + 1 :]:
            if outer.mod in NOISING:
                yield (
                    f"{outer.mod} acts on what {inner.mod} has noised: the update gets noise twice, and each claim "
                    "holds by itself"
                )
            elif outer.norm and (outer.left or 0.0) < 0.5 * outer.norm:
                yield f"{outer.mod} clips what {inner.mod} has noised, so that little of the update is left"
            elif outer.noised:
                yield f"{outer.mod} changes what {inner.mod} has noised"


def _attacked(out: Path, attacks: tuple[Sequence[str], Sequence[str]], progress: Progress) -> TappedSummary | None:
    """Attack the first client's uploads, or the first sum; the tap names the network, if the settings name none."""
    exchanges = read_exchanges(out / TAPPED)
    if not exchanges:
        return None
    trained = [exchange for exchange in exchanges if exchange.type.split(".")[0] == "train"]
    victims = [exchange.name for exchange in exchanges if not exchange.unattacked] or [(trained or exchanges)[0].name]
    whole = [f"{exchanges[0].round}-sum"] if any(exchange.summed for exchange in exchanges) else victims[:1]
    names, overrides = attacks
    settings = (*(_QUICK if not names or "iga" in names else ()), *overrides)
    return attack_tapped(out / TAPPED, names, whole, settings, progress)


def _point_at(app: Path, folder: Path) -> None:
    """The copy is gone: later attacks import the network from the app's own folder."""
    tapped = read_tapped(folder)
    if tapped is not None:
        write_whole(folder / ABOUT, as_json(replace(tapped, app=str(app))))


NOISING = ("LocalDpMod", "privatise")
"""Mods whose noise has a claim."""

_COUNTS = ("example", "sample", "norm_bit")  # of the data, even where they are the same in all answers


@dataclass(frozen=True)
class _Row:
    """One key in one answer."""

    kind: str
    cover: str
    verdict: str
    why: str


def leaving(answers: Sequence[Answer], weights: Collection[str] = ()) -> tuple[Leaving, ...]:
    """Return a line for each record of arrays, and for each key of metrics and configs; ``weights`` are counts."""
    rows: dict[tuple[str, str], list[tuple[_Row, str]]] = defaultdict(list)
    for answer in answers:
        kind = f"{answer.type}, {answer.stage}" if answer.stage else answer.type
        for name, row, value in _rows(answer, weights):
            rows[kind, name].append((row, value))
    return tuple(_over_all(kind, name, seen, weights) for (kind, name), seen in rows.items())


def _over_all(kind: str, name: str, seen: Sequence[tuple[_Row, str]], weights: Collection[str]) -> Leaving:
    """What is said of a key in all answers: one without noise is enough, and what never changes tells nothing."""
    first, values = seen[0][0], {value for _, value in seen} - {""}
    bare = next((row for row, _ in seen if row.verdict == "uncovered"), first)
    row = bare if first.verdict == "covered" else first
    verdict, why = row.verdict, row.why
    if verdict == "uncovered" and len(seen) > 1 and len(values) == 1:
        same = f"{values.pop()} in all answers"
        by_chance = first.kind == "a number" and not name.endswith("res.status.code")  # of few clients
        may_tell = by_chance or _is_count(name.rpartition(".")[2], weights)
        verdict, why = (verdict, f"{same}; {why}") if may_tell else ("constant", same)
    return Leaving(kind, name, first.kind, len(seen), row.cover, verdict, why)


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
    update = answer.trains and any(_is_update(values, record) for record in sent)
    outer = _noising(answer) if name not in {record for record, _ in _added_outside(answer)} else None
    if name in answer.echoed:
        yield "", _Row(kind, "", "constant", "it is sent back unchanged")
    elif any(name in action.lets_out for action in answer.actions):
        yield "", _Row(kind, "", "raw data" if not update else "uncovered", "privatise.pass lets it out")
    elif any("uint8" in value or "object" in value for value in values.values()):
        yield "", _Row(kind, "", "raw data", "bytes, such as trees, whose thresholds are values of the data")
    elif outer is not None and outer.mod == "privatise":
        yield "", _Row(kind, "privatise", "covered", "clipped and noised, and counted in a ledger")
    elif answer.type == "get_parameters":
        yield "", _Row(kind, "", "uncovered", "parameters of the client's own, from which training starts")
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
        noises = [noise for noise in answer.noises if noise.by == outer.mod]
        yield "", _covered(kind, outer.mod, "clipped and noised at the client", noises)
        if left := [name for noise in noises for name in noise.left]:
            yield (
                f" ({', '.join(left[:4])})",
                _Row(f"{len(left)} arrays", "", "uncovered", "left out of the noise"),
            )
    elif engines := [noise for noise in answer.noises if noise.by == "Opacus"]:
        yield "", _covered(kind, "Opacus", "trained with noisy gradients", engines)
        if statistics:
            yield (
                f" ({', '.join(statistics[:4])})",
                _Row(f"{len(statistics)} arrays", "", "uncovered", "no gradient moves them"),
            )
    else:
        yield "", _Row(kind, "", "uncovered", _unnoised(answer))


def _covered(kind: str, by: str, how: str, noises: Sequence[Noise]) -> _Row:
    """An update with noise, unless nothing is proven of that."""
    doubt = next((noise.doubt for noise in noises if noise.doubt), "")
    return _Row(kind, "", "uncovered", doubt) if doubt else _Row(kind, by, "covered", how)


def _unnoised(answer: Answer) -> str:
    """What mods without a claim of noise did to an update."""
    changed = [action.mod for action in answer.actions if action.noised]
    acted = {action.mod for action in answer.actions}
    if changed and any(noise.by not in (*acted, "Opacus") for noise in answer.noises):
        return f"{changed[-1]} calls LocalDpMod; whether it changes more is not known"
    if changed:
        return f"{changed[-1]} changed it; whether that is noise is not known"
    clipped = [action.mod for action in answer.actions if action.norm and (action.left or 0.0) < 0.999 * action.norm]
    return f"clipped by {clipped[-1]}, without noise" if clipped else "an unchanged update of training"


def _noising(answer: Answer) -> ModAction | None:
    """The outermost mod with noise that acted on a reply."""
    acted = (action for action in reversed(answer.actions) if action.mod in NOISING)
    return next((action for action in acted if action.noised or action.mod == "privatise"), None)


def _added_outside(answer: Answer) -> set[tuple[str, str]]:
    """Records and keys that mods around privatise, of which it knows nothing, put into a reply."""
    places = [place for place, action in enumerate(answer.actions) if action.mod == "privatise"]
    outside = answer.actions[places[-1] + 1 :] if places else ()
    return {each for action in outside for each in action.added}


def _is_count(key: str, weights: Collection[str]) -> bool:
    """Whether a number says how many examples a client has, or how many of something."""
    return key in weights or any(word in key for word in _COUNTS)


def _of_value(answer: Answer, name: str, key: str, value: Any, weights: Collection[str]) -> _Row:
    kind = "a number" if isinstance(value, (int, float)) else type(value).__name__
    if isinstance(value, str) and value.endswith(" bytes"):
        return _Row(value, "", "raw data", "bytes, such as a model of trees")
    if isinstance(value, list) and len(value) > 1:
        return _Row(f"{len(value)} values", "", "raw data", "values as they are")
    privatised = any(action.mod == "privatise" for action in answer.actions) and not _let_out(answer, name, key)
    if privatised and (name, key) not in _added_outside(answer):
        return _Row(kind, "privatise", "covered", "it is 1 for all, or has noise of its own")
    if any(record.get(key) == value for record in answer.sent.values()):
        return _Row(kind, "", "constant", "it is sent back unchanged")
    if key == "norm_bit":
        return _Row(kind, "", "uncovered", "whether the update was clipped")
    if _is_count(key, weights):
        return _Row(kind, "", "uncovered", "how many examples the client has")
    return _Row(kind, "", "uncovered", "it may be computed from data")


def _let_out(answer: Answer, name: str, key: str) -> bool:
    kinds = (name, key, answer.type, answer.type.split(".")[0])
    return any(each in action.lets_out for action in answer.actions for each in kinds)


def _is_update(values: dict[str, Any], sent: dict[str, Any]) -> bool:
    """Whether arrays are those that were sent, or some of them, or, under their names, smaller ones of a part."""
    ours, theirs = ({name: _shape(value) for name, value in record.items()} for record in (values, sent))
    if Counter(ours.values()) == Counter(theirs.values()):
        return True
    return all(name in theirs and _is_part(name, shape, theirs[name]) for name, shape in ours.items())


def _is_part(name: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array may be one that was sent, or, where names are no mere numbers, a part of it."""
    fits = len(shape) == len(whole) and all(side <= most for side, most in zip(shape, whole, strict=True))
    return shape == whole or (fits and not name.isdigit())


def _shape(described: str) -> tuple[int, ...]:
    """The shape alone: strategies return whole numbers and halves as other types."""
    return tuple(int(side) for side in described.partition("(")[2].strip(" )").split(",") if side)


_STATES = {"covered": "ok", "constant": "ok", "masked": "ok", "uncovered": "error", "raw data": "error"}


def write_audit_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of an audit and return its path; the same folder gives the same bytes."""
    audit = read_file(folder / RESULT, Audit)
    if audit is None:
        raise InputError(f"{folder} is not the folder of an audit")
    shown = (name for name in audit.pictures if name.endswith(".png"))  # of rows and texts there are numbers alone
    pictures: list[tuple[str, Picture]] = [(name, read_picture(folder / name)) for name in shown]
    page = template("flower/audit/report.html").render(title=audit.app, audit=audit, pictures=pictures, states=_STATES)
    path = folder / "report.html"
    write_whole(path, page.encode())
    return path
