"""What clients are asked for, as the run folder has it and the ledger counts it.

A question is known by the digest of what was sent: asked the same again, as after a kill, a client answers the same and
releases nothing new. Asked something else in the same round it would release once more, and that is counted.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from fedpriv.core.budget import Budget
from fedpriv.core.errors import InputError
from fedpriv.core.records import Asked, Origin, ReleaseKind
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import State, World


def questions(world: World, round_number: int, asked: Sequence[tuple[State, Sequence[int]]]) -> tuple[Asked, ...]:
    """Return a round's lines of asked.jsonl."""
    origin = _origin(world)
    lines = []
    for state, clients in [line for line in asked if line[1]] or asked[:1]:
        released = [json.dumps(world.plans[client].released()) for client in clients]
        kinds = {text: number for number, text in enumerate(dict.fromkeys(released))}
        sent = "" if not world.experiment.draws_noise else world.sent(state).hex()
        releases = tuple(ReleaseKind(**json.loads(text)) for text in kinds)
        lines.append(
            Asked(round_number, tuple(clients), sent, origin, releases, tuple(kinds[text] for text in released))
        )
    return tuple(lines)


def rounds_by_client(lines: Iterable[Asked]) -> dict[int, tuple[int, ...]]:
    """Return the rounds in which each client was asked; one in which it was asked for two answers is there twice."""
    distinct: dict[int, set[tuple[int, str]]] = {}
    for line in lines:
        for client in line.clients:
            distinct.setdefault(client, set()).add((line.round, line.sent))
    return {client: tuple(sorted(number for number, _ in each)) for client, each in distinct.items()}


def released_rounds(lines: Iterable[Asked]) -> tuple[int, ...]:
    """Return the rounds that released a model, ascending; one that was asked two questions is there twice."""
    return tuple(sorted(number for number, _ in {(line.round, line.sent) for line in lines}))


def replay(budget: Budget, lines: Sequence[Asked]) -> None:
    """Note rounds of the past, those that were asked twice included."""
    asked: dict[int, set[int]] = {}
    again: list[tuple[int, list[int]]] = []
    for line in lines:
        if line.round in asked:
            again.append((line.round, [client for client in line.clients if client in asked[line.round]]))
        known = asked.setdefault(line.round, set())
        known |= set(line.clients)
    budget.replay({number: sorted(clients) for number, clients in asked.items()})
    for number, clients in again:
        budget.spend_again(number, clients)


def check_unchanged(world: World, folder: RunFolder) -> None:
    """Refuse to go on with a run in which something was changed that decides what has been released."""
    clients = max((client for line in folder.asked() for client in line.clients), default=0)
    if clients >= len(world.plans):
        raise InputError(
            f"{folder.path / 'asked.jsonl'} names client {clients}, and this run has {len(world.plans)} from number 0"
        )
    if not world.experiment.draws_noise and not any(line.sent for line in folder.asked()):
        return
    path, now = folder.path / "config.toml", _origin(world)
    for line in folder.asked():
        if not line.origin.settings:
            raise InputError(
                f"{folder.path}: a version of fedpriv began this run that did not write down what clients release, so "
                "nothing can be proven about what follows; start a new run"
            )
        for client, kind in zip(line.clients, line.kinds, strict=True):
            change = _change(line.releases[kind], world.plans[client].released())
            if change:
                raise InputError(
                    f"{path} was changed: in round {line.round} client {client} released with {change[0]}, and now it "
                    f"would with {change[1]}; set it as it was, or start a new run"
                )
        _refuse_change(folder, line, now, _PARTS)


def check_data(world: World, folder: RunFolder) -> None:
    """Refuse to attack or audit a run on other data than it was made with, where its digest and secret are known."""
    recorded = [line for line in folder.asked() if line.origin.data]
    if not recorded or not folder.has_secret(world.experiment):
        return
    now = _origin(replace(world, secret=folder.secret(world.experiment)))
    for line in recorded:
        _refuse_change(folder, line, now, ("secret", "data"))


def _refuse_change(folder: RunFolder, line: Asked, now: Origin, parts: Iterable[str]) -> None:
    for part in parts:
        if getattr(line.origin, part) != getattr(now, part):
            raise InputError(
                f"{folder.path}: {_PARTS[part]} after round {line.round} was asked for; undo that, or start a new run"
            )


def check_complete(folder: RunFolder, rounds: int) -> None:
    """Refuse a folder that lacks rounds: its ledger would count fewer releases than there were."""
    checkpoint = folder.load_checkpoint()
    done = 0 if checkpoint is None else checkpoint.round
    recorded = [record.round for record in folder.rounds()]
    until = [number for number in recorded if number <= done]
    kept = checkpoint is None or until == list(range(done + 1))
    missing = {*range(1, done + 1), *recorded} - {0} - {line.round for line in folder.asked()}
    if not 0 <= done <= rounds or not kept or missing:
        raise InputError(f"{folder.path} is damaged: checkpoint, metrics.jsonl and asked.jsonl name different rounds")


# What has become of a run if this part of its origin is another.
_PARTS = {
    "settings": "config.toml was changed where it decides what is released (seed, noise, data, model, training, votes, "
    "clients or algorithm)",
    "secret": "secret.key was replaced",
    "data": "the data were changed",
    "model": "the network's code, or what it is built with, was changed",
}


def _change(before: ReleaseKind, now: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first setting that differs: as it was, and as it is."""
    for section, was in (("mechanism", before.mechanism), ("sampling", before.sampling)):
        for key in dict.fromkeys([*was, *now[section]]):
            old, new = was.get(key), now[section].get(key)
            if old != new:
                return f"{section} {key} = {old}", f"{key} = {new}"
    return None


def _origin(world: World) -> Origin:
    decisive = world.experiment.decisive()
    # The mechanism is recorded on its own.
    del decisive["mechanism"]
    settings = sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    if not world.experiment.draws_noise:
        return Origin(settings)
    secret, data = world.secret.derived("commitment"), world.secret.derived("data", world.dataset.digest)
    return Origin(settings, secret.key.hex(), data.key.hex(), world.model_digest.hex())
