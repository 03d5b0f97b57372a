"""docs/sweeps.md and configs/paper do what they say."""

import re
from collections import Counter
from pathlib import Path

import pytest

from fedpriv.core.config import Experiment
from fedpriv.robustness.settings import RobustnessConfig
from fedpriv.sweep.record import all_fields, part_fields
from fedpriv.sweep.settings import load_sweep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
# Those of "Applying Directional Noise to Deep Learning", and those of "Heterogeneous Gaussian Mechanism".
PAPERS = ROOT / "configs" / "paper"
OTHERS = ("secure-sgd-*", "convexified-*", "blocks.toml", "equal-privacy*")
TABLES = sorted(set(PAPERS.glob("*.toml")).difference(*map(PAPERS.glob, OTHERS)))
CONVEXIFIED = sorted(PAPERS.glob("convexified-*.toml"))
SECURE = sorted((ROOT / "configs" / "paper").glob("secure-sgd-*.toml"))


def test_every_column_has_a_meaning() -> None:
    """The site's page of columns is made of these."""
    for kind in (all_fields(), *(part.model_fields for part in part_fields().values())):
        assert all(field.description for field in kind.values())


def test_the_example_is_a_sweep(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "study").mkdir()
    (tmp_path / "quickstart.toml").write_bytes((ROOT / "configs" / "quickstart.toml").read_bytes())
    path = tmp_path / "study" / "noise.toml"
    path.write_text(example, encoding="utf-8")
    assert len(load_sweep(path).trials) == 3 * 2 * 3
    assert len(load_sweep(path, "full").trials) == 5 * 2 * 3


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("path", CONVEXIFIED, ids=lambda path: path.stem)
def test_the_convexified_sweeps_have_published_and_proven_answers(path: Path, scale: str) -> None:
    services = [trial.experiment.service for trial in load_sweep(path, scale).trials]
    assert {service.method for service in services if service is not None} >= {"paper", "model", "label"}


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_of_the_paper_is_there_at_both_scales(path: Path, scale: str) -> None:
    found = load_sweep(path, scale)
    assert found.name == f"{path.stem}-{scale}"
    mechanisms = [trial.experiment.mechanism for trial in found.trials]
    assert {mechanism.name for mechanism in mechanisms} >= {"gaussian", "vmf"}
    assert {mechanism.blocks for mechanism in mechanisms if mechanism.name == "vmf"} == {"whole", "layer", "size:16"}


def test_both_mechanisms_have_the_same_target_at_every_batch_size() -> None:
    """Rates are chosen with a seed that the comparison leaves out."""
    main, rates, uploads = (
        load_sweep(PAPERS / f"{name}.toml", scale)
        for name, scale in (("equal-privacy", "pass"), ("equal-privacy-rates", "pass"), ("equal-privacy", "uploads"))
    )
    noisy = [trial.experiment for trial in (*main.trials, *uploads.trials) if trial.experiment.mechanism.name != "none"]
    assert {experiment.mechanism.target_epsilon for experiment in noisy} == {8}
    runs = Counter((each.mechanism.name, each.training.batch_size) for each in noisy if not each.adversary.attacks)
    assert runs == {(name, size): 5 for name in ("gaussian", "vmf") for size in (1, 16, 256)}
    assert {trial.seed for trial in main.trials}.isdisjoint(trial.seed for trial in rates.trials)
    tried = {_rated(trial.experiment) for trial in rates.trials}
    assert {_rated(each) for each in noisy if not each.adversary.attacks} <= tried


def _rated(experiment: Experiment) -> tuple[str, int, float]:
    return experiment.mechanism.name, experiment.training.batch_size, experiment.training.learning_rate


@pytest.mark.parametrize(("scale", "seeds"), [("pass", 3), ("membership", 5), ("uploads", 1), ("full", 3)])
def test_the_same_blocks_are_trained_audited_and_attacked(scale: str, seeds: int) -> None:
    """All readings of the paper's blocks at three nominal epsilons, beside no noise."""
    found = load_sweep(PAPERS / "blocks.toml", scale)
    noises = [trial.experiment.mechanism for trial in found.trials if trial.experiment.mechanism.name == "vmf"]
    assert Counter((noise.blocks, noise.epsilon) for noise in noises) == {
        (blocks, epsilon): seeds
        for blocks in ("whole", "layer", *(f"size:{numbers}" for numbers in (1, 2, 4, 16, 64, 256)))
        for epsilon in (1, 10, 50)
    }
    assert len(found.trials) - len(noises) == len({trial.seed for trial in found.trials})
    assert (found.audit is not None) == (scale == "membership")
    assert {bool(trial.experiment.adversary.attacks) for trial in found.trials} == {scale == "uploads"}
    if scale in ("pass", "full"):  # all images, by the paper's Table 1
        training, data = found.trials[0].experiment.training, found.trials[0].experiment.data
        assert (training.batch_size, training.learning_rate, data.train_examples) == (256, 0.01, None)


def test_the_tables_have_the_settings_of_the_papers_table_1() -> None:
    """(batch, rate, epochs) of each network and data set, typed in from the paper; `full` reads all images."""
    wanted = {
        "table2": {
            ("lenet", "cifar10-complete"): (512, 0.001, 90),
            ("lenet", "cifar100"): (512, 0.001, 90),
            ("lenet", "fashion-mnist"): (100, 0.001, 30),
            ("lenet", "lfw"): (128, 0.05, 60),
            ("mlp", "cifar10-complete"): (128, 0.001, 25),
            ("mlp", "cifar100"): (128, 0.001, 25),
            ("mlp", "fashion-mnist"): (256, 0.01, 30),
            ("mlp", "lfw"): (256, 0.001, 60),
        },
        "table3": {
            ("lenet", "cifar10-complete"): (8, 0.01, 60),
            ("lenet", "fashion-mnist"): (8, 0.001, 10),
            ("mlp", "cifar10-complete"): (256, 0.001, 25),
            ("mlp", "fashion-mnist"): (8, 0.1, 30),
        },
    }
    for name, settings in wanted.items():
        path = ROOT / "configs" / "paper" / f"{name}.toml"
        assert _table_1(path, "full") == settings
        assert _table_1(path, "small") == {
            (network, data.removesuffix("-complete")): value
            for (network, data), value in settings.items()
            if data != "cifar100"
        }


def _table_1(path: Path, scale: str) -> dict[tuple[str, str], tuple[int, float, int]]:
    found = {}
    for trial in load_sweep(path, scale).trials:
        training = trial.experiment.training
        key = (trial.experiment.model.name, trial.experiment.data.name)
        found[key] = (training.batch_size, training.learning_rate, training.local_epochs)
    return found


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("path", SECURE, ids=lambda path: path.stem)
def test_every_row_of_secure_sgd_is_there_at_both_scales(path: Path, scale: str) -> None:
    """All rows but AdLM, with two epsilons and two sigmas where they have them; sizes from 0.05 to 0.6."""
    found = load_sweep(path, scale)
    assert found.name == f"{path.stem}-{scale}"
    rows, places = [], []
    for trial in found.trials:
        experiment = trial.experiment
        robustness, smoothing = experiment.robustness, RobustnessConfig.noisy(experiment)
        evade = RobustnessConfig.evaded(experiment)
        assert robustness is not None and evade is not None
        assert (RobustnessConfig.certified(experiment) is None) == (smoothing is None)
        sizes = evade.attacked_sizes
        assert (evade.norm, sizes[0], sizes[-1], len(evade.attacks)) == ("linf", 0.05, 0.6, 4)
        assert set(sizes) <= set(robustness.certify.radii_linf)
        rows.append((experiment.mechanism.name, "" if smoothing is None else smoothing.redistribution, trial.seed))
        places.append(robustness.place)
    seeds = {"small": 1, "full": 3}[scale]
    counts = {("none", ""): 1, ("gaussian", ""): 2}
    counts |= {("none", shares): 2 for shares in ("uniform", "vulnerable")}
    counts |= {("gaussian", shares): 4 for shares in ("uniform", "vulnerable")}
    hidden = path.stem.endswith("mnist")
    counts["none", "uniform"] += 2 * hidden  # on the image, for comparison
    assert Counter(places) == ({"hidden": 15 * seeds, "input": 2 * seeds} if hidden else {"input": 15 * seeds})
    assert Counter(row[:2] for row in rows) == {row: seeds * count for row, count in counts.items()}
    assert len({row[2] for row in rows}) == seeds
