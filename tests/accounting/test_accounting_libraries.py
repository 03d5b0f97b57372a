"""What other libraries say of noise, against closed forms and an integral in the complex plane, by mpmath."""

import itertools
import json
import math
from dataclasses import replace

import mpmath
import pytest
from typer.testing import CliRunner

from fedpriv.accounting import libraries
from fedpriv.accounting.libraries import NEIGHBOURS, PER_RECORD, Neighbours, Opinion, Question
from fedpriv.core.cli.account.text import _opinion_words
from fedpriv.core.cli.app import app
from fedpriv.core.errors import InputError
from tests.accounting.audit import exact_gaussian
from tests.accounting.contour_mpmath import exact_epsilon

NOISE = (
    ("gaussian", 1.0, 1.0, 1),
    ("gaussian", 8.0, 1.0, 50),
    ("gaussian", 1.0, 0.01, 1000),
    ("gaussian", 2.0, 0.1, 100),
    ("laplace", 3.0, 1.0, 1),
)
DELTAS = (1e-2, 1e-6, 1e-12)
CELLS = [
    (Question(*noise, delta), neighbours)  # type: ignore[arg-type]
    for noise, delta, neighbours in itertools.product(NOISE, DELTAS, NEIGHBOURS)
    if (noise[0], neighbours) != ("laplace", "replace")  # of which no library says anything
    # The exact figure of sampled steps takes seconds.
    if noise[2] == 1 or (noise[2], delta) in ((0.01, 1e-6), (0.1, 1e-12))
]


def _named(question: Question, neighbours: Neighbours) -> str:
    noise = f"{question.mechanism} {question.noise:g}, {question.rate:g} x {question.steps}"
    return f"{noise}, {question.delta:g}, {neighbours}"


def oracle(question: Question, neighbours: Neighbours) -> float:
    moved = 1 if neighbours == "add or remove" else 2
    if question.mechanism == "laplace":
        return float(max(0, mpmath.mpf(moved) / question.noise + 2 * mpmath.log1p(-question.delta)))
    if question.rate == 1:
        return exact_gaussian(moved * math.sqrt(question.steps) / question.noise, question.delta)
    pairs = [(1, -1)] if neighbours == "replace" else [(1, 0), (0, 1)]
    return max(exact_epsilon(question.noise, question.rate, question.steps, question.delta, pair) for pair in pairs)


@pytest.mark.parametrize(("question", "neighbours"), CELLS, ids=[_named(*cell) for cell in CELLS])
def test_which_library_is_right(question: Question, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = oracle(question, neighbours)
    asked = tuple(each for each in libraries.ACCOUNTANTS if each.neighbours == neighbours and not each.other)
    monkeypatch.setattr(libraries, "ACCOUNTANTS", asked)
    judged = [each for each in ask(question) if each.epsilon is not None]

    true = libraries.truth(question, neighbours)

    assert true is not None
    assert exact * (1 - 1e-9) <= true <= exact * (1 + 3e-4)
    assert judged
    for opinion in judged:
        assert opinion.epsilon is not None
        difference = opinion.epsilon / exact - 1
        assert abs(abs(difference) - libraries.SAME) > 3e-4, "too close to tell"
        expected = "below the truth" if difference < 0 else "above the truth"
        assert opinion.verdict == (expected if abs(difference) > libraries.SAME else "the truth")


def test_figures_that_answer_no_question_or_another(monkeypatch: pytest.MonkeyPatch) -> None:
    rdp = tuple(
        each for each in libraries.ACCOUNTANTS if each.method.startswith("RDP") and each.neighbours == "replace"
    )
    monkeypatch.setattr(libraries, "ACCOUNTANTS", rdp)

    found = {each.method: each for each in ask(Question("gaussian", 1.0, 0.01, 1000, 1e-5))}

    assert found["RDP, fixed size"].epsilon == pytest.approx(3.58, abs=0.005)
    assert found["RDP, fixed size"].verdict == "another question"
    assert found["RDP"].verdict == "no figure"


def test_many_rounds_of_little_loss() -> None:
    """Each below a grid of 1e-4, on which they add up to three times as much: findings/dp-accounting-many-rounds.sh."""
    question = Question("gaussian", 100.0, 0.001, 100_000, 1e-6)
    exact = oracle(question, "add or remove")

    found = {each.method: each for each in libraries.opinions(question, ("dp-accounting",)) if "add" in each.neighbours}
    true = libraries.truth(question, "add or remove")

    assert true is not None
    assert exact * (1 - 1e-9) <= true <= exact * (1 + 5e-4)
    assert found["PLD"].epsilon == pytest.approx(3.08 * exact, rel=1e-2)
    assert found["PLD"].verdict == "above the truth"


def test_no_epsilon_is_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta 0.5 is above the distance of both laws, so that 0 is true: findings/opacus-negative-epsilon.sh."""
    question = Question("gaussian", 1.0, 0.01, 1000, 0.5)
    fast = tuple(each for each in libraries.ACCOUNTANTS if each.method == "RDP")
    monkeypatch.setattr(libraries, "ACCOUNTANTS", fast)

    found = {each.method: each for each in libraries.opinions(question, ("opacus",))}

    assert found["RDP"].epsilon == pytest.approx(-0.5274, abs=1e-3)
    # What it says is true: delta there is at least 1 - exp(-0.5274) = 0.41, and little more.
    assert found["RDP"].verdict == "the truth"
    assert libraries.truth(question, "add or remove") == 0


def ask(question: Question) -> list[Opinion]:
    return libraries.opinions(question, libraries.LIBRARIES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--with", "opacus"], "--with needs one of --sigma"),
        (["--with", "opacus", "--sigma", "1", "--scale", "1"], "--with needs one of --sigma"),
        (["--with", "autodp", "--sigma", "1"], "--with autodp: allowed are opacus, dp-accounting, riskcal, prv"),
        (["--with", "opacus", "--sigma", "0"], "--sigma 0: allowed is from 0.05"),
        (["--with", "opacus", "--sigma", "1", "--delta", "1"], "--delta 1: allowed is from 1e-15"),
        (["--with", "opacus", "--sigma", "1", "--sampling-rate", "2"], "--sampling-rate 2: allowed is above 0"),
        (["--with", "opacus", "--sigma", "1", "--steps", "0"], "--steps 0: allowed is from 1"),
        (["--with", "opacus", "--scale", "1", "--sampling-rate", "0.1"], "sampled batches are compared for gaussian"),
        (["--with", "opacus", "--sigma", "1", "--plot", "a.png"], "--plot a.png: --with compares libraries"),
        (["--sigma", "1"], "--sigma 1: it is read with --with alone"),
    ],
)
def test_wrong_questions(options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["account", "compare", *options])

    assert isinstance(result.exception, InputError)
    assert words in str(result.exception)


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.PACKAGES, "prv", "no-such-package")

    with pytest.raises(InputError, match="pip install no-such-package"):
        ask(Question("gaussian", 1.0, 1.0, 1, 1e-5))


def test_what_is_printed() -> None:
    asked = ["account", "compare", "--with", "dp-accounting", "--sigma", "1", "--steps", "1"]

    text = CliRunner().invoke(app, asked).output
    parsed = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)

    assert "52.7% BELOW" in text
    nothing = Opinion("a", "b", "replace", PER_RECORD, "bound", 0.3, 0.0)
    assert [_opinion_words(replace(nothing, epsilon=each)) for each in (0.3, -1e-5)] == [
        "bound, above",
        "bound, the truth",
    ]
    assert [row["ledger"] for row in parsed["fedpriv"]] == pytest.approx([4.37718, 9.99726], abs=1e-5)
    assert {row["verdict"] for row in parsed["libraries"]} == {"the truth", "above the truth", "below the truth"}
