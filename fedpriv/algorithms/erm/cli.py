"""The command ``fedpriv account erm``."""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from fedpriv.core.cli.account import Delta
from fedpriv.core.cli.terminal import Json, print_json
from fedpriv.core.errors import InputError
from fedpriv.core.names import Adjacency
from fedpriv.core.verb import Verb

if TYPE_CHECKING:
    from fedpriv.accounting.convex_models import Problem

_ADJACENCY = Adjacency.REPLACE_ONE.worded(
    "one example of a client is replaced by any other; the number of examples is public"
)
_NOTES = (
    "Features have length 1 at most. Two classes: logistic regression, one vector of weights; else softmax regression.",
    "Choosing lambda by looking at results is not accounted for.",
)


def erm(
    examples: Annotated[int, typer.Option(help="Examples that one client holds.")],
    features: Annotated[int, typer.Option(help="Features of an example, with the constant 1.")],
    regularisation: Annotated[float, typer.Option(help="Lambda in the objective's term lambda/2 |w|^2.")],
    epsilon: Annotated[float, typer.Option(help="Epsilon of the one model that a client releases.")],
    delta: Delta = 1e-5,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 2,
    tolerance: Annotated[
        float,
        typer.Option(help="Largest norm of the gradient at the end of training, as erm.tolerance; 0: exact."),
    ] = 1e-8,
    as_json: Json = False,
) -> None:
    """Compute the sensitivity of a private convex model (DP-ERM), and the noise for an epsilon."""
    # Imported here: scipy takes time that --help and a mistyped option need not wait for.
    from fedpriv.accounting.convex_models import Problem
    from fedpriv.core.cli.account.answer import in_options
    from fedpriv.core.cli.account.text import print_figures

    with in_options({name: f"--{name}" for name in ("examples", "features", "classes", "regularisation", "tolerance")}):
        problem = Problem(examples, features, classes, regularisation, tolerance)
    if not 0 < epsilon < math.inf:
        raise InputError(key="--epsilon", given=epsilon, allowed="allowed is above 0, finite")
    if not 0 < delta < 1:
        raise InputError(key="--delta", given=delta, allowed="allowed is between 0 and 1, both excluded")
    rows = _figures(problem, epsilon, delta)
    theorem = (
        "Chaudhuri, Monteleoni and Sarwate 2011, Theorems 6 and 9; the solver's error, in objective perturbation: "
        "Iyengar et al. 2019, Algorithm 1; normal noise: Balle and Wang 2018"
    )
    if as_json:
        figures = {name.replace(" ", "_"): value for name, value, _ in rows}
        asked = {**vars(problem), "epsilon": epsilon, "delta": delta, "adjacency": _ADJACENCY, "theorem": theorem}
        print_json(asked | figures)
    else:
        setting = {"adjacency": _ADJACENCY, "classes": f"{classes:,}", "tolerance": f"{tolerance:g}"}
        print_figures(rows, setting, [theorem], _NOTES)


def _figures(problem: "Problem", epsilon: float, delta: float) -> list[tuple[str, float | None, str]]:
    from fedpriv.accounting.convex_models import objective_terms, output_scale
    from fedpriv.accounting.gaussian import classic_sigma

    pure = output_scale(problem, epsilon, "laplace", delta)
    rows: list[tuple[str, float | None, str]] = [
        (
            "sensitivity",
            problem.sensitivity,
            "how far replacing one example moves the weights: 2 L / (n lambda) + 2 tau / lambda",
        ),
        ("sigma", output_scale(problem, epsilon, "gaussian", delta), f"output, normal noise, at delta = {delta:g}"),
    ]
    if epsilon <= 1:
        classic = problem.sensitivity * classic_sigma(epsilon, delta)
        rows.append(("classic sigma", classic, "the same by the classic formula"))
    rows += [
        ("scale", pure, "output, pure: of the density exp(-length / scale)"),
        ("mean length", problem.dimension * pure, f"of that noise, in {problem.dimension:,} numbers"),
    ]
    if problem.classes > 2:
        return rows
    terms = objective_terms(problem, epsilon)
    return [
        *rows,
        ("objective epsilon", terms.epsilon, "objective, pure: what is left for the noise"),
        ("objective lambda", terms.regularisation, "objective: the regularisation that it needs"),
        ("objective scale", terms.scale, "objective: of the noise b in <b, w> / n"),
        ("objective cover", terms.cover, "objective: of the noise on the weights, for the solver's error"),
    ]


VERBS = (
    Verb(
        "erm",
        erm,
        place=20,
        group="account",
        epilog="Examples:\n\n"
        "  fedpriv account erm --examples 10000 --features 109 --regularisation 0.01 --epsilon 1\n\n"
        "  fedpriv account erm --examples 1437 --features 65 --classes 10 --regularisation 0.01 --epsilon 8",
    ),
)
