"""The key figures at the head of the report, with their conditions; none suggests more safety than was shown."""

from collections.abc import Sequence
from dataclasses import replace

from fedpriv.attacks.settings import by_conduct, is_active
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.finding import Tile, findings
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.records import (
    Guarantee,
    Recovered,
    Score,
    best_rates,
    best_rows,
    last_evaluated,
    parts_read,
    recovered,
)
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.report.view import View

WEAK = (
    "The attacks recover nothing even without protection. They are too weak to test the mechanism: "
    "this run shows nothing about it."
)

ACTIVE = "The server sent these clients crafted parameters. No eavesdropper can do that."


_UNATTACKED = Tile("Uploads", "not attacked", words=True, remark="No attack on uploads was run.")


def mechanism_name(name: str) -> str:
    """Return the mechanism in words."""
    return MECHANISMS[name].title if name in MECHANISMS else name


def tiles(view: View) -> list[Tile]:
    """Return the key figures of a run, in reading order."""
    leakage = _leakage(view)
    # What was not tried stands below what was.
    uploads = {90: [_UNATTACKED]} if leakage is None else {10: leakage}
    own = uploads | {15: _cells(view), 30: [_accuracy(view)], 50: _privacy(view)}
    placed = [replace(tile, place=place) for place, group in own.items() for tile in group]
    placed += [tile for each in findings() for tile in each.tiles(view.result(each.name), view)]
    return sorted(placed, key=lambda tile: tile.place)


def _those(view: View) -> str:
    """What was attacked, at the beginning of a title."""
    return f"{view.kind.capitalize()}s"


def _cells(view: View) -> list[Tile]:
    """Of rows: the best share of right categories, without protection and with the mechanism, compared with a guess."""
    uploads = {"unprotected": "without protection", "protected": f"with {view.experiment.mechanism.title}"}
    cells = []
    for upload, how in uploads.items():
        read = best_rows(view.summary.attacks, upload) if view.summary else None
        if read is None or read[1].share_right is None or read[2].share_right is None:
            continue
        attack, share, guess = read[0], read[1].share_right, read[2].share_right
        conditions = (("attack", attack), ("guess", f"{percent(guess)}: the most frequent values"))
        cells.append(
            Tile(f"Categories right {how}", percent(share), conditions=conditions, share=share, alarm=share > guess)
        )
    return cells


def _accuracy(view: View) -> Tile:
    planned = view.experiment.federation.rounds
    last = last_evaluated(view.rounds)
    done = last.round if last else (view.summary.rounds if view.summary else 0)
    accuracy = last.accuracy if last else (view.summary.test_accuracy if view.summary else None)
    loss = last.loss if last else (view.summary.test_loss if view.summary else None)
    if accuracy is None:
        return Tile("Test accuracy", "not measured", words=True, remark="No round was evaluated.")
    conditions = [("after", f"{count(done)} of {count(planned)} rounds")]
    if loss is not None:
        conditions.append(("test loss", figure(loss)))
    title, value = "Test accuracy", percent(accuracy)
    if view.summary is not None and view.summary.data.task == "next" and loss is not None:
        title, value = "Test loss, nats per token", figure(loss)
        conditions[1:] = [("next tokens right", percent(accuracy))]
    if last is not None and last.evaluated is not None and view.experiment.federation.evaluate_examples is not None:
        conditions.append(("on", f"{count(last.evaluated)} test examples"))
    ended_early = view.summary is not None and view.summary.status == "completed" and view.summary.reason is not None
    remark = "The run ended early: its privacy budget is used up." if ended_early else ""
    return Tile(title, value, conditions=tuple(conditions), remark=remark)


def _privacy(view: View) -> list[Tile]:
    worst = view.worst
    if not view.experiment.protects:
        if view.ledger is not None and view.ledger.labels is not None:
            return []
        return [Tile("Proven privacy", "none", words=True, remark="No mechanism, so no privacy is proven.")]
    if worst is not None and algorithm_of(view.experiment).protects:
        return []
    if worst is None:
        return [Tile("Proven privacy", "not known yet", words=True, remark="This folder has no ledger yet.")]
    if (mechanism := view.experiment.mechanism).filters:
        remark = f"{mechanism.title} hides numbers and adds no noise: it is not privacy."
        return [Tile("Proven privacy", "nothing", words=True, remark=remark, alarm=True)]
    figures = [_proven(view, worst)]
    if worst.nominal_epsilon is not None:
        figures.append(_nominal(worst))
    return figures


def _proven(view: View, worst: Guarantee) -> Tile:
    unit = "example" if view.experiment.mechanism.unit == "example" else "update"
    times = "once" if worst.participations == 1 else f"{count(worst.participations)} times"
    conditions = [
        ("δ", figure(worst.delta)),
        ("adjacency", worst.adjacency),
        ("participations", f"one {unit} at most {times}" if unit == "example" else f"{times}, one update each"),
        ("sampling", worst.sampling),
        ("client", f"{view.ledger.worst.client}, the worst" if view.ledger else "the worst"),
        ("theorem", worst.theorem.get("epsilon", "not named in the ledger")),
    ]
    for key, target in view.experiment.federation.targets.items():
        what = "target" if key == "target_epsilon" else "target ceiling"
        conditions.insert(1, (what, f"{figure(target)}, at which clients stop"))
    if worst.pure_epsilon is not None:
        conditions.insert(1, ("pure ε", f"{figure(worst.pure_epsilon)} (δ = 0)"))
    title = "Proven ε for the whole run"
    if worst.epsilon is None:
        return Tile(title, "No finite figure is proven", words=True, conditions=tuple(conditions))
    return Tile(title, figure(worst.epsilon), conditions=tuple(conditions))


def _nominal(worst: Guarantee) -> Tile:
    basis = worst.theorem.get("nominal_epsilon", "")
    return Tile(
        "Nominal ε",
        figure(worst.nominal_epsilon or 0.0),
        conditions=(("basis", basis),) if basis else (),
        remark="Nominal, not the run's guarantee.",
    )


def _leakage(view: View) -> list[Tile] | None:
    """``None``: no attack on uploads was to be made."""
    adversary = view.experiment.adversary
    if algorithm_of(view.experiment).protects:
        return []
    if not adversary.attacks:
        return None
    parts = by_conduct(view.scores)
    heard, stolen = parts[False], parts[True]
    listened = adversary.passive_attacks or any(score.upload != "none" for score in heard)
    passive = _eavesdropped(view, heard) if listened or not adversary.crafts else []
    return [*passive, *(_worst_case(view, stolen) if adversary.crafts else [])]


def _worst_case(view: View, scores: Sequence[Score]) -> list[Tile]:
    """What an active server recovered; it is never added to what a listener did."""
    kinds = [("unprotected", "without protection")]
    if view.experiment.mechanism.protects:
        kinds.append(("protected", f"with {view.experiment.mechanism.title}"))
    counted = [
        _counted(f"Worst case, active server: {view.kind}s recovered {how}", part, ACTIVE)
        for kind, how in kinds
        if (part := recovered(scores, kind)) is not None
    ]
    unknown = Tile("Worst case, active server", "not known", words=True, remark="No upload could be attacked.")
    return counted or [unknown]


def _eavesdropped(view: View, scores: Sequence[Score]) -> list[Tile]:
    bare, shielded = recovered(scores, "unprotected"), recovered(scores, "protected")
    if bare is None and shielded is None and any(score.picked for score in scores):
        return _told(view)
    if bare is None and shielded is None:
        done = view.summary is not None and view.summary.status == "completed" and not view.summary.attacks
        remark = "No upload could be attacked." if done else "Attacks were planned, but this folder has no scores."
        return [Tile(f"{_those(view)} recovered", "not known", words=True, remark=remark)]
    if view.experiment.hears_masked:
        return [_shielded(view, bare, shielded)]
    first = _bare(view, bare)
    if not view.experiment.mechanism.protects and shielded is None:
        return [first]
    return [first, _shielded(view, bare, shielded), *_told(view)]


def _told(view: View) -> list[Tile]:
    """How often the best attack on protected uploads picked originals out of others, between guess and ceiling."""
    rates = [rate for rate in (view.summary.rates if view.summary else ()) if rate.upload == "protected"]
    told = [rate for rate in rates if rate.event == "told" and not is_active(rate.attack)]
    if not told:
        return []
    ties = best_rates(told)
    rate = ties[0]
    conditions = [("attack", ", ".join(each.attack for each in ties))] if rate.hits else []
    conditions.append(("guess", percent(rate.chance)))
    if rate.best is not None:
        conditions.append(("best decision", f"{percent(rate.best.value)} on these {view.kind}s"))
    conditions.append(("ceiling", "none" if rate.ceiling is None else f"{percent(rate.ceiling)}: no attack exceeds it"))
    title = f"{rate.success[0].upper()}{rate.success[1:]} with {view.experiment.mechanism.title}"
    tile = _counted(title, Recovered(rate.hits, rate.images), "")
    remark = "Above the proven ceiling: the implementation or the proof is wrong." if rate.exceeded else ""
    return [replace(tile, conditions=tuple(conditions), remark=remark, alarm=rate.interval[0] > rate.chance)]


def _bare(view: View, result: Recovered | None) -> Tile:
    title = f"{_those(view)} recovered without protection"
    if result is None:
        remark = "The unprotected upload was not attacked, so it is not known how strong the attack is."
        return Tile(title, "not tried", words=True, remark=remark)
    remark = (_partly(view) or WEAK) if result.images == 0 and view.experiment.mechanism.protects else ""
    if result.images == 0 and not remark:
        remark = "The attack fails, which is no proof of privacy: a stronger one may succeed."
    return _counted(title, result, remark)


def _partly(view: View) -> str:
    """What to look at where nothing is recovered whole, and parts are read."""
    read = parts_read(view.summary.attacks) if view.summary else ""
    return f"None is whole even without protection: compare the {read} that are read." if read else ""


def _shielded(view: View, bare: Recovered | None, result: Recovered | None) -> Tile:
    masked = view.experiment.hears_masked
    how = "from masked uploads" if masked else f"with {view.experiment.mechanism.title}"
    title = f"{_those(view)} recovered {how}"
    if result is not None and masked:
        return _counted(title, result, "The sum of the uploads may still leak.")
    if result is None:
        return Tile(title, "not known", words=True, remark="No protected upload was attacked.")
    if bare is None:
        return _counted(title, result, "Not comparable: the same uploads were not attacked without protection.")
    if bare.images == 0:
        weak = "Says nothing about the mechanism: see the weak attack without protection."
        return _counted(title, result, _partly(view) or weak)
    return _counted(title, result, "By these attacks on these uploads; a stronger attack may recover more.")


def _counted(title: str, result: Recovered, remark: str) -> Tile:
    return Tile(
        title,
        count(result.images),
        of=f"of {count(result.attacked)}",
        remark=remark,
        share=result.images / result.attacked,
        alarm=result.images > 0,
    )
