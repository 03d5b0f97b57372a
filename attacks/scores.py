"""Lines of scores.jsonl: what the referee found, one line for a true image and what one restart made of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Score", "Scores"]


@dataclass(frozen=True)
class Score:
    """One line of scores.jsonl: one true image, and what one restart of one attack (or a guess) made of it.

    Attributes:
        round: the round.
        client: the client whose image it is.
        image: the number of the true image in its batch.
        attack: the attack's name, with the settings by which it differs from the run's; or a guess's name.
        upload: protected or unprotected; none for a guess.
        restart: the restart's number.
        chosen: whether the attack offers this restart.
        loss: the attack's own objective; ``None`` where not finite, and for guesses.
        label: the label that this restart gives; ``None`` for guesses, and where it gives none.
        true_label: the label.
        label_correct: whether they agree; ``None`` without a label.
        mse: on the [0, 1] scale.
        mse_normalised: on the scale of the network's input.
        psnr: in dB, at most 200.
        ssim: at most 1.
        lpips: ``None`` where not computed; only chosen restarts and guesses have one.
        recovered: SSIM of at least the threshold and an MSE below every guess's.
        note: what the attack said about its result.
        clients: how many clients' uploads were added up in the attacked one; 1: it is one client's.
        rank: the place of the original among the candidates, by MSE to this picture: 1 means picked out; ties count
            against. ``None`` where there are no candidates, and in files of versions without them.
        candidates: how many images there were to pick from, the original among them.
    """

    round: int
    client: int
    image: int
    attack: str
    upload: str
    restart: int
    chosen: bool
    loss: float | None
    label: int | None
    true_label: int
    label_correct: bool | None
    mse: float
    mse_normalised: float
    psnr: float
    ssim: float
    lpips: float | None
    recovered: bool
    note: str
    clients: int = 1
    rank: int | None = None
    candidates: int | None = None


@dataclass(frozen=True)
class Scores:
    """Lines of scores.jsonl, why they have no LPIPS, and the pictures that they are about.

    Attributes:
        scores: by restart, then image.
        lpips_reason: ``None`` where LPIPS was computed.
        pictures: number of the true image in the truth -> what the chosen restart made of it, (C, H, W) on [0, 1].
    """

    scores: tuple[Score, ...]
    lpips_reason: str | None
    pictures: Mapping[int, Tensor]
