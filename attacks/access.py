"""Access: the kinds of knowledge that an attack may need and a threat model may grant."""

from enum import StrEnum
from typing import Self


class Access(StrEnum):
    """One thing that an attack may need and a threat model may grant: its name, and what it is, for a person."""

    words: str

    def __new__(cls, name: str, words: str) -> Self:
        """Return the member of this name."""
        member = str.__new__(cls, name)
        member._value_, member.words = name, words
        return member

    PARAMETERS = "parameters", "the parameters that the clients start the round from"
    UPLOADS = "uploads", "the uploads of single clients"
    SUM = "sum", "at least the sum of a round's uploads"
    MECHANISM = "mechanism", "the privacy mechanism and its parameters"
    BATCH_SIZE = "batch-size", "the batch size"
    LABELS = "labels", "the labels of the attacked batch"
    PUBLIC_DATA = "public-data", "public images of the same kind"
    CANDIDATES = "candidates", "for each image, a list of records that contains it"
    ACTIVE = "active", "sending parameters of the adversary's own making"
    MODEL = "model", "the finished model"
    ANSWERS = "answers", "answers of the finished model"
    QUESTIONS = "questions", "the images that people ask the endpoint about, as they are sent"
