"""The section [model]: each network's own keys; files of earlier versions; and digests that noise is keyed by."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from fedpriv.core.config import Experiment, load_experiment, load_run
from fedpriv.core.errors import InputError
from fedpriv.core.registry import MODELS
from fedpriv.models import recorded_model
from fedpriv.sweep.settings import load_sweep

MLP = '[model]\nname = "mlp"\nhidden = [9]\nactivation = "tanh"\n'


def write(folder: Path, text: str, name: str = "experiment.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", [*MODELS, "mine:net"])
def test_a_key_of_another_network_is_an_error_that_says_whose_it_is(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, f'[model]\nname = "{name}"\nhidden = [9]\n')
    if name in {"mlp", "embedding"}:
        assert load_experiment(path).model.model_dump()["hidden"] == (9,)
        return
    words = r'unknown key model\.hidden: "embedding" and "mlp" read it, but ".*" reads init.*; leave it out$'
    with pytest.raises(InputError, match=words):
        load_experiment(path)


def test_another_network_takes_over_what_it_reads(tmp_path: Path) -> None:
    path = write(tmp_path, MLP + 'init = "uniform"\n')
    for name in ("lenet", "mine:net"):
        model = load_experiment(path, [f"model.name={name}"]).model
        assert (model.name, model.init, model.is_own) == (name, "uniform", ":" in name)
    with pytest.raises(InputError, match=r'model\.hidden: "embedding" and "mlp" read it'):
        load_experiment(path, ["model.name=lenet", "model.hidden=[3]"])


def test_files_that_earlier_versions_wrote_are_read(tmp_path: Path) -> None:
    """They held the keys of all networks; what no network reads is an error all the same."""
    text = '[model]\nname = "lenet"\ninit = "uniform"\nhidden = [1024, 1024]\nactivation = "relu"\n'
    write(tmp_path, text, "config.toml")
    assert load_run(tmp_path).model.model_dump() == {"name": "lenet", "init": "uniform"}
    assert recorded_model({"name": "resnet", "hidden": [3]}).model_dump() == {"name": "resnet", "init": "default"}
    write(tmp_path, text + "layers = 3\n", "config.toml")
    with pytest.raises(InputError, match=r"unknown key model\.layers"):
        load_run(tmp_path)


# As before networks had keys of their own: a different one would change the noise of reproducible runs.
DIGESTS = {
    "{}": "4b688eafb21766cb",
    '{"model": {"name": "mlp", "hidden": [9]}, "federation": {"aggregation": "krum"}}': "1522b692482488d6",
    '{"model": {"name": "mine:net"}, "data": {"name": "lfw"}}': "a2dfe41a2ca394f1",
}


@pytest.mark.parametrize("settings", DIGESTS)
def test_what_noise_is_keyed_by_stays(settings: str) -> None:
    decisive = Experiment.model_validate_json(settings).decisive()
    assert sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16] == DIGESTS[settings]


def test_experiments_that_differ_in_one_attacks_settings_differ(tmp_path: Path) -> None:
    one, other = (Experiment.model_validate({"adversary": {"iga": {"tv": tv}}}) for tv in (0.1, 0.2))
    assert one != other
    assert one == Experiment.model_validate({"adversary": {"iga": {"tv": 0.1}}})
    sweep = load_sweep(write(tmp_path, 'name = "s"\n[grid]\n"adversary.iga.tv" = [0.1, 0.2]\n', "sweep.toml"))
    assert [trial.experiment.adversary.settings("iga").tv for trial in sweep.trials] == [0.1, 0.2]


def test_sweeps_of_two_networks_or_mechanisms_are_two(tmp_path: Path) -> None:
    kinds = ["", 'model.name = "resnet"', 'model.name = "mlp"', "mechanism = {name = 'gaussian', epsilon = 9}"]
    kinds.append("mechanism = {name = 'vmf', epsilon = 9}")
    text = "name = 's'\nseeds = [1, 2]\n[base]\n"
    found = [load_sweep(write(tmp_path, text + kind, "sweep.toml")).identity() for kind in kinds]
    assert len({json.dumps(each) for each in found}) == len(kinds)


def test_groups_decide_what_clients_release_and_their_absence_changes_nothing() -> None:
    plain = Experiment.model_validate({}).decisive()
    joined = Experiment.model_validate({"data": {"groups": [[0, 1], [2]]}}).decisive()
    assert "groups" not in plain["data"] and joined["data"].pop("groups") == [[0, 1], [2]]
    assert joined == plain
