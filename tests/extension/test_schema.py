"""The JSON Schema of experiment files: the settings' own, which the shipped files follow."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from fedpriv.core.config import Experiment, json_schema, read_toml
from fedpriv.core.config.file import kind_of_file
from fedpriv.core.registry import ATTACKS, DATASETS, MECHANISMS, MODELS, RULES

CONFIGS = Path(__file__).parents[2] / "configs"
EXPERIMENTS = [path for path in sorted(CONFIGS.glob("*.toml")) if not kind_of_file(read_toml(path))]
SCHEMA = json.loads((CONFIGS / "experiment.schema.json").read_text(encoding="utf-8"))
# ``jsonschema.validate`` checks the schema itself each time, which takes longer than the experiment.
CHECKED = jsonschema.Draft202012Validator(SCHEMA)


def test_the_file_is_the_schema_of_the_settings() -> None:
    """``fedpriv config schema > configs/experiment.schema.json`` writes it anew."""
    assert json.loads(json.dumps(json_schema())) == SCHEMA
    assert jsonschema.validators.validator_for(SCHEMA) is jsonschema.Draft202012Validator
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_the_shipped_experiments_name_and_follow_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#:schema experiment.schema.json\n")
    CHECKED.validate(tomllib.loads(text))


@pytest.mark.parametrize(
    "mechanism",
    [
        {"name": "gaussian", "sigma": 2.0, "kappa": 3.0},
        {"name": "vmf", "kappa": -1.0},
        {"name": "cauchy"},
        {"sigma": 2.0},
    ],
)
def test_what_the_settings_refuse_it_refuses(mechanism: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="mechanism"):
        Experiment.model_validate({"mechanism": mechanism})
    with pytest.raises(jsonschema.ValidationError):
        CHECKED.validate({"mechanism": mechanism})


@pytest.mark.parametrize(
    "model", [{"name": "mlp", "hidden": [0]}, {"name": "resnet", "hidden": [3]}, {"hidden": [3]}, {"name": "lenot"}]
)
def test_of_networks_too(model: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="model"):
        Experiment.model_validate({"model": model})
    with pytest.raises(jsonschema.ValidationError):
        CHECKED.validate({"model": model})


def test_everything_is_in_it() -> None:
    for name, kind in MECHANISMS.items():
        needed = {key for key, field in kind.model_fields.items() if field.is_required()} - {"name"}
        keys = needed if kind.parameter is None else {*needed, kind.parameter}
        CHECKED.validate({"mechanism": {"name": name, **dict.fromkeys(keys, 1.0)}})
    CHECKED.validate({"mechanism": {"delta": 1e-6}, "adversary": {"attacks": list(ATTACKS)}})
    assert set(ATTACKS) <= set(SCHEMA["$defs"]["AdversaryConfig"]["properties"])
    for name in [*MODELS, "my.package:network"]:
        CHECKED.validate({"model": {"name": name}})
    assert SCHEMA["$defs"]["DataConfig"]["properties"]["name"]["enum"] == list(DATASETS)
    for name, kind in RULES.items():
        keys = {key: field.default for key, field in kind.model_fields.items()}
        CHECKED.validate({"federation": {"aggregation": name, **keys}})
