"""What an upload was made of, as the referee is told it; no attack ever is."""

from dataclasses import dataclass

from torch import Tensor

from fedpriv.attacks.candidates import Candidates
from fedpriv.attacks.reconstruction import Optimum
from fedpriv.core.columns import Column
from fedpriv.data.tokenizers import Tokenizer

__all__ = ["Truth"]


@dataclass(frozen=True, eq=False)
class Truth:
    """What one upload, or one sum of uploads, was made of.

    Attributes:
        round: the round.
        client: the client; for a sum the one that its observation names.
        images: (B, C, H, W) on the [0, 1] scale.
        labels: int64 (B,), by which those that an attack names are scored.
        owners: for each image its client and its number in that client's batch; ``None``: ``client``, and their order.
        clients: how many clients' uploads are in the sum; 1 for a single upload.
        others: (N, C, H, W) on the [0, 1] scale: images of the same data set among which the original is to be picked
            out, no two of them alike, and none of them like an original; ``None``: nothing is to be picked.
        other_labels: int64 (N,).
        labels_known: whether the adversary knows the originals' labels, and so which of the others are out.
        candidates: what an attack picks from that is given a list for each image; ``None``: no attack is.
        used_labels: int64 (B,), those that went into the upload, where clients change labels; ``None``: ``labels``.
        columns: of the table whose rows the "images" are; empty: they are images.
        tokenizer: of texts, whose tokens the "images" are, int64 (B, 1, 1, T); ``None``: they are images or rows.
        optima: for each image, how often the best decision among it and the others is right; ``None``: not known.
        releases: for each image, in how many releases it was used by the time of this upload; ``None``: not known.
    """

    round: int
    client: int
    images: Tensor
    labels: Tensor
    owners: tuple[tuple[int, int], ...] | None = None
    clients: int = 1
    others: Tensor | None = None
    other_labels: Tensor | None = None
    labels_known: bool = False
    candidates: Candidates | None = None
    releases: tuple[int, ...] | None = None
    optima: tuple[Optimum, ...] | None = None
    used_labels: Tensor | None = None
    columns: tuple[Column, ...] = ()
    tokenizer: Tokenizer | None = None

    @property
    def used(self) -> Tensor:
        """The labels (B,) that went into the upload, true or changed."""
        return self.labels if self.used_labels is None else self.used_labels

    def place(self, number: int) -> tuple[int, int]:
        """The client of an image, and the image's number in that client's batch."""
        return (self.client, number) if self.owners is None else self.owners[number]
