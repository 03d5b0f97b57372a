"""Tuning: on public images only, and the setting that is named is the one that did best."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.core.config import load_experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab import Tuning, start_run, tune_attack
from fedpriv.core.lab import tune as tune_room
from fedpriv.core.progress import Silent
from fedpriv.core.world import World, build_world
from tests.integration.small import experiment


def settings(tmp_path: Path, **sections: dict[str, object]) -> Path:
    adversary = {"attacks": ["iga"], "iga": {"iterations": 30}, **sections.pop("adversary", {})}
    path = tmp_path / "experiment.toml"
    path.write_text(experiment(adversary=adversary, training={"batch_size": 1}, **sections).to_toml())
    return path


def tuned(path: Path, *grid: str, victims: int = 4, overrides: tuple[str, ...] = ()) -> Tuning:
    return tune_attack(path, "iga", grid, victims, overrides, Silent())


def save_data(path: Path, clients_images: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        path,
        x_train=clients_images,
        y_train=np.arange(len(clients_images)) % 3,
        x_test=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        y_test=np.arange(40) % 3,
    )


def test_no_clients_image_has_a_part_in_it(tmp_path: Path) -> None:
    """Other clients' data, the same public images: the same figures to the last digit."""
    rng = np.random.default_rng(1)
    found = []
    for number in range(2):
        data = tmp_path / f"{number}.npz"
        save_data(data, rng.integers(0, 256, (60, 8, 8), dtype=np.uint8))
        path = settings(tmp_path, data={"name": "npz", "path": str(data)}, mechanism={"name": "vmf", "kappa": 90.0})
        found.append(tuned(path, "tv=0,0.01"))
    assert found[0] == found[1]


def test_the_rehearsal_has_no_seed_of_the_run(tmp_path: Path) -> None:
    """Its batches and its noise are other draws than the clients' own."""
    world = build_world(load_experiment(settings(tmp_path, mechanism={"name": "vmf", "kappa": 90.0})))
    stage = tune_room._public_world(world, 4)
    assert {plan.seed for plan in stage.plans} != {world.experiment.seed}
    assert all(plan.config == world.plans[0].config for plan in stage.plans)
    assert torch.equal(stage.dataset.x_train, world.dataset.x_test)
    draws = [int(stage.uploaded_rows(client, 1)) for client in range(4)]
    assert len(set(draws)) > 1
    assert draws != [int(world.uploaded_rows(client, 1)) for client in range(4)]


def test_what_is_rehearsed_is_not_known_beforehand(tmp_path: Path) -> None:
    """A prior that is fitted to the very images that it helps to find would look better than it is."""
    world = build_world(load_experiment(settings(tmp_path, mechanism={"name": "vmf", "kappa": 90.0})))
    rehearsed = tune_room._rehearse(world, world.initial, 5)
    known = tune_room._unrehearsed(world, rehearsed)
    own = torch.cat([victim.truth.images for victim in rehearsed])
    hidden = len({int(row) for victim in rehearsed for row in victim.rows})
    assert len(known) == len(world.dataset.x_test) - hidden
    apart = torch.cdist(own.flatten(1), world.dataset.x_test.flatten(1).float() / 255)
    assert float(apart.amin(dim=1).max()) < 1e-5  # they are public images
    assert float(torch.cdist(own.flatten(1), known.flatten(1)).min()) > 1e-3


def test_the_best_median_is_named(tmp_path: Path) -> None:
    found = tuned(settings(tmp_path), "tv=0,0.001,10")
    medians = [trial.mse.value for trial in found.trials]
    assert found.best.mse.value == min(medians)
    assert [trial.values for trial in found.trials] == [(0.0,), (0.001,), (10.0,)]
    assert found.best.values != (10.0,)
    assert found.overrides == (f"adversary.iga.tv={found.best.values[0]}",)
    # What is printed can be used.
    (tmp_path / "again").mkdir()
    path = settings(tmp_path / "again")
    assert load_experiment(path, found.overrides).adversary.iga.tv == found.best.values[0]
    assert all(trial.images == 4 for trial in found.trials)


def test_the_figures_are_those_of_the_public_uploads(tmp_path: Path) -> None:
    """A second rehearsal repeats the first; another seed gives other uploads."""
    path = settings(tmp_path)
    assert tuned(path, "tv=0") == tuned(path, "tv=0")
    assert tuned(path, "tv=0") != tuned(path, "tv=0", overrides=("seed=77",))


def test_every_combination_is_tried(tmp_path: Path) -> None:
    found = tuned(
        settings(tmp_path), "tv=0,0.1", "adversary.iga.learning_rate=0.1,0.2", "iga.iterations=2,3", victims=2
    )
    assert found.keys == ("tv", "learning_rate", "iterations")
    assert len({trial.values for trial in found.trials}) == 8


def test_edges_of_the_grid_are_remarked(tmp_path: Path) -> None:
    path = settings(tmp_path)
    many = " ".join(tuned(path, "iterations=1,30").remarks)
    assert "iterations = 30 is the largest value tried" in many
    few = " ".join(tuned(path, "tv=0.001,50").remarks)
    assert "tv = 0.001 is the smallest value tried" in few
    assert "value tried" not in " ".join(tuned(path, "tv=0,50").remarks)


def test_an_attack_that_finds_nothing_says_so(tmp_path: Path) -> None:
    path = settings(tmp_path, mechanism={"name": "vmf", "kappa": 0.0})
    assert "No setting does better" in tuned(path, "tv=0,1e-4").remarks[0]


@pytest.mark.parametrize("name", ["honest-but-curious-server", "secure-aggregation"])
def test_a_run_gives_the_parameters_that_were_heard(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adversary = {"attacks": ["iga"], "iga": {"iterations": 2}, "rounds": [3], "threat_model": name}
    start_run(experiment(adversary=adversary, training={"batch_size": 1}), tmp_path / "run", "", Silent())
    seen = []

    def remembered(world: World, before: object, victims: int) -> list[object]:
        seen.append(before)
        return original(world, before, victims)  # type: ignore[arg-type]

    original = tune_room._rehearse
    monkeypatch.setattr(tune_room, "_rehearse", remembered)
    found = tuned(tmp_path / "run", "tv=0", victims=2)
    initial = build_world(load_experiment(tmp_path / "run" / "config.toml")).initial
    assert any(not torch.equal(value, initial.parameters[key]) for key, value in seen[0].parameters.items())  # type: ignore[attr-defined]
    assert found.trials[0].images == (2 if name == "honest-but-curious-server" else 8)


def test_empty_poisson_batches_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    tree = experiment(adversary={"iga": {"iterations": 2}}, training={"batch_size": 1, "sampling": "poisson"})
    path.write_text(tree.to_toml())
    assert 0 < tuned(path, "tv=0", victims=12).trials[0].images < 24


def test_fedavg_rehearses_whole_rounds(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    tree = experiment(
        adversary={"iga": {"iterations": 2}},
        federation={"algorithm": "fedavg"},
        training={"batch_size": 3, "learning_rate": 0.01},
        data={"train_examples": 24},
    )
    path.write_text(tree.to_toml())
    assert tuned(path, "tv=0", victims=2).trials[0].images == 12  # of two clients with 6 images and two steps each


@pytest.mark.parametrize(
    ("name", "grid", "adversary", "words"),
    [
        ("gan", (), {}, "attack 'gan' is not known"),
        ("dlg", (), {}, "dlg has no weights to tune"),
        ("iga", ("tv",), {}, "expected KEY=VALUE,VALUE"),
        ("iga", ("tv=1,,2",), {}, "expected KEY=VALUE,VALUE"),
        ("iga", ("tvv=1",), {}, "iga has no setting tvv"),
        ("iga", ("tv=much",), {}, "--grid: iga.tv = 'much': "),
        ("iga", ("tv=-1",), {}, "--grid: iga.tv = '-1': "),
        ("iga", ("tv=" + ",".join(["1"] * 201),), {}, "201 combinations; at most 200"),
        ("iga", (), {"knows_public_data": False}, "tuning iga needs public images of the same kind"),
        ("iga", (), {"knows_batch_size": False}, "tuning iga needs the batch size"),
        ("iga", (), {"threat_model": "network-tls"}, "which the threat model network-tls withholds"),
    ],
)
def test_bad_input_is_one_line(
    name: str, grid: tuple[str, ...], adversary: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        tune_attack(settings(tmp_path, adversary=adversary), name, grid, 2, (), Silent())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_few_public_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    save_data(tmp_path / "data.npz", rng.integers(0, 256, (400, 8, 8), dtype=np.uint8))
    path = settings(tmp_path, data={"name": "npz", "path": str(tmp_path / "data.npz")})
    with pytest.raises(InputError, match="a batch needs 50 images, and there are 40 public ones"):
        tuned(path, "tv=0", overrides=("training.batch_size=50",))


def test_a_batch_is_one_upload_in_the_interval(tmp_path: Path) -> None:
    (trial,) = tuned(settings(tmp_path), "tv=0", victims=1, overrides=("training.batch_size=3",)).trials
    assert (trial.images, trial.mse.low) == (3, None)
