"""What is proven of a run, and what was found of it: records that come after the rounds."""

from collections.abc import Sequence
from dataclasses import asdict

from pydantic import TypeAdapter

from fedpriv.core.records import (
    LabelCeiling,
    Ledger,
    Partition,
    Score,
    read_file,
)
from fedpriv.core.runs.files import Files

_SCORES = "reconstructions/scores.jsonl"
# What only the referee may know: exact figures of clients' data.
_CEILINGS, _HOLDINGS = "referee/ceilings.json", "referee/partition.json"

_LEDGER, _SCORE, _LABEL_CEILINGS = TypeAdapter(Ledger), TypeAdapter(Score), TypeAdapter(tuple[LabelCeiling, ...])
_PARTITION = TypeAdapter(Partition)


class Findings(Files):
    """The files about a finished run; readers return ``None``, or nothing, where there is none.

    Each raises an :class:`InputError` where its file is damaged.
    """

    def ledger(self) -> Ledger | None:
        """What is proven; ``None`` until a run ends."""
        return read_file(self.path / "ledger.json", _LEDGER)

    def write_label_ceilings(self, ceilings: Sequence[LabelCeiling]) -> None:
        """Write referee/ceilings.json."""
        self.write_private(_CEILINGS, [asdict(line) for line in ceilings])

    def label_ceilings(self) -> tuple[LabelCeiling, ...]:
        """How often any attack names labels at most; nothing until a run ends, and in runs of earlier versions."""
        return read_file(self.path / _CEILINGS, _LABEL_CEILINGS) or ()

    def write_partition(self, partition: Partition) -> None:
        """Write referee/partition.json; earlier versions left it in the open."""
        self.write_private(_HOLDINGS, asdict(partition))
        (self.path / "partition.json").unlink(missing_ok=True)

    def partition(self) -> Partition | None:
        """How the data are shared; ``None`` if the run ended before they were."""
        known = read_file(self.path / _HOLDINGS, _PARTITION)
        return read_file(self.path / "partition.json", _PARTITION) if known is None else known

    def scores(self) -> tuple[Score, ...]:
        """The lines of scores.jsonl, for every reconstruction and guess so far."""
        return self.whole_lines(_SCORES, _SCORE)

    def write_scores(self, scores: Sequence[Score]) -> None:
        """Write scores.jsonl."""
        self.write_jsonl(_SCORES, [score.to_json() for score in scores])
