"""What the files of a run say: every record, declared once, for whoever writes it and whoever reads it.

:class:`fedpriv.runs.RunFolder` writes and reads the files; a sweep's own records are in :mod:`fedpriv.sweep.record`.
"""

from fedpriv.records.attacks import (
    CONFIDENCE,
    NUMBER_TOLERANCE,
    AttackResult,
    Interval,
    LeakageRate,
    Recovered,
    RowResult,
    RowScore,
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
from fedpriv.records.ledger import Ceiling, DataRelease, Guarantee, Ledger, LedgerLine, Stop, shown_epsilon
from fedpriv.records.membership import Curve, EpsilonBound, Membership, MembershipAttack
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
from fedpriv.records.rounds import Asked, Deployed, Failure, Origin, Partition, Released, RoundRecord, last_evaluated
from fedpriv.records.service import AnswersAudit, AnswersCurve, HeadFacts, Referee, Service, UserFacts
from fedpriv.records.summary import COMPLETED, DataFacts, ModelFacts, Summary

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
    "Failure",
    "Guarantee",
    "HeadFacts",
    "Interval",
    "Inverted",
    "Knowledge",
    "LabelSurvey",
    "LabelsTold",
    "LeakageRate",
    "Ledger",
    "LedgerLine",
    "MeanRadius",
    "Membership",
    "MembershipAttack",
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
    "Service",
    "Shown",
    "Stop",
    "Summary",
    "Synthetic",
    "ThreatModel",
    "UserFacts",
    "VotedAnswer",
    "best_rates",
    "kind_of",
    "last_evaluated",
    "mean_radius",
    "middle",
    "parse_json",
    "read_file",
    "read_text",
    "recovered",
    "shown_epsilon",
]
