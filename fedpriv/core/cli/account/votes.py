"""The command ``fedpriv account votes``."""

from typing import Annotated

import typer

from fedpriv.core.cli.account.commands import Delta, account_app
from fedpriv.core.cli.terminal import Json, print_json


@account_app.command(
    epilog="Examples:\n\n  fedpriv account votes --sigma 40 --answers 286\n\n"
    "  fedpriv account votes --sigma 40 --threshold-sigma 150 --asked 640 --answers 286\n\n"
    "  fedpriv account votes --sigma 40 --target-epsilon 3\n\n"
    "  fedpriv account votes --answers 100 --target-epsilon 1\n\n"
    "  fedpriv account votes --answers 500 --target-epsilon 1 --sampling-rate 0.0073368 --delta 1e-4"
)
def votes(
    sigma: Annotated[
        float | None, typer.Option("--sigma", help="Deviation of normal noise on each count, in votes.")
    ] = None,
    threshold_sigma: Annotated[
        float | None,
        typer.Option(
            "--threshold-sigma", help="Confident answers: deviation of the noise on the largest count, in votes."
        ),
    ] = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Scale of Laplace noise on each count, in votes.")
    ] = None,
    answers: Annotated[int | None, typer.Option("--answers", help="Questions that are answered.")] = None,
    asked: Annotated[
        int | None, typer.Option("--asked", help="Questions, for confident answers; by default all are answered.")
    ] = None,
    target_epsilon: Annotated[
        float | None,
        typer.Option("--target-epsilon", help="Finds how many answers it allows; with --answers the least noise."),
    ] = None,
    votes_per_client: Annotated[
        int, typer.Option("--votes-per-client", help="Votes of the one client who is protected.")
    ] = 1,
    sampling_rate: Annotated[
        float | None,
        typer.Option(
            "--sampling-rate", help="Share of the voters that is drawn for each answer, always the same number."
        ),
    ] = None,
    delta: Delta = 1e-5,
    as_json: Json = False,
) -> None:
    """Noisy answers by vote, as PATE and prompts give them: what they prove, or how many of them a target allows."""
    # Imported here: scipy takes time that --help and a mistyped option need not wait for.
    from fedpriv.core.cli.account.poll import Poll, answered_poll
    from fedpriv.core.cli.account.text import print_poll

    poll = Poll(sigma, threshold_sigma, scale, answers, asked, target_epsilon, votes_per_client, delta, sampling_rate)
    result = answered_poll(poll)
    if as_json:
        print_json(result.to_json())
    else:
        print_poll(result)
