"""summary.json: the result of a run in one object."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from fedpriv.core.reading import GrowingRecord
from fedpriv.core.records.attacks import AttackResult, LeakageRate, ThreatRecord
from fedpriv.core.records.ledger import Guarantee, Stop

COMPLETED = "completed"
"""The status of a run that came to its end; others: failed, interrupted."""


class DataFacts(GrowingRecord):
    """The data set, where it is from, its size, of texts what is predicted (``classify`` or ``next``), and notes."""

    name: str | None = None
    source: str | None = None
    train_examples: int | None = None
    test_examples: int | None = None
    task: str | None = None
    notes: tuple[str, ...] = ()


class ModelFacts(GrowingRecord):
    """The network, the numbers that are trained, in all and of each tensor, and what the settings changed of it."""

    name: str | None = None
    parameters: int | None = None
    tensors: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


class Summary(GrowingRecord):
    """summary.json.

    ``test_accuracy`` and ``test_loss`` are of ``evaluated_round``, the last evaluated round, on ``evaluated_examples``
    test examples; versions without these keys evaluated every round on all examples. ``settings`` is the digest of the
    settings behind the figures (``RunFolder.settings_digest``); empty in summaries of versions up to 0.2. ``seconds``
    is the wall time from the last start to the end, and ``attack_seconds`` that of each attack on all uploads (summed
    over Ray tasks). ``rates`` are success rates of attacks, with guess and ceiling. ``refusals`` are the warnings that
    say what was not attacked, and why. Audits add their results under their own keys (:mod:`fedpriv.core.finding`):
    keys that this class does not declare are kept.
    """

    name: str = ""
    settings: str = ""
    status: str
    reason: str | None = None
    rounds: int = 0
    test_accuracy: float | None = None
    test_loss: float | None = None
    evaluated_round: int | None = None
    evaluated_examples: int | None = None
    ledger: Guarantee | None = None
    stops: tuple[Stop, ...] = ()
    attacks: tuple[AttackResult, ...] = ()
    rates: tuple[LeakageRate, ...] = ()
    seconds: float | None = None
    attack_seconds: Mapping[str, float] = Field(default_factory=dict)
    verdict: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    versions: Mapping[str, str] = Field(default_factory=dict)
    data: DataFacts = DataFacts()
    model: ModelFacts = ModelFacts()
    threat_model: ThreatRecord | None = None
    device: str = ""
    engine: str = ""
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what was read or set, as JSON types."""
        return self.model_dump(mode="json", exclude_unset=True)

    def with_found(self, records: Mapping[str, GrowingRecord | None]) -> "Summary":
        """Return a copy with the results of audits, by key."""
        return self.model_copy(update=dict(records))

    def repeats(self, key: str) -> bool:
        """Whether it contains results under this key."""
        return getattr(self, key, None) is not None
