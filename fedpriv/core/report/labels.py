"""Labels that clients changed: words and rows of the report, each figure between a guess and what is proven."""

from dataclasses import dataclass

from fedpriv.accounting.response import most_told
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.records import LabelSurvey, Partition

_FROM_FEATURES = (0.5, 0.9, 0.99)  # how often somebody is right who has the features


@dataclass(frozen=True)
class LabelRow:
    """One class.

    Attributes:
        name: of the class.
        given: how many examples have it after labels were changed, as counted by clients; empty without a survey.
        share: estimated, with its standard error; empty likewise.
        true: the share among all examples, which the referee knows; empty where nobody does.
    """

    name: str
    given: str
    share: str
    true: str


def label_facts(survey: LabelSurvey) -> list[tuple[str, str]]:
    """Return the law, and the figures between a guess and a theorem, as (name, text)."""
    facts = [
        ("Epsilon of each label", figure(survey.epsilon)),
        ("A label is kept", f"{percent(survey.keep)}, and becomes each other one {percent(survey.other, 2)}"),
    ]
    if survey.examples:
        facts.append(("Counted", f"{count(survey.examples)} changed labels of {count(len(survey.clients))} clients"))
    told = survey.told
    if told is not None:
        facts += [
            ("Labels that were kept", f"{count(told.kept)} of {count(told.examples)}"),
            ("Guess of a label", percent(told.guess)),
            ("Measured", f"{percent(told.right / told.examples)} ({percent(told.low)} to {percent(told.high)})"),
            ("Proven: at most", percent(told.ceiling)),
        ]
    return facts


def label_rows(survey: LabelSurvey, partition: Partition | None) -> list[LabelRow]:
    """Return a row for each class; nothing where no share is estimated and none is known."""
    true = () if survey.told is None else survey.told.true_shares
    number = len(survey.shares) or len(true)
    names = partition.class_names if partition is not None else tuple(map(str, range(number)))
    given = [sum(column) for column in zip(*survey.counts, strict=True)]
    rows = []
    for label in range(number):
        estimate = ""
        if survey.shares:
            estimate = f"{percent(survey.shares[label], 2)} ± {percent(survey.standard_errors[label], 2)}"
        known = percent(true[label], 2) if true else ""
        rows.append(LabelRow(names[label], count(given[label]) if given else "", estimate, known))
    return rows


def label_notes(survey: LabelSurvey) -> list[str]:
    """Return what a reader has to know beside the figures."""
    notes = []
    if survey.shares:
        notes.append(
            "± is a standard error. An estimate has no bias and may lie below 0: of a rare class little is left under "
            "so much noise."
        )
    else:
        notes.append(
            "No shares were estimated: behind a mechanism, and where clients vote, counts would be a second release of "
            "each example, which the first claim does not cover."
        )
    limits = ", ".join(f"{percent(most_told(survey.epsilon, k0))} from {percent(k0)}" for k0 in _FROM_FEATURES)
    notes.append(
        "Measured is the likeliest label behind each changed one, named by somebody who knows how frequent classes "
        "are: the best rule, which by chance may lie a little above its limit, within the interval. The limit is for "
        "whoever knows that and nothing else of an example. Somebody who has the features knows more: from a guess "
        f"that is right that often, the changed label leads to at most {limits}."
    )
    return notes
