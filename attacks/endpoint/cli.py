"""Attacks on the finished model and on its answers, for ``fedpriv probe DIR``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typing_extensions import override

from fedpriv.attacks.commands import Probing, ReadyProbe
from fedpriv.core.cli.terminal import out, print_line, print_sentences, table_of
from fedpriv.core.config import parse_override, validated
from fedpriv.core.errors import InputError
from fedpriv.core.registry import OPTIONS, PROBES

if TYPE_CHECKING:
    from fedpriv.attacks.endpoint.report import Probe
    from fedpriv.attacks.probing import ModelAttack
    from fedpriv.core.records import Guarantee
    from fedpriv.core.runs import RunFolder


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class AnswerProbing(Probing["Probe"]):
    """Attacks on the finished model and on its answers."""

    name: ClassVar[str] = "probe"
    rank: ClassVar[int] = 20
    heading: ClassVar[str] = "On the model and its answers, by fedpriv probe:"
    surface: ClassVar[str] = "answers"

    answers: Annotated[
        str | None,
        typer.Option("--answers", metavar="POLICY", help="What the endpoint shows, such as none or rounded:2."),
    ] = None
    questions: Annotated[
        int | None,
        typer.Option("--queries", metavar="N", min=1, help="Questions that each attack may ask the endpoint."),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="ATTACK.KEY=VALUE", help="A setting of an attack; see fedpriv probe list."),
    ] = None

    @classmethod
    @override
    def attacks(cls) -> Mapping[str, type[Any]]:
        return PROBES

    @override
    def misplaced(self, adversary: str | None) -> str:
        asked = any((self.answers, self.questions, adversary, self.set_))
        return "--answers, --queries, --as and --set are for attacks on the model and its answers" if asked else ""

    @override
    def ready(self, run: "RunFolder", names: tuple[str, ...], adversary: str | None) -> "ReadyProbe[Probe]":
        from fedpriv.attacks.endpoint.probe import probe_run
        from fedpriv.attacks.endpoint.report import Probe

        made = _with_settings(names or tuple(PROBES), self.set_ or ())
        return ReadyProbe(
            partial(probe_run, run, made, self.answers, self.questions, adversary),
            partial(_print, run, run.read(Probe)),
        )


def _with_settings(names: Sequence[str], set_: Sequence[str]) -> "list[ModelAttack]":
    """The attacks, each with its settings."""
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in set_:
        keys, value = parse_override(text)
        if len(keys) != 2 or keys[0] not in given:
            raise InputError(
                key="--set",
                given=text,
                allowed=f"expected ATTACK.KEY=VALUE, of an attack that is made: {', '.join(given)}",
            )
        given[keys[0]][keys[1]] = value
    return [validated(PROBES[name], settings, f"--set {name}") for name, settings in given.items()]


def _print(run: "RunFolder", earlier: "Probe | None", probe: "Probe") -> None:
    """One row a figure, then what it means."""
    print_line(f"Answers: {_answers_words(probe, run.final_ledger().worst)}. Adversary: {probe.adversary}.")
    for result in probe.results:
        print_line(f"{result.attack}{f', {result.variant}' if result.variant else ''}: {result.queries} questions")
        rows = []
        for figure in result.figures:
            known = (figure.guess, figure.measured.value, figure.reference)
            bound = figure.near_one or figure.text(figure.ceiling, "nothing proven")
            rows.append((f"  {figure.what}", *(figure.text(value, "-") for value in known), bound))
        out.print(table_of(("", "guess", "measured", "reference", "at most"), rows))
        print_sentences(result.sentences)
    if earlier is not None:
        gone = ", ".join(dict.fromkeys(result.attack for result in earlier.results))
        print_line(f"This replaces the earlier results in probe.json: {gone}.")


def _answers_words(probe: "Probe", worst: "Guarantee") -> str:
    """The policy, and what is proven: about its answers, or about the model, which no answer tells more than."""
    from fedpriv.attacks.questions import endpoints

    shown = f"{endpoints().title(probe.answers)} (policy {probe.answers})"
    if not probe.heuristic:
        return shown
    if worst.epsilon is None or not (probe.bounded and worst.replaces):
        return f"{shown}; nothing is proven about answers"
    model = f"epsilon {worst.epsilon:.4g} at delta {worst.delta:g} ({worst.adjacency})"
    return f"{shown}; nothing is proven about answers, {model} about the model"
