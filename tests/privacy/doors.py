"""Every way in which something leaves a client or a server, found in the code, and the laws that noise has.

``found`` asks the apps, the endpoint, the command line, the registries and the imports themselves. So a new handler,
mod, route, command, mechanism, policy, or module that opens connections is found without anybody naming it here.
"""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import typer.main
from fastapi import FastAPI
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from scipy import integrate, stats

import fedpriv.flower
from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.clients.app import client_app
from fedpriv.core.cli.app import app as command_line
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import MECHANISMS
from fedpriv.prompts.masked import Prompter, prompter_app
from fedpriv.prompts.settings import IclConfig
from fedpriv.service.policies import POLICIES

__all__ = ["ALARM", "PROMPTER", "ball", "cosine", "found", "handlers", "hits", "laplace", "network_modules", "normal"]
__all__ += ["routes", "verbs"]

ALARM = 1e-9
"""How often a check of one statistic fails where all is well."""

ROOT = Path(__file__).parents[2]
NETWORK = {
    "aiohttp",
    "fastapi",
    "flwr",
    "grpc",
    "http",
    "httpx",
    "requests",
    "socket",
    "starlette",
    "urllib",
    "uvicorn",
}
NETWORK |= {"ftplib", "smtplib", "ssl", "urllib3", "websockets", "xmlrpc"}
_MAYBE = re.compile(rf"\b(?:from|import)\b[^\n]*\b(?:{'|'.join(sorted(NETWORK))})\b")  # parsing all files takes seconds

PROMPTER = Prompter(lambda client, questions: np.zeros((1, len(questions))), (3, 3), 2, 1.0, Secret.of_seed(0))  # type: ignore[arg-type, return-value]

Floats = NDArray[np.float64]


# ---- doors ----------------------------------------------------------------------------------------------------------


def found(endpoint: FastAPI) -> set[str]:
    """Return the name of every door that the code has."""
    pate, icl = PateConfig.model_fields, IclConfig.model_fields
    return {
        *(f"client: {kind}" for kind in handlers(client_app(None))),
        *(f"client with prompts: {kind}" for kind in handlers(prompter_app(PROMPTER))),
        *(f"mod: {name}" for name in fedpriv.flower.__all__),
        *(f"route: {route}" for route in routes(endpoint)),
        *(f"command: {verb}" for verb in verbs(typer.main.get_command(command_line))),
        *(f"mechanism: {name}" for name in MECHANISMS),
        *(f"policy: {name}" for name in POLICIES),
        *(f"aggregator: {name}" for name in get_args(pate["aggregator"].annotation)),
        *(f"noise on votes at: {name}" for name in get_args(pate["noise_at"].annotation)),
        *(f"prompts: {name}" for name in get_args(icl["mode"].annotation)),
        *(f"noise on votes of prompts at: {name}" for name in get_args(icl["noise_at"].annotation)),
        *(f"network: {module}" for module in network_modules(ROOT)),
    }


def handlers(app: ClientApp) -> tuple[str, ...]:
    """The kinds of message that an app answers."""
    return tuple(vars(app)["_registered_funcs"])


def routes(endpoint: FastAPI) -> Iterator[str]:
    """What an endpoint answers."""
    for route in endpoint.routes:
        yield f"{'/'.join(sorted(getattr(route, 'methods', None) or ()))} {getattr(route, 'path', route)}"


def verbs(command: Any, name: str = "") -> Iterator[str]:
    """The commands of the command line."""
    if not getattr(command, "commands", None):
        yield name
        return
    for word, each in command.commands.items():
        yield from verbs(each, f"{name} {word}".strip())


def network_modules(root: Path) -> Iterator[str]:
    """The modules that import what reaches other processes or machines."""
    for package in ("fedpriv", "clients", "server", "attacks"):
        for path in sorted((root / package).rglob("*.py")):
            if not any(folder.is_symlink() for folder in path.parents) and _imports(path) & NETWORK:
                yield path.relative_to(root).as_posix()


def _imports(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    if not _MAYBE.search(text):
        return set()
    nodes = list(ast.walk(ast.parse(text)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    of = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in plain | of}


# ---- laws: each raises AssertionError where the numbers are not from it, and otherwise once in 1 / ALARM times ------


def normal(noise: Floats, deviation: float) -> None:
    """Independent normal numbers of this deviation: chi-squared, two-sided."""
    _usual(float(np.square(noise / deviation).sum()), stats.chi2(noise.size))


def laplace(noise: Floats, scale: float) -> None:
    """Independent Laplace numbers of this scale: the sum of lengths is a Gamma variable."""
    _usual(float(np.abs(noise / scale).sum()), stats.gamma(noise.size))


def ball(noise: Floats, scale: float) -> None:
    """A vector of density proportional to exp(-length / scale): its length is a Gamma variable."""
    _usual(float(np.linalg.norm(noise)) / scale, stats.gamma(noise.size))


def cosine(released: Floats, mean: Floats, kappa: float) -> None:
    """A von Mises-Fisher direction about the mean: the law of their inner product, integrated."""
    dimension, middle = released.size, float(released @ mean / np.linalg.norm(mean))
    np.testing.assert_allclose(np.linalg.norm(released), 1, rtol=1e-4)
    peak = kappa / ((dimension - 3) / 2 + math.hypot((dimension - 3) / 2, kappa))

    def log_density(t: Floats) -> Floats:
        return kappa * t + (dimension - 3) / 2 * np.log1p(-t * t)

    grid = np.linspace(-1 + 1e-9, 1 - 1e-9, 200_001)
    values = np.exp(log_density(grid) - log_density(np.array([peak])))
    below = integrate.cumulative_trapezoid(values, grid, initial=0)
    share = float(np.interp(middle, grid, below) / below[-1])
    assert ALARM < share < 1 - ALARM, f"cosine {middle:.4g} with the mean; expected about {peak:.4g}"


def hits(count: int, chances: Floats) -> None:
    """So many of independent events with these chances: normal approximation, beyond 6 deviations once in 5e8 times."""
    expected, deviation = float(chances.sum()), math.sqrt(float((chances * (1 - chances)).sum()))
    assert abs(count - expected) < 6 * deviation + 1, f"{count} of {len(chances)}; expected {expected:.1f}"


def _usual(statistic: float, law: Any) -> None:
    said = f"statistic {statistic:.6g}; expected {law.mean():.6g}, deviation {law.std():.4g}"
    assert law.cdf(statistic) > ALARM / 2 and law.sf(statistic) > ALARM / 2, said
