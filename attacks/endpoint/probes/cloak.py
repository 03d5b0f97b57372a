"""What a curious endpoint reads out of cloaked questions, beside uniform noise that costs the same accuracy."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from fedpriv.attacks.access import Access
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.errors import InputError
from fedpriv.core.registry import MODELS, PROBES
from fedpriv.core.settings import Count, Groups, Positive, Registered

if TYPE_CHECKING:
    from fedpriv.attacks.scene import ProbeReferee, ProbeScene


@PROBES.register
class CloakedQuestions(ModelAttack):
    """People learn noise for what they ask; whoever answers trains a network to read an attribute out of it."""

    name: ClassVar[str] = "cloak"
    title: ClassVar[str] = "Reading cloaked questions (Cloak)"
    reference: ClassVar[str] = (
        "Mireshghallah et al.: Not All Features Are Equal: Discovering Essential Features for Preserving Prediction "
        "Privacy, WWW 2021"
    )
    needs: ClassVar[tuple[Access, ...]] = (Access.QUESTIONS, Access.PUBLIC_DATA)
    adversary: ClassVar[str] = "curious-endpoint"

    attribute: Groups | None = Field(
        None, description="groups of the data set's classes, which the adversary tells apart; unset: every class"
    )
    gradient: Literal["model", "answers"] = Field(
        "model", description="what people learn noise with; answers: a copy of the model, trained on its answers"
    )
    weights: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        (3.0, 30.0), description="lambda: of the cross entropy against the noise; one variant for each"
    )
    least: Positive = Field(1e-3, description="m, of a deviation, in pixels from 0 to 1")
    most: Positive = Field(1.5, description="M, of a deviation")
    threshold: Positive = Field(0.75, description="T: pixels with larger deviations are suppressed")
    steps: Count = Field(600, description="in which noise is learnt, and then the constants")
    rate: Positive = Field(0.05, description="of these steps (Adam)")
    clamped: bool = Field(True, description="put images back onto [0, 1], as endpoints want them; false: as published")
    network: Annotated[str, Registered(MODELS)] = Field("strided", description="of the adversary, with its defaults")
    filtered: bool = Field(True, description="whether the adversary takes off noise by a linear filter first")
    training: Count = Field(400, description="steps of the adversary's network")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.least >= self.most:
            raise InputError(key="least", given=self.least, allowed=f"not below most = {self.most:g}")
        return self

    @override
    def refusal(self, scene: "ProbeScene") -> str | None:
        if not scene.finer_classes:
            return (
                f"{self.name} needs an attribute other than the model's task: a run with data.groups, such as "
                "[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]], whose task is the group"
            )
        return None

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        from fedpriv.attacks.endpoint.cloak import read_cloaked

        return read_cloaked(self, scene, referee)
