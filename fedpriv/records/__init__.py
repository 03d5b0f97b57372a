"""What the files of a run say: every record, declared once, for whoever writes it and whoever reads it.

:class:`fedpriv.runs.RunFolder` writes and reads the files; a sweep's own records are in :mod:`fedpriv.sweep.record`.
"""

from fedpriv.records.attacks import (
    CONFIDENCE,
    AttackResult,
    Interval,
    LeakageRate,
    Recovered,
    Score,
    ThreatModel,
    best_rates,
    kind_of,
    recovered,
)
from fedpriv.records.evasion import Attempt, Evasion, EvasionCurve
from fedpriv.records.icl import PromptLeak, PromptLevel, Prompts, Synthetic
from fedpriv.records.knowledge import Knowledge, VotedAnswer
from fedpriv.records.labels import LabelsTold, LabelSurvey
from fedpriv.records.ledger import Ceiling, DataRelease, Guarantee, Ledger, LedgerLine, Stop, View, shown_epsilon
from fedpriv.records.members import member_ranges, members_text, named_members
from fedpriv.records.membership import Curve, EpsilonBound, Membership, MembershipAttack
from fedpriv.records.memorisation import CanaryGroup, CanaryResult, Extraction, Memorisation
from fedpriv.records.probe import CurvePoint, Inverted, Probe, ProbeFigure, ProbeResult, Shown
from fedpriv.records.reading import Model, parse_json, read_file, read_text
from fedpriv.records.robustness import (
    BOUNDS,
    Certificate,
    CertifiedCurve,
    MeanRadius,
    NoiseFacts,
    NormFacts,
    Reach,
    Robustness,
    mean_radius,
    middle,
)
from fedpriv.records.rounds import (
    Asked,
    Deployed,
    Failure,
    Holders,
    Origin,
    Partition,
    Released,
    RoundRecord,
    last_evaluated,
)
from fedpriv.records.rows import NUMBER_TOLERANCE, RowResult, RowScore
from fedpriv.records.service import AnswersAudit, AnswersCurve, HeadFacts, LearntFacts, Referee, Service, UserFacts
from fedpriv.records.summary import COMPLETED, DataFacts, ModelFacts, Summary
from fedpriv.records.texts import Sentence, SentenceResult, SentenceScore, sentence_result

__all__ = [
    "BOUNDS",
    "COMPLETED",
    "CONFIDENCE",
    "NUMBER_TOLERANCE",
    "AnswersAudit",
    "AnswersCurve",
    "Asked",
    "AttackResult",
    "Attempt",
    "CanaryGroup",
    "CanaryResult",
    "Ceiling",
    "Certificate",
    "CertifiedCurve",
    "Curve",
    "CurvePoint",
    "DataFacts",
    "DataRelease",
    "Deployed",
    "EpsilonBound",
    "Evasion",
    "EvasionCurve",
    "Extraction",
    "Failure",
    "Guarantee",
    "HeadFacts",
    "Holders",
    "Interval",
    "Inverted",
    "Knowledge",
    "LabelSurvey",
    "LabelsTold",
    "LeakageRate",
    "LearntFacts",
    "Ledger",
    "LedgerLine",
    "MeanRadius",
    "Membership",
    "MembershipAttack",
    "Memorisation",
    "Model",
    "ModelFacts",
    "NoiseFacts",
    "NormFacts",
    "Origin",
    "Partition",
    "Probe",
    "ProbeFigure",
    "ProbeResult",
    "PromptLeak",
    "PromptLevel",
    "Prompts",
    "Reach",
    "Recovered",
    "Referee",
    "Released",
    "Robustness",
    "RoundRecord",
    "RowResult",
    "RowScore",
    "Score",
    "Sentence",
    "SentenceResult",
    "SentenceScore",
    "Service",
    "Shown",
    "Stop",
    "Summary",
    "Synthetic",
    "ThreatModel",
    "UserFacts",
    "View",
    "VotedAnswer",
    "best_rates",
    "kind_of",
    "last_evaluated",
    "mean_radius",
    "member_ranges",
    "members_text",
    "middle",
    "named_members",
    "parse_json",
    "read_file",
    "read_text",
    "recovered",
    "sentence_result",
    "shown_epsilon",
]
