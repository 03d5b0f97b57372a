"""The commands ``fedpriv account MECHANISM`` and ``compare``, with their options; capabilities add theirs."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args

import click
import typer
from typer.core import TyperGroup
from typing_extensions import override

from fedpriv.core.algorithm import ModelRelease
from fedpriv.core.cli.terminal import Json, err, print_json, print_line
from fedpriv.core.errors import InputError
from fedpriv.core.names import AdjacencyName, CalibrationName, SamplingName, UnitName
from fedpriv.core.registry import ALGORITHMS, MECHANISMS
from fedpriv.core.verb import options_of, sign
from fedpriv.mechanisms import NoisySettings


class _Mechanisms(TyperGroup):
    """With a command for each mechanism that makes noise; other packages' are imported when one is named."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        self._add_mechanisms()
        return super().list_commands(ctx)

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # Registries refuse what they do not know, and compare is no mechanism.
        kind = dict(MECHANISMS).get(args[0])
        if kind is not None and issubclass(kind, NoisySettings):
            return args[0], _command(kind), args[1:]
        self._add_mechanisms()
        if kind is not None and args[0] not in self.commands:
            owners = [name for name, kind in ALGORITHMS.items() if issubclass(kind, ModelRelease)]
            own = "" if kind.on_gradients or not owners else owners[0]
            noisy = ", ".join(sorted(self.commands.keys() & MECHANISMS.keys()))
            where = f"; noise on models: fedpriv account {own}" if own else f"; allowed: {noisy}"
            raise InputError(f"nothing is proven about {args[0]}{where}")
        return super().resolve_command(ctx, args)

    def _add_mechanisms(self) -> None:
        noisy = {name: _command(kind) for name, kind in MECHANISMS.items() if issubclass(kind, NoisySettings)}
        self.commands = {**noisy, **self.commands}


account_app = typer.Typer(
    cls=_Mechanisms,
    help="Compute the privacy guarantee of a mechanism, or the noise for a target, without a run.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n  fedpriv account vmf --epsilon 50 --dimension 15826 --participations 10\n\n"
    "  fedpriv account gaussian --target-epsilon 8 --steps 1000 --sampling-rate 0.01\n\n"
    "  fedpriv account compare --plot comparison.svg",
)


def _choice(of: Any, help_: str) -> Any:
    # Not in the column of values: it would be too narrow for the words, and the options beside it cut off.
    words = f"{help_} Allowed: {', '.join(get_args(of))}."
    return typer.Option(click_type=click.Choice(get_args(of)), metavar="NAME", help=words)


Delta = Annotated[float, typer.Option("--delta", help="Delta of (epsilon, delta), between 0 and 1.")]
Participations = Annotated[
    int,
    typer.Option(
        "--participations",
        "--steps",
        metavar="N",
        help="Most uses of one example, or update: steps, or passes if shuffled.",
    ),
]


AS_JSON = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
"""The option that commands have whose others are a dataclass."""


@dataclass(frozen=True)
class AccountOptions:
    """The options of a mechanism's command, ``None`` where they were not given; nothing is checked yet."""

    mechanism: str
    noise: float | None = None  # in the mechanism's own parameter
    epsilon: float | None = None  # nominal
    target_epsilon: Annotated[
        float | None,
        typer.Option(help="Find the least noise that proves this epsilon for the whole run."),
    ] = None
    target_ceiling: Annotated[
        float | None,
        typer.Option(help="Find the least noise with which no attack succeeds more often."),
    ] = None
    guess: Annotated[
        str | None,
        typer.Option(metavar="K0", help="With --target-ceiling: how often a guess succeeds; by default 1/100."),
    ] = None
    target_advantage: Annotated[
        float | None,
        typer.Option(
            help="Find the least noise for this largest true minus false positive rate of any membership test."
        ),
    ] = None
    target_tpr: Annotated[
        float | None,
        typer.Option(help="With --fpr: find the least noise for this true positive rate."),
    ] = None
    fpr: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE",
            help="Also print the largest true positive rate of membership tests at this false one; may be repeated.",
        ),
    ] = None
    participations: Participations = 1
    delta: Delta = 1e-5
    sampling_rate: Annotated[float | None, typer.Option(help="Share of a client's examples in a batch.")] = None
    sampling: Annotated[
        SamplingName | None,
        _choice(
            SamplingName,
            "How batches are drawn; default: full (no sampling), or with --sampling-rate what amplifies best.",
        ),
    ] = None
    unit: Annotated[UnitName, _choice(UnitName, "What is protected: an example, or a client's whole update.")] = (
        "example"
    )
    dimension: int | None = None
    ceiling: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K0",
            help="Also print what no attack exceeds if a guess succeeds with probability K0 (1/100); may be repeated.",
        ),
    ] = None
    records: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Also print what is proven about a person with so many records at each client, such as 3,1.",
        ),
    ] = None
    blocks: Annotated[int, typer.Option(help="Parts of about equal size with a draw of their own.")] = 1
    band: Annotated[
        int | None,
        typer.Option(help="Rounds over which noise is correlated; 1: independent. Default: the separation."),
    ] = None
    separation: Annotated[int, typer.Option(help="A client takes part at most once in so many rounds in a row.")] = 1
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of the run; default: the fewest for the participations.")
    ] = None
    calibration: Annotated[
        CalibrationName,
        _choice(CalibrationName, "From --epsilon to sigma; classic: epsilon <= 1 only."),
    ] = "analytic"
    adjacency: Annotated[
        AdjacencyName,
        _choice(
            AdjacencyName,
            "Which data sets must look alike: one example becomes any other; or, in Poisson batches, one that adds "
            "zero.",
        ),
    ] = "replace-one"


_NEEDED = "Numbers in a gradient, or update. Required: epsilon depends on it"
_BY_SETTING = {
    "blocks": "blocks",
    "band": "band",
    "separation": "band",
    "rounds": "band",
    "calibration": "calibration",
    "adjacency": "adjacency",
}  # options of mechanisms with a setting alone


def _command(kind: type[NoisySettings]) -> click.Command:
    """The command of one mechanism: an option for each number that its figures depend on."""
    fields, noise = kind.model_fields, kind.parameter
    name = fields["name"].default
    own = {
        "noise": _option(f"--{noise}", fields[noise].description),
        "epsilon": _option("--epsilon", f"Nominal: {kind.nominal}."),
        "dimension": _option(
            "--dimension", _NEEDED if kind.by_dimension else "Numbers in a gradient; changes no figure"
        ),
    }
    shown = {each.name: each for each in options_of(AccountOptions) if _BY_SETTING.get(each.name, "name") in fields}
    shown["unit"] = shown["unit"].replace(default=fields["unit"].default)
    for option, words in own.items():
        shown[option] = shown[option].replace(annotation=Annotated[shown[option].annotation, words])
    del shown["mechanism"]

    def command(as_json: Json, **given: Any) -> None:
        _answer(as_json, AccountOptions(name, **given))

    sign(command, [*shown.values(), AS_JSON])
    with_dimension = " --dimension 15826" if kind.by_dimension else ""
    sampled = "--steps 1000 --sampling-rate 0.01" if kind.proof().amplifying else "--participations 10"
    sampled = f"{sampled} --separation 10" if "band" in fields else sampled
    single = typer.Typer(add_completion=False)
    single.command(
        name,
        help=kind.summary,
        epilog=f"Examples:\n\n  fedpriv account {name} --{noise} 20{with_dimension} --participations 10\n\n"
        f"  fedpriv account {name} --target-epsilon 8{with_dimension} {sampled}",
    )(command)
    return typer.main.get_command(single)


def _option(name: str, help_: str | None) -> Any:
    return typer.Option(name, help=f"{(help_ or name)[0].upper()}{(help_ or name)[1:].rstrip('.')}.")


@account_app.command(
    epilog="Examples:\n\n  fedpriv account compare --dimension 61706 --batch-size 256 --participations 30\n\n"
    "  fedpriv account compare --sampling-rate 0.01 --steps 1000 --epsilon 1 --epsilon 8 --plot compare.png\n\n"
    "  fedpriv account compare --with opacus,dp-accounting --sigma 1 --sampling-rate 0.01 --steps 1000"
)
def compare(
    dimension: Annotated[int, typer.Option(help="Numbers in a gradient.")] = 15_826,
    batch_size: Annotated[int, typer.Option(help="Gradients in a mean.")] = 64,
    participations: Participations = 10,
    sampling_rate: Annotated[
        float | None,
        typer.Option(help="Batches of this share of a client's examples, fixed or Poisson."),
    ] = None,
    delta: Delta = 1e-5,
    block_size: Annotated[int | None, typer.Option(help="Numbers in each small block; by default 16.")] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="A proven epsilon to compare at; may be repeated.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the comparison to a .png or .svg file.")
    ] = None,
    libraries: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="LIBRARIES",
            help="Instead, what other libraries say of the noise of --sigma or --scale: some of opacus, dp-accounting, "
            "riskcal and prv, with commas between.",
        ),
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="With --with: deviation of Gaussian noise over the clipping norm.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="With --with: scale of Laplace noise over the clipping norm.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare all mechanisms at the same proven epsilon: how much noise is on the mean gradient."""
    if libraries is not None:
        unread = {"--epsilon": epsilon, "--block-size": block_size, "--plot": plot}
        _refuse(unread, "--with compares libraries, which do not read it")
        _print_libraries(libraries.split(","), sigma, scale, sampling_rate, participations, delta, as_json)
        return
    _refuse({"--sigma": sigma, "--scale": scale}, "it is read with --with alone")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise InputError(key="--plot", given=plot, allowed="allowed are files that end in .png or .svg")
    # Imported here, as below: scipy and matplotlib take time that --help and a mistyped option need not wait for.
    from fedpriv.accounting import compare_mechanisms
    from fedpriv.core.cli.account.answer import in_options
    from fedpriv.core.cli.account.text import comparison_json, draw_comparison, print_comparison

    with err.status("finding the noise of each mechanism for each epsilon"), in_options({"epsilon": "--epsilon"}):
        comparison = compare_mechanisms(
            sorted(set(epsilon or _EPSILONS)),
            delta,
            dimension=dimension,
            batch_size=batch_size,
            participations=participations,
            rate=sampling_rate,
            block_size=block_size,
        )
    if plot is not None:
        draw_comparison(comparison, plot)
    if as_json:
        print_json(comparison_json(comparison))
        return
    print_comparison(comparison)
    if plot is not None:
        print_line(f"Plot: {plot}")


def _refuse(options: Mapping[str, object], why: str) -> None:
    for option, given in options.items():
        if given is not None:
            raise InputError(key=option, given=given, allowed=why)


def _print_libraries(
    libraries: list[str],
    sigma: float | None,
    scale: float | None,
    rate: float | None,
    steps: int,
    delta: float,
    as_json: bool,
) -> None:
    from fedpriv.accounting.libraries import Question, opinions
    from fedpriv.core.cli.account.answer import in_options
    from fedpriv.core.cli.account.text import opinions_json, print_opinions

    if (sigma is None) == (scale is None):
        raise InputError("--with needs one of --sigma (Gaussian noise) and --scale (Laplace noise)")
    name = "sigma" if scale is None else "scale"
    keys = {"noise": f"--{name}", "rate": "--sampling-rate", "steps": "--steps", "delta": "--delta", "with": "--with"}
    with err.status("asking each library"), in_options(keys):
        question = Question.of(sigma, scale, 1.0 if rate is None else rate, steps, delta)
        answers = opinions(question, [name.strip() for name in libraries])
    if as_json:
        print_json(opinions_json(question, answers))
    else:
        print_opinions(question, answers)


_EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def _answer(as_json: bool, options: AccountOptions) -> None:
    from fedpriv.core.cli.account.answer import answer
    from fedpriv.core.cli.account.text import account_json, print_account

    result = answer(options)
    if as_json:
        print_json(account_json(result))
    else:
        print_account(result)
