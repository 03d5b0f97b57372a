"""What can be added by one file, each under its name: mechanisms, attacks, data sets, networks, and so on.

Of each kind there are ours, in modules of a package of ours, and those of other packages, which name them as entry
points: in pyproject.toml of a package of yours

    [project.entry-points."fedpriv.mechanisms"]
    rounded = "my_package.rounded:RoundedSettings"
"""

import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from fedpriv.core.errors import InputError

Kind = TypeVar("Kind", bound=type[Any])

# Reading them goes through every installed package: once for all groups.
_installed = cache(entry_points)

# It becomes a key of experiment files, a part of lists and of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def capabilities(module: str) -> Iterator[ModuleType]:
    """Import a module of this name, such as report.py, from the folder of each capability that has it."""
    root = Path(__file__).parents[1]
    for folder in (root, root / "algorithms", root / "attacks"):
        for path in sorted(folder.glob(f"*/{module}.py")):
            parts = [part for part in path.relative_to(root).with_suffix("").parts if part != "__init__"]
            yield importlib.import_module(".".join(("fedpriv", *parts)))


class Registry(Mapping[str, type[Any]]):
    """Classes by name, most of them of settings, imported when first used; ours first, then others by name.

    One of ours whose file has its name is imported alone where it is asked for; else all are.

    Attributes:
        what: one thing of the kind, for people.
        places: where ours are, each a package, whose modules are imported, but no packages inside it; ``*/NAME``: the
            packages of this name in the folders of capabilities; or, without a dot, a module in these folders.
        group: of entry points.
        base: what they are subclasses of, as "module:class".
    """

    def __init__(self, what: str, places: str, group: str, base: str) -> None:
        self.what, self.places, self.group, self.base = what, places.split(), group, base
        self._things: dict[str, type[Any]] = {}
        self._begun = False

    def register(self, kind: Kind) -> Kind:
        """Enter a thing of ours; a decorator of its class."""
        _enter(self._things, kind)
        return kind

    def __getitem__(self, name: str) -> type[Any]:
        every = self._known(name)
        if name not in every:
            raise InputError(f"there is no {self.what} {name!r}{suggestion(name, tuple(every))}")
        return every[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._every())

    def __len__(self) -> int:
        return len(self._every())

    def _known(self, name: object) -> dict[str, type[Any]]:
        """Ours of this name, or else all of them."""
        if isinstance(name, str) and _NAME.fullmatch(name) and not self._begun:
            modules = (
                f"{place}.{name.replace('-', '_')}" for place in self.places if place[:1] != "*" and "." in place
            )
            for module in filter(find_spec, modules):
                importlib.import_module(module)
        return self._things if name in self._things else self._every()

    def _every(self) -> dict[str, type[Any]]:
        """All of them. While a module is imported that asks for them itself, those that are known already."""
        if self._begun:
            return self._things
        self._begun = True
        self._import_ours()
        self._things = dict(sorted(self._things.items(), key=lambda each: (getattr(each[1], "rank", 0), each[0])))
        for point in sorted(_installed().select(group=self.group), key=lambda point: point.name):
            # Importing a package runs its code, which may do anything: a sys.exit(0) must not look like success.
            try:
                _enter(self._things, check_complete(point.load(), self._base()))
            except (Exception, SystemExit) as error:
                self._begun = False
                raise InputError(
                    f"{self.what} {point.name!r} of the package {point.dist.name if point.dist else point.value} "
                    f"cannot be used: {type(error).__name__}: {_first_line(error)}"
                ) from error
        return self._things

    def _import_ours(self) -> None:
        for place in self.places:
            for package in _packages(place):
                for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                    if not module.ispkg:
                        importlib.import_module(module.name)

    def _base(self) -> type[Any]:
        return pkgutil.resolve_name(self.base)


def _first_line(error: BaseException) -> str:
    """What an error says; of one of pydantic's the first wrong value, without the address of its manual."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    wrong = error.errors()[0]
    return f"{error.title}: {wrong['input']!r}: {wrong['msg']}"


def _packages(place: str) -> Iterator[ModuleType]:
    """The packages whose modules are things of a kind; a module in the folders of capabilities is imported alone."""
    if place.startswith("*/"):
        yield from capabilities(f"{place.removeprefix('*/')}/__init__")
    elif "." in place:
        yield importlib.import_module(place)
    else:
        list(capabilities(place))


def check_complete(kind: Any, base: type[Any]) -> type[Any]:
    """Return what another package has entered, if it is what the others of its kind are."""
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(f"{getattr(kind, '__qualname__', repr(kind))} is no subclass of {base.__qualname__}")
    fields = getattr(kind, "model_fields", {})
    known = getattr(base, "model_fields", {})
    hidden = [key for key in fields if key not in known and key != "name" and hasattr(base, key)]
    if hidden:
        raise TypeError(f"{kind.__qualname__} has a key {hidden[0]!r}, which hides that of {base.__qualname__}")
    ours = [each for each in reversed(kind.__mro__) if each.__module__.startswith("fedpriv.")]
    # A class that says an attribute again may say it in words (PEP 563); what its base says stands.
    said = ((key, value) for each in ours for key, value in inspect.get_annotations(each).items())
    declared = {key: value for key, value in said if not isinstance(value, str)}
    for key, annotation in declared.items():
        if get_origin(annotation) is ClassVar and hasattr(kind, key):
            _check_attribute(kind, key, get_args(annotation)[0])
        elif get_origin(annotation) is ClassVar and key in inspect.get_annotations(base):
            raise TypeError(f"{kind.__qualname__} lacks {key}")
    name = _name(kind)
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise TypeError(
            f"{kind.__qualname__} has the name {name!r}; allowed are letters, digits, _ and -, a letter or digit first"
        )
    return kind


def _check_attribute(kind: type[Any], key: str, wanted: Any) -> None:
    if wanted not in (bool, int, str) and get_origin(wanted) not in (tuple, Literal):
        return
    value = getattr(kind, key)
    try:
        TypeAdapter(wanted).validate_python(value, strict=True)
    except ValidationError:
        shown = wanted if get_origin(wanted) else wanted.__name__
        raise TypeError(f"{kind.__qualname__}.{key} = {value!r} is no {shown}") from None


def _name(kind: type[Any]) -> Any:
    fields = getattr(kind, "model_fields", {})
    return fields["name"].default if "name" in fields else getattr(kind, "name", None)


def _enter(things: dict[str, type[Any]], kind: type[Any]) -> None:
    name = _name(kind)
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"{kind.__qualname__} lacks {', '.join(missing)}")
    if things.setdefault(name, kind) is not kind:
        raise ValueError(f"the name {name!r} is taken by {things[name].__module__}")


def suggestion(word: str, known: Sequence[str], *, else_known: bool = True, section: str = "", most: int = 1) -> str:
    """Return what may have been meant, or all that is known, to be put behind an error; ``section``: before a key."""
    close = difflib.get_close_matches(word, known, n=most, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(section + each for each in close)}?"
    return f"; known: {', '.join(known)}" if else_known else ""


MECHANISMS = Registry("mechanism", "fedpriv.mechanisms", "fedpriv.mechanisms", "fedpriv.mechanisms:MechanismSettings")
ATTACKS = Registry(
    "attack", "fedpriv.attacks.methods */uploads", "fedpriv.attacks", "fedpriv.attacks.settings:AttackSettings"
)
DATASETS = Registry("data set", "fedpriv.data.sets", "fedpriv.datasets", "fedpriv.data.source:Source")
MODELS = Registry("network", "fedpriv.models", "fedpriv.models", "fedpriv.models:ModelSettings")
PROBES = Registry("attack on the finished model", "*/probes", "fedpriv.probes", "fedpriv.attacks.probing:ModelAttack")
ENDPOINTS = Registry("endpoint", "oracle", "fedpriv.endpoints", "fedpriv.attacks.questions:Endpoints")
RULES = Registry("aggregation rule", "fedpriv.server.rules", "fedpriv.rules", "fedpriv.server.rules:Rule")
ALGORITHMS = Registry("algorithm", "algorithm", "fedpriv.algorithms", "fedpriv.core.algorithm:Algorithm")
FINDINGS = Registry("finding", "report", "fedpriv.findings", "fedpriv.core.finding:Finding")
OPTIONS = Registry("options of a command", "cli", "fedpriv.options", "fedpriv.core.verb:Options")
FILES = Registry("kind of files", "settings", "fedpriv.files", "fedpriv.core.config.file:FileKind")
KEYS = Registry("added keys", "settings", "fedpriv.keys", "fedpriv.core.sections:AddedKeys")
PREPARATIONS = Registry(
    "preparation of data", "preparation", "fedpriv.preparations", "fedpriv.core.algorithm:Preparation"
)
TRANSPORTS = Registry("transport of uploads", "transport", "fedpriv.transports", "fedpriv.core.algorithm:Transport")
SECTIONS = Registry("section of experiments", "settings", "fedpriv.sections", "fedpriv.core.sections:ExperimentSection")
