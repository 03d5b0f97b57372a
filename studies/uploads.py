"""What all clients of an experiment upload in its first round, and what the adversary hears of it."""

from fedpriv.attacks.observation import Observation
from fedpriv.core.lab.victims import upload_of
from fedpriv.core.world import State, World
from fedpriv.server.tap import observe
from fedpriv.server.uploads import Upload

FIRST = 1


def sent(world: World, state: State | None = None) -> list[Upload]:
    """Return every client's upload; ``state``: what they are sent, the initial one unless given."""
    before = world.initial if state is None else state
    return [upload_of(world, client, before, FIRST) for client in range(len(world.partitions))]


def heard(world: World, state: State | None = None) -> tuple[Observation, ...]:
    """Return what the threat model lets the adversary hear of these uploads."""
    return observe(world, FIRST, world.initial if state is None else state, sent(world, state))
