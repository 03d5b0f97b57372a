"""The model zoos through ``fedpriv model``: one row a network, and the tables of docs/models.md.

Each row is made by the code of ``fedpriv model`` in a process of its own. Rows that the file has are kept, so that an
interrupted study goes on; ``--anew`` makes the named parts again. ``--only`` takes a pattern such as 'timm/*vit*'. The
tables are written from all rows of the file. Needs torchvision, timm, transformers, peft and Opacus.
"""

import argparse
import csv
import fnmatch
import multiprocessing
import os
import re
import statistics
import time
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.methods import RandomNetwork, least_step, opacus_ghost, opacus_hooks
from fedpriv.core.errors import InputError, cut, one_line
from fedpriv.core.federated import example_losses
from fedpriv.core.progress import Silent
from fedpriv.core.world import network_of
from fedpriv.diagnosis.cost import cpu_seconds, sgd_step
from fedpriv.diagnosis.diagnose import Diagnosis, attacked, diagnose, random_batch
from studies.arguments import StudyParser, listed, whole
from studies.results import Table

_NETWORKS = Path(__file__).with_suffix(".toml")
LIBRARIES = ("torchvision", "timm", "transformers", "peft", "opacus", "torch")
LEAST_MIB = 64  # of a step of SGD: with less, what noise is drawn in counts for most
CONTEXT = "forkserver"
IMAGES, TEXTS = ("iga", "dlg", "map"), ("tag", "lamp", "text_map", "dager")


def rows() -> tuple[RandomNetwork, ...]:
    """The networks of studies/zoo.toml."""
    libraries = tomllib.loads(_NETWORKS.read_text(encoding="utf-8"))
    return tuple(
        RandomNetwork(f"{library}/{name}", given)
        for library, named in libraries.items()
        for name, given in named.items()
    )


Part = Callable[[RandomNetwork], dict[str, Any]]


def steps_of(row: RandomNetwork) -> dict[str, Any]:
    """What ``fedpriv model`` says of a network, but for attacks."""
    found = diagnose(*row.fitting(), row.asked.batch, Silent())
    same, cost = found.exactness, found.cost
    return {
        "trained": found.trained,
        "frozen": found.frozen,
        "accepted": "yes" if found.acceptance.accepted else found.acceptance.reason,
        "error": "" if same is None else f"{same.error:.1e}",
        "precision": "" if same is None else same.precision,
        "furthest": "" if same is None else same.layer,
        "rounding": "" if same is None or same.rounding is None else f"{same.rounding:.1e}",
        "way": way_of(found),
        "step": "" if cost is None else f"{cost.times:.2f}",
        "sgd_ms": "" if cost is None else f"{cost.sgd_ms:.2f}",
        "memory": "" if cost is None or (cost.sgd_mib or 0) < LEAST_MIB else f"{cost.memory_times:.2f}",
        "unmeasured": found.unmeasured,
    }


def way_of(found: Diagnosis) -> str:
    """Ghost or dense, with what is written out."""
    if found.way or not found.layers:
        return found.way
    dense = dict.fromkeys(group.kind for group in found.layers if group.way == "dense")
    return f"ghost; dense: {', '.join(dense)}" if dense else "ghost"


def attacks_of(row: RandomNetwork) -> dict[str, Any]:
    """Which attacks can be made, and why others refuse."""
    trials, _ = attacked(*row.fitting(TEXTS if row.takes_texts else IMAGES), Silent())
    refused = [f"{trial.name}: {trial.reason}" for trial in trials if not trial.runs]
    return {"attacks": ", ".join(trial.name for trial in trials if trial.runs), "refused": "; ".join(refused)}


def opacus_of(row: RandomNetwork) -> dict[str, Any]:
    """Steps of Opacus, by its hooks and its ghost clipping, and less than any private one, next to one of SGD."""
    experiment, dataset = row.fitting()
    x, y = random_batch(dataset, row.asked.batch)
    return {
        name: _times(partial(network_of, experiment, dataset), way, x, y)
        for name, way in zip(CELLS["opacus"], (opacus_hooks, opacus_ghost, least_step), strict=True)
    }


def _times(network: Callable[[], nn.Module], way: Callable[..., Callable[[], None]], x: Tensor, y: Tensor) -> str:
    """CPU time over SGD's, medians of steps in turns."""
    try:
        steps = (sgd_step(network(), example_losses, x, y), way(network(), x, y))
        for step in steps:
            step()
        taken = [[cpu_seconds(step) for step in steps] for _ in range(5)]
    except Exception as error:  # noqa: BLE001 - whatever Opacus raises is the row's reason
        return f"no: {type(error).__name__}: {cut(one_line(error), 120)}"
    return f"{statistics.median(mine for _, mine in taken) / statistics.median(plain for plain, _ in taken):.2f}"


PARTS: dict[str, Part] = {"steps": steps_of, "attacks": attacks_of, "opacus": opacus_of}
CELLS: dict[str, tuple[str, ...]] = {
    "steps": (
        "trained", "frozen", "accepted", "error", "precision", "furthest", "rounding", "way", "step", "sgd_ms",
        "memory", "unmeasured",
    ),
    "attacks": ("attacks", "refused"),
    "opacus": ("opacus_hooks", "opacus_ghost", "least"),
}  # fmt: skip
COLUMNS = ("name", "given", *(cell for part in CELLS.values() for cell in part), "failed", "made")


def made(row: RandomNetwork, parts: Sequence[str], limit: float) -> dict[str, str]:
    """Make parts of a row in a process of its own; what fails or takes too long is one cell that says so."""
    multiprocessing.set_forkserver_preload(["benchmarks.methods", "fedpriv.diagnosis.diagnose", "peft", "timm"])
    context: Any = multiprocessing.get_context(CONTEXT)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = context.Process(target=_work, args=(row, tuple(parts), sending))
    process.start()
    sending.close()
    cells: dict[str, str] = {"failed": ""}
    end, waiting = time.monotonic() + limit, list(parts)
    while waiting and receiving.poll(max(0.0, end - time.monotonic())):
        try:
            part, found = receiving.recv()
        except EOFError:
            process.join()
            cells["failed"] = f"{waiting[0]}: the process ended with {process.exitcode}"
            break
        waiting.remove(part)
        cells |= {**found, "failed": cells["failed"] or found.get("failed", "")}
    else:
        if waiting:
            cells["failed"] = f"{waiting[0]}: not done after {limit:g} s"
    process.kill()
    process.join()
    return cells


def _work(row: RandomNetwork, parts: Sequence[str], sending: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for part in parts:
        try:
            found = {key: str(value) for key, value in PARTS[part](row).items()}
        except Exception as error:  # noqa: BLE001 - one bad network costs one row
            reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {one_line(error)}"
            found = dict.fromkeys(CELLS[part], "") | {"failed": f"{part}: {reason}"}
        sending.send((part, found))


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a file by name."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {line["name"]: dict.fromkeys(COLUMNS, "") | line for line in csv.DictReader(file)}


def write(path: Path, kept: Mapping[str, Mapping[str, str]]) -> None:
    """Write rows in the order of :func:`rows`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[row.name] for row in rows() if row.name in kept)


def missing(row: RandomNetwork, kept: Mapping[str, str] | None, asked: argparse.Namespace) -> list[str]:
    """Return the parts of a row that are to be made: what another command made is none."""
    if kept is None or kept["given"] != row.given or asked.anew:
        return list(asked.parts)
    if kept["failed"]:
        return []
    return [part for part in asked.parts if not any(kept[cell] for cell in CELLS[part])]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are missing, and the tables."""
    parser = StudyParser("studies.zoo", __doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="rows whose name fits, such as 'timm/*vit*'")
    parser.add_argument("--parts", type=listed(tuple(PARTS)), default=tuple(PARTS))
    parser.add_argument("--anew", action="store_true", help="make these parts also of rows that have them")
    parser.add_argument("--limit", type=whole(1), default=300, metavar="SECONDS", help="for a row")
    parser.add_argument("--rows", type=Path, default=Path("docs/results/models.csv"))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with parser.parsed(arguments) as asked:
        wanted = [row for row in rows() if fnmatch.fnmatch(row.name, asked.only)]
        if not wanted:
            raise InputError(key="--only", given=asked.only, allowed="no row has such a name", hint="try 'timm/*'")
        kept = read(asked.rows)
        for number, row in enumerate(wanted, 1):
            parts = missing(row, kept.get(row.name), asked)
            if not parts:
                continue
            began = time.monotonic()
            before = kept.get(row.name, {}) if kept.get(row.name, {}).get("given") == row.given else {}
            cells = {**before, **made(row, parts, asked.limit)}
            line = {"name": row.name, "given": row.given, "made": f"{datetime.now(UTC):%Y-%m-%d}"}
            kept[row.name] = {column: cells.get(column, "") for column in COLUMNS} | line
            write(asked.rows, kept)
            said = kept[row.name]
            about = f"{said['accepted'] or said['failed']}, exact to {said['error']}, {said['step']} x SGD"
            print(
                f"{number}/{len(wanted)} {row.name}: {cut(about, 100)} ({time.monotonic() - began:.0f} s)", flush=True
            )
        for name, table in tables(kept).items():
            asked.rows.with_name(f"{name}.csv").write_text(str(table), encoding="utf-8")


HEADS = (
    "network", "million parameters", "accepted", "exact to", "way", "step", "memory", "Opacus, hooks", "Opacus, ghost",
    "attacks",
)  # fmt: skip
EXACT = 1e-12
GOAL = 0.6  # of Opacus' faster way
_PARTICULAR = re.compile(r"\S*\.\d+\.\S*|\d+(?:[,x ]+\d+)*")  # numbers, and names of layers
_LAYER = re.compile(r"(?:\w+\.)+\w+ \((\w+)\)")  # with its kind, which is kept
_NEXT_ATTACK = re.compile(rf"; (?=(?:{'|'.join((*IMAGES, *TEXTS))}): )")


def tables(kept: Mapping[str, Mapping[str, str]]) -> dict[str, Table]:
    """The tables of docs/models.md by their names in docs/results."""
    begun = [kept[row.name] for row in rows() if row.name in kept]
    lines = [line for line in begun if line["accepted"] or line["failed"]]
    groups: dict[str, list[Mapping[str, str]]] = {}
    for line in lines:
        groups.setdefault(line["name"].partition("/")[0], []).append(line)
    troubles = ((line["name"], trouble) for line in lines if (trouble := _trouble(line)))
    return {
        "models-summary": _summary(lines),
        **{f"models-{name}": Table(HEADS, map(_shown, members)) for name, members in groups.items()},
        "models-troubles": Table(("network", "reason"), troubles),
        "models-slower": Table(("network", "our step", "least step", "plain SGD"), _slower(lines)),
        "models-refusals": _reasons(lines, _refusals),
        "models-opacus": _reasons(lines, _opacus_raised),
    }


def _summary(lines: Sequence[Mapping[str, str]]) -> Table:
    exact = sum(bool(line["error"]) and float(line["error"]) <= EXACT for line in lines)
    steps = sorted(float(line["step"]) for line in lines if line["step"])
    return Table(
        ("what", "figure"),
        (
            ("networks", str(len(lines))),
            ("accepted with Gaussian noise", str(sum(line["accepted"] == "yes" for line in lines))),
            (f"gradients equal to autograd's within {EXACT:g}", str(exact)),
            ("step over SGD's, median", f"{statistics.median(steps):.1f}" if steps else ""),
            ("step over SGD's, most", f"{steps[-1]:.1f}" if steps else ""),
            ("accepted by Opacus' hooks", _count(lines, "opacus_hooks")),
            ("accepted by Opacus' ghost clipping", _count(lines, "opacus_ghost")),
            ("versions", ", ".join(f"{name} {version(name)}" for name in LIBRARIES)),
        ),
    )


def _refusals(line: Mapping[str, str]) -> list[str]:
    return [reason for reason in _NEXT_ATTACK.split(line["refused"]) if reason]


def _opacus_raised(line: Mapping[str, str]) -> list[str]:
    cells = (line["opacus_hooks"], line["opacus_ghost"])
    return [cell.removeprefix("no: ") for cell in cells if cell.startswith("no")]


def _reasons(lines: Sequence[Mapping[str, str]], told: Callable[[Mapping[str, str]], list[str]]) -> Table:
    """A table of reasons, without the numbers and names in them, and how many networks have each."""
    names: dict[str, list[str]] = {}
    for line in lines:
        for reason in dict.fromkeys(cut(_PARTICULAR.sub("...", reason), 150) for reason in told(line) if reason):
            names.setdefault(reason, []).append(line["name"].partition("/")[2])
    rows = sorted(names.items(), key=lambda each: (-len(each[1]), each[0]))
    return Table(("reason", "networks", "such as"), ((why, str(len(who)), who[0]) for why, who in rows))


def _slower(lines: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Networks whose step takes more than the goal's share of that of Opacus' faster way: the shares of all steps."""
    found = []
    for line in lines:
        ways = [float(line[way]) for way in ("opacus_hooks", "opacus_ghost") if re.match(r"\d", line[way])]
        if ways and line["step"] and float(line["step"]) > GOAL * min(ways):
            steps = (line["step"], line["least"], "1")
            shares = (f"{float(step) / min(ways):.2f}" if re.match(r"\d", step) else "" for step in steps)
            found.append((line["name"], *shares))
    return sorted(found, key=lambda each: each[1])


def _count(lines: Sequence[Mapping[str, str]], column: str) -> str:
    tried = [line[column] for line in lines if line[column]]
    return f"{sum(not cell.startswith('no') for cell in tried)} of {len(tried)} tried"


def _shown(line: Mapping[str, str]) -> list[str]:
    group = ", GN" if "model.norm=group" in line["given"] else ""
    refused = [reason.partition(":")[0] for reason in _refusals(line)]
    numbers = int(line["trained"] or 0) + int(line["frozen"] or 0)
    return [
        line["name"].partition("/")[2],
        f"{numbers / 1e6:.2f}",
        ("yes" if line["accepted"] == "yes" else "no") + group,
        line["error"],
        cut(_LAYER.sub(r"\1", line["way"]), 90),
        line["step"],
        line["memory"],
        "no" if line["opacus_hooks"].startswith("no") else line["opacus_hooks"],
        "no" if line["opacus_ghost"].startswith("no") else line["opacus_ghost"],
        line["attacks"] + (f" (no {', '.join(refused)})" if refused else ""),
    ]


def _trouble(line: Mapping[str, str]) -> str:
    if line["failed"] or line["accepted"] != "yes":
        return line["failed"] or line["accepted"]
    if line["unmeasured"]:
        return line["unmeasured"]
    if not line["error"] or float(line["error"]) > EXACT:
        own = f"; with rounded weights autograd's own move by {line['rounding']}" if line["rounding"] else ""
        return f"off by {line['error']}, most in {line['furthest']} ({line['precision']}){own}"
    return ""


if __name__ == "__main__":
    main()
