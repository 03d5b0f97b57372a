"""A client's part of secure aggregation: SecAgg (Bonawitz et al. 2017) over Flower's messages.

Four messages a round: public keys; shares of this round's secrets, encrypted for each other client; the masked upload;
and of those shares the ones by which the server can take off the masks of the sum. All secrets are of one round and
come from the operating system, never from the experiment's seed; they are forgotten with the last answer.

A client gives out the seed's share of clients that survived or the key's share of clients that dropped out, never both
of one: with both the server could read that client's upload. In one round it does all this for one set of clients, and
for one set of survivors: the difference of two sums is an upload.
"""

import os
from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from fedpriv.algorithms.secure_aggregation.secrets import KEY_BYTES, agreed, mask, shares
from fedpriv.clients.answering import Answering, partition_of, trained_with
from fedpriv.clients.memory import kept
from fedpriv.core.algorithm import SharedNoise
from fedpriv.core.errors import RefusedError
from fedpriv.core.federated import masked_weights
from fedpriv.core.randomness import Secret
from fedpriv.core.wire import pack
from fedpriv.core.world import State, World
from fedpriv.mechanisms.machinery.quantisation import encoded
from fedpriv.mechanisms.machinery.whole_numbers import Words, flat, least_survivors, masked_counts, quantised

_STATE = "secure-aggregation"
_NONCE_BYTES = 12
T = TypeVar("T")


def train_masked(answering: Answering, message: Message, context: Context) -> Message:
    """Train, and reply with an upload of which the server can read the sum only."""
    world, upload, own = answering.trained(message, context, ("clients", "sum"))
    with answering.silent(world.experiment, context):
        reply = masked_upload(message, context, world, upload, own)
    reply["client"] = trained_with(world, partition_of(context))
    return Message(reply, reply_to=message)


def offer_keys(message: Message, context: Context) -> Message:
    """Make two pairs of keys for a round and reply with the public halves."""
    secret, secret_channel = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    offered = {
        "public": secret.public_key().public_bytes_raw(),
        "channel": secret_channel.public_key().public_bytes_raw(),
    }
    _remember(
        context,
        round=int(message.metadata.group_id),
        stage="keys",
        secret=secret.private_bytes_raw(),
        secret_channel=secret_channel.private_bytes_raw(),
        **offered,
    )
    return _reply(message, **offered)


def share_secrets(message: Message, context: Context) -> Message:
    """Split this round's seed and key among the clients named in the message; each part is encrypted for its client."""
    asked, own = _asked(message), _at(message, context, "keys")
    me, clients = partition_of(context), _many(asked, "clients", int)
    publics, channels = _many(asked, "public", bytes), _many(asked, "channel", bytes)
    needed = least_survivors(len(clients))
    if len(clients) < 2 or len({*publics, *channels}) != 2 * len(clients) or sorted(set(clients)) != clients:
        raise ValueError("secure aggregation needs two clients or more, with keys that are all different")
    place = clients.index(me)
    if (publics[place], channels[place]) != (own["public"], own["channel"]):
        raise ValueError("the server passes on another key than this client's")
    _settle(message, context, "clients", clients)
    seed, private = os.urandom(KEY_BYTES), X25519PrivateKey.from_private_bytes(_bytes(own, "secret_channel"))
    seed_shares = shares(seed, needed, len(clients))
    key_shares = shares(_bytes(own, "secret"), needed, len(clients))
    keys = [agreed(private, channel, "channel") for channel in channels]
    ciphertexts = [
        _sealed(keys[k], seed_shares[k] + key_shares[k], me, other) for k, other in enumerate(clients) if other != me
    ]
    _remember(
        context,
        **dict(own) | {"stage": "shares", "seed": seed, "clients": clients, "publics": publics, "channel_keys": keys},
        seed_share=seed_shares[place],
        key_share=key_shares[place],
    )
    return _reply(message, to=[other for other in clients if other != me], ciphertexts=ciphertexts)


def masked_upload(
    message: Message, context: Context, world: World, upload: State, secret: Secret | None = None
) -> RecordDict:
    """Return an upload that says nothing by itself: in whole numbers, and masked towards every other client."""
    federation = world.experiment.federation
    if secret is not None and world.experiment.mechanism.noise_at == "sum":
        number = int(str(message.content.config_records["task"]["round"]))
        share, signs = world.plans[partition_of(context)].share_of_noise, world.signs(number)
        words = encoded(flat(upload.parameters) / share.bound, share.variance, signs, secret.stream("share").numpy())
        return masked(message, context, words, share.survivors)
    weight = masked_weights(world.sizes.tolist(), federation.weighting)[partition_of(context)]
    values = flat({**upload.parameters, **{f"buffers/{name}": value for name, value in upload.buffers.items()}})
    return masked(message, context, quantised(weight * values, federation.secure_limit))


def masked_votes(message: Message, context: Context, votes: Tensor, classes: int, noise: SharedNoise) -> RecordDict:
    """Return the reply of a client whose votes (t, Q) are summed under masks, with its share of the noise."""
    words = masked_counts(votes, classes, noise.sigma, noise.clients, noise.stream)
    return masked(message, context, words, least_survivors(noise.clients))


def masked(message: Message, context: Context, words: Words, least: int = 0) -> RecordDict:
    """Return whole numbers modulo 2^32 (N,), masked towards every other client."""
    asked, own = _asked(message, "shares"), _at(message, context, "shares")
    number = int(message.metadata.group_id)
    if int(str(message.content.config_records["task"]["round"])) != number:
        raise ValueError(f"the keys of round {number} mask no upload of another round")
    me, clients = partition_of(context), _many(own, "clients", int)
    held: dict[int, tuple[bytes, bytes]] = {me: (_bytes(own, "seed_share"), _bytes(own, "key_share"))}
    keys = dict(zip(clients, _many(own, "channel_keys", bytes), strict=True))
    for other, ciphertext in zip(_many(asked, "from", int), _many(asked, "ciphertexts", bytes), strict=True):
        opened = _opened(keys[other], ciphertext, other, me)
        held[other] = (opened[: len(opened) // 2], opened[len(opened) // 2 :])
    least = max(least, least_survivors(len(clients)))
    if len(held) < least:
        raise ValueError(f"shares of {len(held)} clients are too few to mask an upload towards")
    words = (
        words
        + mask(_bytes(own, "seed"), len(words))
        + _pairwise(own, me, [other_client for other_client in held if other_client != me], len(words))
    )
    _remember(
        context,
        **dict(own) | {"stage": "masked", "least": least},
        held=list(held),
        seed_shares=[pair[0] for pair in held.values()],
        key_shares=[pair[1] for pair in held.values()],
    )
    return RecordDict({"upload": pack({"masked": torch.from_numpy(words.view(np.int32))})})


def give_shares(message: Message, context: Context) -> Message:
    """Reply with the shares that take the masks off the sum, and forget this round's secrets."""
    asked, own = _asked(message), _at(message, context, "masked")
    survivors, dropped, held = _many(asked, "survivors", int), _many(asked, "dropped", int), _many(own, "held", int)
    context.state.config_records.pop(_STATE)
    if sorted({*survivors, *dropped}) != sorted(held) or set(survivors) & set(dropped):
        raise ValueError("every client that is masked towards either survived or dropped out")
    if len(survivors) < int(str(own["least"])):
        raise ValueError(f"the sum of {len(survivors)} clients is not unmasked")
    _settle(message, context, "survivors", survivors)
    seeds = dict(zip(held, _many(own, "seed_shares", bytes), strict=True))
    keys = dict(zip(held, _many(own, "key_shares", bytes), strict=True))
    return _reply(message, seeds=[seeds[client] for client in survivors], keys=[keys[client] for client in dropped])


HANDLERS = {"masked": train_masked}
"""What clients do with messages that ask for uploads, by their kinds."""

QUERIES = {"keys": offer_keys, "shares": share_secrets, "unmask": give_shares}
"""What clients do with messages before and after an upload, by their kinds."""


def _pairwise(own: ConfigRecord, me: int, others: Sequence[int], count: int) -> Words:
    """The sum of the masks shared with each other client: one of the two adds it, the other takes it off."""
    total = np.zeros(count, dtype=np.uint32)
    publics = dict(zip(_many(own, "clients", int), _many(own, "publics", bytes), strict=True))
    private = X25519PrivateKey.from_private_bytes(_bytes(own, "secret"))
    for other in others:
        words = mask(agreed(private, publics[other], "mask"), count)
        total = total + words if me > other else total - words
    return total


def _sealed(key: bytes, text: bytes, sender: int, receiver: int) -> bytes:
    """Encrypt for another client; the key is that of both directions, so each text has a nonce of its own."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, f"{sender} {receiver}".encode())


def _opened(key: bytes, sealed: bytes, sender: int, receiver: int) -> bytes:
    """Decrypt what another client encrypted for this one."""
    nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    try:
        return AESGCM(key).decrypt(nonce, ciphertext, f"{sender} {receiver}".encode())
    except (InvalidTag, ValueError):
        raise ValueError(f"these are not the shares that client {sender} encrypted for client {receiver}") from None


def _asked(message: Message, name: str = "asked") -> ConfigRecord:
    return message.content.config_records[name]


def _at(message: Message, context: Context, stage: str) -> ConfigRecord:
    """What this client remembers of the round in the message, if that is where it stands."""
    records = context.state.config_records
    own = records[_STATE] if _STATE in records else ConfigRecord({"stage": "none"})
    number = int(message.metadata.group_id)
    if own["stage"] != stage or own["round"] != number:
        raise ValueError(f"secure aggregation: round {number} is not at {stage!r} here, but at {own['stage']!r}")
    return own


def _settle(message: Message, context: Context, name: str, clients: Sequence[int]) -> None:
    """Note whom a round is about, and refuse others, also where the server begins the round anew."""
    number, digest = int(message.metadata.group_id), sha256(repr(sorted(clients)).encode()).digest()
    if kept(context, f"{name}-{number}", digest) != digest:
        raise RefusedError(f"secure aggregation: round {number} had other {name} before")


def _remember(context: Context, **values: object) -> None:
    context.state.config_records[_STATE] = ConfigRecord(values)  # type: ignore[arg-type]


def _reply(message: Message, **values: object) -> Message:
    return Message(RecordDict({"answer": ConfigRecord(values)}), reply_to=message)  # type: ignore[arg-type]


def _bytes(record: ConfigRecord, key: str) -> bytes:
    value = record[key]
    if not isinstance(value, bytes):
        raise TypeError(f"{key} is not a string of bytes")
    return value


def _many(record: ConfigRecord, key: str, kind: type[T]) -> list[T]:
    value = record[key]
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise TypeError(f"{key} is {value!r}, expected a list of {kind.__name__}")
    return [each for each in value if isinstance(each, kind)]
