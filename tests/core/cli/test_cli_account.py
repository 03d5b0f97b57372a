"""`fedpriv account` as a user meets it: the ledger's figures, one line for bad input, exit code 2."""

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting import (
    Contender,
    analytic_sigma,
    calibrate,
    ceilings,
    classic_sigma,
    equal_blocks,
    extended_sigma,
    guarantee,
    noise_to_signal,
    release_with,
)
from fedpriv.core import cli
from fedpriv.core.registry import MECHANISMS
from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms import NoisySettings
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.laplace import LaplaceMechanism
from fedpriv.mechanisms.machinery.base import Mechanism, block_sizes
from fedpriv.mechanisms.vmf import VmfMechanism
from tests.noise import stream

Call = Callable[..., tuple[int, str, str]]
KEYS = {"nominal_epsilon", "pure_epsilon", "epsilon", "delta", "adjacency", "sampling", "participations", "theorem"}
PARAMETER = {"gaussian": "sigma", "hgm": "sigma", "laplace": "scale", "vmf": "kappa"}


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `fedpriv account ...` in this process: exit code, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["fedpriv", "account", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capsys.readouterr()
        return int(ended.value.code or 0), text.out, text.err

    return call


def read(account: Call, *arguments: object) -> dict[str, Any]:
    code, out, err = account(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_the_example_of_the_issue(account: Call) -> None:
    found = read(account, "vmf", "--epsilon", 50, "--dimension", 15826, "--participations", 10, "--delta", 1e-5)
    expected = guarantee(
        release_with(25.0, 1e-5, mechanism="vmf", sampling="full", rate=1.0, participations=10, dimensions=(15826,))
    )
    assert set(found) > KEYS
    assert found["theorem"] == expected.theorem
    assert (found["epsilon"], found["pure_epsilon"], found["nominal_epsilon"]) == (expected.epsilon, 500.0, 50.0)
    assert (found["mechanism"], found["kappa"], found["dimension"], found["blocks"]) == ("vmf", 25.0, 15826, 1)
    assert (found["delta"], found["participations"], found["sampling"]) == (1e-5, 10, "full")
    assert found["adjacency"].startswith("replace-one")


# Updates are not sampled.
CASES = [
    (mechanism, *case, participations)
    for mechanism, case, participations in itertools.product(
        PARAMETER, [(None, "example"), (None, "update"), (0.05, "example")], [1, 7]
    )
]


@pytest.mark.parametrize(("mechanism", "rate", "unit", "participations"), CASES)
def test_figures_are_the_ledgers_with_the_default_sampling(
    account: Call, mechanism: str, rate: float | None, unit: str, participations: int
) -> None:
    amplifying = "poisson" if mechanism in ("gaussian", "hgm") else "fixed"
    sampling = "full" if rate is None else amplifying
    options = ["--steps", participations, "--unit", unit, "--dimension", 30, "--delta", 1e-6]
    options += [] if rate is None else ["--sampling-rate", rate]
    found = read(account, mechanism, f"--{PARAMETER[mechanism]}", 1.7, *options)
    run: dict[str, Any] = {"mechanism": mechanism, "sampling": sampling, "participations": participations, "unit": unit}
    expected = guarantee(release_with(1.7, 1e-6, rate=rate or 1.0, dimensions=(30,), **run))
    assert found[PARAMETER[mechanism]] == 1.7
    for key in sorted(KEYS):
        assert found[key] == getattr(expected, key)
    assert found["notes"] == list(expected.notes)


@pytest.mark.parametrize(("blocks", "sizes"), [(1, (10,)), (3, (4, 3, 3)), (10, (1,) * 10)])
def test_blocks_are_nearly_equal(account: Call, blocks: int, sizes: tuple[int, ...]) -> None:
    assert equal_blocks(10, blocks) == sizes
    found = read(account, "vmf", "--kappa", 2, "--dimension", 10, "--blocks", blocks, "--steps", 5)
    run: dict[str, Any] = {
        "mechanism": "vmf",
        "sampling": "full",
        "rate": 1.0,
        "participations": 5,
        "dimensions": sizes,
    }
    assert found["epsilon"] == guarantee(release_with(2.0, 1e-5, **run)).epsilon
    assert found["blocks"] == blocks


@pytest.mark.parametrize("mechanism", PARAMETER)
@pytest.mark.parametrize("rate", [None, 0.01])
def test_the_other_way_round(account: Call, mechanism: str, rate: float | None) -> None:
    """The noise that is found proves the target, and a little less noise does not."""
    options = ["--steps", 100, "--dimension", 500] + ([] if rate is None else ["--sampling-rate", rate])
    found = read(account, mechanism, "--target-epsilon", 8, *options)
    name = PARAMETER[mechanism]
    assert found["target_epsilon"] == 8
    assert 8 * (1 - 1e-3) <= found["epsilon"] <= 8
    assert read(account, mechanism, f"--{name}", found[name], *options)["epsilon"] == found["epsilon"]
    less = found[name] * (1.01 if name == "kappa" else 0.99)
    assert read(account, mechanism, f"--{name}", less, *options)["epsilon"] > 8


@pytest.mark.parametrize("mechanism", ["gaussian", "hgm"])
@pytest.mark.parametrize(
    ("calibration", "single"), [("analytic", analytic_sigma), ("extended", extended_sigma), ("classic", classic_sigma)]
)
@pytest.mark.parametrize("adjacency", [None, "zero-out"])
def test_a_nominal_epsilon_is_one_releases_own(
    account: Call, mechanism: str, calibration: str, single: Callable[[float, float], float], adjacency: str | None
) -> None:
    options = [] if adjacency is None else ["--sampling-rate", 0.1, "--adjacency", adjacency]
    found = read(account, mechanism, "--epsilon", 0.5, "--calibration", calibration, "--steps", 3, *options)
    sensitivity = 1 if adjacency == "zero-out" else 2
    assert found["sigma"] == sensitivity * single(0.5, 1e-5)
    assert found["nominal_epsilon"] == 0.5
    assert calibration in found["theorem"]["nominal_epsilon"]
    assert f"sensitivity {sensitivity}" in found["theorem"]["nominal_epsilon"]


def test_without_a_nominal_epsilon_there_is_none(account: Call) -> None:
    found = read(account, "gaussian", "--sigma", 2)
    assert (found["nominal_epsilon"], found["pure_epsilon"], found["target_epsilon"]) == (None, None, None)


# ---- the terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["vmf", "--epsilon", 50, "--dimension", 15826, "--blocks", 7, "--participations", 10],
        ["gaussian", "--target-epsilon", 8, "--steps", 1000, "--sampling-rate", 0.01],
        ["laplace", "--scale", 1e-3, "--steps", 1000, "--sampling-rate", 0.01],
        ["hgm", "--epsilon", 0.5, "--unit", "update", "--calibration", "classic"],
        ["compare", "--epsilon", 1, "--epsilon", 8],
    ],
)
def test_output_fits_into_80_columns(account: Call, arguments: list[object]) -> None:
    code, out, err = account(*arguments)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80


def test_figures_come_first_and_then_what_they_rest_on(account: Call) -> None:
    _, out, _ = account("gaussian", "--target-epsilon", 8, "--steps", 1000, "--sampling-rate", 0.01)
    lines = out.splitlines()
    assert lines[0].startswith("sigma") and "the smallest that still proves epsilon 8" in " ".join(out.split())
    order = [out.index(word) for word in ("epsilon   ", "adjacency", "sampling", "What they rest on", "Notes")]
    assert order == sorted(order)
    assert "replace-one: one example" in out and "poisson, rate 0.01" in out


def test_the_two_adjacencies_of_poisson_batches(account: Call) -> None:
    """The command of docs/mechanisms.md: each figure, and in one line the other one."""
    options = ["gaussian", "--sigma", 1, "--steps", 1000, "--sampling-rate", 0.01]
    replaced, zeroed = (read(account, *options, "--adjacency", name) for name in ("replace-one", "zero-out"))
    assert replaced == read(account, *options)
    for found, epsilon, start, other in (
        (replaced, 2.85, "replace-one:", "Under zero-out (one example becomes one that adds 0) epsilon is 1.829:"),
        (zeroed, 1.83, "zero-out:", "Under replace-one (one example becomes any other) epsilon is 2.846:"),
    ):
        assert round(found["epsilon"], 2) == epsilon
        assert found["adjacency"].startswith(start)
        assert any(note.startswith(other) for note in found["notes"])


@pytest.mark.parametrize("mechanism", ["central", "distributed"])
def test_a_sum_of_updates_is_about_whole_clients(account: Call, mechanism: str) -> None:
    given = (mechanism, "--sigma", 1, "--adjacency", "zero-out", "--dimension", 100)
    assert "this client's update counts as zero" in " ".join(account(*given)[1].split())
    code, _, err = account(*given, "--unit", "example")
    assert (code, "allowed is update" in err) == (2, True)


@pytest.mark.parametrize("mechanism", [name for name, kind in MECHANISMS.items() if issubclass(kind, NoisySettings)])
def test_what_a_figure_depends_on_is_asked_for(account: Call, mechanism: str) -> None:
    """Epsilon, the noise for a target, and a ceiling: either nothing changes with the dimension, or it has to be given.

    So a proof that begins to depend on it fails here, and so does a help text that says otherwise.
    """
    kind = MECHANISMS[mechanism]
    noise = (f"--{kind.parameter}", 4.0)
    ceiling = () if kind.noise_at != "clients" else ("--ceiling", "1/100")
    figures = []
    for dimension in (1, 10**9):
        found = read(account, mechanism, *noise, *ceiling, "--steps", 3, "--dimension", dimension)
        target = read(account, mechanism, "--target-epsilon", 3, "--steps", 3, "--dimension", dimension)
        figures.append([found[key] for key in ("epsilon", "pure_epsilon", "ceilings")] + [target[kind.parameter]])
    assert (figures[0] != figures[1]) == kind.by_dimension
    _, out, _ = account(mechanism, "--help")
    words = " ".join(out.replace("│", " ").split())
    assert ("changes no figure" in words, "Required: epsilon depends" in words) == (
        not kind.by_dimension,
        kind.by_dimension,
    )
    code, out, err = account(mechanism, *noise)
    assert (code, out == "") == ((2, True) if kind.by_dimension else (0, False))
    assert err.count("\n") == (1 if kind.by_dimension else 0)


def test_the_module_is_the_command(tmp_path: Path) -> None:
    """In a process of its own, as an installed command runs."""
    command = [sys.executable, "-m", "fedpriv", "account", "laplace", "--scale", "0", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fedpriv: --scale 0: allowed is from 1e-09 to 1e+12\n"


EXTREME = [
    ["gaussian", "--sigma", 1, *["--steps", "10000000", "--sampling-rate", "0.01"]],
    ["gaussian", "--sigma", 1, *["--steps", "10000000", "--sampling-rate", "1e-9"]],
    ["gaussian", "--sigma", 1, *["--steps", "10000000", "--sampling-rate", "1e-9", "--sampling", "fixed"]],
    ["laplace", "--scale", 0.01, *["--steps", "10000000", "--sampling-rate", "1e-12"]],
    ["laplace", "--scale", 1, "--delta", 5e-324, "--steps", 100],
    ["vmf", "--kappa", 1e7, *["--dimension", "2", "--steps", "10000000", "--sampling-rate", "1e-9"]],
    ["vmf", "--kappa", 1, "--dimension", 10**12],
    ["vmf", "--kappa", 1, "--dimension", 10**8, "--blocks", 10**6],
    ["hgm", "--sigma", 1e-9, "--participations", 10**15],
]


@pytest.mark.parametrize("arguments", EXTREME, ids=lambda value: " ".join(map(str, value)))
def test_extreme_settings_are_answered_without_a_warning_and_never_above_no_sampling(
    account: Call, arguments: list[object]
) -> None:
    """Within seconds: what a long run or a rare use would fill the memory with is left out of the ledger."""
    found = read(account, *arguments)
    assert 0 <= found["epsilon"] < math.inf
    if "--sampling-rate" in arguments:
        at = arguments.index("--sampling-rate")
        unsampled = [*arguments[:at], *arguments[at + 2 :]]
        if "fixed" in unsampled:
            unsampled = unsampled[: unsampled.index("--sampling")]
        assert found["epsilon"] <= read(account, *unsampled)["epsilon"]


@pytest.mark.parametrize("dimension", [1, 2, 15])
def test_a_comparison_of_few_coordinates_has_smaller_blocks(account: Call, dimension: int) -> None:
    found = read(account, "compare", "--dimension", dimension, "--epsilon", 1)
    assert [row["blocks"] for row in found["rows"]] == [1, 1, 1, 1]


# ---- bad input ------------------------------------------------------------------------------------------------------

VMF = ["vmf", "--dimension", 100]
GAUSSIAN = ["gaussian", "--sigma", 1]
RATE = ["--sampling-rate", 0.1]
BAD = [
    (["gaussian", "--target-advantage", 1.5], "--target-advantage 1.5: allowed is above 0 and below 1"),
    (["gaussian", "--target-tpr", 0.1], "--target-tpr 0.1: it needs --fpr, the false positive rate, once"),
    (["gaussian", "--target-tpr", 0.01, "--fpr", "1/100"], "--target-tpr 0.01: allowed is above 0.01 and below 1"),
    (["gaussian", "--sigma", 1, "--fpr", 2], "--fpr 2: allowed are numbers and fractions between 0 and 1"),
    (["distributed", "--sigma", 3, "--dimension", 9, "--fpr", 0.1], "no pair of laws is known that dominates it"),
    (
        ["gaussian"],
        "--epsilon, --target-epsilon, --target-ceiling, --target-advantage, --target-tpr; none",
    ),
    ([*GAUSSIAN, "--epsilon", 1], "--sigma and --epsilon are given"),
    (
        [*VMF, "--kappa", 1, "--epsilon", 1, "--target-epsilon", 1],
        "--kappa and --epsilon and --target-epsilon are given",
    ),
    (["laplace", "--scale", 1, "--target-epsilon", 1], "--scale and --target-epsilon are given"),
    ([*VMF, "--kappa", -1], "--kappa -1: allowed is from 0 to 1e+07"),
    ([*VMF, "--kappa", "nan"], "--kappa nan"),
    ([*VMF, "--kappa", 1e8], "--kappa 1e+08"),
    (["gaussian", "--sigma", 0], "--sigma 0: allowed is from 1e-09 to 1e+12"),
    (["gaussian", "--sigma", "nan"], "--sigma nan"),
    (["hgm", "--sigma", "inf"], "--sigma inf"),
    (["laplace", "--scale", "-inf"], "--scale -inf"),
    ([*GAUSSIAN, "--delta", 0], "--delta 0: allowed is between 0 and 1, both excluded"),
    ([*GAUSSIAN, "--delta", 1], "--delta 1"),
    ([*GAUSSIAN, "--delta", "nan"], "--delta nan"),
    (["gaussian", "--epsilon", 1, "--delta", "nan"], "--delta nan"),
    ([*VMF, "--epsilon", 0], "--epsilon 0: allowed is above 0, finite"),
    ([*VMF, "--epsilon", "nan"], "--epsilon nan"),
    (["laplace", "--epsilon", -1], "--epsilon -1"),
    (["gaussian", "--epsilon", "inf"], "--epsilon inf"),
    (["gaussian", "--target-epsilon", 0], "--target-epsilon 0"),
    (["gaussian", "--target-epsilon", "nan"], "--target-epsilon nan"),
    (["gaussian", "--epsilon", 2, "--calibration", "classic"], "proven for epsilon <= 1"),
    (["gaussian", "--epsilon", 2, "--delta", 0.9, "--calibration", "extended"], "0.798"),
    (["gaussian", "--target-epsilon", 1e-14, "--delta", 1e-15], "no sigma from 1e-09 to 1e+12 reaches it"),
    (["laplace", "--target-epsilon", 1e30], "less noise than the least allowed (scale = 1e-09)"),
    ([*VMF, "--target-epsilon", 1e30], "less noise than the least allowed (kappa = 1e+07)"),
    (["vmf", "--kappa", 1, "--dimension", 0], "--dimension 0: allowed is from 1 to 1,000,000,000,000"),
    (["gaussian", "--sigma", 1, "--dimension", -3], "--dimension -3"),
    ([*VMF, "--kappa", 1, "--blocks", 101], "blocks = 101: allowed is from 1 to the 100 coordinates that there are"),
    ([*VMF, "--kappa", 1, "--blocks", 0], "blocks = 0"),
    (
        ["vmf", "--kappa", 1],
        "vmf needs --dimension, the numbers in a gradient or update, because epsilon depends on it",
    ),
    (["distributed", "--sigma", 1], "depends on it; allowed is from 1 to 1,000,000,000,000"),
    (["distributed", "--target-epsilon", 8], "distributed needs --dimension"),
    ([*GAUSSIAN, "--participations", -1], "--participations -1: allowed is a whole number from 0 to 1e15"),
    ([*GAUSSIAN, "--participations", 1.5], "'1.5' is not a valid integer"),
    (["gaussian", "--target-epsilon", 1, "--steps", 0], "--participations 0"),
    ([*GAUSSIAN, "--steps", 10**400], "allowed is a whole number from 0 to 1e15"),
    (["vmf", "--kappa", 1, "--dimension", 10**310], "allowed is from 1 to 1,000,000,000,000"),
    (
        ["vmf", "--kappa", 1, "--dimension", 10**9, "--blocks", 10**9],
        "blocks = 1000000000: allowed is up to 10,000,000",
    ),
    ([*GAUSSIAN, "--sampling-rate", 5e-324], "--sampling-rate 5e-324: allowed is from 1e-12 to 1"),
    (["compare", "--dimension", 10**9], "cuts 1,000,000,000 coordinates in 62,500,000 blocks; allowed is from 1,000"),
    (["compare", "--batch-size", 10**400], "allowed is from 1 to 1,000,000,000,000"),
    ([*GAUSSIAN, "--sampling-rate", 0], "--sampling-rate 0: allowed is from 1e-12 to 1"),
    ([*GAUSSIAN, "--sampling-rate", 1.1], "--sampling-rate 1.1"),
    ([*GAUSSIAN, "--sampling-rate", "nan"], "--sampling-rate nan"),
    ([*VMF, "--kappa", 1, "--sampling", "poisson"], "--sampling poisson needs --sampling-rate"),
    ([*VMF, "--kappa", 1, "--ceiling", 0], "--ceiling 0: allowed are numbers and fractions between 0 and 1"),
    ([*VMF, "--kappa", 1, "--ceiling", "1/0"], "--ceiling 1/0: allowed are numbers"),
    ([*VMF, "--kappa", 1, "--ceiling", "1/2/3"], "--ceiling 1/2/3: allowed are numbers"),
    ([*GAUSSIAN, "--ceiling", "nan"], "--ceiling nan: allowed are numbers"),
    ([*GAUSSIAN, "--ceiling", "1e-400"], "--ceiling 1e-400: allowed are numbers"),
    ([*GAUSSIAN, "--ceiling", 0.1, "--ceiling", "often"], "--ceiling often: allowed are numbers"),
    ([*GAUSSIAN, "--ceiling", 1], "--ceiling 1: allowed are numbers"),
    ([*GAUSSIAN, *RATE, "--sampling", "shuffled"], "--sampling shuffled with --sampling-rate 0.1: no amplification"),
    ([*VMF, "--kappa", 1, *RATE, "--sampling", "shuffled"], "leave out the rate, or take --sampling fixed"),
    ([*GAUSSIAN, *RATE, "--sampling", "full"], "take --sampling poisson, balls-in-bins or fixed"),
    ([*GAUSSIAN, "--sampling", "fixed"], "--sampling fixed needs --sampling-rate"),
    (
        [*GAUSSIAN, "--adjacency", "zero-out"],
        "adjacency = 'zero-out': with mechanism = 'gaussian' and sampling = 'full'",
    ),
    ([*GAUSSIAN, *RATE, "--sampling", "fixed", "--adjacency", "zero-out"], "sampling = 'fixed' allowed is replace-one"),
    ([*GAUSSIAN, "--adjacency", "zero-out", "--unit", "update"], "allowed is replace-one"),
    ([*GAUSSIAN, "--adjacency", "add-one"], "'add-one' is not one of 'replace-one', 'zero-out'"),
    ([*VMF, "--kappa", 1, "--adjacency", "replace-one"], "--adjacency"),
    (
        [*GAUSSIAN, "--sampling", "cyclic"],
        "'cyclic' is not one of 'shuffled', 'fixed', 'poisson', 'balls-in-bins', 'full'",
    ),
    ([*GAUSSIAN, *RATE, "--unit", "update"], "with unit = 'update' allowed is full"),
    ([*GAUSSIAN, "--unit", "person"], "'person' is not one of 'example', 'update'"),
    ([*GAUSSIAN, "--blocks", 3], "--blocks"),
    (["compare", "--dimension", 0], "--dimension 0"),
    (["compare", "--batch-size", 0], "batch_size = 0: allowed is from 1 to 1,000,000,000,000"),
    (["compare", "--block-size", 0], "block_size = 0"),
    (["compare", "--block-size", 10**400], "allowed is from 1 to the 15,826 coordinates"),
    (["compare", "--dimension", 5, "--block-size", 6], "block_size = 6: allowed is from 1 to the 5 coordinates"),
    (["compare", "--participations", 0], "--participations 0"),
    (["compare", "--sampling-rate", 2], "--sampling-rate 2"),
    (["compare", "--delta", "nan"], "--delta nan"),
    (["compare", "--epsilon", "nan"], "--epsilon nan"),
    (["compare", "--plot", "figure.gif"], "--plot figure.gif: allowed are files that end in .png or .svg"),
    (["compare", "--epsilon", 1, "--plot", "no/where/figure.png"], "cannot be written: No such file or directory"),
    (["cauchy", "--scale", 1], "No such command 'cauchy'"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_one_clear_line(
    account: Call, arguments: list[object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = account(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("fedpriv: ")
    assert err.count("\n") == 1


# ---- ceilings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", PARAMETER)
@pytest.mark.parametrize("rate", [None, 0.05])
def test_ceilings_are_those_of_the_release(account: Call, mechanism: str, rate: float | None) -> None:
    options = ["--dimension", 30, "--steps", 7, "--ceiling", "1/100", "--ceiling", 0.1]
    options += [] if rate is None else ["--sampling-rate", rate, "--sampling", "poisson"]
    found = read(account, mechanism, f"--{PARAMETER[mechanism]}", 1.7, *options)
    sampling = "full" if rate is None else "poisson"
    run = release_with(
        1.7, 1e-5, mechanism=mechanism, sampling=sampling, rate=rate or 1.0, participations=7, dimensions=(30,)
    )
    assert found["ceilings"] == [asdict(ceiling) for ceiling in ceilings(run, [0.01, 0.1])]


def test_ceilings_for_people(account: Call) -> None:
    code, out, err = account("vmf", "--kappa", 500, "--dimension", 15826, "--ceiling", "1/100", "--ceiling", 0.1)
    assert (code, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("ceiling")] == ["0.9502", "0.9964"]
    assert out.count("uniform directions") == 1  # the theorem of both


# ---- comparison -----------------------------------------------------------------------------------------------------


def test_the_comparison_calibrates_to_the_same_epsilon(account: Call) -> None:
    options = ["--dimension", 500, "--batch-size", 20, "--participations", 4, "--block-size", 7]
    found = read(account, "compare", *options, "--epsilon", 2, "--epsilon", 0.5)
    assert {"delta", "adjacency", "sampling", "assumptions", "rows"} < set(found)
    assert [row["epsilon"] for row in found["rows"]] == [0.5, 2.0] * 4
    labels = ["gaussian", "laplace", "vmf, whole", "vmf, blocks of 7"]
    assert [row["label"] for row in found["rows"][::2]] == labels
    blocks = {"vmf, blocks of 7": equal_blocks(500, 72)}
    for row in found["rows"]:
        mechanism, dimensions = row["mechanism"], blocks.get(row["label"], (500,))
        run = {"sampling": "full", "rate": 1.0, "participations": 4, "dimensions": dimensions}
        noise = row[PARAMETER[mechanism]]
        assert noise == calibrate(row["epsilon"], release_with(1.0, 1e-5, mechanism=mechanism, **run))
        assert row["noise_to_signal"] == noise_to_signal(Contender("", mechanism, dimensions), noise, 20)
    ratios = np.reshape([row["noise_to_signal"] for row in found["rows"]], (4, 2))
    assert np.all(ratios[:, 0] > ratios[:, 1])


def test_sampled_comparisons_are_on_one_scale(account: Call) -> None:
    """Batches of a fixed size for all, and Poisson batches for those for which they amplify; all replace-one."""
    found = read(account, "compare", "--dimension", 500, "--sampling-rate", 0.05, "--epsilon", 3)
    assert found["adjacency"] == "replace-one" and "rate 0.05" in found["sampling"]
    assert [row["sampling"] for row in found["rows"]] == ["fixed"] * 4 + ["poisson"]
    for row in found["rows"]:
        dimensions = (500,) if row["blocks"] == 1 else equal_blocks(500, row["blocks"])
        run = {"sampling": row["sampling"], "rate": 0.05, "participations": 10, "dimensions": dimensions}
        release = release_with(1.0, 1e-5, mechanism=row["mechanism"], **run)
        assert row[PARAMETER[row["mechanism"]]] == calibrate(3.0, release)
    assert found["rows"][-1]["label"] == "gaussian, Poisson"
    assert found["rows"][-1]["noise_to_signal"] < found["rows"][0]["noise_to_signal"]


def test_an_epsilon_out_of_a_mechanisms_reach_is_left_out_and_said(account: Call) -> None:
    found = read(account, "compare", "--dimension", 2, "--block-size", 1, "--epsilon", 1e9)
    vmf = next(row for row in found["rows"] if row["label"] == "vmf, whole")
    assert (vmf["kappa"], vmf["noise_to_signal"]) == (None, None)
    assert "less noise than the least allowed" in vmf["refusal"]
    code, out, _ = account("compare", "--dimension", 2, "--block-size", 1, "--epsilon", 1e9)
    assert code == 0
    assert "none" in out and "vmf, whole: epsilon = 1e+09" in " ".join(out.split())


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("SVG", b"<?xml")])
def test_the_plot_is_a_picture_and_the_same_again(account: Call, tmp_path: Path, suffix: str, start: bytes) -> None:
    files = [tmp_path / f"{number}.{suffix}" for number in (1, 2)]
    for file in files:
        code, out, err = account("compare", "--epsilon", 1, "--epsilon", 8, "--plot", file)
        assert (code, err) == (0, "")
        assert out.rstrip().endswith(f"Plot: {file}")
    assert files[0].read_bytes().startswith(start)
    assert files[0].read_bytes() == files[1].read_bytes()


# ---- noise-to-signal ratios, measured -------------------------------------------------------------------------------


def measured(mechanism: Mechanism, gradient: torch.Tensor, batch_size: int, draws: int) -> tuple[float, float]:
    """Noise over signal of the real mechanism: B gradients alike; and the standard error of it."""
    noise = stream(20_261)
    column = {"w": gradient.expand(batch_size, -1)}
    released = torch.stack([mechanism.release(DenseGradients(column), batch_size, noise)["w"] for _ in range(draws)])
    signal = mechanism.expected({"w": gradient})["w"]
    squares = (released - signal).square().sum(1)
    ratio = squares.mean().sqrt() / signal.norm()
    return float(ratio), float(ratio * squares.std() / squares.mean() / 2 / math.sqrt(draws))


LONG = 100.0  # times the clipping norm


@pytest.mark.parametrize(("batch_size", "dimension"), [(1, 5), (16, 400)])
def test_the_ratio_of_the_gaussian_mechanism(batch_size: int, dimension: int) -> None:
    """Measured over 1,000 draws, within 5 standard errors (false alarm of all these tests together about 1e-5)."""
    gradient = LONG * torch.randn(dimension, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ratio, error = measured(GaussianMechanism(1.3, 0.7), gradient, batch_size, 1000)
    claimed = noise_to_signal(Contender("", "gaussian", (dimension,)), 1.3, batch_size)
    assert abs(ratio - claimed) < 5 * error


@pytest.mark.parametrize(("batch_size", "dimension"), [(1, 3000), (16, 400)])
def test_the_ratio_of_the_laplace_mechanism(batch_size: int, dimension: int) -> None:
    """Coordinates at the quantiles of the normal distribution: |g|_1 / |g|_2 is sqrt(2 K / pi) up to 1 percent."""
    quantiles = torch.special.ndtri((torch.arange(dimension, dtype=torch.float64) + 0.5) / dimension)
    ratio, error = measured(LaplaceMechanism(0.05, 0.7), LONG * quantiles, batch_size, 1000)
    claimed = noise_to_signal(Contender("", "laplace", (dimension,)), 0.05, batch_size)
    assert abs(ratio - claimed) < 5 * error + 0.01 * claimed


@pytest.mark.parametrize(
    ("batch_size", "blocks", "kappa"),
    [
        (1, "whole", 0.8),
        (16, "whole", 4.0),
        (1, "size:7", 4.0),
        (16, "size:7", 0.8),
        (1, "size:1", 0.8),
        (16, "size:1", 4.0),
    ],
)
def test_the_ratio_of_the_directional_mechanism(batch_size: int, blocks: str, kappa: float) -> None:
    """50 coordinates, which 7 does not divide; over 250 draws, within 5 standard errors as above."""
    gradient = LONG * torch.randn(50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ratio, error = measured(VmfMechanism(kappa, blocks), gradient, batch_size, 250)
    claimed = noise_to_signal(Contender("", "vmf", block_sizes(blocks, [50])), kappa, batch_size)
    assert abs(ratio - claimed) < 5 * error


def test_a_ceiling_of_sampled_batches_is_of_any_example(account: Call) -> None:
    for sampled in ((), ("--sampling-rate", 0.5)):
        _, out, _ = account("laplace", "--scale", 50, "--ceiling", "1/100", *sampled)
        assert ("whether or not a batch has it" in " ".join(out.split())) is bool(sampled)
