"""The command ``fedpriv certify DIR``, and evasion attacks for ``fedpriv probe DIR``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.table import Table
from typing_extensions import override

from fedpriv.attacks.commands import Probing, ReadyProbe
from fedpriv.attacks.evasion.methods import EVASIONS, NOISELESS
from fedpriv.attacks.settings import Access
from fedpriv.core.cli.terminal import (
    Json,
    Quiet,
    Run,
    out,
    print_facts,
    print_json,
    print_line,
    print_sentences,
    shown,
    table_of,
)
from fedpriv.core.config import validated
from fedpriv.core.errors import InputError
from fedpriv.core.registry import OPTIONS
from fedpriv.core.verb import Verb
from fedpriv.robustness.settings import CertifyConfig, EvadeConfig, RobustnessConfig

if TYPE_CHECKING:
    from fedpriv.core.figure import Figure
    from fedpriv.core.runs import RunFolder
    from fedpriv.robustness.records import Evasion, Robustness

_USUAL_NOISE = 0.25  # on inputs from 0 to 1, for models that were trained without
_NORMS = {"l2": "Euclidean (l2)", "linf": "largest change of a value (linf)"}


def certify(
    folder: Run,
    examples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Test examples to certify; default: the run's, or 500 (at most all)."),
    ] = None,
    votes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Fresh votes for each example; default: the run's, or 1000."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(metavar="A", help="Probability that a certificate is wrong; default: 0.001."),
    ] = None,
    norm: Annotated[
        str | None, typer.Option(metavar="l2|linf", help="The table to print; default: the noise's own norm.")
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Add noise of this deviation (inputs are from 0 to 1); default: 0.25 if the run has no noise.",
        ),
    ] = None,
    place: Annotated[str | None, typer.Option(metavar="input", help="Where to add --noise: on the input.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Prove what small perturbations of an input cannot change about the final model in DIR."""
    if norm is not None and norm not in _NORMS:
        raise InputError(key="--norm", given=norm, allowed=f"allowed: {', '.join(_NORMS)}")
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder
    from fedpriv.robustness.certify import certify_run, check_noise
    from fedpriv.robustness.report import robustness_facts, robustness_notes

    check_noise(noise, place)
    run = RunFolder.open(folder)
    robustness = RobustnessConfig.of(run.experiment())
    unsaid = noise is None and RobustnessConfig.noisy(run.experiment()) is None
    given = {"examples": examples, "votes": votes, "alpha": alpha}
    config = _config(robustness, {key: value for key, value in given.items() if value is not None})
    with shown(quiet or as_json) as progress, reported(folder):
        if unsaid:
            progress.stage(
                f"trained without noise: noise of {_USUAL_NOISE:g} is added to the input; --noise changes it"
            )
        found = certify_run(run, config, _USUAL_NOISE if unsaid else noise, progress)
    if as_json:
        print_json({**found.model_dump(mode="json"), "folder": str(folder)})
        return
    shown_norm = norm or found.noise.norm
    out.print(_table(found, shown_norm))
    curve = found.curve(shown_norm)
    certified = [
        (f"Certified at {size:g}", share.in_percent) for size, share in zip(curve.sizes, curve.shares, strict=True)
    ]
    print_facts([*certified, *robustness_facts(found)])
    print_sentences(robustness_notes(found, None))
    print_line(f"Certificates: {folder / 'robustness' / 'certificates.jsonl'}")
    print_line(f"Report: {folder / 'report.html'}")


def _config(robustness: RobustnessConfig | None, given: dict[str, float]) -> CertifyConfig:
    """The run's own settings, with the options in their place."""
    own = CertifyConfig() if robustness is None else robustness.certify
    return validated(CertifyConfig, {**own.model_dump(), **given}, "fedpriv certify")


def _table(robustness: "Robustness", norm: str) -> Table:
    """Certified accuracy by size, one row a theorem, in 80 columns."""
    from fedpriv.robustness.records import BOUNDS

    sizes = robustness.curve(norm).sizes
    rows = []
    for bound, words in BOUNDS.items():
        shares = [f"{share.value:.1%}" for share in robustness.curve(norm, bound).shares]
        rows.append((words, *shares, f"{robustness.mean_radius(norm, bound):.3g}"))
    return table_of(("certified at", *(f"{size:g}" for size in sizes), "mean radius"), rows)


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class EvasionProbing(Probing["Evasion"]):
    """Evasion attacks on the inputs of a finished model."""

    name: ClassVar[str] = "evasion"
    rank: ClassVar[int] = 10
    heading: ClassVar[str] = "On the model's inputs, by fedpriv probe, settings in robustness.evade:"
    surface: ClassVar[str] = "inputs"

    sizes: Annotated[
        list[float] | None,
        typer.Option(
            "--size", metavar="MU", help="Size of perturbations (inputs are from 0 to 1); may be given several times."
        ),
    ] = None
    norm: Annotated[str | None, typer.Option(metavar="l2|linf", help="Norm of perturbations; default: linf.")] = None
    draws: Annotated[
        int | None,
        typer.Option(metavar="M", help="Draws of noise for each gradient; 0: without noise, weaker."),
    ] = None
    restarts: Annotated[
        int | None, typer.Option(metavar="N", help="Number of starts of attacks that start at random.")
    ] = None
    victims: Annotated[
        int | None,
        typer.Option(metavar="N", help="Test examples to attack; default: the run's, or 200 (at most all)."),
    ] = None
    votes: Annotated[int | None, typer.Option(metavar="N", help="Votes that judge an attacked example.")] = None

    @classmethod
    @override
    def attacks(cls) -> Mapping[str, type[Any]]:
        return EVASIONS

    @classmethod
    @override
    def has(cls, name: str) -> bool:
        return name.removesuffix(NOISELESS) in EVASIONS

    @classmethod
    @override
    def remarks(cls, attack: type[Any]) -> tuple[str, ...]:
        return (f"variant {attack.name}{NOISELESS}: the gradient is that of the network without its noise",)

    @override
    def misplaced(self, adversary: str | None) -> str:
        given = next(iter(self._given()), "")
        return f"--{'size' if given == 'sizes' else given} is for evasion attacks" if given else ""

    @override
    def ready(self, run: "RunFolder", names: tuple[str, ...], adversary: str | None) -> "ReadyProbe[Evasion]":
        from fedpriv.attacks.threat import prober
        from fedpriv.robustness.evade import evade_run

        config = self._config(run, {"attacks": names} if names else {})
        # Certificates are about adversaries who have the model.
        refusal = prober(adversary, run.experiment()).refusal(config.attacks[0], (Access.MODEL,))
        if refusal is not None:
            raise InputError(refusal)
        return ReadyProbe(partial(evade_run, run, config), partial(_print_evasion, run))

    @override
    def figures(self, found: "Evasion") -> "tuple[Figure, ...]":
        return found.figures

    def _given(self) -> dict[str, object]:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        given["sizes"] = self.sizes and tuple(sorted(self.sizes))
        return {key: value for key, value in given.items() if value is not None}

    def _config(self, run: "RunFolder", attacks: dict[str, object]) -> "EvadeConfig":
        """The run's own settings, with the options in their place; sizes are of the norm that they were given for."""
        robustness = RobustnessConfig.of(run.experiment())
        own = EvadeConfig() if robustness is None else robustness.evade
        settings = own.model_dump()
        if self.norm not in (None, own.norm):
            del settings["sizes"]
        try:
            return validated(EvadeConfig, {**settings, **self._given(), **attacks}, "fedpriv probe")
        except InputError as error:
            # One of the sizes has a number as well, which the command line does not.
            raise (error.replaced(key="--size") if error.key.split(".")[0] == "sizes" else error) from None


def _print_evasion(run: "RunFolder", evasion: "Evasion") -> None:
    from fedpriv.core.figure import in_words
    from fedpriv.robustness.records import Robustness
    from fedpriv.robustness.report import beyond_reach, truth

    out.print(_evasion_table(evasion))
    print_line(
        f"Attacked: the {evasion.attacked} of {evasion.victims} test examples that are right without an attack; "
        f"votes for each: {evasion.votes}."
    )
    print_facts(in_words(evasion.figures))
    robustness = run.read(Robustness)
    print_sentences([truth(evasion), *([] if robustness is None else beyond_reach(robustness, evasion))])
    print_line(f"Attempts: {run.path / 'robustness' / 'attacks.jsonl'}")


def _evasion_table(evasion: "Evasion") -> Table:
    """What stands between the clean votes and what is proven, by size, in 80 columns for up to five sizes."""
    rows = {"unattacked": (evasion.clean,) * len(evasion.sizes)}
    rows |= {curve.attack: curve.shares for curve in evasion.curves}
    rows["every attack up to it"] = evasion.least
    if evasion.certified is not None:
        rows["proven (certified)"] = evasion.certified
    heads = (f"right at {evasion.norm}", *(f"{size:g}" for size in evasion.sizes))
    return table_of(heads, ((words, *(f"{share.value:.1%}" for share in rows[words])) for words in rows))


VERBS = (
    Verb(
        "certify",
        certify,
        place=50,
        epilog="Examples:\n\n  fedpriv certify runs/robust --examples 200\n\n"
        "  fedpriv certify runs/quickstart-20260101-120000 --noise 0.25 --place input",
    ),
)
