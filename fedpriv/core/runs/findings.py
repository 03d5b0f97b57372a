"""What is proven of a run, and what was found of it: records that come after the rounds."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pydantic import TypeAdapter

from fedpriv.core.records import (
    AnswersAudit,
    Knowledge,
    LabelCeiling,
    LabelsTold,
    LabelSurvey,
    Ledger,
    Memorisation,
    Partition,
    Probe,
    Referee,
    Score,
    Service,
    VotedAnswer,
    read_file,
    read_text,
)
from fedpriv.core.runs.files import Files

_SCORES = "reconstructions/scores.jsonl"
# What only the referee may know: exact figures of clients' data.
_TOLD, _CEILINGS, _HOLDINGS = "referee/labels.json", "referee/ceilings.json", "referee/partition.json"

_LEDGER, _LABELS, _SCORE = TypeAdapter(Ledger), TypeAdapter(LabelSurvey), TypeAdapter(Score)
_LABELS_TOLD, _LABEL_CEILINGS = TypeAdapter(LabelsTold), TypeAdapter(tuple[LabelCeiling, ...])
_PARTITION = TypeAdapter(Partition)
_KNOWLEDGE, _ANSWER = TypeAdapter(Knowledge), TypeAdapter(VotedAnswer)
_SERVICE, _REFEREE, _ANSWERS_AUDIT = TypeAdapter(Service), TypeAdapter(Referee), TypeAdapter(AnswersAudit)
_PROBE, _MEMORISATION = TypeAdapter(Probe), TypeAdapter(Memorisation)


class Findings(Files):
    """The files about a finished run; readers return ``None``, or nothing, where there is none.

    Each raises an :class:`InputError` where its file is damaged.
    """

    def write_knowledge(self, knowledge: Knowledge) -> None:
        """Write knowledge.json."""
        self.write_json("knowledge.json", knowledge.model_dump(mode="json"))

    def knowledge(self) -> Knowledge | None:
        """What the answers are worth; ``None`` until the student was taught, and where clients do not vote."""
        return read_file(self.path / "knowledge.json", _KNOWLEDGE)

    def write_labels(self, survey: LabelSurvey) -> None:
        """Write labels.json, and what the referee knows beside it into a file of its own."""
        if survey.told is not None:
            self.write_private(_TOLD, asdict(survey.told))
        self.write_json("labels.json", survey.model_dump(mode="json", exclude={"told"}))

    def labels(self) -> LabelSurvey | None:
        """What changed labels tell; ``None`` where clients do not change them, and until one has answered."""
        survey = read_file(self.path / "labels.json", _LABELS)
        told = read_file(self.path / _TOLD, _LABELS_TOLD)
        return survey if survey is None or told is None else survey.model_copy(update={"told": told})

    def answers(self) -> tuple[VotedAnswer, ...]:
        """Every question that was put to the aggregator; empty before, and where clients do not vote."""
        return self.whole_lines("answers.jsonl", _ANSWER)

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
        """Who holds what; ``None`` if the run ended before the data were shared."""
        known = read_file(self.path / _HOLDINGS, _PARTITION)
        return read_file(self.path / "partition.json", _PARTITION) if known is None else known

    def write_memorisation(self, memorisation: Memorisation) -> None:
        """Write memorisation.json."""
        self.write_json("memorisation.json", memorisation.model_dump(mode="json"))

    def memorisation(self) -> Memorisation | None:
        """What the model remembers of its texts; ``None`` if nobody looked."""
        return read_file(self.path / "memorisation.json", _MEMORISATION)

    def service(self) -> Service | None:
        """What the run's endpoint is; ``None``: there is none."""
        return read_file(self.path / "service" / "service.json", _SERVICE)

    def referee(self) -> Referee | None:
        """Accuracies of the endpoint; ``None``: there is none."""
        return read_file(self.path / "service" / "referee.json", _REFEREE)

    def answers_audit(self) -> AnswersAudit | None:
        """What an audit of the endpoint's answers found; ``None``: there was none."""
        return read_file(self.path / "service" / "audit.json", _ANSWERS_AUDIT)

    def answered(self) -> Mapping[str, int]:
        """How many answers were charged to each user; the query ledger itself says whether its chain is whole."""
        lines = (read_text(self.path / "service" / "charges.jsonl") or "").splitlines()[1:]
        return Counter(user for user in map(_charged_user, lines) if user is not None)

    def probe(self) -> Probe | None:
        """What attacks on the finished model and its answers found; ``None`` if there were none."""
        return read_file(self.path / "probe.json", _PROBE)

    def write_probe(self, probe: Probe, pictures: Mapping[str, bytes]) -> None:
        """Write probe.json and probe/*.png, in place of what an earlier probe found."""
        folder = self.path / "probe"
        folder.mkdir(exist_ok=True)
        for old in sorted(folder.glob("*.png")):
            if old.name not in pictures:
                old.unlink()
        for name, content in pictures.items():
            self.write_bytes(f"probe/{name}", content)
        self.write_json("probe.json", probe.model_dump(mode="json"))

    def scores(self) -> tuple[Score, ...]:
        """The lines of scores.jsonl, for every reconstruction and guess so far."""
        return self.whole_lines(_SCORES, _SCORE)

    def write_scores(self, scores: Sequence[Score]) -> None:
        """Write scores.jsonl."""
        self.write_jsonl(_SCORES, [score.to_json() for score in scores])


def _charged_user(line: str) -> str | None:
    """Who a line of the query ledger charges; ``None``: it was cut off, and the next one stands for it."""
    try:
        return str(json.loads(line)["user"])
    except (ValueError, TypeError, KeyError):
        return None
