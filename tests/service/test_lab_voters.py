"""Votes of models on disjoint data: one example, or one client, moves one vote."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.core.errors import InputError
from fedpriv.core.progress import Progress, Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.service.answer_sources import CLIENT, shards_of, train_voters, vote_counts
from fedpriv.service.opening import in_process, open_service
from fedpriv.service.policies.votes import NoisyVotes
from fedpriv.service.records import Service
from tests.integration.small import copied, experiment
from tests.service.test_lab_service import BARE, config, run

__all__ = ["run"]

SMALL: dict[str, dict[str, object]] = {**BARE, "data": {"train_examples": 200}, "training": {"batch_size": 8}}


def world_of(**sections: dict[str, object]) -> World:
    return build_world(experiment(**{**SMALL, **sections}))


def votes(**keys: object) -> NoisyVotes:
    return NoisyVotes.model_validate({"noise": 2.0, "shards": 6, "voter_epochs": 3, "regularisation": 0.01, **keys})


@pytest.mark.parametrize("voters", ["head", "network"])
def test_one_example_moves_one_vote_at_every_image(voters: str) -> None:
    """The label of one example in each shard is changed in turn; all test images are asked about."""
    world, policy = world_of(), votes(voters=voters)
    shards = shards_of(world, policy.shards)
    before = vote_counts(world, policy, train_voters(world, policy, shards))(world.dataset.x_test)
    assert (before.sum(axis=1) == 6).all()
    assert sorted(np.concatenate(shards)) == sorted(np.concatenate(world.partitions))
    labels, moved = world.dataset.y_train, 0.0
    for shard in shards:
        kept = labels[shard[:8]].clone()
        labels[shard[0]] = (labels[shard[0]] + 1) % 10
        after = vote_counts(world, policy, train_voters(world, policy, shards))(world.dataset.x_test)
        labels[shard[:8]] = kept
        assert np.abs(after - before).sum(axis=1).max() <= 2
        moved += float(np.abs(after - before).sum())
    assert moved > 0


def test_clients_are_shards_and_protected_as_a_whole(run: RunFolder, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    world = build_world(folder.experiment())
    assert [rows.tolist() for rows in shards_of(world, 0)] == [rows.tolist() for rows in world.partitions]
    heard: list[str] = []

    class Heard(Progress):
        def warn(self, text: str) -> None:
            heard.append(text)

    wanted = config("votes", target_epsilon=1.0, answers=4, features="pooled:4", regularisation=0.01)
    served = open_service(folder, wanted, Heard())
    service = folder.read(Service)
    assert service is not None and service.models == 2
    assert service.guarantee.adjacency == CLIENT and service.guarantee.epsilon == pytest.approx(1.0)
    # sqrt(2 Q) / mu of (1, 1e-5): 5.276 sqrt(Q) votes.
    assert service.scale == pytest.approx(5.276 * 2, rel=1e-4)
    reproducible, little = heard
    assert "the noise follows from the seed" in reproducible
    assert "noise of 10.6 votes on 2 voters leaves little of their answers" in little
    answers = served.ask(world.dataset.x_test[:3])
    assert answers.probabilities is None and served.asked == 3
    assert (folder.path / "service" / "voters.safetensors").stat().st_mode & 0o77 == 0
    assert len(open_service(folder, None, Silent()).ask(world.dataset.x_test[:4])) == 4


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
def test_with_little_noise_the_plurality_answers(run: RunFolder, distribution: str) -> None:
    world = build_world(run.experiment())
    keys = {"shards": 5, "noise": 1e-3, "features": "pooled:4", "regularisation": 0.01, "distribution": distribution}
    images = world.dataset.x_test[:100]
    answers = in_process(run, world, config("votes", **keys)).ask(images)
    policy = NoisyVotes.model_validate(keys)
    counts = vote_counts(world, policy, train_voters(world, policy, shards_of(world, 5)))(images)
    chosen = counts[np.arange(100), answers.labels]
    assert (chosen == counts.max(axis=1)).all()


def test_shares_are_equal_and_do_not_depend_on_the_data() -> None:
    one, other = world_of(), world_of(data={"train_examples": 200})
    torch.manual_seed(1)
    assert [a.tolist() for a in shards_of(one, 7)] == [b.tolist() for b in shards_of(other, 7)]
    assert {len(shard) for shard in shards_of(one, 7)} == {28, 29}
    with pytest.raises(InputError, match=r"service\.shards = 900: there are 200 training examples"):
        shards_of(one, 900)
    with pytest.raises(InputError, match="votes need two models or more"):
        shards_of(world_of(federation={"clients": 1, "rounds": 1}), 0)
