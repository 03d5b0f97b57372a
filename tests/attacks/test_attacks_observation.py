"""Observations: what is written is read back, nothing secret is in it, and no damaged file gets through."""

import json
import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from attack_victims import lenet, mlp, observe_digits, settings
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedpriv.attacks.observation import (
    Observation,
    PublicSettings,
    list_observations,
    read_observation,
    write_observation,
)
from fedpriv.attacks.own_model import named_vector
from fedpriv.core.errors import InputError
from tests.cases import in_one_test


def observation(**changes: object) -> Observation:
    heard, _, _ = observe_digits(mlp(hidden=(3,)), 1)
    return replace(heard[0], **changes)


@pytest.mark.parametrize("model", [lenet(), mlp(), mlp("relu").double()])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mechanism": {"name": "vmf", "kappa": 3.0, "blocks": "layer", "unit": "example", "clip_norm": 1.0}},
        {"algorithm": "fedavg", "local_steps": 7, "optimizer": "adam", "momentum": 0.9},
    ],
)
def test_reads_back_what_was_written(tmp_path: Path, model: torch.nn.Module, changes: dict[str, object]) -> None:
    heard, _, _ = observe_digits(model, 1)
    written = replace(heard[0], round=12, client=345, settings=replace(heard[0].settings, **changes))
    path = write_observation(tmp_path, written)
    assert path.name == "0012-0345.safetensors"
    read = read_observation(path)
    assert (read.round, read.client, read.settings) == (12, 345, written.settings)
    assert [*read.parameters] == [*read.upload] == [*written.parameters]
    for name, value in written.parameters.items():
        assert torch.equal(read.parameters[name], value)
        assert read.parameters[name].dtype == value.dtype
        assert torch.equal(read.upload[name], written.upload[name])


def test_reads_back_labels_and_sums(tmp_path: Path) -> None:
    sum_of_three = replace(observation().settings, clients=3, batch_size=2)
    path = write_observation(tmp_path, observation(settings=sum_of_three, labels=(1, 1, 4, 7, 9, 9)))
    assert path.name == "0001-sum.safetensors"
    read = read_observation(path)
    assert (read.labels, read.settings.clients, read.settings.examples) == ((1, 1, 4, 7, 9, 9), 3, 6)
    assert read.title == "round 1, sum of 3 clients"
    assert list_observations(tmp_path) == (path,)
    assert read_observation(write_observation(tmp_path, observation(labels=()))).labels == ()


def test_a_withheld_batch_size_stays_withheld(tmp_path: Path) -> None:
    read = read_observation(
        write_observation(tmp_path, observation(settings=replace(observation().settings, batch_size=None)))
    )
    assert read.settings.batch_size is None
    with pytest.raises(InputError, match="the batch size is withheld"):
        _ = read.settings.examples


@pytest.mark.parametrize("kept", [True, False])
def test_a_list_of_arrays_keeps_its_order(tmp_path: Path, kept: bool) -> None:
    """Safetensors returns tensors in another order each time; files of earlier versions have numbers alone."""
    network = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(12)))
    listed = {str(number): torch.full((2, 2), float(number)) for number in range(12)}
    path = write_observation(tmp_path, observation(parameters=listed, upload=listed))
    about = json.loads(path.with_suffix(".json").read_text())
    assert about.pop("order") == [*listed]
    if not kept:
        path.with_suffix(".json").write_text(json.dumps(about))
    for arrays in (read_observation(path).parameters, dict(sorted(listed.items()))):
        assert [int(value[0, 0]) for value in named_vector(arrays, network, "upload").values()] == [*range(12)]
    path.with_suffix(".json").write_text(json.dumps({**about, "order": ["0", "1"]}))
    with pytest.raises(InputError, match="damaged: its order names other arrays"):
        read_observation(path)


@pytest.mark.parametrize("labels", [[1, "2"], [True], 3, [1.5], [10], [-1]])
def test_damaged_labels(tmp_path: Path, labels: object) -> None:
    path = write_observation(tmp_path, observation(labels=(3,)))
    about = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**about, "labels": labels}))
    with pytest.raises(InputError, match="damaged: labels"):
        read_observation(path)


def test_more_classes_than_there_is_memory_for(tmp_path: Path) -> None:
    """A number of classes costs nothing to write, and nothing to check labels against."""
    path = write_observation(tmp_path, replace(observation(), labels=(1, 2)))
    about = json.loads(path.with_suffix(".json").read_text())
    about["settings"]["classes"] = 2**62
    path.with_suffix(".json").write_text(json.dumps(about))
    assert read_observation(path).labels == (1, 2)


def test_reads_folders_of_versions_without_sums(tmp_path: Path) -> None:
    path = write_observation(tmp_path, observation())
    about = json.loads(path.with_suffix(".json").read_text())
    del about["settings"]["clients"]
    path.with_suffix(".json").write_text(json.dumps(about))
    assert read_observation(path).settings == observation().settings


def test_writes_views_and_shared_memory(tmp_path: Path) -> None:
    flat = torch.arange(24.0)
    vector = {"a": flat[:12].view(3, 4).T, "b": flat[6:18]}
    read = read_observation(write_observation(tmp_path, Observation(1, 0, vector, vector, settings())))
    assert torch.equal(read.upload["a"], vector["a"])
    assert torch.equal(read.parameters["b"], vector["b"])


def test_same_observation_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    one, other = write_observation(tmp_path, observation()), write_observation(tmp_path / "again", observation())
    assert one.read_bytes() == other.read_bytes()
    assert one.with_suffix(".json").read_bytes() == other.with_suffix(".json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["0001-0000.json", one.name]


def test_holds_only_what_the_threat_model_allows(tmp_path: Path) -> None:
    """Peers leak labels into the attack: here the files' keys are an explicit list, and no secret's name is on it."""
    path = write_observation(tmp_path, observation())
    about = json.loads(path.with_suffix(".json").read_text())
    assert set(about) == {"round", "client", "order", "settings"}
    written = {field.name for field in fields(PublicSettings)} - {"columns", "draws", "text"}  # images have none
    assert set(about["settings"]) == written
    allowed = {
        "model", "shape", "classes", "mean", "std", "algorithm", "batch_size", "local_steps", "learning_rate",
        "optimizer", "momentum", "client_examples", "mechanism", "clients",
    }  # fmt: skip
    assert set(about["settings"]) == allowed
    with safe_open(path, framework="pt") as file:
        keys, metadata = list(file.keys()), file.metadata()
    assert not metadata
    names = set(observation().parameters)
    assert set(keys) == {f"{kind}/{name}" for kind in ("parameters", "upload") for name in names}
    words = " ".join([*about["settings"], *about["settings"]["model"], *about["settings"]["mechanism"], *keys]).lower()
    for secret in ("seed", "label", "target", "index", "indices", "image", "noise", "generator", "partition"):
        assert secret not in words


def test_lists_by_round_then_client(tmp_path: Path) -> None:
    for number, client in ((2, 0), (1, 11), (1, 2)):
        write_observation(tmp_path, observation(round=number, client=client))
    (tmp_path / ".0001-0000.safetensors.part").write_bytes(b"half")
    stems = [path.stem for path in list_observations(tmp_path)]
    assert stems == ["0001-0002", "0001-0011", "0002-0000"]
    assert list_observations(tmp_path / "none") == ()


@pytest.mark.parametrize("ending", [".safetensors", ".json"])
def test_missing_file(tmp_path: Path, ending: str) -> None:
    path = write_observation(tmp_path, observation())
    path.with_suffix(ending).unlink()
    with pytest.raises(InputError, match="no such file"):
        read_observation(path)


@pytest.mark.parametrize("ending", [".safetensors", ".json"])
def test_every_truncation_is_refused(tmp_path: Path, ending: str) -> None:
    path = write_observation(tmp_path, observation())
    file = path.with_suffix(ending)
    content = file.read_bytes().rstrip(b"\n")
    for length in [*range(min(64, len(content))), *range(64, len(content), 97), len(content) - 1]:
        file.write_bytes(content[:length])
        with pytest.raises(InputError):
            read_observation(path)


@pytest.mark.parametrize("ending", [".safetensors", ".json"])
@hypothesis_settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_altered_bytes_give_an_observation_or_an_input_error(tmp_path: Path, ending: str, data: st.DataObject) -> None:
    path = write_observation(tmp_path, observation())
    file = path.with_suffix(ending)
    content = bytearray(file.read_bytes())
    last = min(len(content), 700) - 1  # the header is what can break; a number's bits are as good as others
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(content))
    try:
        read = read_observation(path)
    except InputError as error:
        assert "\n" not in str(error).strip()
        return
    assert isinstance(read, Observation)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"round": -1}, "round"),
        ({"client": 1.5}, "client"),
        ({"client": True}, "client"),
        ({"extra": 1}, "extra = 1: unexpected"),
    ],
)
def test_wrong_numbers_are_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = write_observation(tmp_path, observation())
    file = path.with_suffix(".json")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=says):
        read_observation(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"std": [0.0]}, "std"),
        ({"std": [0.1, 0.1]}, "std"),
        ({"shape": [1, 8]}, "shape"),
        ({"classes": 1}, "classes"),
        ({"algorithm": "fedprox"}, "algorithm"),
        ({"algorithm": "fedsgd", "local_steps": 3}, "local_steps"),
        ({"mechanism": {"name": "laplace"}}, "name"),
        ({"mechanism": {"name": "vmf"}}, "vmf"),
        ({"model": {"name": "lenet", "storeys": 3}}, "storeys"),
        ({"labels": [3]}, "labels"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = write_observation(tmp_path, observation())
    file = path.with_suffix(".json")
    about = json.loads(file.read_text())
    about["settings"] |= change
    file.write_text(json.dumps(about))
    with pytest.raises(InputError, match=says):
        read_observation(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"round": 1}', "\x00", "9" * 5000])
def test_wrong_json(tmp_path: Path, text: str) -> None:
    path = write_observation(tmp_path, observation())
    path.with_suffix(".json").write_text(text)
    with pytest.raises(InputError, match="damaged"):
        read_observation(path)


def test_wrong_tensors(tmp_path: Path) -> None:
    path = write_observation(tmp_path, observation())
    tensors = load_file(path)
    key = "upload/output.bias"
    cases = {
        "differ": {name: value for name, value in tensors.items() if name != key},
        "output.bias": tensors | {key: torch.zeros(7)},
        "'labels' is not one of parameters, upload, redistribution": tensors | {"labels": torch.zeros(1)},
        "expected float32 or float64": tensors | {key: torch.zeros(10, dtype=torch.int64)},
        "at least one": {},
    }
    for says, altered in cases.items():
        save_file(altered, path)
        with pytest.raises(InputError, match=says):
            read_observation(path)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return Path.touch, (tmp_path / "exploded",)  # type: ignore[return-value]

    path = write_observation(tmp_path, observation())
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError):
        read_observation(path)
    assert not (tmp_path / "exploded").exists()


@in_one_test(
    ("changes", "examples"),
    [
        ({"batch_size": 4}, 4),
        ({"batch_size": 4, "algorithm": "fedavg", "local_steps": 5}, 20),
        ({"batch_size": 4, "algorithm": "fedavg", "local_steps": 5, "client_examples": 10}, 10),
        ({"batch_size": 10, "algorithm": "fedavg", "local_steps": 5, "client_examples": 10}, 10),
        ({"batch_size": 1, "client_examples": 1}, 1),
    ],
)
def test_examples_behind_an_upload(changes: dict[str, object], examples: int) -> None:
    assert settings(**changes).examples == examples
