"""`fedpriv account response` and `erm` as a user meets them: printed figures, one line for bad input, exit code 2."""

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fedpriv.core import cli

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `fedpriv account ...` in this process: exit code, standard output, standard error."""

    def call(arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["fedpriv", "account", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capsys.readouterr()
        return int(ended.value.code or 0), text.out, text.err

    return call


def read(account: Call, arguments: str) -> dict[str, Any]:
    code, out, err = account(f"{arguments} --json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_response(account: Call) -> None:
    coin = read(account, "response --coin 0.5 --examples 2000 --share 0.1")
    assert (coin["keep"], coin["epsilon"]) == (pytest.approx(0.75), pytest.approx(1.098612, abs=5e-7))
    assert coin["standard_error"] == pytest.approx(0.02049, abs=5e-6)
    ten = read(account, "response --epsilon 1 --answers 10")
    assert (ten["keep"], ten["told_at_most"]) == (pytest.approx(0.231969, abs=5e-7),) * 2
    assert read(account, f"response --keep {ten['keep']} --answers 10")["epsilon"] == pytest.approx(1.0)


def test_erm(account: Call) -> None:
    found = read(account, "erm --examples 10000 --features 1 --regularisation 0.01 --epsilon 1 --tolerance 0")
    assert found["sensitivity"] == pytest.approx(0.02)
    assert found["sigma"] == pytest.approx(0.0746, abs=5e-5)
    assert found["classic_sigma"] == pytest.approx(0.0969, abs=5e-5)
    assert found["objective_epsilon"] == pytest.approx(0.995006, abs=5e-7)
    assert found["objective_cover"] == 0
    # Unset, the tolerance is that of a run: sqrt(n tau) = 0.01, so that the solver's error has 1 / 101 of epsilon.
    run = read(account, "erm --examples 10000 --features 1 --regularisation 0.01 --epsilon 1")
    assert run["sensitivity"] == pytest.approx(0.02 + 2e-6)
    assert run["objective_epsilon"] == pytest.approx(100 / 101 - 2 * math.log1p(0.25 / 100))
    assert run["objective_cover"] == pytest.approx(2 * 1e-8 / 0.01 * 101)
    ten = read(account, "erm --examples 1437 --regularisation 0.01 --epsilon 8 --classes 10 --features 65")
    assert "objective_scale" not in ten
    assert ten["mean_length"] == pytest.approx(650 * ten["scale"])


@pytest.mark.parametrize(
    "command", ["response --coin 0.5", "erm --examples 10 --features 1 --regularisation 0.1 --epsilon 2"]
)
def test_people_read_figures_and_what_they_rest_on(account: Call, command: str) -> None:
    code, out, err = account(command)
    assert (code, err) == (0, "")
    for words in ("adjacency", "What they rest on", "Notes"):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("response", "needs exactly one of --epsilon, --keep and --coin"),
        ("response --epsilon 1 --keep 0.6", "needs exactly one of --epsilon, --keep and --coin"),
        ("response --epsilon 30", "--epsilon 30: allowed is from 1e-09 to 20"),
        ("response --keep 0.5", "--keep 0.5: with 2 answers allowed is above 1 / 2"),
        ("response --coin 0", "--coin 0: allowed is above 0"),
        ("response --epsilon 1 --answers 1", "--answers 1: allowed are whole numbers from 2"),
        ("response --epsilon 1 --share 2", "--share 2: allowed is from 0 to 1"),
        ("response --epsilon 1 --examples 0", "--examples 0: allowed are whole numbers from 1"),
        ("response --epsilon 1e-300", "--epsilon 1e-300: allowed is from 1e-09 to 20"),
        ("erm --examples 10 --features 1 --regularisation 0 --epsilon 1", "--regularisation 0: allowed are finite"),
        (
            "erm --examples 10 --features 1 --regularisation 1 --epsilon 0",
            "--epsilon 0: allowed is above",
        ),
        ("erm --examples 10 --regularisation 1 --epsilon 1", "--features"),
        ("output --sigma 1", "nothing is proven about output; noise on models: fedpriv account erm"),
    ],
)
def test_bad_input_is_one_line(account: Call, arguments: str, words: str) -> None:
    code, out, err = account(arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fedpriv: ")
    assert words in err
    assert err.count("\n") == 1
