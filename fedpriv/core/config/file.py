"""From a TOML file, and what the command line puts in its place, to an experiment."""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from fedpriv.core.config.error_text import validated
from fedpriv.core.config.experiment import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.registry import FILES, MECHANISMS
from fedpriv.core.settings import Choice, Settings, enumerated
from fedpriv.mechanisms import MECHANISM, noise_keys
from fedpriv.models import MODEL


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read a TOML file and apply ``key=value`` overrides.

    Noise parameters, such as mechanism.kappa and mechanism.epsilon, exclude each other: an override of one of them
    replaces the file's.

    Args:
        path: the TOML file.
        overrides: such as ``"mechanism.epsilon=50"``; values are TOML, and a bare word is a string, also in a list.

    Raises:
        InputError: the file cannot be read or parsed, is not an experiment file, or a key or value is not allowed.
    """
    tree = read_toml(path)
    kind = kind_of_file(tree)
    if kind is not None:
        raise InputError(f"{path} is a file of {kind.command}, no experiment; run {kind.command} {path}")
    return _loaded(tree, path, overrides)


class FileKind(ABC):
    """A kind of TOML files that are no experiments; settings.py in a capability's folder registers its own."""

    name: ClassVar[str]  # of the section or key by which such files are told from experiments
    command: ClassVar[str]  # that reads them
    settings: ClassVar[type[Settings] | None] = None  # what they say; `None`: only their command reads it
    kept_as: ClassVar[str]  # the name under which the resolved settings lie in the folder of a run
    preview: ClassVar[str] = "fedpriv config show {}"  # the command that says what a file does, with {} for the file
    results: ClassVar[str] = "runs/"  # the folder that holds the folders of runs
    report: ClassVar[str]  # "module:function" that writes report.html into such a folder and returns its path

    @staticmethod
    @abstractmethod
    def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
        """Read a file of this kind and apply ``key=value`` overrides."""

    @classmethod
    def write_report(cls, folder: Path) -> Path:
        """Write ``report.html`` into the folder of a run and return its path."""
        return resolve_name(cls.report)(folder)


def kind_of_file(tree: Mapping[str, Any]) -> type[FileKind] | None:
    """Return what kind of files nested tables are; ``None``: an experiment."""
    return next((kind for name, kind in FILES.items() if name in tree), None)


def load_run(folder: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read the resolved experiment in the folder of a run, as :func:`load_experiment` reads a file.

    Versions up to 0.2 wrote the keys of all mechanisms and networks; keys that the run's own do not read are dropped.
    Versions without mechanism.adjacency accounted for normal noise on Poisson batches under zero-out. Their runs
    keep zero-out: calibrated noise must not change in the middle of a run, nor when the run is attacked later.

    Args:
        folder: of the run; config.toml is read.
        overrides: as of :func:`load_experiment`.

    Raises:
        InputError: as of :func:`load_experiment`.
    """
    path = folder / "config.toml"
    tree = read_toml(path)
    for choice in (MECHANISM, MODEL):
        if isinstance(section := tree.get(choice.section), dict):
            tree[choice.section] = choice.read_keys(section)
    mechanism, training = tree.get("mechanism"), tree.get("training")
    if isinstance(mechanism, dict) and isinstance(training, dict) and mechanism.get("name") in MECHANISMS:
        sampled = training.get("sampling") == "poisson" and mechanism.get("unit") == "example"
        if sampled and "adjacency" in MECHANISMS[mechanism["name"]].model_fields:
            mechanism.setdefault("adjacency", "zero-out")
    return _loaded(tree, path, overrides)


def _loaded(tree: dict[str, Any], path: Path, overrides: Sequence[str]) -> Experiment:
    override(tree, [parse_override(text) for text in overrides], "--set ")
    return validated(Experiment, tree, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested tables."""
    try:
        # Some editors put a byte-order mark in front.
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read: {reason}") from None


def override(tree: dict[str, Any], values: Sequence[tuple[Sequence[str], Any]], source: str) -> None:
    """Put values into the nested tables of an experiment file, in place.

    Noise parameters exclude each other: a new one replaces the old one. With a new mechanism.name or model.name, the
    keys that the old and the new one read with the same meaning are kept.

    Args:
        tree: the tables.
        values: pairs of a key's parts, such as ``("mechanism", "epsilon")``, and its value.
        source: where the keys come from, for error messages.

    Raises:
        InputError: a part of a key is a value in the tables, not a section, or the tables' epsilon has another meaning
            for the new mechanism.
    """
    for choice in (MECHANISM, MODEL):
        section = tree.get(choice.section)
        if isinstance(section, dict):
            given = {keys[1]: value for keys, value in values if len(keys) == 2 and keys[0] == choice.section}
            _give_way(choice, section, given, source)
    for keys, value in values:
        node = tree
        for key in keys[:-1]:
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                raise InputError(f"{source}{'.'.join(keys)}: {key} is a value, not a section")
            node = child
        node[keys[-1]] = value


def leaves(tree: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values in nested tables, each behind the parts of its key; dots in a name divide it as tables do."""
    for name, value in tree.items():
        keys = (*before, *name.split("."))
        if isinstance(value, Mapping):
            yield from leaves(value, keys)
        else:
            yield keys, value


def _give_way(choice: Choice[Any], section: dict[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Take out of a section what the given keys replace."""
    if choice is MECHANISM and any(key in noise_keys() for key in given):
        for key in noise_keys():
            section.pop(key, None)
    old, new = section.get("name", choice.default), given.get("name")
    before, after = choice.kind(old), choice.kind(new)
    if new == old or before is None or after is None:
        return
    nominal = getattr(before, "nominal", None), getattr(after, "nominal", None)
    if "epsilon" in section and None not in nominal and nominal[0] != nominal[1]:
        raise InputError(
            f"{source}mechanism.name={new}: mechanism.epsilon = {section['epsilon']} is {old}'s ({nominal[0]}); say "
            f"how much noise {new} makes, with {enumerated([f'mechanism.{key}' for key in after.noise_keys()], 'or')}"
        )
    for key in set(section) - set(after.model_fields):
        del section[key]


def parse_override(text: str) -> tuple[list[str], Any]:
    """Return the parts of the key, and the value, of ``KEY=VALUE``; values are TOML, and a bare word is a string."""
    key, separator, value = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not separator or not all(keys):
        raise InputError(key="--set", given=text, allowed="expected key=value, such as mechanism.epsilon=50")
    try:
        tree = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return keys, _bare(value.strip())
    except (ValueError, RecursionError):
        raise InputError(key="--set", given=key, allowed="the value is too long or too deep") from None
    if len(tree) > 1:
        raise InputError(key="--set", given=key, allowed="expected one value", hint=f"set {list(tree)[1]} on its own")
    return keys, tree["value"]


def _bare(value: str) -> str | list[Any]:
    """A value that is no TOML: a word, or a list of words such as ``[dlg, iga]``, as reports print it."""
    if not (value.startswith("[") and value.endswith("]")):
        return value
    return [parse_override(f"item={word}")[1] for word in value[1:-1].split(",")]
