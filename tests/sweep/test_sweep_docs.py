"""docs/sweeps.md and configs/paper do what they say."""

import re
from pathlib import Path

import pytest

from fedpriv.sweep import Reconstruction, TrialRecord, load_sweep
from fedpriv.sweep.record import MembershipFigures

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
TABLES = sorted((ROOT / "configs" / "paper").glob("*.toml"))


def test_every_column_is_on_the_page_with_its_meaning() -> None:
    for kind in (TrialRecord, Reconstruction, MembershipFigures):
        for name, field in kind.model_fields.items():
            if name not in ("settings", "reconstructions", "memberships", "attack", "upload"):
                assert f"| `{name}` | {field.description} |" in PAGE


def test_the_example_is_a_sweep(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "study").mkdir()
    (tmp_path / "quickstart.toml").write_bytes((ROOT / "configs" / "quickstart.toml").read_bytes())
    path = tmp_path / "study" / "noise.toml"
    path.write_text(example, encoding="utf-8")
    assert len(load_sweep(path).trials) == 3 * 2 * 3
    assert len(load_sweep(path, "full").trials) == 5 * 2 * 3


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_of_the_paper_is_there_at_both_scales(path: Path, scale: str) -> None:
    found = load_sweep(path, scale)
    assert found.name == f"{path.stem}-{scale}"
    mechanisms = [trial.experiment.mechanism for trial in found.trials]
    assert {mechanism.name for mechanism in mechanisms} >= {"gaussian", "vmf"}
    assert {mechanism.blocks for mechanism in mechanisms if mechanism.name == "vmf"} == {"whole", "layer", "size:16"}


def test_the_tables_have_the_settings_of_the_papers_table_1() -> None:
    """(batch, rate, epochs) of each network and data set, typed in from the paper."""
    wanted = {
        "table2": {
            ("lenet", "cifar10"): (512, 0.001, 90),
            ("lenet", "cifar100"): (512, 0.001, 90),
            ("lenet", "fashion-mnist"): (100, 0.001, 30),
            ("lenet", "lfw"): (128, 0.05, 60),
            ("mlp", "cifar10"): (128, 0.001, 25),
            ("mlp", "cifar100"): (128, 0.001, 25),
            ("mlp", "fashion-mnist"): (256, 0.01, 30),
            ("mlp", "lfw"): (256, 0.001, 60),
        },
        "table3": {
            ("lenet", "cifar10"): (8, 0.01, 60),
            ("lenet", "fashion-mnist"): (8, 0.001, 10),
            ("mlp", "cifar10"): (256, 0.001, 25),
            ("mlp", "fashion-mnist"): (8, 0.1, 30),
        },
    }
    for name, settings in wanted.items():
        for scale in ("small", "full"):
            found = {}
            for trial in load_sweep(ROOT / "configs" / "paper" / f"{name}.toml", scale).trials:
                training = trial.experiment.training
                key = (trial.experiment.model.name, trial.experiment.data.name)
                found[key] = (training.batch_size, training.learning_rate, training.local_epochs)
            assert found == {key: value for key, value in settings.items() if scale == "full" or "cifar100" not in key}
