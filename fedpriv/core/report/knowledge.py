"""Knowledge transfer by votes: words and rows of the report. No figure depends on the votes but a sanitised one."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.records import Guarantee, Knowledge, VotedAnswer

_AGGREGATORS = {
    "confident": "where the largest count with noise reaches a threshold, the class with the largest noisy count",
    "gnmax": "the class with the largest count after normal noise",
    "lnmax": "the class with the largest count after Laplace noise",
}


@dataclass(frozen=True)
class ClassRow:
    """How many answers name a class."""

    label: int
    answers: int


def class_rows(answers: Sequence[VotedAnswer]) -> list[ClassRow]:
    """Return a row for each class that was an answer, ascending."""
    labels = [answer.label for answer in answers if answer.label is not None]
    return [ClassRow(label, labels.count(label)) for label in sorted(set(labels))]


def knowledge_facts(knowledge: Knowledge, worst: Guarantee | None) -> list[tuple[str, str]]:
    """Return what was asked, answered and learnt, as (name, text)."""
    facts = [
        ("Teachers", f"{count(knowledge.voted)} of {count(knowledge.teachers)} voted"),
        ("Public images", f"{count(knowledge.planned)} test images, drawn by the seed"),
        ("Questions", f"{count(knowledge.asked)}, {count(knowledge.answered)} answered"),
        ("Answers", _AGGREGATORS.get(knowledge.aggregator, knowledge.aggregator)),
        ("Answers right", "no answers" if knowledge.right is None else percent(knowledge.right)),
        ("Student right", f"{percent(knowledge.student)} of the other {count(knowledge.evaluated)} test images"),
        ("Noise added by", "the server, which sees all votes" if knowledge.noise_at == "server" else "the clients"),
        ("Budget", "none" if knowledge.budget is None else f"ε {figure(knowledge.budget)}"),
    ]
    if knowledge.spent is not None:
        facts.append(("Spent by these answers", f"ε {figure(knowledge.spent)} at δ {figure(knowledge.delta)}"))
    if worst is not None and worst.epsilon is not None:
        facts.append(("Claimed", f"ε {figure(worst.epsilon)} at δ {figure(worst.delta)}"))
    if knowledge.sanitised is not None:
        facts.append(("Sanitised, data-dependent", f"about ε {figure(knowledge.sanitised)}: an estimate, no bound"))
    return facts


def knowledge_notes(knowledge: Knowledge) -> list[str]:
    """Return what a reader has to know beside the figures."""
    notes = [
        "What is claimed is about all data of one client: whoever sees the answers and the student, and knows all "
        "others' data, hardly learns which data this one has."
    ]
    if knowledge.noise_at == "server":
        notes.append("The server, and whoever listens to the messages, sees votes without noise: it has to be trusted.")
    if knowledge.budget is not None and knowledge.spent is not None and knowledge.aggregator == "confident":
        notes.append(
            "The budget is the claim: how many questions are answered depends on the votes, so what was spent may be "
            "claimed only because asking stops before a budget that was fixed beforehand."
        )
    if knowledge.sanitised is not None:
        notes.append(
            "The sanitised figure estimates what the answers cost on these very votes. It has noise on it, so that it "
            "may be shown, and lies above the true figure or below it. The ledger counts that it was shown."
        )
    return notes
