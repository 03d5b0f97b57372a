"""The tap: for each threat model exactly what it lets the adversary see, and nothing else."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.attacks.threat import LISTENERS
from fedpriv.clients.training import local_upload
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.mechanisms import mechanism_settings
from fedpriv.server.exchange import Upload
from fedpriv.server.tap import observe, record_heard
from tests.cases import in_one_test
from tests.integration.small import experiment

ROUND = 2


def world_of(**sections: dict[str, object]) -> World:
    adversary = {"attacks": ["iga"], "rounds": [ROUND], "victims": 2, **sections.pop("adversary", {})}
    return build_world(experiment(adversary=adversary, **sections))


def uploads_of(world: World) -> list[Upload]:
    return [
        Upload(client, len(rows), local_upload(world, client, world.initial, ROUND))
        for client, rows in enumerate(world.partitions)
    ]


def labels_by_hand(world: World, client: int) -> list[int]:
    plan = world.plans[client]
    used = {int(position) for step in plan.steps(ROUND) for position in plan.batch(step)}
    return [int(world.dataset.y_train[world.partitions[client][position]]) for position in used]


@in_one_test("name", ["honest-but-curious-server", "malicious-server", "network-plaintext"])
def test_single_uploads(name: str) -> None:
    world = world_of(adversary={"threat_model": name})
    uploads = uploads_of(world)
    heard = observe(world, ROUND, world.initial, uploads)
    assert [(one.round, one.client, one.settings.clients) for one in heard] == [(ROUND, 0, 1), (ROUND, 1, 1)]
    for one, upload in zip(heard, uploads, strict=False):
        assert one.labels is None
        for key, value in upload.state.parameters.items():
            assert torch.equal(one.upload[key], value)
            assert torch.equal(one.parameters[key], world.initial.parameters[key])


@in_one_test("name", ["secure-aggregation", "malicious-secure-aggregation"])
@in_one_test("weighting", ["examples", "uniform"])
def test_the_sum_only(name: str, weighting: str) -> None:
    world = world_of(
        adversary={"threat_model": name},
        federation={"weighting": weighting},
        data={"partition": "dirichlet", "alpha": 0.5},
        training={"batch_size": 2},
    )
    uploads = uploads_of(world)
    (heard,) = observe(world, ROUND, world.initial, uploads)
    sizes = np.array([len(rows) for rows in world.partitions], dtype=np.float64)
    assert len(set(sizes)) > 1
    weights = sizes / sizes.sum() if weighting == "examples" else np.full(4, 0.25)
    for key, value in heard.upload.items():
        rows = np.stack([upload.state.parameters[key].numpy() for upload in uploads]).astype(np.float64)
        np.testing.assert_allclose(value.numpy(), np.tensordot(weights, rows, axes=1), rtol=1e-5, atol=1e-7)
    assert (heard.settings.clients, heard.settings.batch_size, heard.settings.examples) == (4, 2, 8)
    assert heard.settings.client_examples == round(sizes.mean())


def test_nothing_behind_tls() -> None:
    world = world_of(adversary={"threat_model": "network-tls"})
    assert observe(world, ROUND, world.initial, uploads_of(world)) == ()


@pytest.mark.parametrize(
    ("name", "mechanism", "batch_size", "labels"),
    list(product(["honest-but-curious-server", "secure-aggregation"], *[(False, True)] * 3)),
)
def test_what_is_withheld_is_not_in_the_files(
    name: str, mechanism: bool, batch_size: bool, labels: bool, tmp_path: Path
) -> None:
    knobs = {"knows_mechanism": mechanism, "knows_batch_size": batch_size, "knows_labels": labels}
    world = world_of(
        adversary={"threat_model": name, **knobs},
        mechanism={"name": "hgm", "sigma": 0.6180339, "redistribution": "layer"},
        training={"batch_size": 3},
    )
    folder = RunFolder.create(tmp_path / "run", world.experiment)
    uploads = uploads_of(world_of(training={"batch_size": 3}))  # what is in them does not matter here
    record_heard(world, folder, ROUND, world.initial, uploads)
    record_heard(world, folder, ROUND + 1, world.initial, uploads)  # not an attacked round
    paths = list_observations(folder.observations)
    assert [path.stem for path in paths] == (
        ["0002-sum"] if name == "secure-aggregation" else ["0002-0000", "0002-0001"]
    )
    clients = range(4) if name == "secure-aggregation" else range(2)
    for path in paths:
        about, tensors = json.loads(path.with_suffix(".json").read_text()), load_file(path)
        assert ("labels" in about) == labels
        assert (about["settings"]["batch_size"] == 3) == batch_size
        assert batch_size or about["settings"]["batch_size"] is None
        assert ("0.6180339" in path.with_suffix(".json").read_text()) == mechanism
        assert any(key.startswith("redistribution/") for key in tensors) == mechanism
        one = read_observation(path)
        assert mechanism or mechanism_settings(one.settings.mechanism).name == "none"
        whose = clients if len(paths) == 1 else [one.client]
        if labels:
            assert list(one.labels or ()) == sorted(
                label for client in whose for label in labels_by_hand(world, client)
            )


def test_labels_of_several_local_steps_are_of_distinct_examples() -> None:
    world = world_of(
        adversary={"knows_labels": True},
        federation={"algorithm": "fedavg"},
        training={"batch_size": 200, "local_epochs": 3},
    )
    (one, _) = observe(world, ROUND, world.initial, uploads_of(world))
    assert one.labels is not None
    assert list(one.labels) == sorted(labels_by_hand(world, 0))
    assert len(one.labels) <= len(world.partitions[0])


def test_observing_changes_nothing() -> None:
    """The tap hands out what was sent; it must not touch the uploads that the server goes on to aggregate."""
    world = world_of(adversary={"threat_model": "secure-aggregation"})
    uploads = uploads_of(world)
    before = [{key: value.clone() for key, value in upload.state.parameters.items()} for upload in uploads]
    observe(world, ROUND, world.initial, uploads)
    for upload, copy in zip(uploads, before, strict=True):
        assert all(torch.equal(value, copy[key]) for key, value in upload.state.parameters.items())


def test_every_listener_is_served() -> None:
    uploads = uploads_of(world_of())
    for name in LISTENERS:
        world = world_of(adversary={"threat_model": name})
        assert len(observe(world, ROUND, world.initial, uploads)) in (0, 1, 2)
