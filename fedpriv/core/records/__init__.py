"""The records in the files of a run, each declared once for writing and reading.

:class:`fedpriv.core.runs.RunFolder` writes and reads the files; a sweep's own records are in
:mod:`fedpriv.sweep.record`.
"""

from fedpriv.core.figure import CONFIDENCE, Interval
from fedpriv.core.records.attacks import (
    AttackResult,
    LeakageRate,
    Recovered,
    Score,
    ThreatRecord,
    best_rates,
    best_rows,
    kind_of,
    recovered,
)
from fedpriv.core.records.ledger import (
    Ceiling,
    DataRelease,
    Guarantee,
    LabelCeiling,
    Ledger,
    LedgerLine,
    LedgerView,
    Stop,
    shown_epsilon,
)
from fedpriv.core.records.members import member_ranges, members_text, named_members
from fedpriv.core.records.reading import FileRecord, GrowingRecord, parse_json, read_file, read_text
from fedpriv.core.records.rounds import (
    Asked,
    Deployed,
    Failure,
    Holders,
    Origin,
    Partition,
    ReleaseKind,
    RoundRecord,
    last_evaluated,
)
from fedpriv.core.records.rows import NUMBER_TOLERANCE, RowResult, RowScore
from fedpriv.core.records.summary import COMPLETED, DataFacts, ModelFacts, Summary
from fedpriv.core.records.texts import Sentence, SentenceResult, SentenceScore, sentence_result

__all__ = [
    "COMPLETED",
    "CONFIDENCE",
    "NUMBER_TOLERANCE",
    "Asked",
    "AttackResult",
    "Ceiling",
    "DataFacts",
    "DataRelease",
    "Deployed",
    "Failure",
    "FileRecord",
    "GrowingRecord",
    "Guarantee",
    "Holders",
    "Interval",
    "LabelCeiling",
    "LeakageRate",
    "Ledger",
    "LedgerLine",
    "LedgerView",
    "ModelFacts",
    "Origin",
    "Partition",
    "Recovered",
    "ReleaseKind",
    "RoundRecord",
    "RowResult",
    "RowScore",
    "Score",
    "Sentence",
    "SentenceResult",
    "SentenceScore",
    "Stop",
    "Summary",
    "ThreatRecord",
    "best_rates",
    "best_rows",
    "kind_of",
    "last_evaluated",
    "member_ranges",
    "members_text",
    "named_members",
    "parse_json",
    "read_file",
    "read_text",
    "recovered",
    "sentence_result",
    "shown_epsilon",
]
