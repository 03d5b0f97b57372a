"""A finished run's model behind an endpoint in this process, by a policy's short form."""

from fedpriv.core.config import validated
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World
from fedpriv.lab.service import in_process
from fedpriv.service.endpoint import Endpoint
from fedpriv.service.settings import ServiceConfig

__all__ = ["open_endpoint"]


def open_endpoint(folder: RunFolder, world: World, answers: str, most: int | None = None) -> Endpoint:
    """Return an endpoint in this process that charges no query ledger.

    Args:
        folder: of a completed run.
        world: its experiment, built; the final model is loaded into it.
        answers: the policy's short form, such as ``none`` or ``rounded:2``; where it is that of the run's own section
            [service], the keys there hold.
        most: images that are answered at most; ``None``: any number.

    Raises:
        InputError: there is no model or no such policy, or the policy needs something that the run does not have.
    """
    own = ServiceConfig.of(world.experiment)
    if own is not None and own.method == answers:
        return in_process(folder, world, own, most)
    return in_process(folder, world, validated(ServiceConfig, {"method": answers}, "answers"), most)
