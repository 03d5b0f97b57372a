"""The command ``fedpriv probe DIR``."""

from typing import Annotated

import typer
from rich.table import Table

from fedpriv.cli.terminal import Json, Quiet, Run, out, print_json, print_line, print_sentences, share_words
from fedpriv.config import EvadeConfig, RobustnessConfig, validated
from fedpriv.records import Evasion

__all__ = ["probe"]


def probe(
    folder: Run,
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", "-a", metavar="NAME", help="An attack to make; may be given several times."),
    ] = None,
    sizes: Annotated[
        list[float] | None,
        typer.Option("--size", metavar="MU", help="Of perturbations, pixels from 0 to 1; may be given several times."),
    ] = None,
    norm: Annotated[
        str | None, typer.Option("--norm", metavar="l2|linf", help="What perturbations are measured by; default: linf.")
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option("--draws", metavar="M", help="Draws of noise for each gradient; 0: without noise, weaker."),
    ] = None,
    restarts: Annotated[
        int | None, typer.Option("--restarts", metavar="N", help="Random starts of attacks that have them.")
    ] = None,
    victims: Annotated[
        int | None, typer.Option("--victims", metavar="N", help="Test images to attack; default: the run's, or 200.")
    ] = None,
    votes: Annotated[
        int | None, typer.Option("--votes", metavar="N", help="Votes that judge an attacked image.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Attack the final model in DIR: change test images a little until the vote on them turns."""
    given = {
        "attacks": attacks and tuple(attacks),
        "sizes": sizes and tuple(sorted(sizes)),
        "norm": norm,
        "draws": draws,
        "restarts": restarts,
        "victims": victims,
        "votes": votes,
    }
    from fedpriv.cli.display import shown
    from fedpriv.lab.evade import evade_run, refuse_broken
    from fedpriv.report import reported
    from fedpriv.runs import RunFolder

    run = RunFolder.open(folder)
    config = _config(run.experiment().robustness, {key: value for key, value in given.items() if value is not None})
    with shown(quiet or as_json) as progress, reported(folder):
        evasion = evade_run(run, config, progress)
    if as_json:
        print_json({**evasion.model_dump(mode="json"), "folder": str(folder)})
    else:
        out.print(_table(evasion))
        print_sentences(_sentences(evasion))
        print_line(f"Attempts: {folder / 'robustness' / 'attacks.jsonl'}")
    refuse_broken(evasion)


def _config(robustness: RobustnessConfig | None, given: dict[str, object]) -> EvadeConfig:
    """The run's own settings, with the options in their place; sizes are of the norm that they were given for."""
    own = EvadeConfig() if robustness is None else robustness.evade
    settings = own.model_dump()
    if given.get("norm", own.norm) != own.norm:
        del settings["sizes"]
    return validated(EvadeConfig, {**settings, **given}, "fedpriv probe")


def _table(evasion: Evasion) -> Table:
    """What stands between the clean votes and what is proven, by size, in 80 columns for up to five sizes."""
    table = Table(box=None, pad_edge=False)
    for heading in (f"right at {evasion.norm}", *(f"{size:g}" for size in evasion.sizes)):
        table.add_column(heading, justify="left" if heading.startswith("right") else "right")
    rows = {"unattacked": (evasion.clean,) * len(evasion.sizes)}
    rows |= {curve.attack: curve.shares for curve in evasion.curves}
    rows["every attack up to it"] = evasion.least
    if evasion.certified is not None:
        rows["proven (certified)"] = evasion.certified
    for words, shares in rows.items():
        table.add_row(words, *(f"{share.value:.1%}" for share in shares))
    return table


def _sentences(evasion: Evasion) -> list[str]:
    middle = len(evasion.sizes) // 2
    where = f"At {evasion.norm} {evasion.sizes[middle]:g}"
    judge = "one answer" if evasion.votes == 1 else f"{evasion.votes} votes"
    first = (
        f"{evasion.victims} test images, of which {evasion.attacked} are right unattacked and were attacked; {judge} "
        "for each attacked image."
    )
    at_most = f"at most {share_words(evasion.least[middle])} are right under these attacks"
    if evasion.certified is None:
        return [first, f"{where}, {at_most}; nothing is proven (fedpriv certify)."]
    proven = f"{share_words(evasion.certified[middle])} are proven and {at_most}: the truth lies between."
    return [first, f"{where}, {proven}"]
