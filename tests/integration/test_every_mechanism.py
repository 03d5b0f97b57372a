"""Every mechanism, unit, calibration and precision through a whole run: training, ledger, observations, attacks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedpriv.accounting.proofs import NoProof
from fedpriv.algorithms.rounds.ledger import upload_warnings
from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.core.config import Experiment
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.report import write_report
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import build_world
from fedpriv.mechanisms import MechanismSettings
from tests.integration.small import experiment

ATTACKED = {"attacks": ["iga", "dlg"], "victims": 1, "iga": {"iterations": 2}, "dlg": {"iterations": 2, "restarts": 1}}

MECHANISMS: dict[str, dict[str, object]] = {
    "gaussian by layer": {"name": "gaussian", "sigma": 0.5, "clipping": "layer"},
    "gaussian, one update, classic": {
        "name": "gaussian", "epsilon": 0.5, "unit": "update", "calibration": "classic"
    },
    "gaussian, one update, extended": {
        "name": "gaussian", "epsilon": 4.0, "unit": "update", "calibration": "extended"
    },
    "gaussian, one update, analytic": {"name": "gaussian", "epsilon": 4.0, "unit": "update"},
    "gaussian, target": {"name": "gaussian", "target_epsilon": 8.0},
    "laplace": {"name": "laplace", "epsilon": 50.0},
    "laplace, update": {"name": "laplace", "scale": 0.1, "unit": "update"},
    "laplace, target": {"name": "laplace", "target_epsilon": 8.0},
    "hgm": {"name": "hgm", "sigma": 0.5},
    "hgm by layer": {"name": "hgm", "sigma": 0.5, "redistribution": "layer"},
    "hgm, public": {"name": "hgm", "sigma": 0.5, "redistribution": "public", "public_examples": 20},
    "hgm, one update": {"name": "hgm", "epsilon": 4.0, "unit": "update", "redistribution": "layer"},
    "hgm, target": {"name": "hgm", "target_epsilon": 8.0, "redistribution": "public", "inflation": 2.0},
    "percentile": {"name": "percentile", "gamma": 1e-3},
    "vmf, blocks of 256": {"name": "vmf", "kappa": 40.0, "blocks": "size:256"},
    "vmf, update": {"name": "vmf", "epsilon": 80.0, "unit": "update"},
    "vmf, target": {"name": "vmf", "target_epsilon": 8.0, "blocks": "layer"},
}  # fmt: skip


def settings(mechanism: dict[str, object], precision: str = "float32") -> Experiment:
    return experiment(
        mechanism=mechanism, adversary=ATTACKED, engine={"precision": precision}, data={"train_examples": 80}
    )


def noise_of(settings: MechanismSettings) -> dict[str, float | None]:
    """Nothing, where the mechanism has no such key."""
    return {} if settings.parameter is None else {settings.parameter: settings.noise}


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_whole_run(name: str, tmp_path: Path) -> None:
    """The ledger, the adversary and the plan name the same noise; nothing is refused or warned about."""
    built = build_world(settings(MECHANISMS[name]))
    summary = start_run(built.experiment, tmp_path / "run", "", Silent())
    assert summary.status == "completed"
    assert not [text for text in summary.warnings if "refused" in text or "does not read" in text]
    assert {(attack.attack, attack.upload) for attack in summary.attacks} >= {
        (attack, upload) for attack in ("iga", "dlg") for upload in ("protected", "unprotected")
    }
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    config = built.plans[ledger["worst"]["client"]].config
    assert ledger["mechanism"] == config.name
    assert ledger["unit"] == config.unit
    assert noise_of(config).items() <= ledger["parameters"].items()
    assert set(ledger["parameters"]) <= {*config.effective, "noise"}
    assert not {"epsilon", "target_epsilon", "calibration"} & set(ledger["parameters"])
    assert (ledger["worst"]["epsilon"] is None) == (config.proof() is NoProof)
    if "target_epsilon" in MECHANISMS[name]:
        assert 8 * 0.99 <= ledger["worst"]["epsilon"] <= 8
    for path in list_observations(tmp_path / "run" / "observations"):
        heard = read_observation(path)
        assert noise_of(built.plans[heard.client].config).items() <= heard.settings.mechanism.items()
        assert (heard.redistribution is None) == (config.name != "hgm")
        if heard.redistribution is not None:
            known = built.plans[heard.client].redistribution
            assert known is not None
            for key, value in known.shares.items():
                assert torch.equal(heard.redistribution.shares[key], value)


@pytest.mark.essential
@pytest.mark.parametrize("name", ["gaussian, target", "laplace", "hgm by layer", "vmf, update"])
def test_the_report_names_it(name: str, tmp_path: Path) -> None:
    """With the best decision of those who know the candidates, which attacks alone do not need."""
    changes = {**ATTACKED, "attacks": ["iga"], "best_decision": True, "counterfactual": False}
    tree = experiment(
        mechanism=MECHANISMS[name], federation={"rounds": 1}, adversary=changes, training={"batch_size": 1}
    )
    summary = start_run(tree, tmp_path / "run", "", Silent())
    (told,) = [rate for rate in summary.rates if rate.event == "told"]
    assert told.best is not None
    assert tree.mechanism.name in write_report(tmp_path / "run").read_text()


@pytest.mark.parametrize(
    ("precision", "name", "algorithm"),
    [
        ("bfloat16", "gaussian by layer", "fedsgd"),
        ("bfloat16", "vmf, update", "fedavg"),
        ("float64", "gaussian by layer", "fedsgd"),
        ("float64", "laplace", "fedavg"),
        ("float64", "hgm, public", "fedsgd"),
        ("float64", "vmf, update", "fedavg"),
    ],
)
def test_precision_from_the_clients_to_the_checkpoint(
    precision: str, name: str, algorithm: str, tmp_path: Path
) -> None:
    """And a resumed run goes on in it, to the same bytes."""
    tree = experiment(
        mechanism=MECHANISMS[name],
        federation={"algorithm": algorithm},
        adversary={**ATTACKED, "attacks": ["closed_form"], "counterfactual": False},
        engine={"precision": precision},
        data={"train_examples": 80},
    )
    start_run(tree, tmp_path / "run", "", Silent())
    dtype = torch.float64 if precision == "float64" else torch.float32
    checkpoint = load_file(tmp_path / "run" / "checkpoint" / "server.safetensors")
    assert {value.dtype for key, value in checkpoint.items() if key.startswith("parameters/")} == {dtype}
    (path, *_) = list_observations(tmp_path / "run" / "observations")
    heard = read_observation(path)
    vectors = [heard.parameters, heard.upload, heard.redistribution.shares if heard.redistribution else {}]
    assert {value.dtype for vector in vectors for value in vector.values()} == {dtype}
    if precision == "float64":
        # More digits than float32 has: nothing on the way rounded them off.
        assert any(not torch.equal(value, value.float().double()) for value in heard.upload.values())
        assert any(
            not torch.equal(value, value.float().double())
            for key, value in checkpoint.items()
            if key.startswith("parameters/")
        )
    before = RunFolder.open(tmp_path / "run").load_checkpoint()
    (tmp_path / "run" / "checkpoint" / "server.safetensors").unlink()
    for name in ("asked.jsonl", "metrics.jsonl"):
        (tmp_path / "run" / name).unlink()
    resume_run(tmp_path / "run", Silent())
    after = RunFolder.open(tmp_path / "run").load_checkpoint()
    assert before is not None
    assert after is not None
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(after.tensors[key], value) for key, value in before.tensors.items())


@pytest.mark.parametrize(
    ("name", "federation"),
    [
        ("none", {}),
        # Each way to release: how its noise was found does not matter here.
        ("gaussian by layer", {}),
        ("gaussian, one update, analytic", {}),
        ("laplace", {}),
        ("laplace, update", {}),
        ("hgm by layer", {}),
        ("hgm, one update", {}),
        ("vmf, blocks of 256", {}),
        ("vmf, target", {}),
        ("gaussian, target", {"secure_aggregation": True}),
        ("vmf, update", {"algorithm": "fedavg"}),
        ("vmf, update", {"secure_aggregation": True}),
    ],
    ids=str,
)
def test_parameters_without_dimensions(name: str, federation: dict[str, object], tmp_path: Path) -> None:
    """Temperatures and the like: every release, also summed under masks, and the attack that models its noise."""
    settings = experiment(
        model={"name": "tests.integration.small:scaled"},
        mechanism=MECHANISMS.get(name, {"name": "none"}),
        # Of a block of one number only the sign is released: those of three clients do not cancel.
        federation={"rounds": 1, "clients": 3, **federation},
        training={"batch_size": 1},
        adversary={"attacks": ["map"], "victims": 1, "counterfactual": False, "map": {"iterations": 1}},
        data={"train_examples": 8},
    )
    summary = start_run(settings, tmp_path / "run", "", Silent())
    assert summary.status == "completed"
    assert "map" in {attack.attack for attack in summary.attacks}
    after = RunFolder.open(tmp_path / "run").load_checkpoint()
    assert after is not None
    assert after.tensors["parameters/temperature"].shape == ()
    assert (float(after.tensors["parameters/temperature"]), float(after.tensors["parameters/share"])) != (1, 0.5)


def test_public_examples_must_be_there() -> None:
    with pytest.raises(ValueError, match=r"public_examples = 5000: digits has \d+ test images"):
        build_world(settings({"name": "hgm", "sigma": 1.0, "redistribution": "public", "public_examples": 5000}))


@pytest.mark.parametrize(
    ("mechanism", "says"),
    [
        ({"name": "vmf", "kappa": 4.0, "clip_norm": 3.0}, "mechanism.clip_norm is set, but vmf"),
        ({"name": "gaussian", "sigma": 4.0, "calibration": "classic"}, "mechanism.calibration is set, but gaussian"),
        ({"name": "hgm", "sigma": 4.0, "inflation": 3.0}, "mechanism.inflation is set, but hgm"),
    ],
)
def test_a_setting_of_a_mechanism_without_effect_is_a_warning(
    mechanism: dict[str, object], says: str, tmp_path: Path
) -> None:
    quiet = experiment(mechanism=mechanism, federation={"rounds": 1})
    assert [text for text in start_run(quiet, tmp_path / "run", "", Silent()).warnings if says in text]


@pytest.mark.parametrize(
    ("section", "unread", "choice", "reads"),
    [
        ("training", {"local_epochs": 2}, ("federation", "algorithm", "fedsgd"), "fedavg"),
        ("training", {"momentum": 0.9}, ("federation", "algorithm", "fedsgd"), "fedavg"),
        ("training", {"risk": 2.0}, ("training", "loss", "cross-entropy"), "risk-averting"),
        ("federation", {"server_momentum": 0.9}, ("federation", "server_optimizer", "adam"), "sgd"),
        ("federation", {"trim": 0.3}, ("federation", "aggregation", "median"), "trimmed-mean"),
        ("data", {"alpha": 0.1}, ("data", "partition", "iid"), "dirichlet"),
    ],
)
def test_a_setting_that_another_choice_reads_is_a_warning(
    section: str, unread: dict[str, object], choice: tuple[str, str, str], reads: str
) -> None:
    where, key, value = choice
    for chosen in (value, reads):
        sections: dict[str, dict[str, object]] = {section: dict(unread)}
        sections.setdefault(where, {})[key] = chosen
        said = [line for line in upload_warnings(build_world(experiment(**sections))) if "has no effect" in line]
        name, given = next(iter(unread.items()))
        line = f"{section}.{name} = {given!r} has no effect with {where}.{key} = {value!r}; {reads!r} reads it"
        assert said == ([line] if chosen == value else [])
