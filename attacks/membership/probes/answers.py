"""The attacks of an audit, with answers in place of the model; the shadow attack of Shokri et al. among them."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count

if TYPE_CHECKING:
    from fedpriv.attacks.scene import ProbeReferee, ProbeScene


@PROBES.register
class MembershipByAnswers(ModelAttack):
    """One question a candidate; reference models on the run's own data."""

    name: ClassVar[str] = "membership-answers"
    title: ClassVar[str] = "Membership by answers"
    reference: ClassVar[str] = (
        "Shokri, Stronati, Song and Shmatikov 2017; Ye et al. 2022; Carlini et al. 2022; Zarifzadeh, Liu and "
        "Shokri 2024"
    )

    references: Count = Field(16, description="reference models, even, from 6")
    pairs: Count = Field(500, description="of a member and a non-member, at most")
    population: Count = Field(1000, description="examples of no client that are queried, at most")

    @override
    def refusal(self, scene: "ProbeScene") -> str | None:
        from fedpriv.attacks.membership.answers import need_network

        if self.references < 6 or self.references % 2:
            return f"{self.name}.references = {self.references}: an even number from 6"
        return need_network(scene.known_training().rule, self.name)

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        from fedpriv.attacks.membership.answers import (
            ExactQuestions,
            attack_scores,
            membership_figures,
            signals_by_answers,
            told_words,
            trained_references,
        )
        from fedpriv.attacks.references import draw_game, pairs_within

        rehearsal, endpoint = scene.known_training(), scene.open()
        game = draw_game(rehearsal, pairs_within(scene.budget - 1, self.pairs), scene.seed)
        most = min(self.population, scene.budget - len(game.candidates.rows))
        people, truth = game.candidates.population[:most], game.candidates.truth
        references = trained_references(rehearsal, game, self.references, scene.seed)
        signals = signals_by_answers(rehearsal, game, endpoint, rehearsal.rule, references, people)
        exact = signals_by_answers(rehearsal, game, ExactQuestions(referee), None, references, people)
        figures = membership_figures(attack_scores(signals), truth, scene.proven, scene.seed, raw=attack_scores(exact))
        sentence = f"{endpoint.asked} questions, best attack: {told_words(len(game.candidates.members), figures[0])}"
        return (self.outcome(endpoint.asked, figures, sentence),)
