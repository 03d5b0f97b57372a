"""Audit an app: run a copy of it, list what leaves, attack it, and compare what is claimed with what is proven."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole, writing
from fedpriv.core.progress import Progress
from fedpriv.flower.attack import TappedSummary, attack_tapped
from fedpriv.flower.audit.claims import claims
from fedpriv.flower.audit.leaving import NOISING, leaving
from fedpriv.flower.audit.records import Answer, Audit
from fedpriv.flower.audit.simulation import RUN, Simulated, app_name, copied, simulate
from fedpriv.flower.folder import ABOUT, read_exchanges, read_tapped

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
    if out.exists():
        raise InputError(key="--out", given=str(out), allowed="it is there already")
    with copied(app) as copy:
        progress.stage(f"{name} in Flower's simulation, {clients} clients")
        run, answers = simulate(copy, out, clients, overrides)
        attacked = _attacked(out, attacks, progress)
    _point_at(app.resolve(), out / TAPPED)
    audit = summed_up(name, run, answers, attacked, out)
    for text in audit.warnings:
        progress.warn(text)
    warned = (*audit.warnings, *(attacked.warnings if attacked is not None else ()))
    audit = replace(audit, warnings=warned, clients=clients, seconds=time.monotonic() - start)
    with writing(""):
        write_whole(out / RESULT, f"{json.dumps(asdict(audit), indent=2, allow_nan=False)}\n".encode())
    return audit


def summed_up(name: str, run: Simulated, answers: Sequence[Answer], attacked: TappedSummary | None, out: Path) -> Audit:
    """Return what an audit finds in what was observed."""
    trained = [answer for answer in answers if answer.trains and not answer.error]
    per_client = Counter(answer.client for answer in trained)
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
        yield f"{len(failed)} of {len(answers)} messages failed, the first with: {failed[0].error}"


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
    victims = [exchange.name for exchange in exchanges if not exchange.unattacked] or [exchanges[0].name]
    whole = [f"{exchanges[0].round}-sum"] if any(exchange.summed for exchange in exchanges) else victims[:1]
    names, overrides = attacks
    settings = (*(_QUICK if not names or "iga" in names else ()), *overrides)
    return attack_tapped(out / TAPPED, names, whole, settings, progress)


def _point_at(app: Path, folder: Path) -> None:
    """The copy is gone: later attacks import the network from the app's own folder."""
    tapped = read_tapped(folder)
    if tapped is not None:
        text = json.dumps(asdict(replace(tapped, app=str(app))), indent=2)
        write_whole(folder / ABOUT, f"{text}\n".encode())
