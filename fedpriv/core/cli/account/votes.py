"""The command ``fedpriv account votes``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.core.cli.account import AS_JSON, Delta
from fedpriv.core.cli.terminal import out, print_json
from fedpriv.core.verb import Verb, options_of, sign

if TYPE_CHECKING:
    from fedpriv.core.cli.account.poll_cost import PollAnswer


@dataclass(frozen=True)
class PollOptions:
    """The options of ``fedpriv account votes``, ``None`` where they were not given; nothing is checked yet."""

    sigma: Annotated[float | None, typer.Option(help="Deviation of normal noise on each count, in votes.")] = None
    threshold_sigma: Annotated[
        float | None,
        typer.Option(help="Confident answers: deviation of the noise on the largest count, in votes."),
    ] = None
    scale: Annotated[float | None, typer.Option(help="Scale of Laplace noise on each count, in votes.")] = None
    answers: Annotated[int | None, typer.Option(help="Questions that are answered.")] = None
    asked: Annotated[
        int | None, typer.Option(help="Questions asked, for confident answers; default: as many as answers.")
    ] = None
    target_epsilon: Annotated[
        float | None,
        typer.Option(help="Find how many answers it allows; with --answers the least noise."),
    ] = None
    votes: Annotated[
        int, typer.Option("--votes-per-client", help="Votes of one client, all of which are protected.")
    ] = 1
    sampling_rate: Annotated[
        float | None,
        typer.Option(help="Share of the voters that is drawn for each answer (a fixed number)."),
    ] = None
    delta: Delta = 1e-5


def votes(as_json: bool, **given: Any) -> None:
    """Compute the guarantee of noisy votes, or how many answers a target allows."""
    # Imported here: scipy takes time that --help and a mistyped option need not wait for.
    from fedpriv.core.cli.account.poll_cost import answered_poll

    result = answered_poll(PollOptions(**given))
    if as_json:
        print_json(result.to_json())
    else:
        _print(result)


sign(votes, [*options_of(PollOptions), AS_JSON])


def _print(answer: "PollAnswer") -> None:
    """Print the figures first, then what they rest on."""
    from fedpriv.core.cli.account.text import bold, columns, number, print_grounds

    poll = answer.poll
    figures = columns("left", "right", "left")
    for name, value, meaning in (
        ("sigma", poll.sigma, "deviation of the noise on each count, in votes"),
        ("threshold sigma", poll.threshold_sigma, "deviation of the noise on the largest count, in votes"),
        ("scale", poll.scale, "of the noise on each count, in votes"),
    ):
        if value is not None:
            figures.add_row(name, bold(value), meaning)
    figures.add_row("questions", f"{poll.asked:,}", f"{poll.answers:,} of them answered")
    figures.add_row("epsilon", bold(answer.epsilon), f"proven, whatever is answered, at delta = {poll.delta:g}")
    if poll.answers != poll.asked:
        figures.add_row("", bold(answer.epsilon_answered), "of the answers given, where a budget was fixed beforehand")
    measure = "pure epsilon" if answer.is_pure else "mu"
    figures.add_row(measure, number(answer.spent), "of the answers given")
    out.print(figures)
    setting = {"aggregator": answer.aggregator, "adjacency": answer.adjacency, "votes of one voter": f"{poll.votes:,}"}
    if poll.sampling_rate is not None:
        setting["sampling"] = f"fixed, rate {poll.sampling_rate:.6g}"
    print_grounds(setting, [answer.theorem], answer.notes)


VERB = Verb(
    "votes",
    votes,
    place=40,
    group="account",
    epilog="Examples:\n\n  fedpriv account votes --sigma 40 --answers 286\n\n"
    "  fedpriv account votes --sigma 40 --threshold-sigma 150 --asked 640 --answers 286\n\n"
    "  fedpriv account votes --sigma 40 --target-epsilon 3\n\n"
    "  fedpriv account votes --answers 100 --target-epsilon 1\n\n"
    "  fedpriv account votes --answers 500 --target-epsilon 1 --sampling-rate 0.0073368 --delta 1e-4",
)
