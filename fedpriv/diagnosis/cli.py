"""The command ``fedpriv model NAME``: what a network costs and allows, before any run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedpriv.core.cli.terminal import Json, Quiet, Set, out, print_json, shown
from fedpriv.core.config import load_experiment
from fedpriv.core.errors import InputError, some_of
from fedpriv.core.verb import Verb

if TYPE_CHECKING:
    from fedpriv.diagnosis.diagnose import Acceptance, Diagnosis

_MOST_GROUPS = 24  # lines of the table of layers


def model(
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A network, as model.name has it; or an experiment file.")
    ],
    shape: Annotated[
        str,
        typer.Option(
            metavar="C,H,W|T",
            help="Shape of an image, or number of tokens; default: a usual one that the network takes.",
        ),
    ] = "",
    classes: Annotated[int | None, typer.Option(min=2, help="Number of classes; default: 10.")] = None,
    batch: Annotated[int, typer.Option(min=2, help="Batch size of the steps that are measured.")] = 16,
    set_: Set = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure a network before any run: how its private gradients are computed, how exact they are, what they cost.

    Random examples show whether it trains with a mechanism, time and memory of a step, and which attacks it allows.
    """
    sizes = _sizes(shape)
    # Imported here: torch takes seconds that --help and a mistyped option need not wait for.
    from fedpriv.data.datasets import load_dataset
    from fedpriv.diagnosis.diagnose import CLASSES, diagnose, fitting

    if name.endswith(".toml"):
        if sizes is not None or classes is not None:
            raise InputError(f"--shape and --classes are those of the data in {name}; leave them out")
        experiment = load_experiment(Path(name), set_ or ())
        dataset = load_dataset(experiment.data, experiment.seed)
    else:
        experiment, dataset = fitting(name, set_ or (), sizes, classes or CLASSES, batch)
    with shown(quiet or as_json) as progress:
        found = diagnose(experiment, dataset, batch, progress)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found)


def _sizes(shape: str) -> tuple[int, ...] | None:
    if not shape:
        return None
    parts = shape.split(",")
    if len(parts) not in (1, 3) or not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(key="--shape", given=shape, allowed="C,H,W such as 3,32,32, or tokens such as 16")
    return tuple(map(int, parts))


def _print(found: "Diagnosis") -> None:
    """Facts, then a line for each group of layers."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for heading, text in _facts(found):
        facts.add_row(heading, Text(text))
    out.print(facts)
    if not found.layers:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layers", overflow="fold")
    for heading, side in (("kind", "left"), ("", "right"), ("parameters", "right")):
        table.add_column(heading, justify="right" if side == "right" else "left")
    table.add_column("gradients", overflow="fold")
    # What costs most stands first where not all fit.
    shown = found.layers
    if len(shown) > _MOST_GROUPS:
        first = sorted(shown, key=lambda group: (group.way != "dense", -group.parameters))[:_MOST_GROUPS]
        shown = tuple(group for group in shown if group in first)
    for group in shown:
        way = f"{group.way}: {group.reason}" if group.reason else group.way
        count = f"x {group.count}" if group.count > 1 else ""
        table.add_row(Text(group.name), Text(group.kind), count, f"{group.parameters:,}", Text(way))
    out.print()
    out.print(table)
    if len(shown) < len(found.layers):
        rest = [group for group in found.layers if group not in shown]
        ways = sorted({group.way for group in rest})
        numbers = sum(group.parameters for group in rest)
        out.print(f"and {sum(group.count for group in rest)} more layers ({', '.join(ways)}; {numbers:,} parameters)")


def _facts(found: "Diagnosis") -> Iterator[tuple[str, str]]:
    sides = " x ".join(map(str, found.shape))
    takes = f"texts of {sides} tokens" if found.takes == "sentence" else f"{found.takes}s of {sides}"
    yield "network", f"{found.model}, for {takes} and {found.classes} classes"
    yield "parameters", f"{found.trained:,} trained, {found.frozen:,} frozen"
    yield from _acceptance(found.acceptance)
    yield "gradients", _way(found)
    if found.exactness is not None:
        same = found.exactness
        own = "" if same.rounding is None else f"; autograd's own move by {same.rounding:.0e} with rounded weights"
        yield (
            "exact to",
            f"{same.error:.0e}, next to autograd one example at a time ({same.examples} random examples, "
            f"{same.precision}; norms, products and sums; furthest off: {same.layer}{own})",
        )
    if found.cost is not None:
        cost = found.cost
        yield (
            "step",
            f"{cost.times:.1f} x SGD ({cost.private_ms:.3g} ms of CPU time instead of {cost.sgd_ms:.3g} ms; batch of "
            f"{cost.batch})",
        )
        if cost.memory_times is not None:
            yield (
                "memory",
                f"{cost.memory_times:.1f} x SGD ({cost.private_mib:.3g} MiB instead of {cost.sgd_mib:.3g} MiB at most)",
            )
    if found.unmeasured and (found.way or found.layers):
        yield "", f"not measured: {found.unmeasured}"
    if found.attacks:
        yield "attacks", ", ".join(trial.name for trial in found.attacks if trial.runs) or "none"
    refused: dict[str, list[str]] = {}
    for trial in found.attacks:
        if not trial.runs:
            refused.setdefault(trial.reason.replace(trial.name, "it"), []).append(trial.name)
    for reason, names in refused.items():
        yield "", f"not {', '.join(names)}: {reason}"
    for text in found.warnings:
        yield "", text


def _acceptance(found: "Acceptance") -> Iterator[tuple[str, str]]:
    noise = f"with mechanism.name = {found.mechanism!r}"
    yield "accepted", f"{noise}: {'yes' if found.accepted else f'no: {found.reason}'}"
    if found.mixing:
        yield "mixing", f"{some_of(found.mixing)}: statistics of a whole batch"
    if found.instead:
        yield "instead", f"write {found.instead}"


def _way(found: "Diagnosis") -> str:
    """How the per-example gradients are computed, in a line."""
    if found.way:
        return f"{found.way}: all {found.trained:,} numbers are written out for each example"
    dense = sum(group.parameters for group in found.layers if group.way == "dense")
    if not found.layers:
        return f"cannot be computed: {found.unmeasured}"
    if not dense:
        return "ghost, layer by layer: never written out"
    return f"ghost, layer by layer; written out (dense) for {dense:,} of {found.trained + found.frozen:,} parameters"


VERBS = (
    Verb(
        "model",
        model,
        place=25,
        epilog="Examples:\n\n  fedpriv model resnet\n\n  fedpriv model mynet:build --shape 3,32,32\n\n"
        "  fedpriv model configs/quickstart.toml --json",
    ),
)
