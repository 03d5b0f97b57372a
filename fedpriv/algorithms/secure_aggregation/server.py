"""The server's part of secure aggregation: it passes on keys and shares, adds up masked uploads, and unmasks the sum.

SecAgg (Bonawitz et al. 2017) over Flower's messages; the client's part and what it refuses is in client.py. A
client may vanish at any of the four steps: before its masked upload it is left out, and its masks are rebuilt from the
others' shares; after it, its upload is in the sum. Fewer than two thirds end the round, and so do fewer than the
clients whose shares are the whole noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedpriv.accounting.skellam import padded
from fedpriv.algorithms.secure_aggregation.secrets import KEY_BYTES, agreed, combined, mask
from fedpriv.core.errors import RunFailedError
from fedpriv.core.federated import masked_weights
from fedpriv.core.records import Failure
from fedpriv.core.world import State
from fedpriv.mechanisms.machinery.quantisation import decoded
from fedpriv.mechanisms.machinery.whole_numbers import Words, least_survivors, restored, split, votes_limit
from fedpriv.server.exchange import Federation, Reached, Replies
from fedpriv.server.uploads import Upload, raised, read_upload, refusal


@dataclass(frozen=True)
class _Round:
    """What a round has come to: who is still in it, and who was left out."""

    clients: Reached
    number: int
    failures: dict[int, Failure]

    def ask(self, kind: str, contents: Mapping[int, RecordDict]) -> dict[int, Message]:
        """Send each client its content; returns the answers, by client, ascending; who gives none is left out."""
        received = self.clients.send(kind, self.number, contents)
        for client in contents:
            if client not in self.clients.nodes:
                self.leave_out(client, self.clients.reason(client))
            elif client not in received:
                self.leave_out(client, f"did not reply to {kind} in time")
            elif received[client].has_error():
                self.leave_out(client, raised(received[client]))
        return {client: answer for client, answer in received.items() if not answer.has_error()}

    def leave_out(self, client: int, reason: str) -> None:
        """Note why a client takes no further part."""
        self.failures.setdefault(client, refusal(client, reason))

    def require(self, there: int, needed: int, what: str) -> None:
        """End the round where too few clients are left for their sum to be unmasked."""
        if there < needed:
            reasons = "; ".join(f"client {failure.client} {failure.reason}" for failure in self.failures.values())
            raise RunFailedError(
                f"round {self.number}: {there} {'client has' if there == 1 else 'clients have'} {what}, and secure "
                f"aggregation needs {needed} of them: {reasons}"
            )


def ask_for_sum(federation: Federation, number: int, states: Mapping[int, State]) -> Replies:
    """Have clients train and return the mean of their uploads, of which nothing else reaches the server."""
    world = federation.world
    settings, initial = world.experiment.federation, world.initial
    if world.experiment.mechanism.noise_at == "sum":
        return _ask_for_noisy_sum(federation, number, states)
    questions = federation.questions(number, states)
    count = sum(value.numel() for vector in (initial.parameters, initial.buffers) for value in vector.values())
    masked = ask_for_masked_sum(federation.reached, number, questions, "train.masked", count)
    factors = masked_weights(world.sizes.tolist(), settings.weighting)
    weight = sum(factors[client] for client in masked.replies.clients)
    mean = restored(masked.total, len(masked.replies.clients), settings.secure_limit) / weight

    def seen(words: Words) -> State:
        return _state(restored(words >> np.uint32(10), 1, settings.secure_limit), initial)

    return _replies(states, masked, seen, _state(mean, initial))


def _ask_for_noisy_sum(federation: Federation, number: int, states: Mapping[int, State]) -> Replies:
    """As :func:`ask_for_sum`, where clients send whole numbers with shares of noise (machinery/quantisation.py)."""
    world = federation.world
    initial, share = world.initial, world.plans[0].share_of_noise
    dimension = sum(value.numel() for value in initial.parameters.values())
    nothing = {name: torch.zeros_like(value, device="cpu") for name, value in initial.buffers.items()}

    def state(words: Words, clients: int) -> State:
        values = decoded(words, dimension, world.signs(number)) * (share.bound / clients)
        return State(split(values, initial.parameters), nothing)

    questions = federation.questions(number, states)
    count = padded(dimension)
    masked = ask_for_masked_sum(federation.reached, number, questions, "train.masked", count, share.survivors)
    return _replies(states, masked, lambda words: state(words, 1), state(masked.total, len(masked.replies.clients)))


def _replies(states: Mapping[int, State], masked: "MaskedSum", seen: Callable[[Words], State], mean: State) -> Replies:
    uploads = tuple(replace(upload, state=seen(_words(upload))) for upload in masked.replies.uploads)
    bytes_down = sum(states[client].nbytes for client in masked.asked)
    return replace(masked.replies, uploads=uploads, bytes_down=bytes_down, mean=mean)


@dataclass(frozen=True)
class MaskedSum:
    """The sum of what clients sent under masks."""

    total: Words  # modulo 2^32, (N,), without masks
    replies: Replies  # an upload for each client that is in it, whose numbers are masked
    asked: tuple[int, ...]  # who was asked for a masked upload


def ask_for_masked_sum(
    federation: Reached, number: int, questions: Mapping[int, RecordDict], kind: str, count: int, least: int = 0
) -> MaskedSum:
    """Have clients answer under masks and return the sum of their answers, of which nothing else reaches the server."""
    going = _Round(federation, number, {})
    needed = max(2, least, least_survivors(len(questions)))
    keys = _public_keys(going, tuple(questions))
    going.require(len(keys), needed, "sent keys")
    shares = _shares(going, keys)
    going.require(len(shares), needed, "shared their secrets")
    uploads = _masked(going, shares, questions, kind, count)
    going.require(len(uploads), needed, "sent masked uploads")
    survivors = tuple(upload.client for upload in uploads)
    dropped = tuple(client for client in shares if client not in survivors)
    total = _unmasked(going, keys, survivors, dropped, [_words(upload) for upload in uploads])
    failures = [going.failures[client] for client in sorted(going.failures) if client not in survivors]
    return MaskedSum(total, Replies.of([*uploads, *failures], 0), tuple(shares))


def ask_for_votes(
    federation: Reached,
    number: int,
    questions: Mapping[int, RecordDict],
    shape: tuple[int, int],
    each: int,
    sigma: float,
) -> tuple[NDArray[np.float64], Replies]:
    """Have clients vote under masks and return the sum of their noisy counts; see ``Transport.ask_for_votes``."""
    limit = votes_limit(each, sigma, len(questions))
    found = ask_for_masked_sum(federation, number, questions, "train.masked_votes", shape[0] * shape[1])
    return restored(found.total, len(found.replies.clients), limit).reshape(shape).numpy(), found.replies


def _public_keys(going: _Round, clients: Sequence[int]) -> dict[int, tuple[bytes, bytes]]:
    answers = going.ask("query.keys", {client: RecordDict() for client in clients})
    keys = {}
    for client, answer in answers.items():
        pair = [key for key in (_answer(answer, "public"), _answer(answer, "channel")) if isinstance(key, bytes)]
        if [len(key) for key in pair] == [KEY_BYTES, KEY_BYTES]:
            keys[client] = (pair[0], pair[1])
        else:
            going.leave_out(client, "sent no keys")
    return keys


def _shares(going: _Round, keys: Mapping[int, tuple[bytes, bytes]]) -> dict[int, dict[int, bytes]]:
    """For each client its encrypted shares, by the client that they are for."""
    everybody = sorted(keys)
    publics, channels = ([keys[client][k] for client in everybody] for k in (0, 1))
    asked = ConfigRecord({"clients": everybody, "public": publics, "channel": channels})
    answers = going.ask("query.shares", {client: RecordDict({"asked": asked}) for client in everybody})
    shares: dict[int, dict[int, bytes]] = {}
    for client, answer in answers.items():
        wanted = [other for other in everybody if other != client]
        ciphertexts = _list_of_bytes(answer, "ciphertexts", len(wanted))
        if ciphertexts is None or _answer(answer, "to") != wanted:
            going.leave_out(client, "sent no shares of its secrets")
        else:
            shares[client] = dict(zip(wanted, ciphertexts, strict=True))
    return shares


def _masked(
    going: _Round, shares: Mapping[int, Mapping[int, bytes]], questions: Mapping[int, RecordDict], kind: str, count: int
) -> tuple[Upload, ...]:
    """The masked uploads."""
    contents = {}
    for client in shares:
        senders = [other for other in shares if other != client]
        passed_on = ConfigRecord({"from": senders, "ciphertexts": [shares[other][client] for other in senders]})
        contents[client] = RecordDict({**questions[client], "shares": passed_on})
    like = State({"masked": torch.zeros(count, dtype=torch.int32)}, {})
    uploads = []
    for client, answer in going.ask(kind, contents).items():
        read = read_upload(answer, client, like, going.clients.allowed_masked(client))
        if isinstance(read, Failure):
            going.leave_out(client, read.reason)
        else:
            uploads.append(read)
    return tuple(uploads)


def _unmasked(
    going: _Round,
    keys: Mapping[int, tuple[bytes, bytes]],
    survivors: Sequence[int],
    dropped: Sequence[int],
    words: Sequence[Words],
) -> Words:
    """The sum of the survivors' uploads: masks of each survivor's own are taken off, and those towards the dropped."""
    asked = ConfigRecord({"survivors": list(survivors), "dropped": list(dropped)})
    answers = going.ask("query.unmask", {client: RecordDict({"asked": asked}) for client in survivors})
    seeds: dict[int, list[bytes]] = {}
    secrets: dict[int, list[bytes]] = {}
    for client, answer in answers.items():
        seed_shares = _list_of_bytes(answer, "seeds", len(survivors))
        key_shares = _list_of_bytes(answer, "keys", len(dropped))
        if seed_shares is None or key_shares is None:
            going.leave_out(client, "sent no shares to unmask with")
        else:
            seeds[client], secrets[client] = seed_shares, key_shares
    enough = least_survivors(len(keys))
    going.require(len(seeds), enough, "sent shares to unmask with")
    givers, everybody = list(seeds)[:enough], sorted(keys)
    places = [everybody.index(giver) + 1 for giver in givers]
    count = len(words[0])
    total = np.zeros(count, dtype=np.uint32)
    for each in words:
        total = total + each
    try:
        for k in range(len(survivors)):
            total = total - mask(combined(places, [seeds[giver][k] for giver in givers]), count)
        for k, gone in enumerate(dropped):
            secret = X25519PrivateKey.from_private_bytes(combined(places, [secrets[giver][k] for giver in givers]))
            for client in survivors:
                words_between = mask(agreed(secret, keys[client][0], "mask"), count)
                total = total - words_between if client > gone else total + words_between
    except ValueError as error:
        raise RunFailedError(f"round {going.number}: the shares of the clients' secrets do not fit: {error}") from None
    return total


def _answer(message: Message, key: str) -> object:
    """One value of a client's answer; ``None`` where it has none."""
    record = message.content.config_records.get("answer")
    return record.get(key) if record is not None else None


def _list_of_bytes(message: Message, key: str, count: int) -> list[bytes] | None:
    """So many strings of bytes of a client's answer; ``None`` where it has something else."""
    value = _answer(message, key)
    if not isinstance(value, list) or len(value) != count:
        return None
    strings = [text for text in value if isinstance(text, bytes)]
    return strings if len(strings) == count else None


def _words(upload: Upload) -> Words:
    """The masked numbers of an upload."""
    return upload.state.parameters["masked"].numpy().view(np.uint32)


def _state(values: torch.Tensor, like: State) -> State:
    """Return tensors like those of a state out of numbers laid end to end."""
    count = sum(value.numel() for value in like.parameters.values())
    return State(split(values[:count], like.parameters), split(values[count:], like.buffers))
