"""Central evaluation against scikit-learn's metrics."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.records import RoundRecord
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.server.evaluation import evaluate, evaluate_all, evaluate_round
from tests.integration.small import experiment


def test_loss_and_accuracy_are_scikit_learns() -> None:
    settings = {"model": {"name": "mlp", "hidden": [8]}, "engine": {"device": "cpu"}}
    world = build_world(Experiment.model_validate(settings))
    world.model.train()

    def differentiates(_: object, given: tuple[torch.Tensor]) -> None:
        """A network may do so in its forward pass, as those of energies and forces do."""
        with torch.enable_grad():
            pixels = given[0].detach().requires_grad_()
            torch.autograd.grad(pixels.square().sum(), pixels)

    world.model.register_forward_pre_hook(differentiates)
    loss, accuracy = evaluate(world, world.initial)
    with torch.no_grad():
        world.initial.load_into(world.model)
        probabilities = world.model(world.dataset.normalise(world.dataset.x_test)).double().softmax(1).numpy()
    truth = world.dataset.y_test.numpy()
    assert loss == pytest.approx(log_loss(truth, probabilities, labels=np.arange(10)), rel=1e-5)
    assert accuracy == accuracy_score(truth, probabilities.argmax(1))


def _federation(folder: Path, **keys: object) -> list[RoundRecord]:
    start_run(experiment(federation={"rounds": 5, **keys}), folder, "", Silent())
    return RunFolder.open(folder).rounds()


def test_rounds_between_evaluations_are_the_same_and_have_no_figures(tmp_path: Path) -> None:
    each = _federation(tmp_path / "each")
    some = _federation(tmp_path / "some", evaluate_every=3)
    assert [record.evaluated for record in each] == [360] * 6
    assert [record.evaluated for record in some] == [360, 0, 0, 360, 0, 360]
    for number in (0, 3, 5):
        assert (some[number].loss, some[number].accuracy) == (each[number].loss, each[number].accuracy)
    assert {(some[number].loss, some[number].accuracy) for number in (1, 2, 4)} == {(None, None)}
    summary = RunFolder.open(tmp_path / "some").final_summary()
    assert (summary.evaluated_round, summary.evaluated_examples) == (5, 360)
    write_report(tmp_path / "some")


def test_a_part_of_the_test_data_is_drawn_once_and_the_last_round_is_on_all(tmp_path: Path) -> None:
    settings = experiment(federation={"rounds": 5, "evaluate_examples": 50})
    world = build_world(settings)
    rounds = [evaluate_round(world, world.initial, number) for number in range(6)]
    assert [each.evaluated for each in rounds] == [50, 50, 50, 50, 50, 360]
    # The same model on the same images every time, and not just the first ones.
    assert len({each.loss for each in rounds[:5]}) == 1
    rows = torch.arange(50)
    assert rounds[0].loss not in (evaluate(world, world.initial)[0], evaluate(world, world.initial, rows)[0])
    every = experiment(federation={"rounds": 5, "evaluate_examples": 360})
    assert evaluate_round(build_world(every), world.initial, 1) == evaluate_all(world, world.initial, 1)


def test_more_test_examples_than_there_are_are_refused() -> None:
    with pytest.raises(InputError, match=r"federation\.evaluate_examples = 361: digits has 360 test examples$"):
        build_world(experiment(federation={"evaluate_examples": 361}))


@pytest.mark.essential
def test_a_run_that_its_budget_ends_is_evaluated_at_its_end(tmp_path: Path) -> None:
    """Nobody knows of the last round that it is the last before its successor would be too much."""
    settings: dict[str, dict[str, object]] = {
        "mechanism": {"name": "vmf", "kappa": 40.0},
        "training": {"batch_size": 32},
        "federation": {"rounds": 40, "target_epsilon": 20.0, "evaluate_every": 50, "evaluate_examples": 20},
    }
    start_run(experiment(**settings), tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    records = folder.rounds()
    assert 0 < records[-1].round < 40
    assert [record.evaluated for record in records] == [20] + [0] * (len(records) - 2) + [360]
    written = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    resume_run(tmp_path / "run", Silent())
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == written
