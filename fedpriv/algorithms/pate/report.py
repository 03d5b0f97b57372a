"""PATE in summaries, reports and tables of sweeps. No figure depends on the votes, except a sanitised one."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.algorithms.pate.records import Knowledge, VotedAnswer, read_answers
from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.core.finding import Columns, Finding, RunView, Section, Tile
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.reading import GrowingRecord
from fedpriv.core.records import Guarantee, shown_epsilon
from fedpriv.core.registry import FINDINGS
from fedpriv.core.runs import RunFolder


@dataclass(frozen=True)
class VotedKnowledge:
    """What answers by vote are worth, and each question."""

    knowledge: Knowledge
    answers: tuple[VotedAnswer, ...]


class VotesColumns(Columns):
    """What votes add to the record of a trial."""

    votes_asked: int | None = Field(None, description="PATE: questions that the aggregator got before the budget ended")
    votes_answered: int | None = Field(None, description="PATE: questions that have an answer")
    votes_right: float | None = Field(None, description="PATE: share of the answers that are right")
    votes_spent: float | None = Field(
        None, description="PATE: epsilon of the answers given; epsilon is what is claimed"
    )


@FINDINGS.register
class VotesFinding(Finding[VotedKnowledge]):
    """Knowledge transfer by votes."""

    name: ClassVar[str] = "knowledge"
    rank: ClassVar[int] = 40
    leads: ClassVar[bool] = True
    columns: ClassVar[type[Columns] | None] = VotesColumns

    @override
    def read(self, folder: RunFolder) -> VotedKnowledge | None:
        knowledge = folder.read(Knowledge)
        return None if knowledge is None else VotedKnowledge(knowledge, read_answers(folder))

    @override
    def records(self, found: VotedKnowledge) -> dict[str, GrowingRecord]:
        return {self.name: found.knowledge}

    @override
    def tested(self, found: VotedKnowledge) -> int | None:
        return found.knowledge.evaluated

    @override
    def sentences(self, found: VotedKnowledge) -> tuple[str, ...]:
        known = found.knowledge
        where = "the server saw their votes" if known.noise_at == "server" else "nobody saw their votes"
        asked = (
            f"{known.voted} teachers voted on {known.planned} public images ({where}); {known.asked} questions "
            f"were put and {known.answered} answered"
        )
        if known.right is not None:
            asked += f", {known.right:.1%} of them correctly"
        sentences = [f"{asked}."]
        if known.sanitised is not None:
            sentences.append(
                f"Sanitised: on these votes the answers cost about epsilon {shown_epsilon(known.sanitised)} at delta "
                f"{known.delta:g} (an estimate with noise on it, no bound; the ledger's figure is the claim)."
            )
        return tuple(sentences)

    @override
    def section(self, found: VotedKnowledge, view: RunView) -> Section:
        known = found.knowledge
        labels = Counter(answer.label for answer in found.answers if answer.label is not None)
        values = {"known": known, "worst": view.worst, "rows": sorted(labels.items())}
        return Section("knowledge", "Knowledge transfer", values)

    @override
    def tiles(self, found: VotedKnowledge | None, view: RunView) -> tuple[Tile, ...]:
        pate = PateConfig.of(view.experiment)
        if pate is None:
            return ()
        asked = Tile("Answers", "not known yet", words=True, remark="No question was put to the vote yet.")
        answered = asked if found is None else _answered(found.knowledge)
        return (answered,) if view.worst is None else (answered, _voted(view.worst, pate.target_epsilon))

    @override
    def trial(self, found: VotedKnowledge) -> Mapping[str, Any]:
        known = found.knowledge
        return {
            "votes_asked": known.asked,
            "votes_answered": known.answered,
            "votes_right": known.right,
            "votes_spent": known.spent,
        }


def _answered(knowledge: Knowledge) -> Tile:
    """What was answered, in place of images that nobody can recover from votes."""
    right = "no answers" if knowledge.right is None else percent(knowledge.right)
    conditions = (("right", right), ("teachers", count(knowledge.voted)))
    title, of = "Questions answered by vote", f"of {count(knowledge.asked)}"
    share = knowledge.answered / knowledge.asked if knowledge.asked else None
    return Tile(title, count(knowledge.answered), of=of, conditions=conditions, share=share)


def _voted(worst: Guarantee, budget: float | None) -> Tile:
    """What is proven of all answers by vote."""
    conditions = [
        ("δ", figure(worst.delta)),
        ("adjacency", worst.adjacency),
        ("questions", count(worst.participations)),
        ("theorem", worst.theorem.get("epsilon", "not named in the ledger")),
    ]
    if budget is not None:
        conditions.insert(1, ("budget", f"{figure(budget)}, at which asking stops"))
    title = "Proven ε of all answers"
    if worst.epsilon is None:
        return Tile(title, "No finite figure is proven", words=True, conditions=tuple(conditions), place=50)
    return Tile(title, figure(worst.epsilon), conditions=tuple(conditions), place=50)
