"""What an endpoint is: service.json, which anyone may see, and referee.json, which is for nobody outside."""

from typing import Any

from pydantic import Field

from fedpriv.core.figure import CurvePoint, EpsilonBound, Figure, Interval
from fedpriv.core.records.ledger import Guarantee
from fedpriv.core.records.reading import Model
from fedpriv.core.settings import absent


class HeadFacts(Model):
    """The certificate of the convex head: public numbers only.

    Attributes:
        regularisation: lambda.
        norm: R, the length of its features.
        features: d, how many.
        examples: n.
        tolerance: tau; training stopped at a gradient of at most half of it.
        sensitivity: Delta, how far replacing one example moves the weights.
    """

    regularisation: float
    norm: float
    features: int
    examples: int
    tolerance: float
    sensitivity: float


class LearntFacts(Model):
    """The network that gives the convex head's features: another run's final model, which its own training protects.

    Attributes:
        run: its folder, as it was told; it is not needed any more.
        model: settings of the network.
        seed: of that run: own networks may draw from it what is no parameter.
        digest: SHA-256 of service/features.safetensors, which has the network's numbers.
        guarantee: what is proven of that run; the endpoint's guarantee includes it.
    """

    run: str
    model: dict[str, Any]
    seed: int
    digest: str
    guarantee: Guarantee


class Service(Model):
    """service.json.

    Attributes:
        method: the policy's short form.
        title: what it is called.
        settings: of the section [service], resolved.
        answers: images that are answered in all.
        scale: of the noise; 0 without.
        delta: of the statement.
        model: digest of the run's final model.
        source: what is answered from: network, head or votes.
        classes: how many.
        shape: (C, H, W) of an image.
        head: its certificate; ``None`` without one.
        models: that vote; 0 without votes.
        guarantee: what is proven about all planned answers together.
        learnt: the network that gives the head's features; ``None``, and not written: they are public.
    """

    method: str
    title: str
    settings: dict[str, Any]
    answers: int
    scale: float
    delta: float
    model: str
    source: str
    classes: int
    shape: tuple[int, int, int]
    head: HeadFacts | None = None
    models: int = 0
    guarantee: Guarantee
    learnt: LearntFacts | None = Field(None, exclude_if=absent)


class AnswersCurve(Model):
    """How often answers are right under one policy, where an epsilon has to last for so many.

    Attributes:
        policy: its name.
        points: answers, and the share of test images that are named correctly.
    """

    policy: str
    points: tuple[CurvePoint, ...]


class Referee(Model):
    """referee.json: figures that depend on private data, for whoever has the folder.

    Attributes:
        accuracy: of the exact scores on test images.
        answered: of answers with noise of their own, which no endpoint ever gives.
        tested: test images.
        gradient_norm: of the convex head at the end of training.
        curves: of each proven policy with the same source, at the endpoint's epsilon; on 1,000 test images at most.
        epsilon: of the curves, where the endpoint's guarantee has more than answers in it; else ``None``, and not
            written.
    """

    accuracy: Interval
    answered: Interval
    tested: int
    gradient_norm: float | None = None
    curves: tuple[AnswersCurve, ...] = ()
    epsilon: float | None = Field(None, exclude_if=absent)


class AnswersAudit(Model):
    """audit.json: what answers and measured neighbours show against what is claimed; for whoever has the folder.

    Attributes:
        method: the policy's short form.
        moved: largest distance of two models whose training data differ in one example, over the proven (head) or the
            claimed (paper) bound: measured, no guarantee.
        shifted: largest change of a logit at a question (test images, replaced images), over the bound of one logit.
        replaced: how many replacements these are the largest of.
        above: share of the replacements whose change of a logit is above the bound.
        claimed: epsilon of one answer, at delta; for ``paper`` nominal. ``None``: nothing is claimed.
        proven: whether the claim is one that is proven.
        bound: lower bound on epsilon of one answer, from a game on the replacement that moved most.
        recovered: share of test images whose exact probabilities two answers give away; ``None``: not tried.
    """

    method: str
    moved: float
    shifted: float
    replaced: int
    above: float
    claimed: float | None
    proven: bool
    bound: EpsilonBound | None
    recovered: float | None = None

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The bound of the game between 0 and what is claimed."""
        if self.bound is None:
            return ()
        return (self.bound.against(self.claimed, self.bound.delta),)

    @property
    def refutes(self) -> bool:
        """Whether the game shows more than is claimed."""
        return any(figure.exceeded for figure in self.figures)


class UserFacts(Model):
    """A user of the endpoint, in users.json.

    Attributes:
        name: in the query ledger.
        key: SHA-256 of the key; the key itself is kept nowhere.
        answers: images that are answered for this user in all.
    """

    name: str
    key: str
    answers: int
