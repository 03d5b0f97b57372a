"""Import what users wrote, such as networks and data sets, which settings name as ``module:name``."""

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fedpriv.core.errors import InputError, reason_of, some_of
from fedpriv.core.registry import suggestion


def own_object(path: str, key: str, folders: Sequence[Path] = ()) -> Any:
    """Return what ``module:name`` names, from the first of the folders and the working one that has it, or installed.

    ``key``: the setting that says so. Where there is no such thing, or the module raises, it is an ``InputError``.
    """
    module, _, name = path.partition(":")
    refused = partial(InputError, key=key, given=path)
    if module.endswith(".py"):
        raise refused(allowed=f"expected the name of a module, {Path(module).stem}, without folder and .py")
    place, near = module.replace(".", "/"), [*folders, Path.cwd()]
    folder = str(next((each for each in near if (each / place).is_dir() or (each / f"{place}.py").is_file()), near[-1]))
    if folder not in sys.path:
        sys.path.append(folder)  # for good: the module's own code may import more later
    importlib.invalidate_caches()
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        allowed = f"module {module} cannot be imported: {reason_of(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            allowed = f"no module {error.name} in {folder} or among what is installed"
        raise refused(allowed=allowed) from error
    try:
        return attrgetter(name)(found)
    except AttributeError:
        known = [each for each, value in vars(found).items() if _is_of(module, each, value)]
        hint = suggestion(name, known, else_known=False) or (f"; it has {some_of(known)}" if known else "")
        raise refused(allowed=f"module {module} has no {name!r}{hint}") from None


def _is_of(module: str, name: str, value: object) -> bool:
    """Whether a name in a module is its own and public, and no module, function or class of another one."""
    if isinstance(value, type | FunctionType):
        return value.__module__ == module and not name.startswith("_")
    return not isinstance(value, ModuleType) and not name.startswith("_")
