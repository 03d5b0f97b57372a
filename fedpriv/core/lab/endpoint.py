"""A finished run's model behind an endpoint in this process, by a policy's short form."""

from fedpriv.core.config import validated
from fedpriv.core.lab.service import in_process
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World
from fedpriv.service.endpoint import Endpoint
from fedpriv.service.settings import ServiceConfig


def open_endpoint(folder: RunFolder, world: World, answers: str, most: int | None = None) -> Endpoint:
    """Return an endpoint in this process that charges no query ledger."""
    own = ServiceConfig.of(world.experiment)
    if own is not None and own.method == answers:
        return in_process(folder, world, own, most)
    return in_process(folder, world, validated(ServiceConfig, {"method": answers}, "answers"), most)
