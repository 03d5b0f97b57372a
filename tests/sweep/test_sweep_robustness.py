"""Trials that are certified and attacked: what is asked, what the record, the tables and the report say of it."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from ray import cloudpickle
from rich.console import Console

from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.robustness.records import Evasion, Robustness
from fedpriv.sweep.cli import _refuse_faults
from fedpriv.sweep.display import result_table
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.page import write_sweep_report
from fedpriv.sweep.record import SweepProgress, TrialRecord
from fedpriv.sweep.run import check_trials, run_sweep
from fedpriv.sweep.settings import load_sweep
from tests.sweep.sweeps import SMALL, sweep, write

CERTIFY = {"examples": 12, "selection": 10, "votes": 40, "radii_l2": [0.1, 0.3], "radii_linf": [0.01]}
EVADE = {"attacks": ["fgsm", "pgd"], "sizes": [0.05, 0.4], "steps": 3, "draws": 2, "victims": 8, "votes": 20}
ROWS = [
    {"robustness": {"noise": 0}},
    {"robustness": {"noise": 0.3, "redistribution": "vulnerable", "public_examples": 20}},
]
BASE = {**SMALL, "robustness": {"noise": 0.3, "certify": CERTIFY, "evade": EVADE}}


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("robust")
    asked = sweep(path, base=BASE, seeds=[1], list={"row": ROWS})
    assert check_trials(asked) == ()
    run_sweep(asked, SweepFolder.prepare(path / "out", asked), SweepProgress())
    return path / "out"


def records(folder: Path) -> list[TrialRecord]:
    return SweepFolder.open(folder).records()


def test_records_say_what_certify_and_probe_wrote(certified: Path) -> None:
    plain, noisy = records(certified)
    assert plain.voted is None and plain.certified == () and plain.broken is None
    robustness = Robustness.model_validate_json((certified / noisy.folder / "robustness.json").read_text())
    assert noisy.voted == robustness.voted.value
    wanted = [
        (norm, size, share.value, share.low, share.high)
        for norm in ("l2", "linf")
        for size, share in zip(robustness.curve(norm).sizes, robustness.curve(norm).shares, strict=True)
    ]
    assert [tuple(each.model_dump().values()) for each in noisy.certified] == wanted
    assert [each[:2] for each in wanted] == [("l2", 0.1), ("l2", 0.3), ("linf", 0.01)]
    for record in (plain, noisy):
        evasion = Evasion.model_validate_json((certified / record.folder / "evasion.json").read_text())
        shares = {"every": evasion.least} | {curve.attack: curve.shares for curve in evasion.curves}
        assert list(shares) == ["every", "fgsm", "pgd"]
        left = {(each.attack, each.size): each.right for each in record.evasions}
        assert left == {
            (name, size): share.value
            for name, each in shares.items()
            for size, share in zip(evasion.sizes, each, strict=True)
        }
    assert noisy.broken == 0 and not noisy.wrong


def test_the_table_has_a_column_for_each_size(certified: Path) -> None:
    rows = parquet.read_table(certified / "results.parquet").to_pylist()
    plain, noisy = records(certified)
    assert rows[0]["certified.l2.0.3.share"] is None
    assert rows[1]["certified.l2.0.3.share"] == noisy.certified[1].share
    assert rows[0]["evasion.every.linf.0.4.right"] == plain.evasions[1].right
    assert not any(key.endswith((".norm", ".size")) for key in rows[0])


def test_the_terminals_table_shows_one_size_in_80_columns(certified: Path) -> None:
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        console = Console(width=80, record=True, file=nowhere)
        console.print(result_table(records(certified)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["certified", "attacked"]
    assert lines[1].split() == ["trial", "settings", "accuracy", "ε", "l2", "0.3", "linf", "0.4", "time"]


def test_the_report_shows_both(certified: Path) -> None:
    page = write_sweep_report(certified).read_text()
    assert "Certified at l2 0.3" in page and "Right under attack at linf 0.4" in page


def test_a_broken_certificate_is_an_error(certified: Path) -> None:
    found = [record.model_copy(update={"broken": 2}) if record.certified else record for record in records(certified)]
    with pytest.raises(RunFailedError, match="trial 2: certificates are broken: attacks broke 2 of them"):
        _refuse_faults(found)
    assert [str(row.style) for row in result_table(found).rows] == ["", "red"]


def test_only_what_is_asked_is_done(tmp_path: Path) -> None:
    """The sections' presence decides, also where all of their keys have their defaults; so another folder is needed."""
    without = sweep(tmp_path, base={**SMALL, "robustness": {"noise": 0.3}}, seeds=[1, 2], list=None)
    usual = sweep(
        tmp_path, base={**SMALL, "robustness": {"noise": 0.3, "certify": {}, "evade": {}}}, seeds=[1, 2], list=None
    )
    assert [trial.asked for trial in without.trials] == [{}] * 2
    # Ray sends trials to its workers by pickle.
    sent = [cloudpickle.loads(cloudpickle.dumps(trial)) for trial in usual.trials]
    assert all(list(trial.asked) == ["certificates", "evasion"] for trial in (*usual.trials, *sent))
    assert "certified" not in json.dumps(without.identity())
    SweepFolder.prepare(tmp_path / "out", without)
    with pytest.raises(InputError, match="its trial 1 has other settings"):
        SweepFolder.prepare(tmp_path / "out", usual)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"certify": {**CERTIFY, "examples": 10**6}}, "certify.examples = 1000000: allowed is from 1 to"),
        ({"noise": 0, "evade": {**EVADE, "victims": 10**6}}, "evade.victims = 1000000: allowed is from 1 to"),
        ({"certify": {"vote": 3}}, "unknown key robustness.certify.vote; did you mean robustness.certify.votes?"),
    ],
)
def test_too_many_images_are_found_before_anything_starts(tmp_path: Path, section: dict[str, Any], said: str) -> None:
    path = write(tmp_path, base={**SMALL, "robustness": {"noise": 0.3, **section}}, list=None)
    with pytest.raises(InputError, match=said) as error:
        check_trials(load_sweep(path))
    assert "\n" not in str(error.value)
