"""Rows of tables: scores by hand, guesses against all rows there are, and rows read off the gradients of networks."""

import itertools
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn

from fedpriv.accounting.estimated import surer
from fedpriv.attacks.baselines import best_guess_mse, guesses, most_frequent, row_scores
from fedpriv.attacks.methods.tabular import TabularSettings
from fedpriv.attacks.observation import Observation, PublicSettings, read_observation, write_observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Reconstruction, Restart, run_attack
from fedpriv.attacks.reconstruction.variables import Relaxation
from fedpriv.attacks.referee import Truth, score, score_guesses
from fedpriv.core.columns import ColumnSpec, features_of, groups, slices
from fedpriv.core.records import Score, kind_of, recovered
from fedpriv.core.runs import RunFolder
from fedpriv.gradients import per_example_gradients
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from tests.cases import in_one_test

COLUMNS = (
    ColumnSpec("city", "category", ("Bern", "Oslo", "Rome", "Wien")),
    ColumnSpec("age", "number", low=0, high=100, whole=True),
    ColumnSpec("job", "category", ("none", "cook", "smith")),
    ColumnSpec("wed", "flag", ("no", "yes")),
    ColumnSpec("wage", "number", low=-10, high=10, optional=True),
)
FEATURES = features_of(COLUMNS)


def rows(count: int, seed: int = 0) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    made = torch.zeros(count, FEATURES)
    for column, where in slices(COLUMNS):
        if column.kind == "category":
            made[torch.arange(count), where.start + torch.randint(column.width, (count,), generator=stream)] = 1
        else:
            made[:, where.start] = torch.rand(count, generator=stream)
    made[:, 8] = made[:, 8].round()
    return made.view(count, 1, 1, FEATURES)


def test_cells_by_hand() -> None:
    true, made = rows(1), rows(1).clone()
    made[..., 0:4] = torch.tensor([0.1, 0.2, 0.0, 0.05])  # Oslo
    made[..., 4] = true[..., 4] + (0.13 if true[..., 4] < 0.5 else -0.13)
    made[..., 10] = 0.6  # no wage
    (cells,) = row_scores(COLUMNS, true, made)
    assert cells.categories == {"city": bool(true[0, 0, 0, 1] == 1), "job": True, "wed": True}
    assert cells.numbers == {"age": pytest.approx(0.13, abs=0.005), "wage": 1.0}
    assert cells.mean_error == pytest.approx(0.565, abs=0.003) and not cells.is_recovered
    (same,) = row_scores(COLUMNS, made, made)
    assert same.is_recovered and set(same.numbers.values()) == {0.0}


def test_no_row_has_more_right_values_than_the_most_frequent_one() -> None:
    """All rows of categories and flags there are, and the numbers of all rows."""
    public = rows(60, seed=3)
    guess = most_frequent(COLUMNS, public)

    def figures(offered: Tensor) -> tuple[float, float]:
        scores = row_scores(COLUMNS, public, offered.expand_as(public))
        return sum(each.share_right or 0 for each in scores), sum(each.numbers["age"] for each in scores)

    best = figures(guess)
    for city, job, wed in itertools.product(range(4), range(3), range(2)):
        other = torch.cat([F.one_hot(torch.tensor(city), 4), guess[0, 0, 4:5], F.one_hot(torch.tensor(job), 3)])
        other = torch.cat([other, torch.tensor([wed, 0.5, 0.0])]).view(1, 1, FEATURES)
        assert figures(other)[0] <= best[0] + 1e-9
    for age in public[:, 0, 0, 4]:
        assert best[1] <= figures(torch.where(torch.arange(FEATURES) == 4, age, guess))[1] + 1e-9


def scored(made: Tensor, known: Truth) -> tuple[Score, ...]:
    attempts = (Restart(made, known.labels, 0.1, 10),)
    given = Reconstruction(known.round, known.client, "tabular", attempts, 0, "", 1.0)
    return score(given, "protected", known, guesses(rows(40, 9), columns=COLUMNS), (1.0,), 0.6).scores


def test_lines_speak_of_rows_and_are_read_back(tmp_path: Path) -> None:
    known = Truth(1, 4, rows(2), torch.tensor([0, 1]), columns=COLUMNS)
    lines = scored(known.images.flip(0), known)
    assert [line.recovered for line in lines] == [True, True] and kind_of(lines) == "row"
    line = lines[0].to_json()
    assert {"row", "cells"} < set(line) and not {"image", "psnr", "ssim", "lpips"} & set(line)
    (tmp_path / "reconstructions").mkdir()
    folder = RunFolder(tmp_path)
    guessed = score_guesses(guesses(rows(40, 9), columns=COLUMNS), known, (1.0,)).scores
    folder.write_scores((*lines, *guessed))
    assert folder.scores() == (*lines, *guessed) and not any(each.recovered for each in guessed)


def test_rows_that_never_saw_an_upload_are_paired_like_an_attacks() -> None:
    """Pairing alone makes cells right: the same public rows, in any order, must score as an attack that offers them."""
    public = rows(6, seed=5)
    known = Truth(
        1, 4, public[torch.randperm(6, generator=torch.manual_seed(1))], torch.zeros(6).long(), columns=COLUMNS
    )
    offers = guesses(public, columns=COLUMNS)
    drawn = [line for line in score_guesses(offers, known, (1.0,)).scores if line.attack == "guess-drawn"]
    made = scored(public, known)
    assert [line.cells for line in drawn] == [line.cells for line in made] and not any(each.recovered for each in drawn)
    assert all(line.mse == 0 and line.offered == 6 for line in drawn)
    alone = Truth(1, 4, rows(1), torch.tensor([0]), columns=COLUMNS)
    assert {line.attack for line in score_guesses(offers, alone, (1.0,)).scores} == {"guess-mode"}
    # What an attack has to beat, to have recovered a row, is as it was: the most frequent values.
    assert best_guess_mse(offers, known.images, known.labels).equal(
        best_guess_mse(offers[:1], known.images, known.labels)
    )


def test_lines_of_images_are_what_they_were() -> None:
    image = replace(scored(rows(1), Truth(1, 4, rows(1), torch.tensor([0]), columns=COLUMNS))[0], cells=None)
    later = ("cells", "words", "ssim_padded", "is_signal")
    assert image.to_json() == {key: value for key, value in asdict(image).items() if key not in later}
    assert "image" in image.to_json() and "ssim" in image.to_json()
    signal = replace(image, is_signal=True)
    assert {"signal", "ssim"} < {*signal.to_json()} and "image" not in signal.to_json()
    assert TypeAdapter(Score).validate_python(signal.to_json()) == signal
    assert str(recovered([signal, replace(signal, recovered=False, image=1)], signal.upload)) == "1 of 2 signals"


def test_the_relaxation_makes_rows_and_takes_them_back() -> None:
    relaxation = Relaxation(groups(COLUMNS), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    variables = torch.randn(3, 2, 1, 1, FEATURES, generator=torch.Generator().manual_seed(1))
    made = relaxation.images(variables)
    for group in groups(COLUMNS):
        torch.testing.assert_close(made[..., group].sum(dim=-1), torch.ones(3, 2, 1, 1))
    torch.testing.assert_close(relaxation.images(relaxation.of(made)), made, atol=5e-3, rtol=0)
    assert torch.equal(relaxation.hard(rows(5)), rows(5))
    pool = relaxation.pooled([rows(4), rows(4), rows(4, seed=5)])
    assert torch.equal(pool, rows(4))


def network(name: str, **keys: object) -> nn.Module:
    return build_model(model_settings({"name": name, **keys}), (1, 1, FEATURES), 3, 0, COLUMNS)


def test_an_embedding_is_a_look_up() -> None:
    model, some = network("embedding", hidden=[6]), rows(5)
    tables = model.get_submodule("embedded.tables")
    wanted = [
        F.embedding(some[:, 0, 0, group].argmax(dim=1), table.weight.T)
        for group, table in zip(groups(COLUMNS), tables.children(), strict=True)
    ]
    wanted.append(some[:, 0, 0, [4, 8, 9, 10]])
    torch.testing.assert_close(model.get_submodule("embedded")(some.flatten(1)), torch.cat(wanted, dim=1))


@in_one_test(("name", "keys"), [("embedding", {"hidden": [6]}), ("logistic", {}), ("logistic", {"bias": False})])
def test_gradients_of_examples_are_those_of_autograd(name: str, keys: dict[str, object]) -> None:
    model, x, y = network(name, **keys), rows(4), torch.tensor([0, 1, 2, 1])
    found = per_example_gradients(model, partial(F.cross_entropy, reduction="none"), x, y)
    for weights in torch.eye(4):
        row = int(weights.argmax())
        wanted = torch.autograd.grad(
            F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]), list(model.parameters())
        )
        combined = found.combine(weights)
        for (key, _), value in zip(model.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(combined[key], value)


def heard(
    model: nn.Module, x: Tensor, y: Tensor, columns: tuple[ColumnSpec, ...] = COLUMNS, name: str = "mlp"
) -> Observation:
    loss = F.cross_entropy(model(x), y)
    names = [key for key, _ in model.named_parameters()]
    gradient = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    public = PublicSettings(
        {"name": name}, (1, 1, FEATURES), 3, (0.0,), (1.0,), "fedsgd", len(x), 1, 0.1, "sgd", 0.0, 100,
        {"name": "none"}, columns=columns,
    )  # fmt: skip
    return Observation(1, 0, {key: value.detach() for key, value in model.named_parameters()}, gradient, public)


@pytest.mark.parametrize(("name", "batch"), [("mlp", 2), ("embedding", 1)])
def test_rows_are_read_off_gradients(name: str, batch: int) -> None:
    model, x, y = network(name, hidden=[32]), rows(batch, seed=2), torch.arange(batch)
    config = TabularSettings(iterations=200, restarts=3)
    (found,) = run_attack(AttackJob("tabular", [heard(model, x, y, name=name)], model, config, 0))
    known = Truth(1, 0, x, y, columns=COLUMNS)
    lines = [
        line for line in score(found, "u", known, guesses(rows(9), columns=COLUMNS), (1.0,), 0.6).scores if line.chosen
    ]
    assert all(line.cells is not None and line.cells.share_right == 1 for line in lines)
    assert max(line.cells.numbers["age"] for line in lines if line.cells) < 0.01


@pytest.mark.parametrize("sigma", [1e-3, 100.0])
def test_behind_noise_rows_are_read_or_guessed(sigma: float) -> None:
    """One upload each: with little noise its row, with very much the most frequent values, not worse ones."""
    model, public = network("mlp", hidden=[32]), rows(200, seed=9)
    public[150:] = public[0]
    clean = heard(model, rows(1, seed=2), torch.tensor([1]))
    stream = torch.Generator().manual_seed(3)
    length = torch.cat([value.flatten() for value in clean.upload.values()]).norm()
    upload = {
        key: value / length + sigma * torch.randn(value.shape, generator=stream) for key, value in clean.upload.items()
    }
    mechanism = {"name": "gaussian", "clip_norm": 1.0, "sigma": sigma}
    noisy = replace(clean, upload=upload, settings=replace(clean.settings, mechanism=mechanism))
    config = TabularSettings(iterations=40, restarts=2)
    (found,) = run_attack(AttackJob("tabular", [noisy], model, config, 0, public_images=public))
    wanted = rows(1, seed=2) if sigma < 1 else most_frequent(COLUMNS, public)[None]
    (cells,) = row_scores(COLUMNS, wanted, found.attempts[found.chosen].images)
    assert cells.share_right == 1 and max(cells.numbers.values()) < 0.02


def test_images_have_no_columns_and_no_such_attack(tmp_path: Path) -> None:
    model, x = network("mlp", hidden=[8]), rows(1)
    observation = heard(model, x, torch.tensor([1]), columns=())
    with pytest.raises(AttackRefused, match="tabular reads rows of tables"):
        run_attack(AttackJob("tabular", [observation], model, TabularSettings(iterations=1), 0))
    path = write_observation(tmp_path, observation)
    assert "columns" not in json.loads(path.with_suffix(".json").read_text())["settings"]
    table = write_observation(tmp_path, heard(model, x, torch.tensor([1])))
    assert read_observation(table).settings.columns == COLUMNS


@in_one_test("epsilon", [0.0, 0.3, 2.0])
def test_no_release_of_pure_epsilon_makes_a_guess_surer(epsilon: float) -> None:
    """Every answer of randomised response on 5 values, of which one has the share k0; it is attained."""
    k0, ratio = 0.3, np.exp(epsilon)
    prior = np.array([k0, *[(1 - k0) / 4] * 4])
    two = np.array([ratio, 1.0, 1.0, 1.0, 1.0])  # of one answer, by the true value
    posterior = prior[0] * two[0] / (prior * two).sum()
    assert surer(k0, epsilon) == pytest.approx(posterior)
    for answer in range(1, 5):
        likelihood = np.where(np.arange(5) == answer, ratio, 1.0)
        assert prior[0] * likelihood[0] / (prior * likelihood).sum() <= surer(k0, epsilon) + 1e-12
