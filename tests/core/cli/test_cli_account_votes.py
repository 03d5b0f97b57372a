"""`fedpriv account votes` as a user meets it: the figures of the specification, one line for bad input, exit code 2."""

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fedpriv.core import cli

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def votes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `fedpriv account votes ...` in this process: exit code, standard output, standard error."""

    def call(arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "argv", ["fedpriv", "account", "votes", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capsys.readouterr()
        return int(ended.value.code or 0), text.out, text.err

    return call


def read(votes: Call, arguments: str) -> dict[str, Any]:
    code, out, err = votes(f"{arguments} --json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_figures_of_given_noise(votes: Call) -> None:
    assert read(votes, "--sigma 40 --answers 286")["epsilon"] == pytest.approx(2.435, abs=5e-4)
    found = read(votes, "--sigma 40 --threshold-sigma 150 --asked 640 --answers 286")
    assert found["epsilon"] == pytest.approx(3.927, abs=5e-4)
    assert found["epsilon_answered"] == pytest.approx(2.543, abs=5e-4)
    assert found["mu"] == pytest.approx(math.sqrt(640 / 150**2 + 2 * 286 / 40**2))
    assert any("fixed beforehand" in note for note in found["notes"])
    laplace = read(votes, "--scale 20 --answers 1000")
    assert (laplace["mu"], laplace["pure_epsilon"]) == (None, 100)
    assert laplace["epsilon"] == pytest.approx(17.8, abs=0.05)


def test_a_target_finds_answers_or_noise(votes: Call) -> None:
    assert read(votes, "--sigma 40 --target-epsilon 3")["answers"] == 413
    # Three votes of one voter with three times the noise are as one.
    assert read(votes, "--sigma 120 --votes-per-client 3 --target-epsilon 3")["answers"] == 413
    found = read(votes, "--answers 100 --target-epsilon 1")
    assert found["sigma"] == pytest.approx(52.76, abs=5e-3)
    assert 1 - 1e-9 < found["epsilon"] <= 1


def test_people_read_the_same(votes: Call) -> None:
    code, out, err = votes("--sigma 40 --threshold-sigma 150 --asked 640 --answers 286")
    assert (code, err) == (0, "")
    told = " ".join(out.split())  # lines are wrapped to the terminal
    for words in ("3.927", "2.543", "286 of them answered", "where a budget was fixed beforehand", "replace-one-voter"):
        assert words in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "exactly one of --sigma and --scale"),
        ("--sigma 3 --scale 3 --answers 1", "exactly one of --sigma and --scale"),
        ("--sigma 3", "needs --answers, or --target-epsilon"),
        ("--sigma 0 --answers 1", "sigma = 0: allowed is from"),
        ("--sigma nan --answers 1", "sigma = nan: allowed is from"),
        ("--scale -2 --answers 1", "scale = -2: allowed is from"),
        ("--sigma 3 --threshold-sigma inf --answers 1", "sigma1 = inf: allowed is from"),
        ("--scale 3 --threshold-sigma 3 --answers 1", "--threshold-sigma goes with --sigma"),
        ("--sigma 3 --answers -1", "--answers -1: allowed"),
        ("--sigma 3 --answers 10000001", "--answers 10000001: allowed"),
        ("--sigma 3 --answers 1 --asked 2", "--asked is for confident answers"),
        ("--sigma 3 --threshold-sigma 3 --answers 3 --asked 2", "--answers 3 is more than --asked 2"),
        ("--sigma 3 --threshold-sigma 3 --asked 2 --target-epsilon 1", "--asked needs --answers"),
        ("--sigma 3 --answers 1 --delta 1", "--delta 1: allowed"),
        ("--sigma 3 --answers 1 --votes-per-client 0", "--votes-per-client 0: allowed"),
        ("--sigma 3 --target-epsilon 0", "--target-epsilon 0: allowed"),
        ("--answers 3 --target-epsilon inf", "--target-epsilon inf: allowed"),
    ],
)
def test_bad_input_is_one_line(votes: Call, arguments: str, said: str) -> None:
    code, out, err = votes(arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1
