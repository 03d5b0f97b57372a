"""The commands and their options."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import click
import typer

from fedpriv.cli_account.asked import Asked
from fedpriv.errors import InputError
from fedpriv.names import AdjacencyName, CalibrationName, MechanismName, SamplingName, UnitName
from fedpriv.terminal import Json, err, print_json, print_line

__all__ = ["account_app"]

account_app = typer.Typer(
    help="Say what is proven about a mechanism's noise, or how much noise a target needs, without running anything.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n  fedpriv account vmf --epsilon 50 --dimension 15826 --participations 10\n\n"
    "  fedpriv account gaussian --target-epsilon 8 --steps 1000 --sampling-rate 0.01\n\n"
    "  fedpriv account compare --plot comparison.svg",
)


def _choice(name: str, of: Any, help_: str, **options: Any) -> Any:
    return typer.Option(name, click_type=click.Choice(get_args(of)), help=help_, **options)


def _sampling(with_rate: SamplingName) -> Any:
    words = f"How batches are drawn. Without --sampling-rate full (no sampling) is assumed, with it {with_rate}."
    return _choice("--sampling", SamplingName, words)


Target = Annotated[
    float | None, typer.Option("--target-epsilon", help="Proven for the whole run; the least noise for it is found.")
]
Participations = Annotated[
    int,
    typer.Option(
        "--participations", "--steps", help="The most often one example, or update, is used: steps; passes if shuffled."
    ),
]
Delta = Annotated[float, typer.Option("--delta", help="Of (epsilon, delta), between 0 and 1.")]
Rate = Annotated[float | None, typer.Option("--sampling-rate", help="Share of a client's examples in a batch.")]
Unit = Annotated[UnitName, _choice("--unit", UnitName, "What is protected: an example, or a client's whole update.")]
Dimension = Annotated[int | None, typer.Option("--dimension", help="Numbers in a gradient; no figure depends on it.")]


def _add_gaussian(mechanism: MechanismName, help_: str) -> None:
    """The two commands whose noise is sigma."""

    @account_app.command(
        mechanism,
        help=help_,
        epilog=f"Examples:\n\n  fedpriv account {mechanism} --sigma 1.1 --steps 1000 --sampling-rate 0.01\n\n"
        f"  fedpriv account {mechanism} --target-epsilon 8 --steps 1000 --sampling-rate 0.01",
    )
    def command(
        sigma: Annotated[
            float | None, typer.Option("--sigma", help="Standard deviation of the noise on the sum, over clip_norm.")
        ] = None,
        epsilon: Annotated[
            float | None,
            typer.Option("--epsilon", help="Nominal: of one release alone, without sampling, by --calibration."),
        ] = None,
        target_epsilon: Target = None,
        calibration: Annotated[
            CalibrationName,
            _choice("--calibration", CalibrationName, "From --epsilon to sigma; classic: epsilon <= 1 only."),
        ] = "analytic",
        participations: Participations = 1,
        delta: Delta = 1e-5,
        sampling_rate: Rate = None,
        sampling: Annotated[SamplingName | None, _sampling("poisson")] = None,
        adjacency: Annotated[
            AdjacencyName,
            _choice(
                "--adjacency",
                AdjacencyName,
                "Which data sets must look alike: one example becomes any other; or, in Poisson batches, one that adds "
                "zero.",
            ),
        ] = "replace-one",
        unit: Unit = "example",
        dimension: Dimension = None,
        as_json: Json = False,
    ) -> None:
        asked = Asked(mechanism, sigma, epsilon, target_epsilon, participations, delta, sampling_rate, sampling, unit)
        _answer(replace(asked, calibration=calibration, dimension=dimension, adjacency=adjacency), as_json)


_add_gaussian("gaussian", "Gaussian noise on a sum of gradients that are clipped in the L2 norm, as in DP-SGD.")
_add_gaussian("hgm", "Gaussian noise that public shares r spread unevenly, gradients clipped in |x / sqrt(K r)|.")


@account_app.command(
    epilog="Examples:\n\n  fedpriv account laplace --scale 20 --participations 10\n\n"
    "  fedpriv account laplace --target-epsilon 8 --steps 1000 --sampling-rate 0.01"
)
def laplace(
    scale: Annotated[
        float | None, typer.Option("--scale", help="Scale of the noise on the sum, over clip_norm.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Nominal: of one participation, 1 / scale.")
    ] = None,
    target_epsilon: Target = None,
    participations: Participations = 1,
    delta: Delta = 1e-5,
    sampling_rate: Rate = None,
    sampling: Annotated[SamplingName | None, _sampling("fixed")] = None,
    unit: Unit = "example",
    dimension: Dimension = None,
    as_json: Json = False,
) -> None:
    """Laplace noise on a sum of gradients that are clipped in the L1 norm."""
    asked = Asked("laplace", scale, epsilon, target_epsilon, participations, delta, sampling_rate, sampling, unit)
    _answer(replace(asked, dimension=dimension), as_json)


@account_app.command(
    epilog="Examples:\n\n  fedpriv account vmf --epsilon 50 --dimension 15826 --participations 10\n\n"
    "  fedpriv account vmf --target-epsilon 8 --dimension 15826 --blocks 100 --steps 1000 --sampling-rate 0.01"
)
def vmf(
    dimension: Annotated[int, typer.Option("--dimension", help="Numbers in a gradient.")],
    kappa: Annotated[
        float | None, typer.Option("--kappa", help="Concentration of each draw; small: more noise.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="Nominal: the paper's, 2 kappa.")] = None,
    target_epsilon: Target = None,
    blocks: Annotated[int, typer.Option("--blocks", help="Parts of about equal size with a draw of their own.")] = 1,
    participations: Participations = 1,
    delta: Delta = 1e-5,
    sampling_rate: Rate = None,
    sampling: Annotated[SamplingName | None, _sampling("fixed")] = None,
    unit: Unit = "example",
    as_json: Json = False,
) -> None:
    """Directional noise: gradients of length 1, replaced by von Mises-Fisher draws around them (DirDP-SGD)."""
    asked = Asked("vmf", kappa, epsilon, target_epsilon, participations, delta, sampling_rate, sampling, unit)
    _answer(replace(asked, dimension=dimension, blocks=blocks), as_json)


@account_app.command(
    epilog="Examples:\n\n  fedpriv account compare --dimension 61706 --batch-size 256 --participations 30\n\n"
    "  fedpriv account compare --sampling-rate 0.01 --participations 1000 --epsilon 1 --epsilon 8 --plot compare.png"
)
def compare(
    dimension: Annotated[int, typer.Option("--dimension", help="Numbers in a gradient.")] = 15_826,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Gradients in a mean.")] = 64,
    participations: Participations = 10,
    sampling_rate: Annotated[
        float | None,
        typer.Option("--sampling-rate", help="Batches of this share of a client's examples, fixed or Poisson."),
    ] = None,
    delta: Delta = 1e-5,
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Numbers in each of vmf's small blocks; by default 16.")
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="A proven epsilon to compare at; may be repeated.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the comparison to a .png or .svg file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """All mechanisms at the same proven epsilon: how much noise is left on the mean gradient."""
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise InputError(f"--plot {plot}: allowed are files that end in .png or .svg")
    # Imported here, as below: scipy and matplotlib take time that --help and a mistyped option need not wait for.
    from fedpriv.accounting import compare_mechanisms
    from fedpriv.cli_account.text import comparison_json, print_comparison

    with err.status("finding the noise of each mechanism for each epsilon"):
        found = compare_mechanisms(
            sorted(set(epsilon or _EPSILONS)),
            delta,
            dimension=dimension,
            batch_size=batch_size,
            participations=participations,
            rate=sampling_rate,
            block_size=block_size,
        )
    if plot is not None:
        from fedpriv.cli_account.plot import draw_comparison

        draw_comparison(found, plot)
    if as_json:
        print_json(comparison_json(found))
        return
    print_comparison(found)
    if plot is not None:
        print_line(f"Plot: {plot}")


_EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def _answer(asked: Asked, as_json: bool) -> None:
    from fedpriv.cli_account.answer import answer
    from fedpriv.cli_account.text import account_json, print_account

    found = answer(asked)
    if as_json:
        print_json(account_json(found))
    else:
        print_account(found)
