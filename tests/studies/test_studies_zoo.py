"""The study of the zoos: its rows, what one bad network costs, and the tables."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.methods import RandomNetwork
from fedpriv.diagnosis import cost
from studies import zoo

SMALL = (
    "torchvision/efficientnet_v2 (small)",
    "timm/mixer (small)",
    "transformers/llama, label",
    "peft/lora, gpt2, next",
)


def row(name: str) -> RandomNetwork:
    return next(each for each in zoo.rows() if each.name == name)


def test_there_are_as_many_networks_as_the_libraries_had_tried() -> None:
    libraries = [each.name.partition("/")[0] for each in zoo.rows()]
    counts = {name: libraries.count(name) for name in dict.fromkeys(libraries)}
    assert counts == {"torchvision": 24, "timm": 43, "transformers": 48, "peft": 18}
    assert len({each.name for each in zoo.rows()}) == 133
    for each in zoo.rows():
        assert each.asked.batch in (8, 16) and ":" in each.asked.model, each


@pytest.mark.parametrize("name", SMALL)
def test_a_small_network_is_accepted_and_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MOST", 1)
    monkeypatch.setattr(cost, "FEWEST", 1)
    cells = zoo.steps_of(row(name))
    assert cells["accepted"] == "yes" and not cells["unmeasured"]
    assert float(cells["error"]) <= zoo.EXACT and cells["precision"] == "float64"
    assert set(cells) == set(zoo.CELLS["steps"])


def _ends(row: RandomNetwork) -> dict[str, Any]:
    os._exit(3)


def _hangs(row: RandomNetwork) -> dict[str, Any]:
    time.sleep(60)
    return {}


def _raises(row: RandomNetwork) -> dict[str, Any]:
    raise MemoryError("too large")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (_ends, "attacks: the process ended with 3"),
        (_hangs, "attacks: not done after 0.5 s"),
        (_raises, "attacks: MemoryError: too large"),
    ],
)
def test_a_bad_network_costs_one_part_of_one_row(part: zoo.Part, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "CONTEXT", "fork")
    monkeypatch.setattr(zoo, "PARTS", {"steps": lambda row: {"trained": 3}, "attacks": part})
    cells = zoo.made(row(SMALL[0]), ("steps", "attacks"), 0.5)
    assert (cells["trained"], cells["failed"]) == ("3", words)


def test_rows_are_made_once_and_parts_anew_only_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, tuple[str, ...]]] = []

    def fake(row: RandomNetwork, parts: tuple[str, ...], limit: float) -> dict[str, str]:
        made.append((row.name, tuple(parts)))
        return {CELL[part]: str(len(made)) for part in parts} | {"accepted": "yes", "failed": ""}

    monkeypatch.setattr(zoo, "made", fake)
    files = ["--rows", str(tmp_path / "rows.csv")]
    every = ("steps", "attacks", "opacus")
    zoo.main(["--only", "peft/p*", *files])
    first = [name for name, parts in made if parts == every]
    assert len(first) == len(made) == 6 and all(name.startswith("peft/p") for name in first)
    zoo.main(["--only", "peft/*", *files])
    assert len(made) == 18 and {name for name, _ in made[6:]}.isdisjoint(first)
    zoo.main(["--only", "peft/prefix*", "--parts", "steps", "--anew", *files])
    assert made[18:] == [(f"peft/prefix, {base}, next", ("steps",)) for base in ("gpt2", "llama")]
    kept = zoo.read(tmp_path / "rows.csv")
    assert (kept["peft/prefix, gpt2, next"]["error"], kept["peft/prefix, gpt2, next"]["attacks"]) == ("19", "1")
    assert list(kept) == [each.name for each in zoo.rows() if each.name.startswith("peft/")]


CELL = {"steps": "error", "attacks": "attacks", "opacus": "opacus_ghost"}


def test_the_tables_say_what_the_rows_say() -> None:
    cells = {"trained": "1000000", "accepted": "yes", "error": "1.0e-15", "way": "ghost", "step": "2.00"}
    cells |= {"opacus_hooks": "no: it holds 17 buffers", "opacus_ghost": "3.00", "attacks": "iga", "made": "2026-01-01"}
    line = {column: cells.get(column, "") for column in zoo.COLUMNS}
    kept = {each.name: line | {"name": each.name, "given": each.given} for each in zoo.rows()}
    kept["timm/test_vit2"] |= {"error": "2.0e-03", "furthest": "head (Linear)", "precision": "float64"}
    kept["peft/lora, bert, label"] |= {"accepted": "it mixes", "refused": "tag: layer 3 of a.4.b; lamp: why"}
    made = zoo.tables(kept)
    assert dict(made["models-summary"].rows)["accepted with Gaussian noise"] == "132"
    assert ("timm/test_vit2", "off by 2.0e-03, most in head (Linear) (float64)") in made["models-troubles"].rows
    assert ("peft/lora, bert, label", "it mixes") in made["models-troubles"].rows
    assert made["models-opacus"].rows[0][:2] == ("it holds ... buffers", "133")
    assert ("tag: layer ... of ...", "1") in [row[:2] for row in made["models-refusals"].rows]


def test_the_published_tables_are_what_the_published_rows_say() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    for name, table in zoo.tables(zoo.read(folder / "models.csv")).items():
        kept = (folder / f"{name}.csv").read_text(encoding="utf-8")
        assert kept.partition("versions,")[0] == str(table).partition("versions,")[0]
