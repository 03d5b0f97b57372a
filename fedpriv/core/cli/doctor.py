"""``fedpriv doctor``: versions, devices, data and disk of this installation, and what of it was never tested."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fedpriv.core.cli.terminal import Json, out, print_json

_GIB = 2**30
_LEAST_DISK = 2 * _GIB
_TOOLS = ("dev", "docs", "oracles")  # extras of those who work on fedpriv itself


@dataclass(frozen=True)
class _Check:
    """One line: what was looked at, what was found, and what is wrong with it; empty: nothing."""

    what: str
    found: str
    problem: str = ""


def doctor(as_json: Json = False) -> None:
    """Show versions, devices, threads, data sets and disk, and name what is missing or was not tested."""
    checks = [*_packages(), *_extras(), *_machine(), _data(), _disk()]
    if as_json:
        print_json([asdict(check) for check in checks])
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        cells = map(Text, (check.what, check.found, check.problem))  # brackets of extras are no markup
        table.add_row(*cells, style="yellow" if check.problem else "")
    out.print(table)


def _packages() -> Iterator[_Check]:
    from packaging.specifiers import SpecifierSet

    ours = metadata("fedpriv")
    python, allowed = ".".join(map(str, sys.version_info[:3])), SpecifierSet(ours["Requires-Python"])
    yield _Check("fedpriv", version("fedpriv"))
    yield _Check("Python", python, "" if python in allowed else f"tested: {allowed}")
    for name, wanted in _requirements(""):
        if name in ("flwr", "torch"):
            yield _version(name, wanted)
    for name, wanted in _requirements("simulation", of="flwr"):
        if name == "ray":
            yield _version(name, wanted, optional=True)


def _version(name: str, wanted: str, *, optional: bool = False) -> _Check:
    from packaging.specifiers import SpecifierSet

    try:
        found = version(name)
    except PackageNotFoundError:
        return _Check(name, "not installed", "" if optional else f"needed: {wanted}")
    fits = SpecifierSet(wanted).contains(found, prereleases=True)
    return _Check(name, f"{found} (tested: {wanted})", "" if fits else "this version was not tested")


def _requirements(extra: str, of: str = "fedpriv") -> Iterator[tuple[str, str]]:
    """Name and versions of what a package needs for an extra; empty: for itself."""
    from packaging.requirements import Requirement

    for text in metadata(of).get_all("Requires-Dist") or ():
        needed = Requirement(text)
        asked = "extra" in str(needed.marker or "")
        if asked == bool(extra) and (needed.marker is None or needed.marker.evaluate({"extra": extra})):
            yield needed.name, str(needed.specifier)


def _extras() -> Iterator[_Check]:
    for extra in metadata("fedpriv").get_all("Provides-Extra") or ():
        if extra in _TOOLS:
            continue
        missing = [name for name, _ in _requirements(extra) if not _is_installed(name)]
        # Ray comes with an extra of Flower's.
        if extra == "ray" and not _is_installed("ray"):
            missing = ["ray"]
        found = f"no {', '.join(missing)}: pip install 'fedpriv[{extra}]'" if missing else "installed"
        yield _Check(f"extra {extra}", found)


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _machine() -> Iterator[_Check]:
    import psutil
    import torch

    from fedpriv.core.world import choose_device

    cuda = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = [f"{each.name}, {each.total_memory / _GIB:.0f} GiB" for each in cuda]
    names += ["mps"] if torch.backends.mps.is_available() else []
    yield _Check("devices", "; ".join(("cpu", *names)) + f' (engine.device = "auto" takes {choose_device("auto")})')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield _Check("CPU cores", f"{cores} (a run computes with engine.threads, 1 unless set)")
    memory = psutil.virtual_memory()
    yield _Check("memory", f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free")


def _data() -> _Check:
    from fedpriv.data.datasets import list_datasets

    here = [status.name for status in list_datasets("") if status.available]
    place = os.environ.get("FEDPRIV_DATA") or "data"
    return _Check("data sets", f"{', '.join(here)} (FEDPRIV_DATA: {place}; fedpriv data lists all)")


def _disk() -> _Check:
    free = shutil.disk_usage(Path.cwd()).free
    short = "runs of language models and sweeps may need more" if free < _LEAST_DISK else ""
    return _Check("disk", f"{free / _GIB:.0f} GiB free here", short)
