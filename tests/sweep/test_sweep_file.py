"""From a sweep file to its trials; whatever is wrong with the file is one line, before anything runs."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from fedpriv.core.config import load_experiment
from fedpriv.core.errors import InputError
from fedpriv.sweep.run import check_trials
from fedpriv.sweep.settings import load_sweep
from tests.sweep.sweeps import NOISES, SMALL, sweep, write


def test_trials_are_the_product_of_seeds_lists_and_grid(tmp_path: Path) -> None:
    rates, batches = [0.1, 0.5], [2, 4]
    grid = {"training": {"learning_rate": rates, "batch_size": batches}}
    found = sweep(tmp_path, seeds=[4, 9], grid=grid)
    wanted = list(itertools.product([4, 9], NOISES, rates, batches))
    assert [trial.number for trial in found.trials] == list(range(1, len(wanted) + 1))
    for trial, (seed, noise, rate, batch) in zip(found.trials, wanted, strict=True):
        experiment = trial.experiment
        assert (experiment.seed, experiment.training.learning_rate, experiment.training.batch_size) == (
            seed,
            rate,
            batch,
        )
        assert experiment.mechanism.name == noise["mechanism"]["name"]
        assert trial.settings["mechanism.name"] == noise["mechanism"]["name"]
        assert trial.settings["training.batch_size"] == batch
        assert "seed" not in trial.settings


def test_a_trial_is_what_the_same_overrides_make_of_the_base_file(tmp_path: Path) -> None:
    """The oracle is ``--set``: one code for both, two ways in."""
    base = tmp_path / "base.toml"
    text = '[model]\nname = "mlp"\n[mechanism]\nname = "vmf"\nepsilon = 600\n[engine]\nname = "inline"\n'
    base.write_text(text, encoding="utf-8")
    found = sweep(
        tmp_path, base="base.toml", seeds=[5], list=None, set={"federation": {"rounds": 3}},
        grid={"mechanism.kappa": [1.5, 7.0], "model": {"hidden": [[8], [8, 4]]}, "adversary.attacks": [["iga"]]},
    )  # fmt: skip
    for trial in found.trials:
        texts = [f"{key}={value}".replace("'", '"') for key, value in trial.settings.items()]
        assert trial.experiment == load_experiment(base, [*texts, "federation.rounds=3", "seed=5"])
    # A noise parameter that varies replaces the base's own.
    assert {trial.experiment.mechanism.epsilon for trial in found.trials} == {None}
    assert len(found.trials) == 4


def test_a_scale_replaces_keys_of_the_file(tmp_path: Path) -> None:
    scales = {
        "full": {"seeds": [1, 2, 3], "set": {"federation": {"rounds": 9}}},
        "small": {"list": {"noise": NOISES[:1]}, "audit": {"references": 6}},
    }
    path = write(tmp_path, scales=scales, scale="small", audit={"references": 64, "pairs": 20})
    small, full = load_sweep(path), load_sweep(path, "full")
    assert (small.name, full.name) == ("small-small", "small-full")
    assert (len(small.trials), len(full.trials)) == (2, 9)
    assert small.audit is not None and (small.audit.references, small.audit.pairs) == (6, 20)
    assert full.audit is not None and (full.audit.references, full.audit.pairs) == (64, 20)
    assert {trial.experiment.federation.rounds for trial in full.trials} == {9}
    with pytest.raises(InputError, match="scale 'huge' is not known; known: full, small"):
        load_sweep(path, "huge")
    with pytest.raises(InputError, match=r"the file has no \[scales\]"):
        load_sweep(write(tmp_path), "full")


def test_one_list_may_go_without_a_name_and_seeds_may_vary_alone(tmp_path: Path) -> None:
    assert len(sweep(tmp_path, seeds=None, list=NOISES).trials) == 3
    alone = sweep(tmp_path, seeds=[1, 2, 3], list=None)
    assert [dict(trial.settings) for trial in alone.trials] == [{}] * 3


def test_trials_run_inline_whatever_the_base_says(tmp_path: Path) -> None:
    for name in ("auto", "inline"):
        trials = sweep(tmp_path, base={**SMALL, "engine": {"name": name}}).trials
        assert {trial.experiment.engine.name for trial in trials} == {"inline"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grid": {"training.learning_rat": [1]}}, "key training.learning_rat; did you mean training.learning_rate?"),
        ({"set": {"training": {"sed": 1}}}, "unknown key training.sed"),
        ({"base": {"dat": {}}}, "unknown key dat; did you mean data?"),
        ({"seed": [1]}, "unknown key seed; did you mean seeds?"),
        ({"audit": {"reference": 6}}, "unknown key audit.reference; did you mean audit.references?"),
        ({"audit": {"references": 7}}, "an even number from 6"),
        ({"resources": {"cpus": 0}}, "resources.cpus = 0:"),
        ({"grid": {}}, "grid is empty: no trial would run"),
        ({"grid": {"training.batch_size": []}}, "grid.training.batch_size is empty"),
        ({"grid": {"training.batch_size": 4}}, r"batch_size = 4: expected a list of values, such as \[4\]"),
        ({"list": {"noise": []}}, "list.noise is empty"),
        ({"list": {"noise": {"mechanism": {}}}}, r"write \[\[list.noise\]\]"),
        ({"list": 3}, r"list = 3:"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": [3, 3]}, "names a seed twice"),
        ({"seeds": [-1]}, "seed = -1:"),
        ({"seeds": None, "list": None}, "nothing varies"),
        ({"grid": {"seed": [1, 2]}}, "grid.seed sets seed; use seeds"),
        ({"grid": {"mechanism.name": ["none"]}}, "mechanism.name varies twice, in list.noise and in grid"),
        ({"list": {"noise": [NOISES[0], NOISES[0]]}}, "trials 1 and 2 .* are the same"),
        ({"base": 3}, "base = 3:"),
        ({"base": "nowhere.toml"}, "nowhere.toml: no such file"),
        ({"base": {**SMALL, "engine": {"name": "ray"}}}, "engine.name: a trial runs in one process"),
        ({"name": "a b"}, "letters, digits"),
        ({"scales": {"small": 3}, "scale": "small"}, "scales is a section of sections"),
        ({"set": {"seed": {"x": 1}}}, "seed is a value, not a section"),
        ({"set": {"seed": 3}}, "seeds and set.seed exclude each other"),
        ({"seeds": None, "base": {**SMALL, "seed": "x"}}, "base's seed = 'x':"),
        ({"audit": {"pairs": 1}}, "audit.pairs = 1:"),
        ({"scales": {"small": {}}, "scale": ["small"]}, r"scale = \['small'\]:"),
        ({"scale": 3}, "scale = 3:"),
        ({"set": {"data.name": "digits", "data": {"name": "lfw"}}}, "set gives data.name twice"),
        ({"grid": {"training.epochs": [1], "training": {"epochs": [2]}}}, "grid gives training.epochs twice"),
        ({"list": [{"data.name": "lfw", "data": {"name": "digits"}}]}, "an entry of list gives data.name twice"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        sweep(tmp_path, **changes)
    assert "\n" not in str(error.value)


def test_every_trial_that_cannot_run_is_named(tmp_path: Path) -> None:
    """Two kinds of contradiction: each reason once, with all of its trials."""
    noises = [*NOISES, {"mechanism": {"name": "gaussian"}}, {"mechanism": {"name": "laplace", "sigma": 1.0}}]
    with pytest.raises(InputError) as error:
        sweep(tmp_path, list={"noise": noises})
    text = str(error.value)
    assert "4 trials of 10 cannot run, so none was started" in text
    keys = "epsilon, sigma, target_epsilon or target_ceiling"
    assert text.count(f"gaussian needs exactly one of {keys}; none is set: trials 4 (") == 1
    assert "9 (mechanism.name=gaussian)" in text
    assert "trials 5 (mechanism.name=laplace, mechanism.sigma=1.0), 10 (" in text


@pytest.mark.parametrize("other", ["target_epsilon", "epsilon"])
def test_noise_is_not_set_twice_by_two_axes(tmp_path: Path, other: str) -> None:
    """One of them would win, and the table would still show both."""
    grid = {"mechanism": {"name": ["vmf"], "kappa": [5.0, 50.0], other: [2.0]}}
    with pytest.raises(InputError, match=r"2 trials of 2 cannot run.*vmf needs exactly one of epsilon, kappa, "):
        sweep(tmp_path, seeds=[1], list=None, grid=grid)


def test_many_trials_that_cannot_run_are_named_by_ranges(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"101 trials of 101 cannot run.*, and 4-101$"):
        sweep(tmp_path, seeds=list(range(101)), list=None, set={"mechanism.name": "vmf"})


def test_many_reasons_are_counted_after_the_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"7 trials of 7 cannot run.*; and 4 further reasons$") as error:
        sweep(tmp_path, seeds=[1], list=None, grid={"training.batch_size": [-number for number in range(1, 8)]})
    assert str(error.value).count("training.batch_size = ") == 3


def test_what_does_not_fit_the_data_or_the_network_is_found_before_anything_starts(tmp_path: Path) -> None:
    found = sweep(tmp_path, grid={"training.batch_size": [4, 31, 64]}, list=None)
    with pytest.raises(InputError, match=r"training.batch_size = 31: larger than the data of client 0: 30") as error:
        check_trials(found)
    # Both seeds of both sizes, and the right one not.
    assert "4 trials of 6 cannot run" in str(error.value)
    assert "trials 2 (training.batch_size=31), 5 (training.batch_size=31); " in str(error.value)


def test_networks_that_cannot_be_audited_are_refused_only_with_an_audit(tmp_path: Path) -> None:
    own = {"model": {"name": "tests.sweep.networks:dropping"}}
    assert check_trials(sweep(tmp_path, set=own, list=None)) is not None
    with pytest.raises(InputError, match="2 trials of 2 cannot run"):
        check_trials(sweep(tmp_path, set=own, list=None, audit={"references": 6}))


@pytest.mark.parametrize(
    ("set_to", "says"),
    [
        ({"federation.aggregation": "median"}, "federation.aggregation = 'median': reference models average uploads"),
        (
            {"data": {"partition": "overlapping", "examples_per_client": 20}},
            "under data.partition = 'overlapping' others hold copies",
        ),
    ],
)
def test_settings_that_cannot_be_audited_are_found_before_anything_starts(
    set_to: dict[str, object], says: str, tmp_path: Path
) -> None:
    assert check_trials(sweep(tmp_path, set=set_to, list=None)) is not None
    with pytest.raises(InputError, match=f"2 trials of 2 cannot run.*{says}"):
        check_trials(sweep(tmp_path, set=set_to, list=None, audit={"references": 6}))


def test_an_experiment_is_not_a_sweep() -> None:
    with pytest.raises(InputError, match=r"quickstart.toml is an experiment, no sweep: .* run fedpriv run "):
        load_sweep(Path(__file__).parents[2] / "configs" / "quickstart.toml")
