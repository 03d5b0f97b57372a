"""The listener's records: an observation of each upload and the experiment, by run, and counts of what passed."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor, nn

from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.files import write_whole
from fedpriv.core.plan import plan_client
from fedpriv.core.reading import read_file
from fedpriv.core.wire import unpack
from fedpriv.data.datasets import load_dataset
from fedpriv.deploy.messages import ConnectionKind, Exchange
from fedpriv.gradients import Vector
from fedpriv.mechanisms.machinery.redistribution import Redistribution
from fedpriv.server.tap import public_settings

LISTENED = "listener.json"
EXPERIMENT = "experiment.json"


class NotReadableError(ValueError):
    """Something passed that is no upload which an observation can be made of; the text says why."""


@dataclass(frozen=True)
class Listened:
    """What passed while the listener was there."""

    address: str  # where it listened
    server: str  # the SuperLink
    connections: dict[str, int]  # how many it passed on, by kind: http, tls, silent, other
    bytes_up: int = 0  # from SuperNodes to the SuperLink
    bytes_down: int = 0  # from the SuperLink to SuperNodes
    exchanges: int = 0  # questions to SuperNodes whose answers it has read, too
    uploads: int = 0  # how many of them it has stored
    unread: tuple[str, ...] = ()  # why others were not, each reason once
    unanswered: int = 0  # connections that it could not pass on, since no SuperLink answered

    @property
    def is_encrypted(self) -> bool:
        """Whether everything that passed was TLS."""
        return self.connections.get(ConnectionKind.TLS, 0) > 0 and self.connections.get(ConnectionKind.HTTP, 0) == 0

    @property
    def verdict(self) -> str:
        """What the listener has, in one sentence."""
        if self.unanswered and not self.connections:
            return f"The network listener has passed on nothing: no SuperLink answered on {self.server}."
        passed = (
            f"The network listener between SuperNodes and SuperLink passed on {sum(self.connections.values())} "
            f"connections ({(self.bytes_up + self.bytes_down) / 1e6:.1f} MB)"
        )
        if self.is_encrypted:
            return f"{passed}, all of them TLS: it could read nothing, and has stored no upload."
        if not self.uploads:
            why = f" ({self.unread[0]})" if self.unread else ""
            return f"{passed} and has stored no upload{why}."
        return f"{passed} without TLS: it has read {self.exchanges} exchanges and stored {self.uploads} uploads."


_LISTENED = TypeAdapter(Listened)


def write_listened(folder: Path, listened: Listened) -> None:
    """Write ``listener.json`` whole."""
    write_whole(folder / LISTENED, _LISTENED.dump_json(listened, indent=2) + b"\n")


def read_listened(folder: Path) -> Listened:
    """Read ``listener.json``."""
    listened = read_file(folder / LISTENED, Listened)
    if listened is None:
        raise InputError(f"{folder} is not the folder of a listener: it has no {LISTENED}")
    return listened


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
        raise NotReadableError(f"a training message that does not fit: {' '.join(str(error).split())[:200]}") from None


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
