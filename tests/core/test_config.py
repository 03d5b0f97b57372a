"""The experiment file: what is accepted, what is refused, and in which words."""

import re
import sys
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from fedpriv.accounting.release import KAPPA, SIGMA
from fedpriv.core.config import AdversaryConfig, Experiment, describe, load_experiment, load_run, read_toml, validated
from fedpriv.core.config.file import kind_of_file
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ATTACKS, MECHANISMS
from fedpriv.core.settings import Settings, enumerated
from fedpriv.mechanisms import NoisySettings, mechanism_settings

CONFIGS = Path(__file__).parents[2] / "configs"

VMF = '[mechanism]\nname = "vmf"\nepsilon = 50\n'
GAUSSIAN = '[mechanism]\nname = "gaussian"\nsigma = 2\n'
HGM = GAUSSIAN.replace("gaussian", "hgm")
LAPLACE = '[mechanism]\nname = "laplace"\nscale = 2\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def test_the_resolved_file_gives_the_same_experiment(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, VMF), ["data.partition=dirichlet", "adversary.attacks=[]", "seed=5"])
    again = load_experiment(write(tmp_path, experiment.to_toml()))
    assert again == experiment
    assert hash(again) == hash(experiment)


@pytest.mark.parametrize("write_out", [Experiment.to_json, Experiment.to_toml, Experiment.decisive])
def test_ctrl_c_while_an_experiment_is_written_out_stays_ctrl_c(write_out: Callable[[Experiment], object]) -> None:
    experiment, hit = Experiment(), []

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        # Wherever pydantic calls our code.
        if event == "call" and frame.f_code is not write_out.__code__ and "fedpriv" in frame.f_code.co_filename:
            hit.append(frame.f_code.co_qualname)
            raise KeyboardInterrupt

    profiler = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_out(experiment)
    finally:
        sys.setprofile(profiler)
    assert hit


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("[trainin]\na = 1", [], "unknown key trainin; did you mean training?"),
        ("", ["mechanism.name=vmf", "mechanism.kapa=3"], "unknown key mechanism.kapa; did you mean mechanism.kappa?"),
        ("", ["adversary.iga.tvv=3"], "unknown key adversary.iga.tvv; did you mean adversary.iga.tv?"),
        ("rounds = 3", [], "unknown key rounds; did you mean federation.rounds or adversary.rounds?"),
        ("", ["zzz=3"], "unknown key zzz; known: name, seed, noise, data"),
        ("", ["data.name=mnits"], "data.name = 'mnits': allowed: adult, agnews, cifar10, "),
        (
            "",
            ["model.name=lenot"],
            "model.name = 'lenot': allowed: convnet, embedding, encoder, gpt, lenet, ",
        ),
        (
            "",
            ["training.batch_size=0"],
            "training.batch_size = 0: allowed is from 1",
        ),
        (
            "",
            ["training.batch_size=two"],
            "training.batch_size = 'two': expected a whole number",
        ),
        ("", ["training.learning_rate=nan"], "training.learning_rate = nan:"),
        ("", ["training.learning_rate=-1"], "training.learning_rate = -1:"),
        ("", ["mechanism.delta=1"], "mechanism.delta = 1:"),
        ("", ["mechanism.delta=0"], "mechanism.delta = 0:"),
        (
            "",
            ["mechanism.name=vmf"],
            "vmf needs exactly one of epsilon, kappa, target_epsilon or target_ceiling; none is set",
        ),
        (VMF, ["mechanism.sigma=1"], 'read it, but "vmf" reads unit, delta'),
        (
            "",
            ["mechanism.name=distributed", "mechanism.sigma=1", "mechanism.target_ceiling=0.1"],
            "noise on a sum; allowed with gaussian, hgm, laplace or vmf",
        ),
        (
            "",
            ["mechanism.kapa=3"],
            'mechanism.kapa; did you mean mechanism.kappa? "vmf" reads it, but "none" reads unit',
        ),
        (VMF, ["mechanism.name=laplace"], "mechanism.epsilon = 50 is vmf's (the paper's, 2 kappa); say how much noise"),
        (VMF, ["seed=-1", "mechanism.kapa=3"], "(1) seed = -1:"),
        (
            "",
            ["mechanism.name=gaussian"],
            "gaussian needs exactly one of epsilon, sigma, target_epsilon or target_ceiling; none is set",
        ),
        (VMF, ["mechanism.kappa=1", "mechanism.epsilon=2"], "both epsilon and kappa are set"),
        (VMF + "kappa = 3", [], "both epsilon and kappa are set"),
        (VMF, ["mechanism.kappa=1e8"], "mechanism.kappa = 1e+08:"),
        (VMF, ["mechanism.epsilon=inf"], "mechanism.epsilon = inf:"),
        (VMF, ["mechanism.epsilon=3e7"], "mechanism.epsilon = 3e+07: vmf allows up to 2e+07, twice the largest kappa"),
        (
            VMF,
            ["mechanism.blocks=layers"],
            "mechanism.blocks = 'layers': allowed: whole, layer, or size",
        ),
        (VMF, ["mechanism.blocks=size:0"], "mechanism.blocks = 'size:0':"),
        (VMF, ["mechanism.blocks=size:-3"], "mechanism.blocks = 'size:-3':"),
        (VMF, ["mechanism.blocks=size:1.5"], "mechanism.blocks = 'size:1.5':"),
        (VMF, ["mechanism.blocks=size:"], "mechanism.blocks = 'size:':"),
        (VMF, ["mechanism.blocks=256"], "mechanism.blocks = 256:"),
        ("", ["mechanism.name=laplas"], "did you mean laplace?"),
        (GAUSSIAN, ["mechanism.sigma=0"], "mechanism.sigma = 0:"),
        (GAUSSIAN, ["mechanism.sigma=1e13"], "mechanism.sigma = 1e+13:"),
        (LAPLACE, ["mechanism.scale=0"], "mechanism.scale = 0:"),
        (LAPLACE, ["mechanism.scale=nan"], "mechanism.scale = nan:"),
        (VMF, ["mechanism.kappa=-1"], "mechanism.kappa = -1:"),
        (VMF, ["mechanism.target_epsilon=0"], "mechanism.target_epsilon = 0:"),
        (VMF, ["mechanism.target_epsilon=nan"], "mechanism.target_epsilon = nan:"),
        (GAUSSIAN, ["mechanism.clip_norm=0"], "mechanism.clip_norm = 0:"),
        (GAUSSIAN, ["mechanism.clipping=layers"], "mechanism.clipping = 'layers': allowed: flat, layer"),
        (HGM, ["mechanism.redistribution=even"], "mechanism.redistribution = 'even': allowed: uniform"),
        (HGM, ["mechanism.inflation=0"], "mechanism.inflation = 0:"),
        (HGM, ["mechanism.public_examples=0"], "mechanism.public_examples = 0:"),
        (
            GAUSSIAN,
            ["mechanism.calibration=exact"],
            "mechanism.calibration = 'exact': allowed: analytic",
        ),
        ("", ["engine.precision=float16"], "engine.precision = 'float16': allowed: float32, bfloat16"),
        ("", ["engine.gradient_memory=0"], "engine.gradient_memory = 0:"),
        ("", ["seed=true"], "seed = true: expected a number"),
        ("", ['adversary.attacks=["iga", "dlg", "iga"]'], ": iga is named twice"),
        ("", ["adversary.rounds=[2, 1, 2]"], "adversary.rounds = [2, 1, 2]: 2 is named twice"),
        ("", ["seed=3\nname = 'x'"], "--set seed: expected one value; set name on its own"),
        ("", ["seed=3\n[data]\nname = 'mnist'"], "--set seed: expected one value; set data on its own"),
        ("", ["federation.min_clients=9"], "min_clients = 9: more than the 8 clients of a round"),
        ("", ["federation.clients_per_round=9"], "clients_per_round = 9: more than clients = 8"),
        ("", ["adversary.rounds=[1, 21]"], "adversary.rounds names round 21, but federation.rounds = 20"),
        (
            GAUSSIAN,
            ["mechanism.adjacency=add-one"],
            "mechanism.adjacency = 'add-one': allowed: replace-one, z",
        ),
        (
            VMF,
            ["mechanism.adjacency=zero-out", "training.sampling=poisson"],
            'read it, but "vmf" reads unit',
        ),
        (
            "",
            ["mechanism.name=gaussian", "mechanism.sigma=1", "mechanism.adjacency=zero-out"],
            "and training.sampling = 'shuffled' allowed is replace-one",
        ),
        (
            '[mechanism]\nname = "hgm"\nsigma = 1\nunit = "update"\nadjacency = "zero-out"\n',
            ["training.sampling=poisson"],
            "mechanism.unit = 'update' and training.sampling = 'poisson' allowed is replace-one",
        ),
        ("", ['adversary.attacks=["dgl"]'], "adversary.attacks.0 = 'dgl':"),
        ("", ["data.name=npz"], "name = 'npz' needs data.path, the file"),
        ("", ["mechanism=none"], "mechanism is a section, such as [mechanism]"),
        ("", ["adversary.imprint=[]"], "adversary.imprint is a section, such as [adversary.imprint] with keys"),
        ("", ["seed='" + 3000 * "x" + "'"], "xxxx ...:"),
        ('"a\\r\\u001b[31m" = 1', [], "unknown key a  [31m; known"),
        ("", ["adversary.rounds=1"], "adversary.rounds = 1: expected a list, such as [1]"),
        ("", ["data.name=mnsit"], "did you mean mnist?"),
        ("", ["seed=" + "9" * 5000], "the value is too long or too deep"),
        ("", ["seed=" + "[" * 3000], "--set seed: the value is too long or too deep"),
        ("", ["training.learning_rate=1e300"], "training.learning_rate = 1e+300:"),
        ("", ["seed=-1"], "seed = -1:"),
        ("", ["data.groups=[[0,-1],[1]]"], "toml: data.groups.0.1 = -1: allowed is from 0"),
        ("", ["name=a/b"], "name = 'a/b':"),
        ("", ["seed"], "--set seed: expected key=value"),
        ("", ["=3"], "--set =3: expected key=value"),
        ("", ["seed.x=3"], "seed"),
        ("mechanism = 3", [], "mechanism = 3:"),
        ("name = ", [], "not TOML"),
        ('base = "x.toml"', [], "is a file of fedpriv sweep, no experiment; run fedpriv sweep"),
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
    with pytest.raises(InputError, match=r"cannot be read: Is a directory$"):
        load_experiment(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        load_experiment(tmp_path / "binary.toml")


NOISE_KEYS = {name: kind.noise_keys() for name, kind in MECHANISMS.items() if issubclass(kind, NoisySettings)}


def subsets(name: str) -> list[tuple[str, ...]]:
    keys = NOISE_KEYS[name]
    return [chosen for count in range(len(keys) + 1) for chosen in combinations(keys, count)]


@pytest.mark.parametrize(("name", "given"), [(name, given) for name in NOISE_KEYS for given in subsets(name)])
def test_exactly_one_of_the_noise_keys(name: str, given: tuple[str, ...]) -> None:
    tree = {"name": name, **dict.fromkeys(given, 0.5)}
    if len(given) == 1:
        config = mechanism_settings(tree)
        assert {key for key in NOISE_KEYS[name] if getattr(config, key) is not None} == set(given)
        return
    with pytest.raises(ValidationError) as caught:
        mechanism_settings(tree)
    message = caught.value.errors()[0]["msg"]
    assert f"{name} needs exactly one of {enumerated(NOISE_KEYS[name], 'or')}" in message
    assert all(key in message.partition(";")[2] for key in given)
    assert ("federation.target_epsilon" in message) == ("target_epsilon" in given and len(given) > 1)


@pytest.mark.parametrize(("name", "override"), [(name, key) for name, keys in NOISE_KEYS.items() for key in keys])
def test_an_override_of_the_noise_replaces_the_files_choice(tmp_path: Path, name: str, override: str) -> None:
    keys = NOISE_KEYS[name]
    for given in keys:
        path = write(tmp_path, f'[mechanism]\nname = "{name}"\n{given} = 0.5\n')
        mechanism = load_experiment(path, [f"mechanism.{override}=0.25"]).mechanism
        assert {key: getattr(mechanism, key) for key in keys} == {
            key: 0.25 if key == override else None for key in keys
        }


@pytest.mark.parametrize("unit", ["example", "update"])
@pytest.mark.parametrize("name", ["gaussian", "hgm"])
@pytest.mark.parametrize(("noise", "value"), [("epsilon", 0.5), ("epsilon", 1.0), ("epsilon", 1.001), ("sigma", 9.0)])
def test_the_classic_calibration_is_for_small_epsilons(unit: str, name: str, noise: str, value: float) -> None:
    """Only where it is used: one upload's own epsilon on whole updates."""
    tree = {"name": name, "unit": unit, noise: value, "calibration": "classic"}
    if unit == "update" and value == 1.001:
        with pytest.raises(ValidationError, match=r"'classic': proven for epsilon <= 1, not for epsilon = 1\.001"):
            mechanism_settings(tree)
    else:
        assert mechanism_settings(tree).calibration == "classic"


def test_ranges_are_those_of_the_ledger() -> None:
    for name in ("gaussian", "hgm"):
        for sigma in (SIGMA.floor, SIGMA.ceiling):
            assert mechanism_settings({"name": name, "sigma": sigma}).noise == sigma
        for sigma in (SIGMA.floor * 0.99, SIGMA.ceiling * 1.01):
            with pytest.raises(ValidationError):
                mechanism_settings({"name": name, "sigma": sigma})
    for kappa in (0.0, KAPPA.ceiling):
        assert mechanism_settings({"name": "vmf", "kappa": kappa}).noise == kappa
    assert mechanism_settings({"name": "vmf", "epsilon": 2 * KAPPA.ceiling}).epsilon == 2 * KAPPA.ceiling


def numbers(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of all settings that are numbers, or lists of them."""
    for key, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from numbers(kind, f"{prefix}{key}.")
        elif re.search(r"\b(int|float)\b", str(kind)):
            yield f"{prefix}{key}"
    if model is AdversaryConfig:
        for name, attack in ATTACKS.items():
            yield from numbers(attack, f"{prefix}{name}.")


def test_true_is_not_a_number(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    for key, value in product(numbers(Experiment), ("true", "[true]")):
        with pytest.raises(InputError, match=key.replace(".", r"\.")):
            load_experiment(path, [f"{key}={value}"])


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, kind in MECHANISMS.items() for key in numbers(kind)])
def test_true_is_not_a_number_of_a_mechanism(name: str, key: str) -> None:
    for value in (True, [True]):
        with pytest.raises(InputError, match=rf"mechanism\.{key} = \[?[tT]rue"):
            validated(Experiment, {"mechanism": {"name": name, key: value}}, "x")


def test_the_list_of_numbers_is_not_empty() -> None:
    found = set(numbers(Experiment))
    assert {"seed", "adversary.rounds", "data.memory", "adversary.iga.tv"} <= found
    assert "engine.precision" not in found


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if kind.on_gradients])
@pytest.mark.parametrize("unit", ["example", "update"])
def test_resolved_settings_hold_the_noise_and_no_target(name: str, unit: str) -> None:
    parameter = MECHANISMS[name].parameter
    if parameter is None:
        with pytest.raises(ValueError, match="makes no noise"):
            mechanism_settings({}).with_noise(1.0)
        return
    if unit == "example" and MECHANISMS[name].noise_at != "clients":
        return  # noise on sums is for whole updates alone
    config = mechanism_settings({"name": name, "unit": unit, "target_epsilon": 2.0})
    resolved = config.with_noise(0.25)
    assert resolved.noise == 0.25
    assert {key for key in NOISE_KEYS[name] if getattr(resolved, key) is not None} == {parameter}
    changed = {key for key in type(config).model_fields if getattr(config, key) != getattr(resolved, key)}
    assert changed == {"target_epsilon", parameter}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"name": "none"}, ""),
        (
            {"name": "gaussian", "sigma": 3.0},
            "epsilon sigma target_epsilon delta clip_norm clipping adjacency",
        ),
        (
            {"name": "gaussian", "sigma": 3.0, "unit": "update"},
            "epsilon sigma target_epsilon delta clip_norm clipping",
        ),
        (
            {"name": "gaussian", "epsilon": 3.0, "unit": "update"},
            "epsilon sigma target_epsilon delta clip_norm clipping calibration",
        ),
        ({"name": "laplace", "scale": 3.0}, "epsilon scale target_epsilon delta clip_norm"),
        ({"name": "vmf", "kappa": 3.0}, "epsilon kappa target_epsilon delta blocks"),
        (
            {"name": "vmf", "kappa": 3.0, "unit": "update"},
            "epsilon kappa target_epsilon delta blocks clip_norm",
        ),
        (
            {"name": "hgm", "sigma": 3.0},
            "epsilon sigma target_epsilon delta clip_norm redistribution adjacency",
        ),
        (
            {"name": "hgm", "sigma": 3.0, "redistribution": "public"},
            "epsilon sigma target_epsilon delta clip_norm redistribution inflation public_examples adjacency",
        ),
    ],
)
def test_what_a_mechanism_reads(settings: dict[str, object], keys: str) -> None:
    targets = ["target_ceiling"] if keys else []
    assert sorted(mechanism_settings(settings).effective) == sorted([*keys.split(), *targets])


@pytest.mark.parametrize("name", ["gaussian", "hgm"])
def test_zero_out_where_it_is_proven(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, f'[mechanism]\nname = "{name}"\nadjacency = "zero-out"\n[training]\nsampling = "poisson"\n')
    assert load_experiment(path, ["mechanism.sigma=2"]).mechanism.adjacent == "zero-out"


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("unit", ["example", "update"])
@pytest.mark.parametrize("name", ["none", "gaussian", "hgm", "laplace"])
def test_runs_of_earlier_versions_keep_their_adjacency(tmp_path: Path, name: str, unit: str, sampling: str) -> None:
    mechanism = {"name": name, "unit": unit} | ({} if name == "none" else {"target_epsilon": 3.0})
    run = Experiment.model_validate({"mechanism": mechanism, "training": {"sampling": sampling}})
    (tmp_path / "config.toml").write_text(run.to_toml())
    assert load_run(tmp_path) == run
    (tmp_path / "config.toml").write_text(run.to_toml().replace('adjacency = "replace-one"\n', ""))
    was_zero_out = name in ("gaussian", "hgm") and unit == "example" and sampling == "poisson"
    assert load_run(tmp_path).mechanism.adjacent == ("zero-out" if was_zero_out else "replace-one")
    assert load_run(tmp_path, ["seed=9"]).seed == 9


def test_another_mechanism_ignores_the_files_parameters(tmp_path: Path) -> None:
    path = write(tmp_path, '[mechanism]\nname = "vmf"\nkappa = 50\n')
    assert load_experiment(path, ["mechanism.name=none"]).mechanism.name == "none"
    assert load_experiment(path, ["mechanism.name=gaussian", "mechanism.sigma=2"]).mechanism.sigma == 2.0


@pytest.mark.parametrize("text", ["[1,\n2]", "[1, 2] # both", "[1, 2]\n# both\n"])
def test_an_override_may_take_several_lines(tmp_path: Path, text: str) -> None:
    assert load_experiment(write(tmp_path, ""), [f"adversary.rounds={text}"]).adversary.rounds == (1, 2)


@pytest.mark.parametrize(("text", "value"), [("abc", "abc"), ("'a b'", "a b"), ("a=b", "a=b")])
def test_override_values_are_toml_or_bare_words(tmp_path: Path, text: str, value: str) -> None:
    assert load_experiment(write(tmp_path, ""), [f"data.path={text}"]).data.path == value


@pytest.mark.parametrize("text", ["[dlg]", "[ dlg , 'map' ]", '[dlg, "map"]', "[]"])
def test_a_list_may_hold_bare_words(tmp_path: Path, text: str) -> None:
    """As reports print lists."""
    attacks = load_experiment(write(tmp_path, ""), [f"adversary.attacks={text}"]).adversary.attacks
    assert list(attacks) == [name for name in ("dlg", "map") if name in text]


def test_a_list_of_bare_words_is_checked_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"adversary\.attacks"):
        load_experiment(write(tmp_path, ""), ["adversary.attacks=[dgl]"])


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 5\n")
    assert load_experiment(path).seed == 5


UNHEARD = {"attacks": []}


def test_every_key_has_a_description() -> None:
    for name, kind in MECHANISMS.items():
        amount = kind.parameter or "target_epsilon"
        noise = {amount: 1.0} if amount in kind.model_fields else {}
        rest = {} if kind.on_gradients else {"federation": {"algorithm": "erm", "rounds": 1}, "adversary": UNHEARD}
        experiment = Experiment.model_validate({"mechanism": {"name": name, **noise}, **rest})
        assert [key for key, _, _, meaning in describe(experiment) if not meaning] == []


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONFIGS.glob("*.toml")) if not kind_of_file(read_toml(path))],
    ids=lambda path: path.stem,
)
def test_the_shipped_experiments_are_valid(path: Path) -> None:
    load_experiment(path)


class Foreign(Settings):
    """Settings as other packages may have them."""

    value: Any = None
    doubled: int = 0

    @field_validator("doubled", mode="before")
    @classmethod
    def _double(cls, given: Any) -> Any:
        return 2 * given["deep"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), {"a": 1.0}, {1}, [1], object(), (1, (2, [3])), 1j])
def test_settings_that_no_file_can_hold_are_refused(value: object) -> None:
    with pytest.raises(ValidationError, match=r"value = .* cannot be written into a file of settings; allowed are"):
        Foreign(value=value)


@pytest.mark.parametrize("value", [1, 0.5, True, None, "a", Path("a"), (1, ("a", 0.5)), LAPLACE, Foreign()])
def test_settings_that_files_can_hold_are_taken(value: object) -> None:
    assert Foreign(value=value).value == value


@pytest.mark.parametrize(("given", "error"), [(3, "TypeError"), ({}, "KeyError")])
def test_a_validator_that_raises_is_an_error_of_the_settings(given: object, error: str) -> None:
    with pytest.raises(ValidationError, match=rf"test_config.Foreign raises {error}"):
        Foreign.model_validate({"doubled": given})
