"""Partitions: the training examples of each client. Flower Datasets' partitioners cut by label."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, overload

import numpy as np
from typing_extensions import override

from fedpriv.core.config import DataConfig
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import numpy_stream

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

_KEPT = 1024  # clients whose examples are at hand once they were looked up


@dataclass(frozen=True, eq=False)
class Shares(Sequence[np.ndarray]):
    """Which examples each client holds: int64, ascending, never empty. Looked up client by client where that is asked.

    Attributes:
        sizes: (C,), int64, how many each of them holds.
        find: client -> its examples.
    """

    sizes: np.ndarray
    find: Callable[[int], np.ndarray]

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
    - ``key``: each client is one of those whose examples there are most; what belongs to others is nobody's.

    Args:
        labels: integers (N,).
        keys: whose each example is, (N,), numbers from 0; ``None``: nobody says.

    Returns:
        The shares; disjoint but for overlapping ones.
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
    return _by_label(labels, order, config, clients, int(stream.integers(2**63)))


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
    from datasets import Dataset  # with the partitioners three seconds to import

    partitioner = _partitioner(config, clients, seed)
    partitioner.dataset = Dataset.from_dict({"index": order, "label": labels[order]})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each redraw of the Dirichlet partitioner warns
            shares = [_indices(partitioner, client) for client in range(clients)]
    except ValueError:
        if config.partition != "dirichlet":
            raise
        raise InputError(
            f"data.alpha = {config.alpha:g} leaves some of federation.clients = {clients} without any of the "
            f"{len(labels)} examples, in eleven draws; raise alpha or have fewer clients"
        ) from None
    return Shares(np.array([len(share) for share in shares], dtype=np.int64), shares.__getitem__)


def _indices(partitioner: "Partitioner", client: int) -> np.ndarray:
    indices: np.ndarray = partitioner.load_partition(client).with_format("numpy")[:]["index"]
    return np.sort(indices)


def _by_key(keys: np.ndarray | None, name: str, clients: int) -> Shares:
    if keys is None:
        raise InputError(
            key="data.partition",
            given="key",
            allowed=f"data.name = {name!r} does not say whose an example is",
            hint="own tables and texts name the column in data.key",
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
    from flwr_datasets.partitioner import DirichletPartitioner, ShardPartitioner

    if config.partition == "dirichlet":
        return DirichletPartitioner(clients, "label", config.alpha, min_partition_size=1, seed=seed)
    return ShardPartitioner(clients, "label", num_shards_per_partition=config.shards_per_client, seed=seed)
