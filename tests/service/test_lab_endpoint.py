"""A finished run's model behind an endpoint: its answers are the network's."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.attacks.scene import Counted
from fedpriv.core.errors import InputError
from fedpriv.core.finished import final_state
from fedpriv.core.world import build_world
from fedpriv.service.opening import open_endpoint
from tests.integration.small import finished

TRAINED: dict[str, dict[str, object]] = {"federation": {"clients": 1, "rounds": 1}, "adversary": {"attacks": []}}


def test_answers_are_the_final_networks(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", **TRAINED)
    world = build_world(folder.experiment())
    endpoint = Counted(open_endpoint(folder, world, "none"), 300)
    images = world.dataset.x_test[:300]
    answers = endpoint.ask(images.double() / 255)
    assert (endpoint.asked, endpoint.classes) == (300, 10)
    final_state(folder, world, "test").load_into(world.model)
    with torch.no_grad():
        expected = world.model.eval()(world.network_input(images)).softmax(1).numpy()
    np.testing.assert_allclose(answers.probabilities, expected, atol=1e-6)
    assert (answers.labels == expected.argmax(1)).mean() > 0.99
    with pytest.raises(InputError, match="answers asked for: 1; left: 0 of 300"):
        endpoint.ask(images[:1])


def test_post_processing_needs_a_private_run(tmp_path: Path) -> None:
    public = finished(tmp_path / "public", **TRAINED, mechanism={"name": "none"})
    with pytest.raises(InputError, match="needs a run that is private itself, and its ledger proves nothing"):
        open_endpoint(public, build_world(public.experiment()), "post-processing")
    private = finished(tmp_path / "private", **TRAINED, mechanism={"name": "gaussian", "sigma": 3.0})
    world = build_world(private.experiment())
    assert len(open_endpoint(private, world, "post-processing").ask(world.dataset.x_test[:2])) == 2
