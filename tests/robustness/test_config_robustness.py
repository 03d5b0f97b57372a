"""The section [robustness]: what is allowed, what is said otherwise, and that its absence leaves no trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedpriv.core.config import Experiment, load_experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.robustness.settings import RobustnessConfig


def of(robustness: Any) -> RobustnessConfig:
    found = validated(Experiment, {"robustness": robustness}, "x.toml").robustness
    assert found is not None
    return found


def test_an_absent_section_leaves_no_trace(tmp_path: Path) -> None:
    bare = Experiment.model_validate({})
    assert bare.robustness is None and RobustnessConfig.noisy(bare) is None
    for text in (bare.to_toml(), bare.model_dump_json(), json.dumps(bare.decisive())):
        assert "robustness" not in text


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tree = {"robustness": {"epsilon": 2.0, "delta": 0.1, "size": 0.2, "certify": {"votes": 70}}}
    given = Experiment.model_validate(tree)
    (tmp_path / "x.toml").write_text(given.to_toml())
    assert load_experiment(tmp_path / "x.toml") == given
    assert Experiment.model_validate_json(given.model_dump_json()) == given
    (tmp_path / "y.toml").write_text("")
    made = load_experiment(tmp_path / "y.toml", ["robustness.noise=0.25", "robustness.place=input"])
    assert (noise := RobustnessConfig.noisy(made)) is not None and noise.sigma == 0.25


def test_how_it_is_certified_decides_no_release() -> None:
    one, other = (Experiment.model_validate({"robustness": {"noise": 0.5, "certify": {"votes": n}}}) for n in (5, 6))
    assert one.decisive() == other.decisive()
    louder = Experiment.model_validate({"robustness": {"noise": 0.6}})
    assert louder.decisive() != one.decisive()
    silent = Experiment.model_validate({"robustness": {"noise": 0.0}})
    assert silent.decisive() == Experiment.model_validate({}).decisive()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "robustness: give either noise, or epsilon and size"),
        ({"noise": 0.5, "epsilon": 1.0, "size": 0.1}, "robustness: give either noise, or epsilon and size"),
        ({"noise": 0.5, "size": 0.1}, "robustness: size is for epsilon, and noise = 0.5 is given"),
        ({"noise": 0.5, "calibration": "classic"}, "calibration is for epsilon"),
        ({"epsilon": 1.0}, "robustness: epsilon = 1 needs size"),
        ({"epsilon": 2.0, "size": 0.1, "calibration": "classic"}, "proven for epsilon <= 1 only"),
        ({"epsilon": 2.0, "size": 0.1, "delta": 0.9, "calibration": "extended"}, "needs delta <= sqrt(2/pi)"),
        ({"epsilon": 1e-9, "size": 1e9}, "needs noise above 1e+06"),
        ({"noise": 1e-9}, "noise is 1e-09; allowed: 0, or from 1e-06: float32 rounds less away"),
        ({"epsilon": 1.0, "size": 1e-9}, "allowed: 0, or from 1e-06"),
        ({"noise": -1.0}, "robustness.noise = -1: allowed is from 0"),
        (
            {"noise": 0.5, "evade": {"attacks": []}},
            "robustness.evade.attacks = []: expected at least 1",
        ),
        ({"noise": 0.5, "evade": {"sizes": []}}, "robustness.evade.sizes = []: expected at least 1"),
        ({"noise": True}, "robustness.noise = true: expected a number"),
        ({"noise": 0.5, "place": "hiden"}, "did you mean hidden?"),
        ({"noise": 0.5, "redistribution": "informative"}, "for place = 'input'; allowed: uniform, vulnerable, rows"),
        ({"noise": 0.5, "place": "input", "redistribution": "rows"}, "for place = 'hidden'"),
        ({"noise": 0.5, "inflation": 2.0}, "inflation is for vulnerable and rows"),
        (
            {"noise": 0.5, "certify": {"alpha": 0.5}},
            "robustness.certify.alpha = 0.5: allowed is below 0.5",
        ),
        ({"noise": 0.5, "certify": {"radii_l2": [0.5, 0.25]}}, "sizes ascend, each once"),
        ({"noise": 0.5, "certify": {"vote": 3}}, "unknown key robustness.certify.vote; did you mean"),
    ],
)
def test_mistakes_are_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        of(given)
    assert said in str(error.value) and "\n" not in str(error.value) and str(error.value).startswith("x.toml: ")


def test_public_images_are_counted_where_they_are_used() -> None:
    assert of({"noise": 0.5, "redistribution": "vulnerable", "public_examples": 9}).public_images == 9
    assert of({"noise": 0.5, "place": "input", "redistribution": "informative"}).public_images == 64
    assert of({"noise": 0.5, "redistribution": "rows"}).public_images == 0
