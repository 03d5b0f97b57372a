"""Partitions: which training examples each client holds. The cutting is done by Flower Datasets' partitioners."""

import warnings
from typing import TYPE_CHECKING

import numpy as np

from fedpriv.config import DataConfig
from fedpriv.errors import InputError
from fedpriv.randomness import numpy_stream

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

__all__ = ["partition_indices"]


def partition_indices(
    labels: np.ndarray, config: DataConfig, clients: int, seed: int, keys: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Share the training examples out. The examples are put into a random order first, whatever the kind.

    - ``iid``: equal shares, sizes differing by at most one.
    - ``dirichlet``: each class is cut by its own draw from a symmetric Dirichlet distribution over the clients
      (Yurochkin et al. 2019), redrawn up to ten times while a client is left without an example.
    - ``shards``: the examples, sorted by label, are cut into ``clients * shards_per_client`` shards of equal size, and
      each client gets ``shards_per_client`` of them (McMahan et al. 2017). The few examples at the end that fill no
      shard (fewer than there are shards) belong to nobody.
    - ``key``: each client is one of those whose examples there are most; what belongs to others is nobody's.

    Args:
        labels: integers (N,).
        config: reads partition, alpha and shards_per_client.
        clients: number of partitions.
        seed: the experiment's seed.
        keys: whose each example is, (N,), numbers from 0; ``None``: nobody says.

    Returns:
        One array a client: the indices of its examples, int64, ascending; disjoint and never empty.

    Raises:
        InputError: fewer examples than clients or shards, an alpha that leaves a client without an example, or no keys
            or too few.
    """
    _check_enough(len(labels), config, clients)
    if config.partition == "key":
        return _by_key(keys, config.name, clients)
    from datasets import Dataset  # with the partitioners three seconds to import

    stream = numpy_stream(seed, "partition")
    order = stream.permutation(len(labels))
    partitioner = _partitioner(config, clients, int(stream.integers(2**63)))
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
    return tuple(shares)


def _indices(partitioner: "Partitioner", client: int) -> np.ndarray:
    indices: np.ndarray = partitioner.load_partition(client).with_format("numpy")[:]["index"]
    return np.sort(indices)


def _by_key(keys: np.ndarray | None, name: str, clients: int) -> tuple[np.ndarray, ...]:
    if keys is None:
        raise InputError(f"data.partition = 'key': data.name = {name!r} does not say whose an example is")
    counts = np.bincount(keys)
    if clients > np.count_nonzero(counts):
        raise InputError(
            f"federation.clients = {clients}: data.partition = 'key', and the examples belong to "
            f"{np.count_nonzero(counts)}"
        )
    most = np.argsort(-counts, kind="stable")[:clients]
    return tuple(np.flatnonzero(keys == key) for key in most)


def _check_enough(examples: int, config: DataConfig, clients: int) -> None:
    if clients > examples:
        raise InputError(f"federation.clients = {clients} is more than the {examples} training examples")
    shards = clients * config.shards_per_client
    if config.partition == "shards" and shards > examples:
        raise InputError(
            f"data.shards_per_client = {config.shards_per_client} for {clients} clients makes {shards} shards of "
            f"{examples} training examples; have fewer shards or clients"
        )


def _partitioner(config: DataConfig, clients: int, seed: int) -> "Partitioner":
    from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, ShardPartitioner

    if config.partition == "iid":
        return IidPartitioner(clients)
    if config.partition == "dirichlet":
        return DirichletPartitioner(clients, "label", config.alpha, min_partition_size=1, seed=seed)
    return ShardPartitioner(clients, "label", num_shards_per_partition=config.shards_per_client, seed=seed)
