"""Central evaluation against scikit-learn's metrics."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from fedpriv.config import Experiment
from fedpriv.server.evaluation import evaluate
from fedpriv.world import build_world


def test_loss_and_accuracy_are_scikit_learns() -> None:
    settings = {"model": {"name": "mlp", "hidden": [8]}, "engine": {"device": "cpu"}}
    world = build_world(Experiment.model_validate(settings))
    world.model.train()
    loss, accuracy = evaluate(world, world.initial)
    with torch.no_grad():
        world.initial.load_into(world.model)
        probabilities = world.model(world.dataset.normalise(world.dataset.x_test)).double().softmax(1).numpy()
    truth = world.dataset.y_test.numpy()
    assert loss == pytest.approx(log_loss(truth, probabilities, labels=np.arange(10)), rel=1e-5)
    assert accuracy == accuracy_score(truth, probabilities.argmax(1))
