"""The base of all attacks' settings, and the interface by which the rest of the project uses an attack."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedpriv.core.errors import InputError
from fedpriv.core.registry import ATTACKS, suggestion
from fedpriv.core.settings import Count, Integer, Settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedpriv.attacks.reconstruction.results import Outcome
    from fedpriv.attacks.simulation import Simulation
    from fedpriv.attacks.threat import ThreatModel
    from fedpriv.core.records import Score
    from fedpriv.gradients import Vector


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


# A sum of several clients' uploads serves as well: it is an upload of their examples together.
GRADIENT_MATCHING = (Access.PARAMETERS, Access.SUM, Access.BATCH_SIZE)

PriorFile = Annotated[
    str, Field(description="file of a prior that fedpriv attack train-prior has trained; empty: none")
]
Restarts = Annotated[Count, Field(description="random starts; the one with the lowest loss of its own is kept")]

# Of the parts of a recipe.
ObjectiveName = Literal["squared-distance", "cosine", "likelihood"]
OptimiserName = Literal["lbfgs", "adam", "signed-adam", "soft-signed-adam"]
ScheduleName = Literal["constant", "steps", "cosine"]
StartName = Literal["normal", "uniform", "patterned", "public-mean", "closed-form", "features"]


@dataclass(frozen=True)
class Recipe:
    """Parts of an attack, one of each kind. All of them combine.

    They are what it minimises (objective and priors), in which variables, how (optimiser, schedule), from where
    (start), and where labels come from.
    """

    objective: ObjectiveName  # a key of OBJECTIVES
    optimiser: OptimiserName  # lbfgs, in float64, or a key of SIGNS
    schedule: ScheduleName = "constant"  # of Adam's learning rate: a key of SCHEDULES
    variables: Literal["pixels", "decorrelated", "relaxed"] = "pixels"  # of the search
    # a key of STARTS or of FOUND
    start: StartName = "normal"
    box: bool = False  # whether images stay within the valid range of pixels
    priors: tuple[Literal["tv", "opponents", "public_mean", "gaussian", "denoiser"], ...] = ()  # keys of PRIORS
    labels: tuple[Literal["known", "read", "optimised"], ...] = ("known", "read", "optimised")  # in this order
    otherwise: Literal["", "patterned"] = ""  # the start where images cannot be found; empty: the attack refuses

    @property
    def parts(self) -> Mapping[str, str]:
        """Kind of part -> part, for people."""
        return {
            "objective": self.objective,
            "prior": ", ".join([*(["box"] if self.box else []), *self.priors]) or "none",
            "variables": self.variables,
            "optimiser": self.optimiser,
            "schedule": "line search" if self.optimiser == "lbfgs" else self.schedule,
            "start": f"{self.start}, else {self.otherwise}" if self.otherwise else self.start,
            "labels": ", else ".join(self.labels),
        }


Runs = Callable[..., "Outcome"]
"""What runs an attack on a chunk of rows: (scene, rows, images, logits, settings, report) -> Outcome."""


class AttackSettings(Settings):
    """The section ``[adversary.NAME]``; an attack is a subclass with a name, entered in ``ATTACKS``."""

    name: ClassVar[str]  # in the experiment file
    title: ClassVar[str]  # what it is called
    label: ClassVar[str] = ""  # the same, short; empty: the title
    reference: ClassVar[str]  # the paper
    needs: ClassVar[tuple[Access, ...]] = GRADIENT_MATCHING  # what the threat model must grant
    # the settings whose best value depends on the data and the noise (`fedpriv attack tune`)
    tunable: ClassVar[tuple[str, ...]] = ()
    smooth: ClassVar[bool] = False  # whether it needs a network that can be differentiated twice everywhere
    stacks: ClassVar[bool] = False  # whether it can use uploads of other batches of one client's images together
    is_text: ClassVar[bool] = False  # whether it reads texts, rather than images or rows of tables
    is_of_rows: ClassVar[bool] = False  # whether it reads rows of tables only
    # whether it searches for examples by simulating uploads, so that it finds nothing where the simulation is
    # wrong; else it reads them off the upload
    simulates: ClassVar[bool] = True
    # functions are named as module:function and imported when asked for
    made_of: ClassVar[tuple[Recipe | str, ...]]  # its parts, or what runs it; a victim's restarts take turns
    whole: ClassVar[str] = ""  # what attacks all uploads of a job; empty: its parts do, a chunk of rows at a time
    simulated_by: ClassVar[str] = "fedpriv.attacks.simulation:simulated_images"

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """Raise TypeError where an attack that runs in chunks lacks what its rows are made by."""
        if not hasattr(cls, "made_of") or cls.whole:
            return
        for key in ("iterations", "restarts"):
            if key not in cls.model_fields and not hasattr(cls, key):
                raise TypeError(f"{cls.__qualname__} lacks {key}: a setting, or a ClassVar that is 1")

    @classmethod
    def simulation(cls) -> "Simulation":
        """What it takes for a client's upload, which is compared with the clients' own before its failure counts."""
        return resolve_name(cls.simulated_by)

    @classmethod
    def runs(cls) -> tuple[Runs, ...]:
        """What runs it on a chunk of rows, for a victim's restarts in turn."""
        from fedpriv.attacks.reconstruction.recipes import run_recipe

        return tuple(
            partial(run_recipe, each) if isinstance(each, Recipe) else resolve_name(each) for each in cls.made_of
        )

    @classmethod
    def parts(cls) -> Mapping[str, str]:
        """Kind of part -> part, or the parts that restarts take in turn; empty where it is not made of these."""
        recipes = [recipe.parts for recipe in cls.made_of if isinstance(recipe, Recipe)]
        kinds = recipes[0] if recipes else ()
        return {kind: " and in turn ".join(dict.fromkeys(parts[kind] for parts in recipes)) for kind in kinds}

    @classmethod
    def picks(cls) -> bool:
        """Whether it picks images out of a list, rather than making any."""
        return Access.CANDIDATES in cls.needs

    @classmethod
    def active(cls) -> bool:
        """Whether the clients must have been sent parameters of the adversary's own making: a worst case."""
        return Access.ACTIVE in cls.needs


class MatchingSettings(AttackSettings):
    """Settings of attacks that optimise from random starts."""

    iterations: Count
    restarts: Count = Field(1, description="random starts; the one with the lowest loss of its own is kept")


class ActiveSettings(AttackSettings):
    """Settings of attacks on uploads of parameters that the server made: a worst case."""

    needs: ClassVar[tuple[Access, ...]] = (*GRADIENT_MATCHING, Access.PUBLIC_DATA, Access.ACTIVE)
    simulates: ClassVar[bool] = False
    restarts: ClassVar[int] = 1

    public_examples: Annotated[Integer, Field(ge=2, le=10_000_000)] = Field(
        10_000, description="public images (test images), at most, from which the parameters are made"
    )

    @abstractmethod
    def craft(self, model: "nn.Module", public_images: "Tensor", threat: "ThreatModel") -> "Vector":
        """Return what clients are sent, of public images (M, C, H, W), normalised; refuse networks that do not suit."""


def known_attack(name: str) -> type[AttackSettings]:
    """Return the settings of an attack."""
    if not isinstance(name, str) or name not in ATTACKS:
        raise InputError(f"attack {name!r} is not known{suggestion(str(name), tuple(ATTACKS))}")
    return ATTACKS[name]


def is_active(label: str) -> bool:
    """Whether an attack, by its name or as scores call it, needs parameters of the adversary's making."""
    name = label.partition(",")[0]
    return name in ATTACKS and bool(ATTACKS[name].active())


def by_conduct(scores: Sequence["Score"]) -> dict[bool, list["Score"]]:
    """Return the scores of uploads of parameters that the server had made (True), and all others with their guesses."""
    made = {score.source for score in scores if is_active(score.attack)}
    parts: dict[bool, list[Score]] = {False: [], True: []}
    for score in scores:
        parts[score.source in made].append(score)
    return parts
