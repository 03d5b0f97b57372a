"""The command ``fedpriv account response``."""

from typing import TYPE_CHECKING, Annotated

import typer

from fedpriv.core.cli.terminal import Json, print_json
from fedpriv.core.errors import InputError
from fedpriv.core.verb import Verb

if TYPE_CHECKING:
    from fedpriv.accounting.response import Response


def response(
    epsilon: Annotated[float | None, typer.Option(help="Pure epsilon of one answer.")] = None,
    keep: Annotated[float | None, typer.Option(help="Probability that an answer is true.")] = None,
    coin: Annotated[
        float | None,
        typer.Option(help="Probability of answering truly; otherwise the answer is random, and may be true."),
    ] = None,
    answers: Annotated[int, typer.Option(help="Number of possible answers, such as classes.")] = 2,
    examples: Annotated[int | None, typer.Option(help="Number of people: adds the standard error of a share.")] = None,
    share: Annotated[float, typer.Option(help="True share of an answer, for its standard error.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Convert epsilon of randomised response to the probability of a true answer, or back, and judge a survey."""
    # Imported here: scipy takes time that --help and a mistyped option need not wait for.
    from fedpriv.accounting.response import label_guarantee
    from fedpriv.core.cli.account.text import print_figures

    law = _law(epsilon, keep, coin, answers)
    error = _error(law, share, examples)
    proven = label_guarantee(law)
    if as_json:
        figures = {"epsilon": law.epsilon, "answers": answers, "keep": law.keep, "other": law.other}
        survey = {"told_at_most": law.keep, "examples": examples, "share": share, "standard_error": error}
        print_json({**figures, **survey, "theorem": proven.theorem["epsilon"]})
        return
    rows = [
        ("epsilon", law.epsilon, "pure, of each answer"),
        ("keep", law.keep, "probability that the answer given is the true one"),
        ("other", law.other, "probability of each other answer"),
        ("ceiling", law.keep, "nobody names the truth behind an answer more often, if all are as likely beforehand"),
    ]
    if error is not None:
        rows.append(("standard error", error, f"of the estimated share, if {share:g} of {examples:,} answers are true"))
    notes = ["A claim about the answer alone, against anyone who collects it; an image may show the class, too."]
    setting = {"adjacency": "one true answer becomes any other", "answers": f"{answers:,} to choose from"}
    print_figures(rows, setting, [proven.theorem["epsilon"]], notes)


def _law(epsilon: float | None, keep: float | None, coin: float | None, answers: int) -> "Response":
    from fedpriv.accounting.response import Response, coin_response, kept_response

    given = [option for option in (epsilon, keep, coin) if option is not None]
    if len(given) != 1:
        raise InputError("response needs exactly one of --epsilon, --keep and --coin")
    from fedpriv.core.cli.account.answer import in_options

    with in_options({"epsilon": "--epsilon", "keep": "--keep", "coin": "--coin", "answers": "--answers"}):
        if epsilon is not None:
            return Response(epsilon, answers)
        return kept_response(keep, answers) if keep is not None else coin_response(coin or 0.0, answers)


def _error(law: "Response", share: float, examples: int | None) -> float | None:
    if not 0 <= share <= 1:
        raise InputError(key="--share", given=share, allowed="allowed is from 0 to 1")
    if examples is None:
        return None
    if examples < 1:
        raise InputError(key="--examples", given=examples, allowed="allowed are whole numbers from 1")
    return law.standard_error(share, examples)


VERBS = (
    Verb(
        "response",
        response,
        place=30,
        group="account",
        epilog="Examples:\n\n  fedpriv account response --epsilon 1 --answers 10\n\n"
        "  fedpriv account response --coin 0.5 --examples 2000 --share 0.1\n\n"
        "  fedpriv account response --keep 0.75 --json",
    ),
)
