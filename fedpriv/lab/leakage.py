"""What the attack stage hands on: scores, refusals, and how often attacks succeeded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedpriv.attacks.truth import Scores
from fedpriv.core.progress import Progress
from fedpriv.core.records import LeakageRate, Score


@dataclass(frozen=True)
class Refusal:
    """What was not attacked, and why.

    Attributes:
        reason: in one line.
        attack: as its scores name it; empty: this is about uploads, whatever attacks them.
        upload: protected or unprotected; empty: both.
        where: the single upload, in words; empty: all of that kind.
        void: whether the attack simulates the client wrongly, so that its failure shows nothing.
    """

    reason: str
    attack: str = ""
    upload: str = ""
    where: str = ""
    void: bool = False

    def __str__(self) -> str:
        if not self.attack:
            return self.reason
        return f"{', '.join(filter(None, (f'attack {self.attack} refused', self.where, self.upload)))}: {self.reason}"


@dataclass(frozen=True)
class Leakage:
    """What the attack stage found.

    Attributes:
        scores: one for each victim image, attack, kind of upload and restart, and for each guess; those that were in
            the folder before included.
        lpips_reason: why there is no LPIPS; ``None`` where it was computed.
        refusals: what could not be attacked, and why.
        unattacked: how many of the uploads that were heard no attack could work on.
        rates: how often attacks succeeded, between guess and ceiling; of all that is in the folder.
        seconds: attack, as its scores name it -> the wall time that it took now, for all uploads. It is not in the
            scores, which are the same whenever the same attacks are made.
    """

    scores: tuple[Score, ...] = ()
    lpips_reason: str | None = None
    refusals: tuple[Refusal, ...] = ()
    unattacked: int = 0
    rates: tuple[LeakageRate, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def plus(self, scored: Scores) -> "Leakage":
        """Return this with more scores."""
        return replace(self, scores=self.scores + scored.scores, lpips_reason=scored.lpips_reason or self.lpips_reason)

    def refused(self, refusal: Refusal, progress: Progress) -> "Leakage":
        """Return this with one more thing that could not be attacked, and say so."""
        progress.warn(str(refusal))
        return replace(self, refusals=(*self.refusals, refusal))

    @property
    def refused_words(self) -> tuple[str, ...]:
        """The refusals as the summary has them."""
        return tuple(map(str, self.refusals))
