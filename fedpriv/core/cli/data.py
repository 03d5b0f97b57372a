"""The command ``fedpriv data``: which data sets are here, what is read of one, and how few facts single out people."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedpriv.core.cli.terminal import Json, out, print_json, print_line, print_sentences
from fedpriv.core.config import DataConfig, load_experiment, validated
from fedpriv.core.errors import InputError, printable, some_of
from fedpriv.core.numbers import several
from fedpriv.core.registry import DATASETS
from fedpriv.core.settings import LEAST_EPSILON, MOST_EPSILON

_SEED, _PEOPLE = 0, 1000
_SHOWN = 20  # classes, clients, and columns


def data(
    root: Annotated[str, typer.Option(metavar="DIR", help="Folder of the data sets.")] = "",
    known: Annotated[
        int | None,
        typer.Option(
            "--unicity", metavar="K", min=1, help="Instead: count how many people K facts about them single out."
        ),
    ] = None,
    bounds: Annotated[
        float | None,
        typer.Option(metavar="EPSILON", help="Instead: estimate bounds of your table's numbers privately."),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--of",
            metavar="NAME|FILE",
            help="An experiment file: show what is read of its data. With --bounds: the one that names your table. "
            "With --unicity: the data set, of yes-or-no features; default: the first.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """List the data sets: what is here, where, and what can be downloaded."""
    if known is not None and bounds is not None:
        raise InputError("--unicity K and --bounds EPSILON are two things; ask for one of them")
    if bounds is not None:
        _bounds(name, bounds, as_json)
    elif known is None and name:
        _describe(name, as_json)
    elif known is None:
        _list(root, as_json)
    elif name in DATASETS and DATASETS[name].needs_path:
        raise InputError(
            key="--of",
            given=name,
            allowed="this data set is a file of yours, and --unicity takes those that come without one, "
            f"such as {_of_facts()}",
        )
    else:
        given = {"name": name or _of_facts(), "root": root}
        _single_out(validated(DataConfig, given, "fedpriv data --of"), known, as_json)


def _list(root: str, as_json: bool) -> None:
    from fedpriv.data.datasets import list_datasets
    from fedpriv.data.source import data_folder

    statuses = list_datasets(root)
    if as_json:
        print_json([vars(status) for status in statuses])
        return
    folder = str(data_folder(root))
    table = Table(box=None, pad_edge=False)
    for heading in ("data set", "here", "examples", "where", "note"):
        table.add_column(heading, overflow="fold")
    for status in statuses:
        where, note = status.where.replace(f"{folder}/", ""), status.note.removesuffix(f" in {folder}")
        table.add_row(status.name, "yes" if status.available else "no", str(status.examples or ""), where, note)
    print_line(f"In {folder}:")
    out.print(table)


def _describe(file: str, as_json: bool) -> None:
    """Print what is read of an experiment's data, and how many examples each client has."""
    from fedpriv.data.datasets import load_dataset
    from fedpriv.data.partition import partition_indices

    experiment = load_experiment(Path(file))
    dataset = load_dataset(experiment.data, experiment.seed)
    train, test = (dataset.kinds(labels) for labels in (dataset.y_train, dataset.y_test))
    owners = None if dataset.keys is None else dataset.keys.train
    shares = partition_indices(train.numpy(), experiment.data, experiment.federation.clients, experiment.seed, owners)
    counts = (part.bincount(minlength=len(dataset.counted)).tolist() for part in (train, test))
    found = {
        "source": dataset.source,
        "example": dataset.example,
        "task": "next" if dataset.is_next else "classify",
        "examples": [len(train), len(test)],
        "classes": dict(zip(dataset.counted, zip(*counts, strict=True), strict=True)),
        "clients": shares.sizes.tolist(),
        "unread": dataset.unread,
        "notes": dataset.notes,
        "warnings": dataset.warnings,
    }
    if as_json:
        print_json(found)
        return
    classes = some_of([f"{name} ({train} + {test})" for name, (train, test) in found["classes"].items()], _SHOWN)
    sizes = some_of([f"{size:,}" for size in found["clients"]], _SHOWN)
    lines = [f"{dataset.source}: {len(train):,} training + {len(test):,} test examples, each {dataset.example}"]
    task = "task: predict the next token" if dataset.is_next else f"classes, training + test examples: {classes}"
    lines += [task, *([dataset.left_out] if dataset.left_out else [])]
    keys = _keys_text(dataset.keys.names, experiment.data.partition) if dataset.keys is not None else ""
    lines += [f"{several(len(shares), 'client')}{keys}, training examples: {sizes}", *dataset.notes]
    print_sentences([printable(line) for line in (*lines, *(f"warning: {each}" for each in dataset.warnings))])


def _keys_text(names: Sequence[str], partition: str) -> str:
    """How many keys the data have, and whether they say whose an example is."""
    if partition == "key":
        return f" of {len(names):,} keys in the data"
    return f", data.partition = '{partition}' ('key' would make clients of {len(names):,} keys in the data)"


def _of_facts() -> str:
    """The first data set that says yes or no in every feature."""
    return next(name for name, source in DATASETS.items() if source.is_facts)


def _bounds(file: str, epsilon: float, as_json: bool) -> None:
    """Print what an experiment file says of the columns from then on."""
    from fedpriv.core.randomness import Secret
    from fedpriv.data.bounds import private_bounds
    from fedpriv.data.datasets import place_of

    if not file:
        raise InputError("--bounds needs --of FILE, the experiment file that names your table")
    if not LEAST_EPSILON <= epsilon <= MOST_EPSILON:
        raise InputError(
            key="--bounds", given=epsilon, allowed=f"allowed is an epsilon from {LEAST_EPSILON:g} to {MOST_EPSILON:g}"
        )
    experiment = load_experiment(Path(file))
    before = experiment.data.bounds_epsilon
    together = before + epsilon
    if together > MOST_EPSILON:
        raise InputError(
            key="--bounds",
            given=epsilon,
            allowed=f"with the {before:g} that {file} has already, allowed is up to {MOST_EPSILON:g}",
        )
    schema = DATASETS[experiment.data.name].schema(place_of(experiment.data))
    found = private_bounds(schema, epsilon, Secret.drawn(), before)
    columns = [{"name": name, "low": low, "high": high} for name, (low, high) in found.low_high.items()]
    if as_json:
        known = {"bounds_epsilon": together, "before": before, "columns": columns, "left_out": dict(found.left_out)}
        print_json(known)
        return
    words = ["# Each call of fedpriv data --bounds is a new release of the rows, and its epsilon adds to those before."]
    if before:
        words.append(f"# bounds_epsilon is {before:g}, which {file} has already, and {epsilon:g} of this call.")
    left_out = "; ".join(f"{name!r} ({why})" for name, why in found.left_out.items())
    words += [
        f"# Without bounds: {printable(left_out)}",
        f"# In place of the section [data.table] of {file}; all but low and high is read off the rows as they are:",
    ]
    out.print("\n".join([*words, found.section]), markup=False, highlight=False, soft_wrap=True)


def _single_out(config: DataConfig, known: int, as_json: bool) -> None:
    from fedpriv.attacks.linkage import facts_of, unicity
    from fedpriv.core.randomness import numpy_stream
    from fedpriv.data.datasets import load_dataset

    if config.is_text:
        raise InputError(f"--unicity counts facts of images and rows, and data.name = {config.name!r} are texts")
    facts = facts_of(load_dataset(config, _SEED))
    share = unicity(facts, known, _PEOPLE, numpy_stream(_SEED, "unicity"))
    if as_json:
        print_json({"data": config.name, "known": known, "people": len(facts), "singled_out": vars(share)})
        return
    print_line(
        f"{config.name}: {known} facts that hold of a person single out {share.in_percent} of {len(facts):,} people."
    )
