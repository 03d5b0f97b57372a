"""The experiment file: what is accepted, what is refused, and in which words."""

from pathlib import Path

import pytest

from fedpriv.config import Experiment, describe, load_experiment
from fedpriv.errors import InputError

VMF = '[mechanism]\nname = "vmf"\nepsilon = 50\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def test_the_resolved_file_gives_the_same_experiment(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, VMF), ["data.partition=dirichlet", "adversary.attacks=[]", "seed=5"])
    again = load_experiment(write(tmp_path, experiment.to_toml()))
    assert again == experiment
    assert hash(again) == hash(experiment)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("[trainin]\na = 1", [], "unknown key trainin; did you mean training?"),
        ("", ["mechanism.kapa=3"], "unknown key mechanism.kapa; did you mean kappa?"),
        ("", ["adversary.iga.tvv=3"], "unknown key adversary.iga.tvv; did you mean tv?"),
        ("", ["zzz=3"], "unknown key zzz; known: name, seed, data"),
        ("", ["data.name=mnits"], "data.name = 'mnits' is not allowed: allowed: digits, mnist, "),
        ("", ["model.name=lenot"], "model.name = 'lenot' is not allowed: allowed: lenet, mlp"),
        (
            "",
            ["training.batch_size=0"],
            "training.batch_size = 0 is not allowed: input should be greater than or equal",
        ),
        (
            "",
            ["training.batch_size=two"],
            "training.batch_size = 'two' is not allowed: input should be a valid integer",
        ),
        ("", ["training.learning_rate=nan"], "training.learning_rate = nan is not allowed"),
        ("", ["training.learning_rate=-1"], "training.learning_rate = -1 is not allowed"),
        ("", ["mechanism.delta=1"], "mechanism.delta = 1 is not allowed"),
        ("", ["mechanism.delta=0"], "mechanism.delta = 0 is not allowed"),
        ("", ["mechanism.name=vmf"], "vmf needs exactly one of epsilon, kappa or target_epsilon; none is set"),
        (
            "",
            ["mechanism.name=gaussian"],
            "gaussian needs exactly one of epsilon, sigma or target_epsilon; none is set",
        ),
        (VMF, ["mechanism.kappa=1", "mechanism.epsilon=2"], "both epsilon and kappa are set"),
        (VMF + "kappa = 3", [], "both epsilon and kappa are set"),
        (VMF, ["mechanism.kappa=1e8"], "mechanism.kappa = 100000000.0 is not allowed"),
        (VMF, ["mechanism.epsilon=inf"], "mechanism.epsilon = inf is not allowed"),
        ("", ["federation.min_clients=9"], "min_clients = 9 is more than the 8 clients of a round"),
        ("", ["federation.clients_per_round=9"], "clients_per_round = 9 is more than clients = 8"),
        ("", ["adversary.rounds=[1, 21]"], "adversary.rounds names round 21, but federation.rounds = 20"),
        ("", ['adversary.attacks=["dgl"]'], "adversary.attacks.0 = 'dgl' is not allowed"),
        ("", ["data.name=npz"], "name = 'npz' needs data.path, the .npz file"),
        ("", ["mechanism=none"], "mechanism is a section, such as [mechanism]"),
        ("", ["adversary.rounds=1"], "adversary.rounds = 1 is not allowed: a list is wanted, such as [1]"),
        ("", ["data.name=mnsit"], "did you mean mnist?"),
        ("", ["seed=" + "9" * 5000], "the value is too long or too deep"),
        ("", ["seed=" + "[" * 3000], "--set seed: the value is too long or too deep"),
        ("", ["training.learning_rate=1e300"], "training.learning_rate = 1e+300 is not allowed"),
        ("", ["seed=-1"], "seed = -1 is not allowed"),
        ("", ["name=a/b"], "name = 'a/b' is not allowed"),
        ("", ["seed"], "--set seed: expected key=value"),
        ("", ["=3"], "--set =3: expected key=value"),
        ("", ["seed.x=3"], "seed"),
        ("mechanism = 3", [], "mechanism = 3 is not allowed"),
        ("name = ", [], "not TOML"),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(
    tmp_path: Path, text: str, overrides: list[str], expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_experiment(write(tmp_path, text), overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_file_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.toml: no such file"):
        load_experiment(tmp_path / "missing.toml")
    with pytest.raises(InputError, match="cannot be read"):
        load_experiment(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        load_experiment(tmp_path / "binary.toml")


@pytest.mark.parametrize("override", ["mechanism.kappa=3", "mechanism.epsilon=3"])
def test_an_override_of_the_noise_replaces_the_files_choice(tmp_path: Path, override: str) -> None:
    key = override.split(".")[1].split("=")[0]
    mechanism = load_experiment(write(tmp_path, VMF), [override]).mechanism
    assert {"kappa": mechanism.kappa, "epsilon": mechanism.epsilon} == {"kappa": None, "epsilon": None, key: 3.0}


def test_another_mechanism_ignores_the_files_parameters(tmp_path: Path) -> None:
    path = write(tmp_path, '[mechanism]\nname = "vmf"\nkappa = 50\n')
    assert load_experiment(path, ["mechanism.name=none"]).mechanism.name == "none"
    assert load_experiment(path, ["mechanism.name=gaussian", "mechanism.sigma=2"]).mechanism.sigma == 2.0


@pytest.mark.parametrize(("text", "value"), [("abc", "abc"), ("'a b'", "a b"), ("a=b", "a=b")])
def test_override_values_are_toml_or_bare_words(tmp_path: Path, text: str, value: str) -> None:
    assert load_experiment(write(tmp_path, ""), [f"data.path={text}"]).data.path == value


def test_every_key_has_a_description() -> None:
    assert [key for key, _, _, meaning in describe(Experiment()) if not meaning] == []


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "configs").rglob("*.toml")), ids=lambda path: path.stem
)
def test_the_shipped_experiments_are_valid(path: Path) -> None:
    load_experiment(path)
