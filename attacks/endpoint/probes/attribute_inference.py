"""Hidden features of records, from the rest of them and the model's answers."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.access import Access
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count

if TYPE_CHECKING:
    from fedpriv.attacks.scene import ProbeReferee, ProbeScene


@PROBES.register
class AttributeInference(ModelAttack):
    """The adversary has a record but for one feature, and public records for the prior; members beside others."""

    name: ClassVar[str] = "attribute-inference"
    title: ClassVar[str] = "Attribute inference"
    reference: ClassVar[str] = (
        "Fredrikson et al.: Privacy in Pharmacogenetics, 2014; Yeom, Giacomelli, Fredrikson and Jha: Privacy Risk in "
        "Machine Learning, 2018"
    )
    needs: ClassVar[tuple[Access, ...]] = (Access.ANSWERS, Access.PUBLIC_DATA)

    features: Count = Field(8, description="that are hidden, one at a time: those that vary most")
    pairs: Count = Field(200, description="of a member and a non-member, at most")

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        import numpy as np

        from fedpriv.accounting.ceiling import membership_advantage
        from fedpriv.attacks.endpoint.attributes import attributes, guessed_values, truth_of
        from fedpriv.attacks.intervals import rate_interval
        from fedpriv.attacks.references import draw_game, pairs_within
        from fedpriv.core.figure import Figure, Interval

        endpoint, hidden = scene.open(), attributes(scene.known_public(), self.features)
        count = pairs_within(scene.budget, self.pairs, 2 * len(hidden))
        game = draw_game(scene.known_training(), count, scene.seed)
        images, labels = game.asked()
        truth = np.stack([truth_of(attribute, images) for attribute in hidden])
        right = np.stack([guessed_values(endpoint, attribute, images, labels) for attribute in hidden]) == truth
        prior = np.array([attribute.prior > 0.5 for attribute in hidden])[:, None] == truth
        member, total = game.candidates.truth, right[:, game.candidates.truth].size
        figures = [
            Figure(
                f"hidden features right, {who}",
                rate_interval(int(right[:, which].sum()), total),
                float(prior[:, which].mean()),
                theorem="the prior alone is the guess; features follow from one another, which no epsilon bounds",
            )
            for who, which in (("members", member), ("others", ~member))
        ]
        # Features of one record are not independent: the interval is over records.
        each = right.mean(axis=0)
        difference = float(each[member].mean() - each[~member].mean())
        reach = 1.96 * float(np.sqrt((each[member].var(ddof=1) + each[~member].var(ddof=1)) / count))
        proven = scene.proven
        ceiling = (
            None if proven is None or proven.epsilon is None else membership_advantage(proven.epsilon, proven.delta)
        )
        advantage = Figure(
            "members' advantage over others",
            Interval(difference, difference - reach, difference + reach),
            0.0,
            ceiling=ceiling,
            theorem="no epsilon under replace-one is proven"
            if ceiling is None
            else "Yeom et al. 2018, total variation",
        )
        sentence = (
            f"{endpoint.asked} questions: for members {figures[0].measured.value:.1%} of the hidden features are "
            f"right, for others {figures[1].measured.value:.1%}; the prior alone has {figures[0].guess:.1%}."
        )
        return (self.outcome(endpoint.asked, (*figures, advantage), sentence),)
