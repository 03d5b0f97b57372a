"""Train the clients that one process answers for together, as far as they do the same; each answers by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from typing_extensions import override

from fedpriv.clients.stack import Stack, same_work, stack_of
from fedpriv.core.wire import record_in, unpack
from fedpriv.core.world import State, World
from fedpriv.gradients.ghost import Entangled


@dataclass(frozen=True)
class _Received(State):
    """What clients were sent and do not change, so that its digest stays what it is."""

    @override
    def digest(self) -> bytes:
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return super().digest()


@dataclass
class Cohort:
    """Who is about to be asked, what they were sent, and what was trained before its client was asked for it."""

    _expected: dict[int, State] = field(default_factory=dict)
    _states: dict[int, tuple[ArrayRecord, State]] = field(default_factory=dict)
    _trained: dict[int, State] = field(default_factory=dict)
    _stacks: list[tuple[World, Stack | Entangled]] = field(default_factory=list)

    def expect(self, messages: Mapping[int, Message]) -> None:
        """Take note of messages that are about to be answered, by client, in their order."""
        self._states, self._trained = {}, {}
        self._expected = {client: self._unpacked(message) for client, message in messages.items()}

    def sent(self, message: Message) -> State:
        """Return the global state in a message; of messages that were expected, one for all that hold the same."""
        known = self._states.get(id(record_in(message.content, "parameters", ArrayRecord)))
        return _received(message) if known is None else known[1]

    def upload(self, world: World, client: int, before: State, round_number: int) -> State | None:
        """Return what leaves a client, trained with those that are asked after it; ``None``: it is trained alone."""
        if client not in self._trained and self._expected.get(client) is before:
            self._train(world, client, before, round_number)
        return self._trained.pop(client, None)

    def _train(self, world: World, client: int, before: State, round_number: int) -> None:
        stack = self._stack(world)
        if isinstance(stack, Entangled):
            return
        work = same_work(world.plans[client])
        alike = (
            other
            for other, state in self._expected.items()
            if state is before and same_work(world.plans[other]) == work
        )
        group = list(islice(alike, stack.most))
        for other in group:
            del self._expected[other]
        uploads = stack.uploads(group, before, round_number)
        if uploads is not None:
            self._trained |= zip(group, uploads, strict=True)

    def _stack(self, world: World) -> Stack | Entangled:
        if not self._stacks or self._stacks[0][0] is not world:
            self._stacks = [(world, stack_of(world))]
        return self._stacks[0][1]

    def _unpacked(self, message: Message) -> State:
        record = record_in(message.content, "parameters", ArrayRecord)
        if id(record) not in self._states:
            # The record is kept, so that no other one takes its place in memory.
            self._states[id(record)] = record, _received(message)
        return self._states[id(record)][1]


def _received(message: Message) -> State:
    parameters, buffers = (record_in(message.content, name, ArrayRecord) for name in ("parameters", "buffers"))
    return _Received(unpack(parameters), unpack(buffers))


class CohortApp(ClientApp):
    """A ClientApp whose clients may be trained together, where an engine says who is about to be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.cohort = Cohort()
        # `World.origin` of the run, where clients may read none but the server's data, as in a simulation; `None`: each
        # client has its own data, and goes on with them for the whole run
        self.origin: bytes | None = None
