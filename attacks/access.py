"""Access: the kinds of knowledge that an attack may need and a threat model may grant."""

from enum import StrEnum


class Access(StrEnum):
    """One thing that an attack may need and a threat model may grant."""

    PARAMETERS = "parameters"
    UPLOADS = "uploads"
    SUM = "sum"
    MECHANISM = "mechanism"
    BATCH_SIZE = "batch-size"
    LABELS = "labels"
    PUBLIC_DATA = "public-data"
    CANDIDATES = "candidates"
    ACTIVE = "active"
    MODEL = "model"
    ANSWERS = "answers"
    QUESTIONS = "questions"

    @property
    def words(self) -> str:
        """What it is, for a person."""
        return _WORDS[self]


_WORDS = {
    Access.PARAMETERS: "the parameters that the clients start the round from",
    Access.UPLOADS: "the uploads of single clients",
    Access.SUM: "at least the sum of a round's uploads",
    Access.MECHANISM: "the privacy mechanism and its parameters",
    Access.BATCH_SIZE: "the batch size",
    Access.LABELS: "the labels of the attacked batch",
    Access.PUBLIC_DATA: "public images of the same kind",
    Access.CANDIDATES: "for each image, a list of records that contains it",
    Access.ACTIVE: "sending parameters of the adversary's own making",
    Access.MODEL: "the finished model",
    Access.ANSWERS: "answers of the finished model",
    Access.QUESTIONS: "the images that people ask the endpoint about, as they are sent",
}
