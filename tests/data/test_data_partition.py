"""Partitions against their definitions: disjoint, complete, never empty, a function of the seed."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedpriv.core.config import DataConfig, Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.lab.preflight import warnings_for
from fedpriv.core.world import build_world
from fedpriv.data.partition import partition_indices
from tests.integration.small import experiment

KINDS = ("iid", "dirichlet", "shards")
LABELS = np.random.default_rng(0).integers(0, 10, 1437)


def share(kind: str, clients: int, seed: int = 0, labels: np.ndarray = LABELS, **options: float) -> list[np.ndarray]:
    return list(partition_indices(labels, DataConfig(partition=kind, **options), clients, seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clients", [1, 2, 8, 100])
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_clients_share_the_examples_without_overlap(kind: str, clients: int, seed: int) -> None:
    shares = share(kind, clients, seed)
    everything = np.concatenate(shares)
    assert len(shares) == clients
    assert all(len(s) > 0 and s.dtype == np.int64 and np.all(np.diff(s) > 0) for s in shares)
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0 and everything.max() < len(LABELS)
    left_over = len(LABELS) % (2 * clients) if kind == "shards" else 0
    assert len(everything) == len(LABELS) - left_over


@pytest.mark.parametrize("kind", KINDS)
def test_a_partition_is_a_function_of_the_seed(kind: str) -> None:
    first, again, other = share(kind, 8, 1), share(kind, 8, 1), share(kind, 8, 2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("clients", [3, 8, 1437])
def test_iid_shares_are_equal_and_random(clients: int) -> None:
    """Sizes differ by at most one; labels of clients are homogeneous (chi-square, false alarm 1e-6, fixed seed)."""
    shares = share("iid", clients)
    assert {len(s) for s in shares} <= {1437 // clients, -(-1437 // clients)}
    table = np.stack([np.bincount(LABELS[s], minlength=10) for s in shares])
    assert stats.chi2_contingency(table).pvalue > 1e-6


def test_iid_does_not_follow_the_order_of_the_file() -> None:
    """Clients of a file that is sorted by label must still see all classes."""
    assert all(len(np.unique(np.sort(LABELS)[s])) == 10 for s in share("iid", 8, labels=np.sort(LABELS)))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1000.0])
def test_dirichlet_shares_of_a_class_are_dirichlet(alpha: float) -> None:
    """The share of a class at one client is Beta(alpha, (clients - 1) alpha).

    Kolmogorov-Smirnov over 100 classes of 250 examples, one client of 4, so that the redraw of empty clients (which
    would bend the distribution) practically never happens; rounding to whole examples moves a share by less than
    1/250, which is given to the critical value; false alarm 1e-6, fixed seed.
    """
    labels = np.repeat(np.arange(100), 250)
    shares = share("dirichlet", 4, 3, labels, alpha=alpha)
    fractions = np.bincount(labels[shares[0]], minlength=100) / 250
    law = stats.beta(alpha, 3 * alpha)
    grid = np.linspace(0, 1, 251)
    empirical = (fractions[None, :] <= grid[:, None] + 1e-12).mean(1)
    slack = np.sqrt(np.log(2e6) / (2 * 100))
    assert np.all(empirical <= law.cdf(grid + 2 / 250) + slack)
    assert np.all(empirical >= law.cdf(grid - 2 / 250) - slack)


def test_a_small_alpha_separates_the_classes() -> None:
    def largest_share(alpha: float) -> float:
        counts = [np.bincount(LABELS[s], minlength=10) for s in share("dirichlet", 5, alpha=alpha)]
        return float(np.mean([count.max() / count.sum() for count in counts]))

    assert largest_share(0.05) > 0.5 > 0.2 > largest_share(1000)


@pytest.mark.parametrize("clients", [2, 5, 10])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_are_label_sorted_runs(clients: int, shards: int) -> None:
    """Every client has ``shards`` runs of equal size of the label-sorted examples, so few classes."""
    labels = np.repeat(np.arange(10), 60)
    shares = share("shards", clients, 4, labels, shards_per_client=shards)
    size = 600 // (clients * shards)
    assert [len(s) for s in shares] == [shards * size] * clients
    for client in shares:
        assert len(np.unique(labels[client])) <= shards * (-(-size // 60) + (60 % size != 0))
    assert len({tuple(np.unique(labels[s])) for s in shares}) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_more_clients_than_examples_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"federation\.clients = 6: more than the 5 training examples"):
        share(kind, 6, labels=np.arange(5))


def test_overlapping_shares_are_draws_of_their_own() -> None:
    """Ten of 40 examples at 3,000 clients: each held equally often (chi-square, false alarm 1e-6, fixed seed)."""
    labels = np.arange(40) % 4
    shares = share("overlapping", 3000, 5, labels, examples_per_client=10)
    assert all(len(s) == 10 and s.dtype == np.int64 and np.all(np.diff(s) > 0) for s in shares)
    counts = np.bincount(np.concatenate(shares), minlength=40)
    # Draws without replacement scatter less than a chi-square law by (40 - 10) / (40 - 1).
    statistic = ((counts - 750) ** 2 / 750).sum() / (30 / 39)
    assert stats.chi2(39).cdf(statistic) < 1 - 1e-6
    held = np.zeros((3000, 40))
    for client, rows in enumerate(shares):
        held[client, rows] = 1
    # One client's share says nothing of the next one's: 2.5 in common on average, variance 1.44 (hypergeometric).
    common = (held[:-1] * held[1:]).sum(1)
    assert abs(common.mean() - 2.5) < 4.9 * np.sqrt(1.4423 / 2999)
    # More clients, or other labels, leave a client's share as it is.
    more = partition_indices(labels[::-1], DataConfig(partition="overlapping", examples_per_client=10), 10**6, 5)
    assert len(more) == 10**6
    assert np.array_equal(more[2999], shares[2999])
    assert not np.array_equal(more[2999], share("overlapping", 3000, 6, labels, examples_per_client=10)[2999])


def test_shares_are_looked_up_as_in_a_tuple() -> None:
    for kind, options in (("iid", {}), ("shards", {}), ("overlapping", {"examples_per_client": 7})):
        shares = partition_indices(LABELS, DataConfig(partition=kind, **options), 9, 1)  # type: ignore[arg-type]
        listed = list(shares)
        assert [len(rows) for rows in listed] == shares.sizes.tolist()
        assert np.array_equal(shares[-1], listed[8])
        assert [rows.tolist() for rows in shares[2:4]] == [rows.tolist() for rows in listed[2:4]]
        with pytest.raises(IndexError):
            shares[9]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"partition": "overlapping"}, "needs data.examples_per_client"),
        ({"examples_per_client": 3}, "'iid' does not read data.examples_per_client"),
    ],
)
def test_copies_that_nothing_is_claimed_of_are_refused(data: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataConfig.model_validate(data)


def test_copies_of_labels_that_are_changed_anew_are_refused() -> None:
    data = {"partition": "overlapping", "examples_per_client": 3, "label_epsilon": 1.0}
    with pytest.raises(ValueError, match="each copy's label"):
        Experiment.model_validate({"data": data})


def test_more_examples_a_client_than_there_are_are_refused() -> None:
    with pytest.raises(InputError, match=r"data\.examples_per_client = 6: more than the 5 training examples"):
        share("overlapping", 2, labels=np.arange(5), examples_per_client=6)


def test_more_shards_than_examples_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"shards_per_client = 3 for 4 clients makes 12 shards of 11 training examples"
    ):
        share("shards", 4, labels=np.arange(11), shards_per_client=3)


@pytest.mark.parametrize("alpha", [1e-300, 1e-3])
def test_an_alpha_that_starves_clients_is_refused_in_one_line(alpha: float) -> None:
    with pytest.raises(InputError, match=r"data\.alpha = .* federation\.clients = 20 without any") as caught:
        share("dirichlet", 20, labels=np.repeat([0, 1], 30), alpha=alpha)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_nothing_is_printed_or_cached_on_disk(tmp_path: Path) -> None:
    """A fresh process with an empty home: no progress bar, no warning (small alpha redraws), no data set cache."""
    program = """
import numpy as np
from fedpriv.core.config import DataConfig, Experiment, validated
from fedpriv.data.partition import partition_indices
import sys
assert "flwr_datasets" not in sys.modules and "datasets" not in sys.modules and "torchvision" not in sys.modules
labels = np.repeat(np.arange(4), 500)
for kind in ("iid", "dirichlet", "shards"):
    partition_indices(labels, DataConfig(partition=kind, alpha=0.1), 16, 0)
assert "flwr" not in sys.modules
"""
    environment = os.environ | {"HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    environment = {name: value for name, value in environment.items() if not name.startswith(("HF_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=Path.cwd(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in tmp_path.iterdir()} <= {"matplotlib"}, "matplotlib's font list is all that is kept"


def worst_log_ratio(counts: Callable[[tuple[int, ...]], tuple[int, ...]], epsilon: float) -> float:
    """Of data sets of four bits, their neighbours with one bit replaced, and outputs of two geometric mechanisms."""
    outputs = np.arange(-8, 13)
    worst = 0.0
    for data in product((0, 1), repeat=4):
        for place in range(4):
            other = (*data[:place], 1 - data[place], *data[place + 1 :])
            # log of p(o | count) is -epsilon |o - count| and a constant; the two parts' noise is independent.
            parts = [
                epsilon * (np.abs(outputs - two) - np.abs(outputs - one))
                for one, two in zip(counts(data), counts(other), strict=True)
            ]
            worst = max(worst, float(np.add.outer(*parts).max()))
    return worst


def test_parallel_composition_needs_a_partition_that_the_data_do_not_choose() -> None:
    """Replace-one, by enumeration: a fixed partition costs epsilon once, one by the records' values twice."""
    assert worst_log_ratio(lambda data: (sum(data[:2]), sum(data[2:])), 0.7) == pytest.approx(0.7)
    assert worst_log_ratio(lambda data: (data.count(0), data.count(1)), 0.7) == pytest.approx(2 * 0.7)


def test_no_example_decides_who_holds_the_others() -> None:
    """Shares at random follow from number and seed; shares by label are an assumption about who holds what."""
    changed = LABELS.copy()
    changed[0] = (changed[0] + 1) % 10
    for clients in (2, 8):
        for one, two in zip(share("iid", clients), share("iid", clients, labels=changed), strict=True):
            assert np.array_equal(one, two)
    moved = zip(share("shards", 8), share("shards", 8, labels=changed), strict=True)
    assert any(not np.array_equal(one, two) for one, two in moved)


# --- partitioners of flwr-datasets --------------------------------------------------------------------------------

OWNERS = np.random.default_rng(5).integers(0, 6, 600)
PARTITIONERS: dict[str, dict[str, object]] = {
    "IidPartitioner": {},
    "linear": {},
    "square": {},
    "Exponential": {},
    "size": {"partition_sizes": [100, 150, 150, 100, 100]},
    "inner-dirichlet": {"partition_sizes": [100, 150, 150, 100, 100], "alpha": 0.5},
    "dirichlet": {"alpha": 0.5},
    "pathological": {"num_classes_per_partition": 2},
    "shard": {"num_shards_per_partition": 2},
    "natural id": {},
    "grouped_natural_id": {"group_size": 1},
    "continuous": {"strictness": 0.5},
    "distribution": {
        "distribution_array": 10 * [[1, 1]], "num_unique_labels_per_partition": 2,
        "preassigned_num_samples_per_label": 5,
    },
}  # fmt: skip


def flowers(name: str, clients: int, **arguments: object) -> list[np.ndarray]:
    config = validated(DataConfig, {"partitioner": {"name": name, **arguments}}, "a test")
    return list(partition_indices(LABELS[:600], config, clients, 0, OWNERS))


@pytest.mark.parametrize("name", PARTITIONERS)
def test_partitioners_of_flwr_datasets(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Disjoint, never empty, a function of the seed, not in the order of the file, and without a progress bar."""
    clients = 10 if name == "distribution" else 5  # as many as classes, or a multiple
    shares, again = (flowers(name, clients, **PARTITIONERS[name]) for _ in range(2))
    assert len(shares) == clients and all(map(len, shares)) and not capfd.readouterr().err
    everything = np.concatenate(shares)
    assert len(np.unique(everything)) == len(everything) <= 600
    assert all(map(np.array_equal, shares, again))
    assert shares[0].tolist() != list(range(len(shares[0])))
    if "natural" in name:
        assert all(len(set(OWNERS[share].tolist())) == 1 for share in shares)
    elif name == "pathological":
        assert all(len(set(LABELS[share].tolist())) <= 2 for share in shares)
    elif name == "size":
        assert [len(share) for share in shares] == PARTITIONERS[name]["partition_sizes"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "fair"}, r"data\.partitioner\.name = 'fair': allowed: .*Dirichlet.*Pathological"),
        ({"name": "vertical-even"}, r"data\.partitioner\.name = 'vertical-even': allowed"),
        ({"name": "iid", "alpha": 1.0}, r"data\.partitioner\.alpha: Iid takes no arguments, and federation"),
        (
            {"name": "dirichlet", "seed": 3, "alpha": 1.0},
            r"data\.partitioner\.seed: Dirichlet takes partition_by, alpha",
        ),
        ({"name": "dirichlet", "alpha": -1.0}, r"data\.partitioner: Dirichlet: Alpha"),
        ({"name": "dirichlet"}, r"data\.partitioner: Dirichlet: .*alpha"),
        ({"name": "natural-id", "partition_by": "city"}, r"partition_by = 'city': allowed: label, key"),
        ({"name": "grouped-natural-id", "group_size": 3}, r"federation\.clients = 5: data\.partitioner makes 2"),
        ({"name": "size", "partition_sizes": [700] * 5}, r"data\.partitioner: size: "),
    ],
)
def test_wrong_partitioners(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        flowers(str(settings["name"]), 5, **{key: value for key, value in settings.items() if key != "name"})
    assert "\n" not in str(caught.value)


def test_examples_that_a_partitioner_gives_to_nobody_are_said() -> None:
    """Some do so without a word: findings/flwr-datasets-shards.sh."""
    four = {"name": "size", "partition_sizes": [100] * 4}
    worlds = [build_world(experiment(data={"partitioner": each})) for each in (four, {"name": "iid"})]
    left = len(worlds[0].dataset.y_train) - 400
    said = [[line for line in warnings_for(world) if "belong to no client" in line] for world in worlds]
    assert said == [[f"data.partitioner = 'size': {left:,} of {left + 400:,} examples belong to no client"], []]


def test_partitioners_and_partitions_exclude_each_other() -> None:
    for tree in ({"partition": "partitioner"}, {"partition": "iid", "partitioner": {"name": "iid"}}):
        with pytest.raises(InputError, match=r"partition = '\w+': with data\.partitioner, and only then"):
            validated(DataConfig, tree, "a test")
