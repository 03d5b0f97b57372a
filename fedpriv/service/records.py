"""What an endpoint is: service.json, which anyone may see, and referee.json, which is for nobody outside."""

import json
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from fedpriv.core.errors import InputError
from fedpriv.core.figure import CurvePoint, EpsilonBound, Figure, Interval
from fedpriv.core.reading import FileRecord, GrowingRecord, read_file, read_text
from fedpriv.core.records import Guarantee
from fedpriv.core.runs import Files
from fedpriv.core.settings import absent
from fedpriv.service.ledger import Opening, QueryLedger


class HeadFacts(GrowingRecord):
    """The certificate of the convex head: public numbers only."""

    regularisation: float  # lambda
    norm: float  # R, the length of its features
    features: int  # d, how many
    examples: int  # n
    tolerance: float  # tau; training stopped at a gradient of at most half of it
    sensitivity: float  # Delta, how far replacing one example moves the weights


class LearntFacts(GrowingRecord):
    """The network that gives the convex head's features: another run's final model, which its own training protects."""

    run: str  # its folder, as it was told; it is not needed any more
    model: dict[str, Any]  # settings of the network
    seed: int  # of that run: own networks may draw from it what is no parameter
    digest: str  # SHA-256 of service/features.safetensors, which has the network's numbers
    guarantee: Guarantee  # what is proven of that run; the endpoint's guarantee includes it


class Service(FileRecord):
    """service.json."""

    path: ClassVar[str] = "service/service.json"

    method: str  # the policy's short form
    title: str  # what it is called
    settings: dict[str, Any]  # of the section [service], resolved
    answers: int  # images that are answered in all
    scale: float  # of the noise; 0 without
    delta: float  # of the statement
    model: str  # digest of the run's final model
    source: str  # what is answered from: network, head or votes
    classes: int  # how many
    shape: tuple[int, int, int]  # (C, H, W) of an image
    head: HeadFacts | None = None  # its certificate; `None` without one
    models: int = 0  # that vote; 0 without votes
    guarantee: Guarantee  # what is proven about all planned answers together
    # the network that gives the head's features; `None`, and not written: they are public
    learnt: LearntFacts | None = Field(None, exclude_if=absent)


class AnswersCurve(GrowingRecord):
    """How often answers are right under one policy, where an epsilon has to last for so many."""

    policy: str  # its name
    points: tuple[CurvePoint, ...]  # answers, and the share of test images that are named correctly


class Referee(FileRecord):
    """referee.json: figures that depend on private data, for whoever has the folder."""

    path: ClassVar[str] = "service/referee.json"

    accuracy: Interval  # of the exact scores on test images
    answered: Interval  # of answers with noise of their own, which no endpoint ever gives
    tested: int  # test images
    gradient_norm: float | None = None  # of the convex head at the end of training
    # of each proven policy with the same source, at the endpoint's epsilon; on 1,000 test images at most
    curves: tuple[AnswersCurve, ...] = ()
    # of the curves, where the endpoint's guarantee has more than answers in it; else `None`, and not written
    epsilon: float | None = Field(None, exclude_if=absent)


class AnswersAudit(FileRecord):
    """audit.json: what answers and measured neighbours show against what is claimed; for whoever has the folder."""

    path: ClassVar[str] = "service/audit.json"

    method: str  # the policy's short form
    # largest distance of two models whose training data differ in one example, over the proven (head) or the claimed
    # (paper) bound: measured, no guarantee
    moved: float
    # largest change of a logit at a question (test images, replaced images), over the bound of one logit
    shifted: float
    replaced: int  # how many replacements these are the largest of
    above: float  # share of the replacements whose change of a logit is above the bound
    claimed: float | None  # epsilon of one answer, at delta; for `paper` nominal. `None`: nothing is claimed.
    proven: bool  # whether the claim is one that is proven
    bound: EpsilonBound | None  # lower bound on epsilon of one answer, from a game on the replacement that moved most
    # share of test images whose exact probabilities two answers give away; `None`: not tried
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


class UserFacts(GrowingRecord):
    """A user of the endpoint, in users.json."""

    name: str  # in the query ledger
    key: str  # SHA-256 of the key; the key itself is kept nowhere
    answers: int  # images that are answered for this user in all


def made_service(run: Path) -> Service:
    """Return what a run's endpoint is."""
    if not (run / "config.toml").is_file():
        raise InputError(f"{run} is not the folder of a run: it has no config.toml")
    service = Files(run).read(Service)
    if service is None:
        make = f"fedpriv serve {run} --status --set service.method=METHOD"
        raise InputError(f"{run} has no endpoint yet: make it with {make}")
    return service


def answered(run: Path) -> Mapping[str, int]:
    """Return how many answers were charged to each user; the query ledger itself says whether its chain is whole."""
    lines = (read_text(run / "service" / "charges.jsonl") or "").splitlines()[1:]
    return Counter(map(_charged_user, lines))


def users(run: Path) -> tuple[UserFacts, ...]:
    """Return the users of an endpoint; without any, whoever reaches it asks as the folder's owner."""
    return read_file(run / "service" / "users.json", tuple[UserFacts, ...]) or ()


def query_ledger(run: Path, service: Service) -> QueryLedger:
    """Open the ledger of an endpoint."""
    content = (run / "service" / "service.json").read_bytes()
    limits: Mapping[str, int] = {user.name: user.answers for user in users(run)}
    return QueryLedger(run / "service" / "charges.jsonl", Opening(sha256(content).hexdigest(), service.answers), limits)


def _charged_user(line: str) -> str:
    """Who a line of the query ledger charges; empty: it was cut off."""
    try:
        return str(json.loads(line)["user"])
    except (ValueError, TypeError, KeyError):
        return ""
