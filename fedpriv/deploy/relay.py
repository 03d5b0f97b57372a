"""The listener's reverse proxy on TCP: passes on every byte unchanged, and a copy to the follower on its own thread."""

import asyncio
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from torch import Tensor, nn

from fedpriv.attacks.observation import Observation, PublicSettings, write_observation
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, one_line
from fedpriv.core.files import write_whole, writing, writing_to
from fedpriv.core.plan import plan_client
from fedpriv.core.wire import unpack
from fedpriv.data.datasets import load_dataset
from fedpriv.deploy.folder import cannot_listen
from fedpriv.deploy.messages import Conversation, Exchange, Messages, Spoken
from fedpriv.deploy.report import LISTENED, ConnectionKind, Listened, read_listened, write_listened
from fedpriv.gradients import Vector
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.server.tap import public_settings

_MOST_REASONS = 20


class NotReadableError(ValueError):
    """Something passed that is no upload which an observation can be made of; the text says why."""


def observation_in(exchange: Exchange) -> tuple[Experiment, Observation]:
    """What an exchange says: the experiment, and the upload with what is public about it."""
    question, answer = exchange.question, exchange.answer
    try:
        experiment = Experiment.model_validate_json(str(question.config_records["task"]["experiment"]))
        round_number = int(str(question.config_records["task"]["round"]))
        client = int(str(answer.metric_records["client"]["partition"]))
        examples = int(str(answer.metric_records["client"]["examples"]))
        before, upload = unpack(question.array_records["parameters"]), unpack(answer.array_records["upload"])
        settings, shares = _public(experiment, client, examples, before)
        return experiment, Observation(round_number, client, before, upload, settings, shares)
    except KeyError as error:
        raise NotReadableError(f"a training message without {error}") from None
    except (ValueError, TypeError) as error:
        raise NotReadableError(f"a training message that does not fit: {one_line(error)[:200]}") from None


def _public(
    experiment: Experiment, client: int, examples: int, parameters: Vector
) -> tuple[PublicSettings, Redistribution | None]:
    """What the messages and the data set's name tell everybody: no seed is needed for any of it."""
    dataset = load_dataset(experiment.data, experiment.seed)
    shares = _shares(experiment, parameters)
    plan = plan_client(experiment, client, examples, [value.numel() for value in parameters.values()], shares)
    return public_settings(experiment, dataset, plan), shares


def _shares(experiment: Experiment, parameters: Vector) -> Redistribution | None:
    """How the noise is shared out, where it follows from the shapes of the parameters."""

    def public(_: int) -> tuple[nn.Module, Tensor]:
        raise NotReadableError("mechanism.redistribution = 'public': the shares of the noise are in no message")

    return experiment.mechanism.redistributed(parameters, public)


class Follower:
    """Follows all connections of one listener, which adds to what passed before. Not for several threads at once."""

    def __init__(self, folder: Path, listened: Listened) -> None:
        self._folder = folder
        self._noted = listened  # without connections that are open
        self._written: Listened | None = None
        self._messages = Messages()
        self._conversations = defaultdict[int, Conversation](Conversation)

    @property
    def listened(self) -> Listened:
        """What passed so far."""
        kinds = Counter(self._noted.connections) + Counter(str(talk.kind) for talk in self._conversations.values())
        return replace(self._noted, connections=dict(sorted(kinds.items())))

    def asked(self, number: int, data: bytes) -> None:
        """Follow what a SuperNode said on connection ``number``."""
        self._count(bytes_up=len(data))
        self._conversations[number].asked(data)

    def answered(self, number: int, data: bytes) -> None:
        """Follow what the SuperLink said on connection ``number``."""
        self._count(bytes_down=len(data))
        for spoken in self._conversations[number].answered(data):
            self._hear(spoken)

    def closed(self, number: int) -> None:
        """Forget a connection."""
        conversation = self._conversations.pop(number, None)
        kind = conversation.kind if conversation else ConnectionKind.SILENT
        self._noted = replace(self._noted, connections=Counter(self._noted.connections) + Counter([str(kind)]))

    def unanswered(self) -> None:
        """Count a connection that found no SuperLink."""
        self._count(unanswered=1)

    def write(self) -> None:
        """Write down what passed so far, where that is news."""
        listened = self.listened
        if listened != self._written:
            write_listened(self._folder, listened)
            self._written = listened

    def note(self, exchange: Exchange) -> None:
        """Store the upload in an exchange, or the reason why it has none that can be stored."""
        self._count(exchanges=1)
        if exchange.kind.startswith("train."):
            self._give_up(f"a {exchange.kind} message: its upload is not sent as it is")
        if exchange.kind != "train":
            return
        try:
            experiment, observation = observation_in(exchange)
        except (NotReadableError, InputError) as error:
            self._give_up(str(error))
            return
        run = self._folder / f"run-{exchange.run_id}"
        (run / "observations").mkdir(parents=True, exist_ok=True)
        write_whole(run / "experiment.json", f"{experiment.to_json()}\n".encode())
        write_observation(run / "observations", observation)
        self._count(uploads=1)

    def _hear(self, spoken: Spoken) -> None:
        try:
            for exchange in self._messages.hear(spoken):
                self.note(exchange)
        except Exception as error:  # noqa: BLE001 - whatever passes (anybody may send it), the listener goes on
            self._give_up(f"{spoken.path}: {type(error).__name__}: {one_line(error)[:200]}")

    def _give_up(self, reason: str) -> None:
        """Note why something could not be read."""
        known = self._noted.unread
        if reason not in known and len(known) < _MOST_REASONS:
            self._noted = replace(self._noted, unread=(*known, reason))

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._noted, name) + number for name, number in more.items()}
        self._noted = replace(self._noted, **counts)


_PIECE = 1 << 16
_WRITE_SECONDS = 1.0

Address = tuple[str, int]


def listen(at: Address, server: Address, folder: Path, tell: Callable[[str], None]) -> Listened:
    """Pass on connections until Ctrl-C (or SIGTERM), and write down what can be read; returns what passed."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        follower = Follower(folder, _passed_before(folder, at, server))
        follower.write()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="follower") as thread:
        asyncio.run(_serve(at, _Relay(server, follower, thread, tell), tell))
    # What has passed is heard out by now.
    with writing(""):
        follower.write()
    return follower.listened


def _passed_before(folder: Path, at: Address, server: Address) -> Listened:
    """What an earlier listener has written in this folder: one that has died and is started again goes on."""
    if not (folder / LISTENED).exists():
        return Listened(_text(at), _text(server), {})
    return replace(read_listened(folder), address=_text(at), server=_text(server))


async def _serve(at: Address, relay: "_Relay", tell: Callable[[str], None]) -> None:
    """Listen until a signal comes."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        listening = await asyncio.start_server(relay.carry, *at)
    except OSError as error:
        raise cannot_listen(_text(at), error) from None
    tell(f"listening on {_text(at)}, passing on to {_text(relay.server)}; Ctrl-C ends it")
    writing = asyncio.create_task(relay.write_now_and_then())
    await ended.wait()
    writing.cancel()
    listening.close()
    await relay.cut()


class _Relay:
    """Carries connections to the server."""

    def __init__(
        self, server: Address, follower: Follower, thread: ThreadPoolExecutor, tell: Callable[[str], None]
    ) -> None:
        self.server = server
        self._follower, self._thread, self._tell = follower, thread, tell
        self._answers = True
        self._numbers = count()
        self._carrying: set[asyncio.Task[None]] = set()

    async def carry(self, node: asyncio.StreamReader, to_node: asyncio.StreamWriter) -> None:
        """Carry one connection of a SuperNode to its end."""
        task = asyncio.ensure_future(self._carry(next(self._numbers), node, to_node))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        with suppress(asyncio.CancelledError):
            await task

    async def cut(self) -> None:
        """End all connections."""
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def write_now_and_then(self) -> None:
        """Keep the account on disk up to date; a listener that is killed leaves it behind."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            with suppress(OSError):  # tried again soon; the last time it counts
                await loop.run_in_executor(self._thread, self._follower.write)

    async def _carry(self, number: int, node: asyncio.StreamReader, to_node: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection(*self.server)
        except OSError as error:
            to_node.close()  # no SuperLink there (yet): the SuperNode tries again
            if self._answers:
                self._tell(f"no SuperLink answers on {_text(self.server)}: {error}")
            self._answers = False
            self._thread.submit(self._follower.unanswered)
            return
        self._answers = True
        up = asyncio.create_task(self._pass_on(node, to_server, partial(self._follower.asked, number)))
        down = asyncio.create_task(self._pass_on(server, to_node, partial(self._follower.answered, number)))
        try:
            await asyncio.gather(up, down)
        except OSError:
            pass  # one end has vanished; the other is told by closing below
        finally:
            up.cancel()
            down.cancel()
            to_server.close()
            to_node.close()
            self._thread.submit(self._follower.closed, number)

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, hear: Callable[[bytes], None]
    ) -> None:
        """Pass on one direction to its end; heard first, so that a request is heard before its reply."""
        while data := await source.read(_PIECE):
            self._thread.submit(hear, data)
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
