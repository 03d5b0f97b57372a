"""The attacked uploads as only the laboratory knows them: rebuilt from the settings, never shown to the adversary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedpriv.attacks.observation import (
    OTHERS,
    CandidateLists,
    Observation,
    list_observations,
    observation_stem,
    observation_title,
    read_observation,
)
from fedpriv.attacks.referee import Truth
from fedpriv.attacks.settings import Access
from fedpriv.attacks.threat import threat_model
from fedpriv.clients.training import local_upload
from fedpriv.core.errors import InputError
from fedpriv.core.plan import with_seed
from fedpriv.core.randomness import Secret, numpy_stream
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import State, World
from fedpriv.data.datasets import unit_scale
from fedpriv.server.tap import observe
from fedpriv.server.uploads import Upload

_LISTED = 12


@dataclass(frozen=True)
class UploadTarget:
    """An upload that the adversary observed: one client's, or the sum of several."""

    round: int
    clients: tuple[int, ...]  # whose
    crafted: bool = False  # whether the clients had been sent parameters of an active server's own making

    @property
    def client(self) -> int:
        """The client that the observation names."""
        return self.clients[0] if len(self.clients) == 1 else 0

    @property
    def name(self) -> str:
        """How a user names it."""
        return f"{self.round}-{self.client if len(self.clients) == 1 else 'sum'}"

    @property
    def stem(self) -> str:
        """The name of the observation's files, without ending."""
        return observation_stem(self.round, self.client, len(self.clients))

    @property
    def title(self) -> str:
        """What it is, for a person."""
        return observation_title(self.round, self.client, len(self.clients))


def targets(world: World, folder: RunFolder) -> tuple[UploadTarget, ...]:
    """Return the uploads of finished rounds that the settings show to an adversary; without attacks none is kept."""
    adversary = world.experiment.adversary
    if not adversary.attacks and not list_observations(folder.observations):  # those of a listener may be there
        return ()
    threat = threat_model(adversary)
    heard = []
    for record in folder.rounds():
        if record.round not in adversary.rounds or not threat.grants_uploads:
            continue
        if Access.UPLOADS in threat.grants:
            heard += [UploadTarget(record.round, (client,), crafted=True) for client in record.crafted]
            heard += [UploadTarget(record.round, (client,)) for client in record.used[: adversary.victims]]
        else:
            heard += [UploadTarget(record.round, record.crafted, crafted=True)] if record.crafted else []
            heard += [UploadTarget(record.round, record.used)] if record.used else []
    return tuple(heard)


def chosen(heard: Sequence[UploadTarget], names: Sequence[str]) -> tuple[UploadTarget, ...]:
    """Return those of the targets that a user names; all, where none is named."""
    known = {target.name: target for target in heard}
    for name in names:
        if name not in known:
            there = list(known)
            listed = ", ".join(there if len(there) <= _LISTED else [*there[:_LISTED], f"{len(there) - _LISTED} more"])
            raise InputError(f"victim {name}: the adversary did not observe it; observed (as ROUND-CLIENT): {listed}")
    return tuple(known[name] for name in dict.fromkeys(names)) or tuple(heard)


def read_target(world: World, folder: RunFolder, target: UploadTarget) -> Observation:
    """Read the observation."""
    path = folder.observations / f"{target.stem}.safetensors"
    observation = read_observation(path)
    about = (observation.round, observation.client, observation.settings.clients)
    if about != (target.round, target.client, len(target.clients)):
        raise InputError(f"{path} is damaged: it is about {observation.title}")
    own, data = observation.settings, world.dataset
    if (own.shape, own.classes) != (data.shape, data.classes):
        raise InputError(
            f"{path} is damaged: images of shape {own.shape} in {own.classes} classes; "
            f"the run's are of shape {data.shape} in {data.classes}"
        )
    return observation


def surplus(folder: RunFolder, wanted: Sequence[UploadTarget]) -> tuple[str, ...]:
    """Return the names of observations in the folder that the settings do not account for."""
    stems = {target.stem for target in wanted}
    return tuple(path.name for path in list_observations(folder.observations) if path.stem not in stems)


def truth(world: World, target: UploadTarget, asked: Mapping[int, Sequence[int]] | None = None) -> Truth:
    """Rebuild the images of an upload, and draw others from which they are to be picked out."""
    rows = [world.uploaded_rows(client, target.round) for client in target.clients]
    owners = [
        (client, number) for client, part in zip(target.clients, rows, strict=True) for number in range(len(part))
    ]
    chosen_rows = torch.cat(rows)
    others = _others(world, target, chosen_rows, OTHERS)
    return Truth(
        round=target.round,
        client=target.client,
        images=unit_scale(world.dataset.x_train[chosen_rows]),
        labels=world.dataset.kinds(world.true_labels[chosen_rows]),
        used_labels=world.dataset.kinds(world.dataset.y_train[chosen_rows]),
        owners=tuple(owners),
        clients=len(target.clients),
        others=unit_scale(world.dataset.x_train[others]),
        other_labels=world.dataset.kinds(world.dataset.y_train[others]),
        # Labels alone rule candidates out where they are known, or where a client holds few classes.
        labels_known=world.experiment.adversary.knows_labels or world.experiment.data.partition != "iid",
        releases=None if asked is None else _releases(world, target, rows, asked),
        columns=world.dataset.columns,
        tokenizer=None if world.dataset.text is None else world.dataset.text.tokenizer,
    )


def candidates(world: World, target: UploadTarget, known: Truth) -> CandidateLists | None:
    """Return for each image a list of records, itself among them, in random order; no record is in two lists."""
    own = len(known.images)
    rows = torch.cat([world.uploaded_rows(client, target.round) for client in target.clients])
    others = _others(world, target, rows, OTHERS * own)
    each = min(OTHERS, len(others) // own)
    if each == 0 or len(known.images.flatten(1).unique(dim=0)) < own:
        return None
    others = others[: each * own]
    stream = numpy_stream(world.experiment.seed, "candidate order", target.round, target.client)
    order = torch.from_numpy(stream.permutation(own + len(others)))
    place = torch.empty_like(order).index_put((order,), torch.arange(len(order)))
    lists = torch.cat([place[:own, None], place[own:].view(own, each)], dim=1).sort(dim=1).values
    images = unit_scale(world.dataset.x_train[others])
    labels = world.dataset.kinds(world.dataset.y_train[others])
    return CandidateLists(torch.cat([known.images, images])[order], torch.cat([known.used, labels])[order], lists)


def without_mechanism(world: World, observation: Observation, target: UploadTarget) -> Observation:
    """Return the observation that there would be if the clients had sent their uploads as they were; a sum's mean."""
    bare = world.unprotected
    before = State(observation.parameters, bare.initial.buffers)
    (sent,) = observe(bare, target.round, before, bare_uploads(world, before, target))
    return replace(sent, labels=observation.labels, candidates=observation.candidates)


def bare_uploads(world: World, before: State, target: UploadTarget) -> list[Upload]:
    """Return what each client of an upload would have sent, from the state that it had got, without the mechanism."""
    # The same batches, which without a mechanism would not be hidden.
    bare = replace(world.unprotected, plans=with_seed(world.unprotected.plans, world.plans[target.client].seed))
    return [upload_of(bare, client, before, target.round) for client in target.clients]


def upload_of(world: World, client: int, before: State, round_number: int, secret: Secret | None = None) -> Upload:
    """Return what a client of a world uploads in a round, as the server receives it."""
    upload = local_upload(world, client, before, round_number, secret)
    return Upload(client, len(world.partitions[client]), upload)


def approximation(world: World, target: UploadTarget) -> str:
    """Say where an attack on a sum has to simplify: it takes the sum for one client's upload; empty otherwise."""
    if len(target.clients) == 1:
        return ""
    plans = [world.plans[client] for client in target.clients]
    config = world.experiment.mechanism
    simplified = {
        "the clients' weights": world.experiment.federation.weighting == "examples"
        and len({plan.sampling.examples for plan in plans}) > 1,
        "their numbers of local steps": len({plan.steps_per_round for plan in plans}) > 1,
        "their noise": len({plan.config.noise for plan in plans}) > 1,
    }
    differ = [what for what, holds in simplified.items() if holds]
    notes = [f"{', '.join(differ)} differ, and the attack takes them for equal"] if differ else []
    if config.protects_updates:
        notes.append("the mechanism acts on each client's update, and the attack models it as acting on their mean")
    return "; ".join(notes)


def _others(world: World, target: UploadTarget, own: Tensor, count: int) -> Tensor:
    """Rows of training images as likely to be in this upload, from other clients first, no two alike; up to a count."""
    dataset = world.dataset
    stream = numpy_stream(world.experiment.seed, "candidates", target.round, target.client)
    order = stream.permutation(len(dataset.y_train))
    mine = np.concatenate([world.partitions[client] for client in target.clients])
    foreign = np.isin(order, mine, invert=True)
    rows = np.concatenate([order[foreign], order[~foreign & ~np.isin(order, own.numpy())]])
    seen = {dataset.x_train[row].numpy().tobytes() for row in own.tolist()}
    others: list[int] = []
    for row in rows.tolist():
        picture = dataset.x_train[row].numpy().tobytes()
        if picture not in seen and len(others) < count:
            seen.add(picture)
            others.append(row)
    return torch.tensor(others, dtype=torch.int64)


def _releases(
    world: World, target: UploadTarget, rows: Sequence[Tensor], asked: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    """In how many releases each image was used up to this round: all that an eavesdropper may have seen of it."""
    counts: list[int] = []
    for client, used in zip(target.clients, rows, strict=True):
        plan = world.plans[client]
        rounds = [number for number in asked.get(client, ()) if number <= target.round]
        if plan.config.unit == "update":
            counts += [len(rounds)] * len(used)
            continue
        batches = [world.partitions[client][plan.batch(step)] for number in rounds for step in plan.steps(number)]
        counts += [sum(row in batch for batch in batches) for row in used.tolist()]
    return tuple(counts)
