"""Candidate records: a list for each image of an upload, one of which is that image.

The question of re-identification, and of an adversary who already holds the record and asks whose it is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.core.errors import InputError

__all__ = ["Candidates"]


@dataclass(frozen=True, eq=False)
class Candidates:
    """What an adversary holds who is to pick each image of an upload out of a list.

    Attributes:
        images: (M, C, H, W) on the [0, 1] scale, no two of them the same.
        labels: int64 (M,), the records' labels.
        lists: int64 (B, N), for each image of the upload the numbers of N >= 2 records; their order says nothing.

    Raises:
        InputError: shapes do not fit, a number is out of range, or a record is there twice.
    """

    images: Tensor
    labels: Tensor
    lists: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.labels.shape != self.images.shape[:1]:
            raise InputError(
                f"candidates: images {tuple(self.images.shape)} and labels {tuple(self.labels.shape)}; allowed are "
                "(M, C, H, W) and (M,)"
            )
        if self.lists.ndim != 2 or self.lists.shape[1] < 2:
            raise InputError(f"candidates: lists {tuple(self.lists.shape)}; allowed is (B, N) with N of 2 or more")
        if int(self.lists.min()) < 0 or int(self.lists.max()) >= len(self.images):
            raise InputError(f"candidates: a list names a record that is not from 0 to {len(self.images) - 1}")
        _refuse_copies(self.images)
        if any(len(row.unique()) < len(row) for row in self.lists):
            raise InputError("candidates: a list names a record twice; each is allowed once")

    def alike(self, number: int, label: Tensor, labels_known: bool) -> Tensor:
        """Return the records of one list that may be the image: those with its label, where that is known."""
        listed = self.lists[number]
        return listed[self.labels[listed] == label] if labels_known else listed

    @staticmethod
    def of_all(images: Tensor, labels: Tensor, examples: int) -> "Candidates":
        """Return one list of all records for each of so many images of an upload."""
        return Candidates(images, labels, torch.arange(len(images)).expand(examples, len(images)))


def _refuse_copies(images: Tensor) -> None:
    _, number, counts = images.flatten(1).unique(dim=0, return_inverse=True, return_counts=True)
    twice = (counts[number] > 1).nonzero().flatten().tolist()
    if twice:
        other = next(place for place in twice[1:] if number[place] == number[twice[0]])
        raise InputError(f"candidates: records {twice[0]} and {other} are the same; each is allowed once")
