"""Engines: run an app in this process, or on Ray's actors.

The same ServerApp and ClientApp run on every engine. Inline and Ray give the same bytes; the stacked engine, which
trains the clients of a round together in this process, gives the same numbers up to rounding.
"""

from importlib.util import find_spec

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedpriv.core.config import EngineConfig
from fedpriv.core.errors import InputError
from fedpriv.core.world import choose_device
from fedpriv.engines.inline import InlineGrid, StackedGrid, run_server

__all__ = ["check_engine", "choose_engine", "refuse_without_ray", "run_engine"]


def check_engine(config: EngineConfig) -> None:
    """Refuse settings that need Ray where it is not installed."""
    reasons = {
        "engine.name = 'ray'": config.name == "ray",
        f"engine.address = {config.address!r}": bool(config.address),
        f"engine.attack_tasks = {config.attack_tasks}": config.attack_tasks > 1,
    }
    for setting in (key for key, is_given in reasons.items() if is_given):
        refuse_without_ray(setting)


def refuse_without_ray(setting: str, instead: str = "") -> None:
    """Refuse a setting that needs Ray where it is not installed; ``instead``: what else the user can do."""
    if not _has_ray():
        raise InputError(f"{setting} needs Ray, which is not installed: pip install 'fedpriv[ray]'{instead}")


def choose_engine(config: EngineConfig) -> str:
    """Return ``inline``, ``stacked`` or ``ray``; auto is Ray where there is an address or a GPU, else inline."""
    if config.name != "auto":
        return config.name
    to_share = config.address or choose_device(config.device).type == "cuda"
    return "ray" if to_share and _has_ray() else "inline"


def _has_ray() -> bool:
    return find_spec("ray") is not None


def run_engine(
    server_app: ServerApp, client_app: ClientApp, clients: int, config: EngineConfig, timeout: float | None = None
) -> None:
    """Run the apps with ``clients`` clients until the server is done, which waits ``timeout`` seconds for a round."""
    name = choose_engine(config)
    if name == "ray":
        from fedpriv.engines.ray import run_ray  # Ray takes a second to import

        run_ray(server_app, client_app, clients, config, timeout)
    elif name == "stacked":
        run_server(server_app, StackedGrid(client_app, clients))
    else:
        run_server(server_app, InlineGrid(client_app, clients))
