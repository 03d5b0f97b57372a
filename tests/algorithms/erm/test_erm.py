"""Private ERM in whole runs: the released model recomputed outside the app, the ledger, refusals, and attacks on it."""

import json
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedpriv.accounting.convex_models import Problem, objective_terms, output_scale
from fedpriv.algorithms.erm.algorithm import Erm
from fedpriv.algorithms.erm.training import bounded_features, client_problem, feature_length
from fedpriv.attacks.membership.audit import audit_run
from fedpriv.attacks.references import Reference, build_pool, train_references
from fedpriv.clients.training import _model_change, answer_secret, local_upload
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World, build_world
from fedpriv.server.uploads import allowed_upload, norm
from tests.integration.small import experiment, left_behind

LINEAR = {"name": "mlp", "hidden": [], "activation": "relu"}
OUTPUT = {"name": "output", "target_epsilon": 4.0}


def convex(clients: int = 3, **sections: dict[str, object]) -> Experiment:
    """The small experiment with convex models, released once."""
    federation = {"algorithm": "erm", "clients": clients, "rounds": 1, **sections.pop("federation", {})}
    erm = {"regularisation": 0.01, **sections.pop("erm", {})}
    return experiment(federation=federation, model=LINEAR, erm=erm, **sections)


def parity(path: Path, examples: int = 400) -> Path:
    """Digits as odd and even, in a file of one's own."""
    dataset = build_world(experiment()).dataset
    images = {"x_train": dataset.x_train[:examples], "x_test": dataset.x_test}
    labels = {"y_train": dataset.y_train[:examples] % 2, "y_test": dataset.y_test % 2}
    file = path / "parity.npz"
    np.savez(
        file,
        **{name: value.permute(0, 2, 3, 1).numpy() for name, value in images.items()},
        **{name: value.numpy() for name, value in labels.items()},
    )
    return file


def final(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = RunFolder.open(path).load_checkpoint()
    assert checkpoint is not None
    return {name: checkpoint.tensors[f"parameters/output.{name}"] for name in ("weight", "bias")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("erm") / "run"
    start_run(convex(mechanism=OUTPUT), path, "fedpriv run x", Silent())
    return path


def world_of(path: Path) -> World:
    folder = RunFolder.open(path)
    return build_world(folder.experiment(), folder.secret(folder.experiment()))


def test_the_result_is_the_mean_of_what_clients_release(finished: Path) -> None:
    world = world_of(finished)
    sizes = [len(rows) for rows in world.partitions]
    uploads = [local_upload(world, client, world.initial, 1) for client in range(3)]
    for name, value in final(finished).items():
        key = f"output.{name}"
        mean = sum(n / sum(sizes) * upload.parameters[key] for n, upload in zip(sizes, uploads, strict=True))
        torch.testing.assert_close(value, world.initial.parameters[key] + mean)


def test_without_noise_it_is_scikit_learns_model(tmp_path: Path) -> None:
    """One client: the network classifies as the minimum of the same objective does."""
    settings = convex(1)
    start_run(settings, tmp_path / "run", "", Silent())
    world = build_world(settings)
    inputs, labels = world.examples(0, np.arange(len(world.partitions[0])))
    features = bounded_features(inputs, feature_length(world))
    theirs = LogisticRegression(C=1 / (0.01 * len(labels)), fit_intercept=False, tol=1e-10, max_iter=10_000)
    weights = theirs.fit(features, labels.numpy()).coef_
    layer = final(tmp_path / "run")
    found = torch.cat([layer["weight"], layer["bias"][:, None]], dim=1).double().numpy() * feature_length(world)
    np.testing.assert_allclose(found, weights, atol=2e-3)
    assert RunFolder.open(tmp_path / "run").final_summary().test_accuracy == pytest.approx(
        theirs.score(bounded_features(world.network_input(world.dataset.x_test), 1.0), world.dataset.y_test), abs=0.01
    )


def test_noise_is_as_large_as_the_ledger_says(finished: Path) -> None:
    """The released model minus the one without noise, of every client: a chi-square law, wrong once in 10^6 runs."""
    world = world_of(finished)
    ledger = RunFolder.open(finished).final_ledger()
    assert ledger.worst.epsilon == 4.0
    assert ledger.parameters["regularisation"] == 0.01
    squares = []
    clients = [(each, client) for each in ledger.clients for client in chain(*each.ranges)]
    for line, client in clients:
        problem = client_problem(world, client)
        assert problem == Problem(line.examples or 0, 65, 10, 0.01, 1e-8)
        assert line.noise == pytest.approx(output_scale(problem, 4.0, "gaussian", 1e-5))
        received = world.received(client, world.initial)
        own = answer_secret(world.secret, client, 1, received)
        changes = [_model_change(Erm(), world, world.plans[client], world.initial, secret) for secret in (own, None)]
        noise = torch.cat([(changes[0][name] - changes[1][name]).flatten() for name in changes[0]])
        squares.append(float((noise.double() * feature_length(world) / line.noise).square().sum()))
    assert len(squares) == 3
    assert sum(squares) == pytest.approx(3 * 650, abs=5 * (2 * 3 * 650) ** 0.5)


def test_uploads_are_shorter_than_is_allowed(finished: Path) -> None:
    world = world_of(finished)
    for client in range(len(world.plans)):
        length = norm(local_upload(world, client, world.initial, 1).parameters)
        assert length < allowed_upload(world, client).norm < 100 * length


def test_a_killed_run_ends_with_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    before = left_behind(copy)
    shutil.rmtree(copy / "checkpoint")
    (copy / "metrics.jsonl").unlink()
    resume_run(copy, Silent())
    assert left_behind(copy) == before


def test_the_verdict_and_the_report(finished: Path) -> None:
    summary = RunFolder.open(finished).final_summary()
    (accuracy,) = (place for place, text in enumerate(summary.verdict) if text.startswith("After 1 round"))
    assert "the most frequent class is" in summary.verdict[accuracy + 1]
    assert summary.verdict[accuracy + 2].startswith("Proven for the whole run")
    assert "training.learning_rate is set, but erm trains to the minimum and does not read it" in summary.warnings
    page = render_page(load_view(finished))
    assert "output perturbation" in page
    assert "ERM" in page


def test_noise_that_wins_is_named(tmp_path: Path) -> None:
    """Few examples and a small epsilon: no better than the majority, warned of beforehand and said afterwards."""
    settings = convex(
        8,
        data={"name": "npz", "path": str(parity(tmp_path, 80))},
        mechanism={"name": "output", "target_epsilon": 0.001, "distribution": "laplace"},
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    accuracy = summary.test_accuracy or 0.0
    assert accuracy < 0.8  # 0.81 without noise; of 20,000 directions drawn at random one was above
    labels = build_world(settings).dataset.y_test.numpy()
    place = "below" if accuracy < np.bincount(labels).max() / len(labels) else "above"
    assert any(text.startswith(f"That is {place} guessing the majority") for text in summary.verdict)
    assert any("noise that may be longer than any model" in text for text in summary.warnings)


@pytest.mark.parametrize(
    ("mechanism", "pure"),
    [
        ({"name": "objective", "target_epsilon": 8.0}, 8.0),
        ({"name": "output", "target_epsilon": 8.0, "distribution": "laplace"}, 8.0),
        ({"name": "output", "target_epsilon": 8.0}, None),
    ],
    ids=["objective", "output, pure", "output, normal"],
)
def test_two_classes(mechanism: dict[str, object], pure: float | None, tmp_path: Path) -> None:
    data = {"name": "npz", "path": str(parity(tmp_path))}
    summary = start_run(convex(1, data=data, mechanism=mechanism), tmp_path / "run", "", Silent())
    worst = RunFolder.open(tmp_path / "run").final_ledger().worst
    assert (worst.epsilon, worst.pure_epsilon) == (8.0, pure)
    layer = final(tmp_path / "run")
    torch.testing.assert_close(layer["weight"][0], -layer["weight"][1])
    assert summary.status == "completed"
    if mechanism["name"] == "objective":
        problem = Problem(400, 65, 2, 0.01, 1e-8)
        assert worst.noise == pytest.approx(objective_terms(problem, 8.0).scale)


def test_references_are_trained_as_the_run_was() -> None:
    """On the run's own data and without noise they are the run's model."""
    settings = convex()
    world = build_world(settings)
    references = [Reference(seed, world.partitions) for seed in (1, 2)]
    stack = train_references(world, build_pool(world), references, {1: (0, 1, 2)}, [1])[1]
    uploads = [local_upload(world, client, world.initial, 1) for client in range(3)]
    sizes = [len(rows) for rows in world.partitions]
    for name, value in stack.items():
        mean = sum(n / sum(sizes) * upload.parameters[name] for n, upload in zip(sizes, uploads, strict=True))
        torch.testing.assert_close(value, (world.initial.parameters[name] + mean).expand_as(value))


def test_audit_says_why_it_is_refused(finished: Path) -> None:
    with pytest.raises(InputError, match="releases a finished model once; membership in it: fedpriv probe"):
        audit_run(RunFolder.open(finished), 6, 10, Silent())


def test_a_solver_that_fails_shows_no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With noise the model counts as zero, because a refusal would tell something; without, the client fails."""

    def failing(*_: object) -> None:
        raise RunFailedError("float64 ends there")

    monkeypatch.setattr("fedpriv.algorithms.erm.training.minimised", failing)
    world = build_world(convex(mechanism=OUTPUT))
    secret = world.secret.derived("test")
    change = _model_change(Erm(), world, world.plans[0], world.initial, secret)
    released = torch.cat([(change[name] + world.initial.parameters[name]).flatten() for name in change])
    scale = output_scale(client_problem(world, 0), 4.0, "gaussian", 1e-5) / feature_length(world)
    assert float(released.square().mean().sqrt()) == pytest.approx(scale, rel=0.2)  # 7 standard deviations
    with pytest.raises(RunFailedError):
        _model_change(Erm(), world, world.plans[0], world.initial, None)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"federation": {"rounds": 2}}, "erm has one round"),
        ({"mechanism": {"name": "gaussian", "sigma": 1.0}}, "use output, objective or none"),
        ({"adversary": {"attacks": ["dlg"]}}, "under erm clients upload a finished model"),
        ({"federation": {"server_momentum": 0.5}}, "server_momentum: under erm"),
        ({"training": {"weight_decay": 0.1}}, "under erm clients minimise"),
        ({"erm": {"regularisation": 1e-300}}, "regularisation"),
        ({"mechanism": {"name": "output"}}, "target_epsilon"),
        ({"mechanism": {"name": "output", "target_epsilon": 1.0, "unit": "update"}}, "unit"),
    ],
)
def test_what_makes_no_sense_is_refused(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convex(**sections)


def test_what_float64_might_not_solve_is_refused_beforehand(tmp_path: Path) -> None:
    """A noise term so long that rounding hides the tolerance, and the tolerance that is named instead is enough."""
    data = {"name": "npz", "path": str(parity(tmp_path))}
    tiny = {"name": "objective", "target_epsilon": 1e-7}
    with pytest.raises(InputError, match=r"erm.tolerance = 1e-08: float64 may end above it") as refusal:
        build_world(convex(1, data=data, mechanism=tiny))
    named = float(str(refusal.value).partition("set erm.tolerance to ")[2].split()[0])
    settings = convex(1, data=data, mechanism=tiny, erm={"tolerance": named})
    start_run(settings, tmp_path / "run", "", Silent())
    assert final(tmp_path / "run")["weight"].abs().max() > 0
    with pytest.raises(InputError, match="float64 may end above it"):
        build_world(convex(1, data=data, mechanism=OUTPUT, erm={"tolerance": 1e-12}))


@pytest.mark.parametrize("mechanism", [OUTPUT, {"name": "objective", "target_epsilon": 1e5}])
def test_what_the_solver_may_take_forever_for_is_refused_beforehand(
    mechanism: dict[str, object], tmp_path: Path
) -> None:
    """And the regularisation that is named instead is enough."""
    data = {"name": "npz", "path": str(parity(tmp_path))}
    with pytest.raises(InputError, match=r"erm.regularisation = 1e-09: the solver may take 4e\+10 steps") as refusal:
        build_world(convex(1, data=data, mechanism=mechanism, erm={"regularisation": 1e-9, "tolerance": 1e-6}))
    named = float(str(refusal.value).partition("set erm.regularisation to ")[2].split()[0])
    assert named < 1e-5
    build_world(convex(1, data=data, mechanism=mechanism, erm={"regularisation": named, "tolerance": 1e-6}))


def test_noise_on_models_is_for_erm() -> None:
    with pytest.raises(ValueError, match="noise on a convex model, which clients train with"):
        experiment(mechanism=OUTPUT)
    with pytest.raises(ValueError, match=r"the section \[erm\] is read with"):
        experiment(erm={"regularisation": 0.1})


def test_networks_with_hidden_layers_and_many_classes_are_refused() -> None:
    settings = convex()
    hidden = Experiment.model_validate({**settings.model_dump(), "model": {"name": "mlp", "hidden": [3]}})
    with pytest.raises(InputError, match="minimises a convex objective, for one linear layer"):
        build_world(hidden)
    with pytest.raises(InputError, match="proven for two classes, and these data have 10"):
        build_world(convex(mechanism={"name": "objective", "target_epsilon": 1.0}))


def test_old_settings_have_the_bytes_that_they_had() -> None:
    assert "erm" not in experiment().to_toml()
    assert "erm" not in json.dumps(experiment().decisive())
