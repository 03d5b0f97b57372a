"""The page: a view and its plots, put into report.html. Everything is escaped; nothing is loaded from anywhere."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache, cached_property
from itertools import chain, groupby
from pathlib import Path

from jinja2 import Template
from markupsafe import Markup

from fedpriv.attacks.settings import by_conduct, is_active
from fedpriv.core import numbers
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.config import describe
from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError
from fedpriv.core.files import write_whole, writing
from fedpriv.core.finding import Picture, Section, Tile, findings
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.records import (
    NUMBER_TOLERANCE,
    SSIM_WINDOW,
    Guarantee,
    LeakageRate,
    Ledger,
    LedgerLine,
    Recovered,
    RowScore,
    Score,
    Sentence,
    Stop,
    best_rates,
    best_rows,
    last_evaluated,
    named_members,
    parts_read,
    recovered,
    ssim_window,
)
from fedpriv.core.registry import ATTACKS, MECHANISMS
from fedpriv.core.report.drawing import Plot, accuracy_plot, epsilon_plot, loss_plot, partition_plot
from fedpriv.core.report.filters import fragment, template
from fedpriv.core.report.view import Content, ShownResult, ShownVictim, View, load_view
from fedpriv.core.runs import RunFolder
from fedpriv.core.trackers import track

NAMED = 40  # numbers and ranges of numbers by which the clients of one line are named; ledger.json has all
PERCEIVED = 16  # pixels a side: in smaller pictures there is nothing that LPIPS, made for patches of 64, could tell

# What is shown with the attacks, and is none.
NAMES = {
    "guess-mean": "Guess: mean image",
    "guess-grey": "Guess: grey image",
    "guess-class": "Guess: mean of the class",
    "guess-mode": "Guess: most frequent values",
    "guess-drawn": "Guess: other examples, paired like an attack’s",
    "guess-frequent": "Guess: most frequent tokens",
    "guess-model": "Guess: a language model’s sample",
}
# The order in which a reader wants them.
EVENTS = {"told": 0, "label": 1, "recovered": 2, "signal": 2, "row": 2, "sentence": 2}
UPLOADS = {"unprotected": "without protection", "protected": "with the mechanism", "none": "without any upload"}


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Write the report of what happens inside, however it ends; nothing where nothing of the report was written."""
    before = _versions(folder)
    try:
        yield
    except (InputError, RunFailedError, RunInterruptedError):
        with suppress(InputError, RunFailedError):
            _write_if_new(folder, before)
        raise
    _write_if_new(folder, before)


def _write_if_new(folder: Path, before: list[tuple[int, int] | None]) -> None:
    if _versions(folder) != before:
        with writing(RunFolder(folder).to_report):
            write_report(folder)
            track(RunFolder(folder))


def _versions(folder: Path) -> list[tuple[int, int] | None]:
    """Of the summary, and of what it does not repeat."""
    others = (name for finding in findings() for name in finding.files)
    return [_version(folder / name) for name in ("summary.json", *others)]


def _version(path: Path) -> tuple[int, int] | None:
    """A mark that changes with a file's content: it is written under another name, then renamed."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a run and return its path.

    The file is written atomically; the same folder gives the same bytes.

    Raises:
        InputError: it is not the folder of a run, or one of its files is damaged.
        WriteError: the report cannot be written.
    """
    path = folder / "report.html"
    write_whole(path, render_page(load_view(folder)).encode())
    return path


def render_page(view: View) -> str:
    """Return the report as one HTML document that needs no network and no script."""
    return _template().render(
        view=view,
        title=view.experiment.report.title or view.experiment.name,
        mechanism="noise on votes" if algorithm_of(view.experiment).protects else view.experiment.mechanism.title,
        tiles=tiles(view),
        sections=_sections(view),
        uploads=_Uploads(view),
        plots=_training_plots(view),
        proven=None if view.ledger is None else _Proven(view.ledger),
        partition_plot=partition_plot(view.partition) if view.partition else None,
        settings=list(describe(view.experiment)),
    )


_IN_CARD = 4  # victims


def render_card(view: View) -> str:
    """Return what a notebook shows of a run: a piece of HTML."""
    shown = [victim for victim in view.victims[:_IN_CARD] if isinstance(victim.original, Picture)]
    names = dict.fromkeys(_made_by(each) for victim in shown for each in victim.candidates)
    victims = []
    for victim in shown:
        made = {_made_by(each): each.content for each in victim.candidates if isinstance(each.content, Picture)}
        victims.append((victim, (victim.original, *(made.get(name) for name in names))))
    page = template("core/report/card.html")
    return page.render(view=view, tiles=tiles(view), columns=tuple(names), victims=victims)


def _made_by(shown: ShownResult) -> str:
    name = NAMES.get(shown.attack, shown.attack)
    return name if shown.upload == "none" else f"{name}, {shown.upload}"


@dataclass(frozen=True)
class _FindingPart:
    """One finding on the page: its section, the heading over what is refuted, and why."""

    section: Section
    refuted: str
    alarms: tuple[str, ...]
    html: Markup


def _sections(view: View) -> list[_FindingPart]:
    parts = []
    for found in view.found:
        section, alarms = found.finding.section(found.result, view), found.finding.alarms(found.result)
        if section is not None:
            values = {**section.values, "refuted_title": found.finding.refuted, "alarms": alarms}
            html = fragment(type(found.finding), values)
            parts.append(_FindingPart(section, found.finding.refuted, alarms, html))
    return parts


@cache
def _template() -> Template:
    """The page without its content; compiled once a process."""
    return template(
        "report.html", attack_name=_attack_name, upload_name=_upload_name, members=_members, exp=math.exp,
        row_table=row_table, sentence_lines=sentence_lines, stopped_after=_stopped_after,
    )  # fmt: skip


def _attack_name(label: str) -> str:
    """What scores call an attack, for a reader: its name, and the settings in which it differs from the run's."""
    name, _, settings = label.partition(",")
    title = NAMES.get(name) or (ATTACKS[name].label or ATTACKS[name].title if name in ATTACKS else name)
    return f"{title} ({settings.replace(',', ', ')})" if settings else title


def _upload_name(upload: str) -> str:
    return UPLOADS.get(upload, upload)


# ---- training -------------------------------------------------------------------------------------------------------


def _training_plots(view: View) -> list[Plot]:
    """Accuracy, loss and epsilon over rounds, as far as they are known."""
    rounds, partition = view.rounds, view.partition
    # What is no class, such as a sequence, cannot be guessed among others.
    counted = len(partition.class_names) if partition else 0
    drawn = (
        accuracy_plot(rounds, counted if counted > 1 else None, partition.majority if partition else 0.0),
        loss_plot(rounds),
        epsilon_plot(rounds, view.experiment.federation.target_epsilon),
    )
    return [plot for plot in drawn if plot]


# ---- ledger ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Proven:
    """The section about the ledger."""

    ledger: Ledger

    @property
    def mechanism(self) -> str:
        """In words."""
        name = self.ledger.mechanism
        return MECHANISMS[name].title if name in MECHANISMS else name

    @property
    def own_noise(self) -> str:
        """What the clients' own noise is called, where it differs between them; else empty."""
        if len({line.noise for line in self.ledger.clients}) == 1 or self.ledger.mechanism not in MECHANISMS:
            return ""
        return MECHANISMS[self.ledger.mechanism].parameter or ""

    @cached_property
    def lines(self) -> list[LedgerLine]:
        """One line where several differ in nothing that the table shows: ceilings stand elsewhere."""
        alike: dict[str, list[LedgerLine]] = {}
        for line in self.ledger.clients:
            alike.setdefault(repr(replace(line, client=0, count=1, members="", ceilings={})), []).append(line)
        return [
            same[0]
            if len(same) == 1
            else same[0].of_all(sorted(chain.from_iterable(chain(*(each.ranges for each in same)))))
            for same in alike.values()
        ]

    @cached_property
    def statements(self) -> list[str]:
        """Each theorem once."""
        return list(dict.fromkeys(text for line in self.ledger.clients for text in line.theorem.values()))

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Each note once, with the clients it is about: empty for all."""
        holders: dict[str, list[LedgerLine]] = {}
        for line in self.ledger.clients:
            for note in line.notes:
                holders.setdefault(note, []).append(line)
        every = len(self.ledger.clients)
        return [(note, "" if len(lines) == every else _members(*lines)) for note, lines in holders.items()]


def _members(*lines: LedgerLine) -> str:
    """The clients of these lines; of very many parts the first, and how many clients are left out."""
    return named_members(sorted((part for line in lines for part in line.ranges), key=lambda part: part.start), NAMED)


def _stopped_after(line: LedgerLine, stops: Sequence[Stop]) -> str:
    """After which rounds clients of a line stopped, and how many did not."""
    ranges = line.ranges
    mine = [(stop.round, sum(_common(part, ranges) for part in stop.ranges)) for stop in stops]
    rounds = sorted({number for number, clients in mine if clients})
    if not rounds:
        return "not stopped"
    others = line.count - sum(clients for _, clients in mine)
    when = " to ".join(map(numbers.count, sorted({rounds[0], rounds[-1]})))
    return f"{when}; {numbers.count(others)} not stopped" if others else when


def _common(part: range, ranges: Sequence[range]) -> int:
    """How many numbers of a range are in others, which ascend."""
    return sum(max(0, min(part.stop, other.stop) - max(part.start, other.start)) for other in ranges)


# ---- attacks on uploads ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Uploads:
    """The sections about attacks on uploads."""

    view: View

    @property
    def are_attacked(self) -> bool:
        """Whether there is anything to say about attacks on uploads, be it that they have no result."""
        view = self.view
        return bool(view.experiment.adversary.attacks or view.victims or view.scores) or not self.are_models

    @property
    def are_models(self) -> bool:
        """Whether clients upload gradients or parameters, which pictures may be made of."""
        return not algorithm_of(self.view.experiment).protects

    @cached_property
    def rates(self) -> list[LeakageRate]:
        """How often attacks succeeded: each event with the mechanism first, the most successful attack first."""
        return sorted(
            self.view.summary.rates if self.view.summary else (),
            key=lambda rate: (EVENTS.get(rate.event, len(EVENTS)), rate.upload != "protected", -rate.share),
        )

    @property
    def notes(self) -> list[tuple[str, int]]:
        """What attacks said about their results, each remark once, and how many images it is about."""
        images: dict[str, set[tuple[int, int, int]]] = {}
        for score in self.view.scores:
            if score.chosen and score.note:
                text = f"{_attack_name(score.attack)}, {_upload_name(score.upload)}: {score.note}"
                images.setdefault(text, set()).add(score.victim)
        return [(text, len(about)) for text, about in images.items()]

    @cached_property
    def lpips_reason(self) -> str:
        """Why there is no LPIPS; empty where there is one, or where nothing was scored."""
        view = self.view
        if not view.scores or any(score.lpips is not None for score in view.scores):
            return ""
        if 0 < self._smallest < PERCEIVED:
            return f"a side of {self._smallest} pixel{'' if self._smallest == 1 else 's'} is too short for it"
        reasons = [result.lpips_reason for result in view.summary.attacks] if view.summary else []
        return next((reason for reason in reasons if reason), "the run gives no reason")

    @property
    def ssim_window(self) -> str:
        """Height and width of SSIM's window on this run's pictures, where it is not the usual one."""
        sizes = {(each.height, each.width) for each in self._originals}
        if self.view.kind == "signal":  # whose channels may be in rows
            sizes = {(1, width) if height <= width else (height, 1) for height, width in sizes}
        windows = {ssim_window(*size) for size in sizes}
        return " and ".join(f"{height} × {width}" for height, width in windows - {(SSIM_WINDOW, SSIM_WINDOW)})

    @property
    def _smallest(self) -> int:
        """The shortest side of a picture; 0: there is none."""
        return min((min(each.width, each.height) for each in self._originals), default=0)

    @property
    def _originals(self) -> list[Picture]:
        return [victim.original for victim in self.view.victims if isinstance(victim.original, Picture)]

    @property
    def references(self) -> list[str]:
        """The papers of the attacks that were made."""
        return [ATTACKS[name].reference for name in self._made]

    @property
    def settings(self) -> list[tuple[str, object, object, str]]:
        """The settings of the adversary, without those of attacks that were not made."""
        idle = tuple(f"adversary.{name}." for name in ATTACKS if name not in self._made)
        rows = describe(self.view.experiment)
        return [row for row in rows if row[0].startswith("adversary.") and not row[0].startswith(idle)]

    @property
    def _made(self) -> list[str]:
        """The attacks of the settings, and those that were made afterwards on the same uploads."""
        later = [score.attack.partition(",")[0] for score in self.view.scores if score.upload != "none"]
        planned = self.view.experiment.adversary.attacks
        return [name for name in dict.fromkeys((*planned, *later)) if name in ATTACKS]


# ---- rows and sentences, next to what attacks read of them ----------------------------------------------------------


MOST_COLUMNS = 40  # that are shown of one row


@dataclass(frozen=True)
class ShownCell:
    """One cell that an attack or a guess offers."""

    text: str  # as a person reads it
    # read (right, or within the tolerance, where the guess is not), right (so is the guess), wrong, or empty where it
    # was not scored
    state: str
    off: str = ""  # the error of a number that is not read, as a share of its column's range; else empty


@dataclass(frozen=True)
class RowTable:
    """One attacked row."""

    candidates: tuple[ShownResult, ...]  # what was made of it, one a column of the report
    lines: tuple[tuple[str, str, tuple[ShownCell, ...]], ...]  # (column's name, true text, a cell for each candidate)
    hidden: int  # columns that are not shown: those in which all candidates are right first


def row_table(victim: ShownVictim) -> RowTable:
    """Return what the report shows of an attacked row."""
    shown = tuple(candidate for candidate in victim.candidates if candidate.content is not None)
    guess = next((candidate.score.cells for candidate in shown if candidate.upload == "none" and candidate.score), None)
    lines = [
        (name, text, tuple(_cell(candidate, name, guess) for candidate in shown))
        for name, text in _cells(victim.original).items()
    ]
    kept = lines
    if len(lines) > MOST_COLUMNS:
        order = sorted(
            range(len(lines)),
            key=lambda place: (all((cell.state in ("read", "right")) for cell in lines[place][2]), place),
        )
        kept = [lines[place] for place in sorted(order[:MOST_COLUMNS])]
    return RowTable(shown, tuple(kept), len(lines) - len(kept))


def _cells(content: Content | None) -> Mapping[str, str]:
    return content if isinstance(content, Mapping) else {}


def _cell(candidate: ShownResult, name: str, guess: RowScore | None) -> ShownCell:
    text = _cells(candidate.content).get(name, "n/a")
    scores = candidate.score.cells if candidate.score else None
    if scores is None:
        return ShownCell(text, "")
    right = "right" if guess is not None and _right(guess, name) else "read"
    return ShownCell(text, right if _right(scores, name) else "wrong", _off(scores.numbers, name))


def _right(scores: RowScore, name: str) -> bool:
    return scores.categories[name] if name in scores.categories else scores.numbers.get(name, 1.0) <= NUMBER_TOLERANCE


def _off(numbers: Mapping[str, float], name: str) -> str:
    error = numbers.get(name, 0.0)
    return percent(error) if error > NUMBER_TOLERANCE else ""


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of which the same is to be said."""

    text: str  # of the tokens
    state: str  # read (in the original, in this order), moved (in the original, elsewhere), wrong, or empty: nothing


def sentence_lines(victim: ShownVictim) -> list[tuple[ShownResult, list[Run]]]:
    """Return what each attack or guess read of a sentence: nothing, for some."""
    true = victim.original.tokens if isinstance(victim.original, Sentence) else []
    return [(candidate, _runs(candidate.content, true)) for candidate in victim.candidates]


def _runs(content: Content | None, true: Sequence[int]) -> list[Run]:
    if not isinstance(content, Sentence):
        return []
    states = _states(true, content.tokens)
    parts = groupby(zip(states, content.pieces, strict=True), key=lambda pair: pair[0])
    return [Run(content.joined([piece for _, piece in part]), state) for state, part in parts]


def _states(true: Sequence[int], made: Sequence[int]) -> list[str]:
    """Of each token of a reading whether it was read, moved or is wrong."""
    matched = SequenceMatcher(None, true, made, autojunk=False).get_matching_blocks()
    read = {block.b + place for block in matched for place in range(block.size)}
    left = Counter(true) - Counter(made[place] for place in read)
    states = []
    for place, token in enumerate(made):
        if place in read:
            states.append("read")
            continue
        states.append("moved" if left[token] > 0 else "wrong")
        left[token] -= 1
    return states


WEAK = (
    "The attacks recover nothing even without protection. They are too weak to test the mechanism: "
    "this run shows nothing about it."
)

ACTIVE = "The server sent these clients crafted parameters. No eavesdropper can do that."


_UNATTACKED = Tile("Uploads", "not attacked", words=True, remark="No attack on uploads was run.")


def tiles(view: View) -> list[Tile]:
    """Return the key figures of a run, in reading order."""
    leakage = _leakage(view)
    # What was not tried stands below what was.
    uploads = {90: [_UNATTACKED]} if leakage is None else {10: leakage}
    own = uploads | {15: _share_of_cells(view), 30: [_accuracy(view)], 50: _privacy(view)}
    placed = [replace(tile, place=place) for place, group in own.items() for tile in group]
    placed += [tile for each in findings() for tile in each.tiles(view.result(each.name), view)]
    return sorted(placed, key=lambda tile: tile.place)


def _those(view: View) -> str:
    """What was attacked, at the beginning of a title."""
    return f"{view.kind.capitalize()}s"


def _share_of_cells(view: View) -> list[Tile]:
    """Of rows: the best share of right categories, without protection and with the mechanism, compared with a guess."""
    uploads = {"unprotected": "without protection", "protected": f"with {view.experiment.mechanism.title}"}
    cells = []
    for upload, how in uploads.items():
        read = best_rows(view.summary.attacks, upload) if view.summary else None
        if read is None or read[1].share_right is None or read[2].share_right is None:
            continue
        attack, share, guess = read[0], read[1].share_right, read[2].share_right
        conditions = (("attack", attack), ("guess", f"{percent(guess)}, the best without any upload"))
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
