"""What can be added by one file, each under its name: mechanisms, attacks, data sets, networks and aggregation rules.

Of each kind there are ours, one module each in a package of ours, and those of other packages, which name them as entry
points: in pyproject.toml of a package of yours

    [project.entry-points."fedpriv.mechanisms"]
    rounded = "my_package.rounded:RoundedSettings"
"""

import difflib
import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fedpriv.errors import InputError

__all__ = ["ATTACKS", "DATASETS", "MECHANISMS", "MODELS", "RULES", "Registry", "suggestion"]


Kind = TypeVar("Kind", bound=type[Any])


class Registry(Mapping[str, type[Any]]):
    """Classes by name, most of them of settings, found when they are first asked for; ours first, then others by name.

    Attributes:
        what: one thing of the kind, for people.
        package: where ours are; modules of packages inside it are not looked at.
        group: of entry points.
    """

    def __init__(self, what: str, package: str, group: str) -> None:
        self.what, self.package, self.group = what, package, group
        self._things: dict[str, type[Any]] = {}
        self._begun = False

    def register(self, kind: Kind) -> Kind:
        """Enter a thing of ours; a decorator of its class.

        Raises:
            ValueError: another one has this name.
        """
        _enter(self._things, kind)
        return kind

    def __getitem__(self, name: str) -> type[Any]:
        every = self._every()
        if name not in every:
            raise InputError(f"there is no {self.what} {name!r}{suggestion(name, tuple(every))}")
        return every[name]

    def __contains__(self, name: object) -> bool:
        return name in self._every()

    def __iter__(self) -> Iterator[str]:
        return iter(self._every())

    def __len__(self) -> int:
        return len(self._every())

    def _every(self) -> dict[str, type[Any]]:
        """All of them. While a module is imported that asks for them itself, those that are known already."""
        if self._begun:
            return self._things
        self._begun = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, f"{self.package}."):
            if not module.ispkg:
                importlib.import_module(module.name)
        self._things = dict(sorted(self._things.items()))
        for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
            try:
                _enter(self._things, point.load())
            except Exception as error:
                self._begun = False
                raise InputError(
                    f"{self.what} {point.name!r} of the package {point.dist.name if point.dist else point.value} "
                    f"cannot be used: {type(error).__name__}: {' '.join(str(error).split())}"
                ) from error
        return self._things


def _enter(things: dict[str, type[Any]], kind: type[Any]) -> None:
    fields = getattr(kind, "model_fields", {})
    name = fields["name"].default if "name" in fields else kind.name
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"{kind.__qualname__} lacks {', '.join(missing)}")
    if things.setdefault(name, kind) is not kind:
        raise ValueError(f"the name {name!r} is taken by {things[name].__module__}")


def suggestion(word: str, known: Sequence[str], *, else_known: bool = True) -> str:
    """Return what may have been meant, or all that is known, to be put behind an error."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known)}" if else_known else ""


MECHANISMS = Registry("mechanism", "fedpriv.mechanisms", "fedpriv.mechanisms")
ATTACKS = Registry("attack", "fedpriv.attacks.methods", "fedpriv.attacks")
DATASETS = Registry("data set", "fedpriv.data.sets", "fedpriv.datasets")
MODELS = Registry("network", "fedpriv.models", "fedpriv.models")
RULES = Registry("aggregation rule", "fedpriv.server.rules", "fedpriv.rules")
