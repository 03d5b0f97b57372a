"""Partitions: the training examples of each client. Flower Datasets' partitioners cut by label."""

import contextlib
import inspect
import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from typing_extensions import override

from fedpriv.core.config import DataConfig
from fedpriv.core.config.data import PartitionerConfig
from fedpriv.core.errors import InputError, one_line, optional
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.registry import DATASETS

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

_KEPT = 1024  # clients whose examples are at hand once they were looked up


@dataclass(frozen=True, eq=False)
class Shares(Sequence[np.ndarray]):
    """Which examples each client holds: int64, ascending, never empty; looked up client by client where asked."""

    sizes: np.ndarray  # (C,), int64, how many each of them holds
    find: Callable[[int], np.ndarray]  # client -> its examples

    @override
    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, client: slice) -> tuple[np.ndarray, ...]: ...

    @override
    def __getitem__(self, client: int | slice) -> np.ndarray | tuple[np.ndarray, ...]:
        if isinstance(client, slice):
            return tuple(self[each] for each in range(*client.indices(len(self))))
        return self._known(range(len(self))[client])

    @cached_property
    def _known(self) -> Callable[[int], np.ndarray]:
        return lru_cache(maxsize=_KEPT)(self.find)


def partition_indices(
    labels: np.ndarray, config: DataConfig, clients: int, seed: int, keys: np.ndarray | None = None
) -> Shares:
    """Share the training examples out. The examples are put into a random order first, whatever the kind.

    - ``iid``: equal shares, sizes differing by at most one.
    - ``dirichlet``: each class is cut by its own draw from a symmetric Dirichlet distribution over the clients
      (Yurochkin et al. 2019), redrawn up to ten times while a client is left without an example.
    - ``shards``: the examples, sorted by label, are cut into ``clients * shards_per_client`` shards of equal size, and
      each client gets ``shards_per_client`` of them (McMahan et al. 2017). The few examples at the end that fill no
      shard (fewer than there are shards) belong to nobody.
    - ``overlapping``: each client draws ``examples_per_client`` of all examples without replacement, by its own stream,
      so that several clients hold copies of one example.
    - ``partitioner``: as a partitioner of flwr-datasets cuts them.
    - ``key``: each client is one of those whose examples there are most; what belongs to others is nobody's.
    """
    _check_enough(len(labels), config, clients)
    if config.partition == "overlapping":
        return _drawn(len(labels), config.examples_per_client or 0, clients, seed)
    if config.partition == "key":
        return _by_key(keys, config.name, clients)
    stream = numpy_stream(seed, "partition")
    order = stream.permutation(len(labels))
    if config.partition == "iid":
        return _cut(order, clients)
    seed = int(stream.integers(2**63))
    if config.partitioner is not None:
        return _by_partitioner(labels, order, config.partitioner, keys, clients, seed)
    return _by_label(labels, order, config, clients, seed)


def _drawn(examples: int, each: int, clients: int, seed: int) -> Shares:
    def find(client: int) -> np.ndarray:
        return np.sort(numpy_stream(seed, "share", client).choice(examples, each, replace=False))

    return Shares(np.full(clients, each, dtype=np.int64), find)


def _cut(order: np.ndarray, clients: int) -> Shares:
    """Consecutive pieces, the first ones larger by one where they cannot all be equal."""
    each, more = divmod(len(order), clients)
    sizes = np.full(clients, each, dtype=np.int64)
    sizes[:more] += 1
    ends = np.cumsum(sizes)
    return Shares(sizes, lambda client: np.sort(order[ends[client] - sizes[client] : ends[client]]))


def _by_label(labels: np.ndarray, order: np.ndarray, config: DataConfig, clients: int, seed: int) -> Shares:
    partitioner = _partitioner(config, clients, seed)
    try:
        return _flower_shares(partitioner, {"index": order, "label": labels[order]}, clients)
    except ValueError:
        if config.partition != "dirichlet":
            raise
        raise InputError(
            f"data.alpha = {config.alpha:g} leaves some of federation.clients = {clients} without any of the "
            f"{len(labels)} examples, in eleven draws; raise alpha or have fewer clients"
        ) from None


def _by_partitioner(
    labels: np.ndarray, order: np.ndarray, config: PartitionerConfig, keys: np.ndarray | None, clients: int, seed: int
) -> Shares:
    """As the partitioner cuts examples in a random order, with the columns index, label and, where known, key."""
    partitioner = _flower_partitioner(config, clients, seed, has_keys=keys is not None)
    columns = {"index": order, "label": labels[order]} | ({} if keys is None else {"key": keys[order]})
    try:
        shares = _flower_shares(partitioner, columns, clients)
    except Exception as error:  # noqa: BLE001 (other people's code, with arguments of the user's)
        raise InputError(f"data.partitioner: {config.name}: {one_line(error)}") from None
    if len(shares) < clients:
        allowed = f"data.partitioner makes {len(shares)} partitions"
        raise InputError(key="federation.clients", given=clients, allowed=allowed)
    if not shares.sizes.all():
        empty = int(shares.sizes.argmin())
        raise InputError(
            f"data.partitioner: {config.name} leaves client {empty} without an example; have fewer clients"
        )
    return shares


def _flower_shares(partitioner: "Partitioner", columns: dict[str, np.ndarray], clients: int) -> Shares:
    """The first partitions that it makes of these columns, at most ``clients``."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # some show how far they are
        warnings.simplefilter("ignore")  # each redraw of the Dirichlet partitioner warns
        partitioner.dataset = optional("datasets", "datasets", "data.partition").Dataset.from_dict(columns)
        made = range(min(clients, int(partitioner.num_partitions)))
        parts = (partitioner.load_partition(client).with_format("numpy")[:]["index"] for client in made)
        shares = [np.sort(part) for part in parts]
    return Shares(np.array([len(share) for share in shares], dtype=np.int64), shares.__getitem__)


def _known_partitioners(key: str) -> Any:
    """Flower's partitioners, which take three seconds to import."""
    return optional("flwr_datasets.partitioner", "datasets", key)


_FLOWERS = "Partitioner"  # what the names of its classes end with
# The base, one of a function, and those that cut columns.
_UNSUITED = ("", "idtosizefnc", "verticaleven", "verticalsize")


def _flower_partitioner(config: PartitionerConfig, clients: int, seed: int, *, has_keys: bool) -> "Partitioner":
    """The partitioner of this name, with its arguments and those that follow from the experiment."""
    known = _known_partitioners(f"data.partitioner.name = {config.name!r}")

    def plain(name: str) -> str:
        return re.sub("[^a-z]", "", name.removesuffix(_FLOWERS).lower())

    names = [name.removesuffix(_FLOWERS) for name in known.__all__ if plain(name) not in _UNSUITED]
    kind = next((name for name in names if plain(name) == plain(config.name)), None)
    if kind is None:
        raise InputError(key="data.partitioner.name", given=config.name, allowed=f"allowed: {', '.join(names)}")
    make = getattr(known, kind + _FLOWERS)
    takes = [name for name in inspect.signature(make).parameters if name not in ("num_partitions", "seed")]
    unknown = next((name for name in config.arguments if name not in takes), None)
    if unknown is not None:
        allowed = f"{kind} takes {', '.join(takes) or 'no arguments'}, and federation.clients and seed give the others"
        raise InputError(f"data.partitioner.{unknown}: {allowed}")
    by = config.arguments.get("partition_by", "key" if "NaturalId" in kind else "label")
    if by not in ("label", "key") or (by == "key" and not has_keys and "partition_by" in takes):
        given = "the data say whose an example is" if has_keys else "the data do not say whose an example is (data.key)"
        raise InputError(key="data.partitioner.partition_by", given=by, allowed=f"allowed: label, key; {given}")
    everything = {**config.arguments, "num_partitions": clients, "partition_by": by, "seed": seed % 2**32}
    arguments = {name: everything[name] for name in inspect.signature(make).parameters if name in everything}
    plain_arguments = {name: _listed(value) for name, value in arguments.items()}
    try:
        return make(**plain_arguments)
    except Exception as error:  # noqa: BLE001 (as above)
        raise InputError(f"data.partitioner: {kind}: {one_line(error)}") from None


def _listed(value: Any) -> Any:
    """A list where settings have a tuple, and an array where they have a tuple of these."""
    if not isinstance(value, tuple):
        return value
    return np.array(value) if any(isinstance(each, tuple) for each in value) else list(value)


def _by_key(keys: np.ndarray | None, name: str, clients: int) -> Shares:
    if keys is None:
        raise InputError(
            key="data.partition",
            given="key",
            allowed=f"data.name = {name!r} does not say whose an example is",
            hint=DATASETS[name].key_hint,
        )
    counts = np.bincount(keys)
    if clients > np.count_nonzero(counts):
        raise InputError(
            key="federation.clients",
            given=clients,
            allowed=f"data.partition = 'key', and the examples belong to {np.count_nonzero(counts)}",
        )
    most = np.argsort(-counts, kind="stable")[:clients]
    return Shares(counts[most].astype(np.int64), lambda client: np.flatnonzero(keys == most[client]))


def _check_enough(examples: int, config: DataConfig, clients: int) -> None:
    if config.partition == "overlapping":
        each = config.examples_per_client or 0
        if each > examples:
            raise InputError(
                key="data.examples_per_client", given=each, allowed=f"more than the {examples} training examples"
            )
        return
    if clients > examples:
        raise InputError(
            key="federation.clients",
            given=clients,
            allowed=f"more than the {examples} training examples; clients share examples with "
            "data.partition = 'overlapping'",
        )
    shards = clients * config.shards_per_client
    if config.partition == "shards" and shards > examples:
        raise InputError(
            f"data.shards_per_client = {config.shards_per_client} for {clients} clients makes {shards} shards of "
            f"{examples} training examples; have fewer shards or clients"
        )


def _partitioner(config: DataConfig, clients: int, seed: int) -> "Partitioner":
    known = _known_partitioners(f"data.partition = {config.partition!r}")
    if config.partition == "dirichlet":
        return known.DirichletPartitioner(clients, "label", config.alpha, min_partition_size=1, seed=seed)
    return known.ShardPartitioner(clients, "label", num_shards_per_partition=config.shards_per_client, seed=seed)
