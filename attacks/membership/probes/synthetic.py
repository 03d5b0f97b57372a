"""The shadow attack by whoever has none of the target's data: shadows are trained on data made in three ways."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count, Real

if TYPE_CHECKING:
    from fedpriv.attacks.scene import ProbeReferee, ProbeScene


@PROBES.register
class MembershipBySynthesis(ModelAttack):
    """Shadows of the run's own training; half of the questions make data, the others are about candidates."""

    name: ClassVar[str] = "membership-synthetic"
    title: ClassVar[str] = "Membership by shadows on made data"
    reference: ClassVar[str] = (
        "Shokri, Stronati, Song and Shmatikov: Membership Inference Attacks against Machine Learning Models, 2017"
    )

    references: Count = Field(8, description="shadow models")
    pairs: Count = Field(500, description="of a member and a non-member, at most")
    records: Count = Field(400, description="made records, at most")
    noise: Annotated[Real, Field(ge=0, le=1)] = Field(
        0.1, description="share of flipped binary features, or deviation, of public records"
    )

    @override
    def refusal(self, scene: "ProbeScene") -> str | None:
        from fedpriv.attacks.membership.answers import need_network

        return need_network(scene.known_training().rule, self.name)

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        from fedpriv.attacks.membership.answers import by_shadows

        return by_shadows(self, scene)
