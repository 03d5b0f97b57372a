"""Equation solving: every number of a logistic or softmax model, from d + 1 answers."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.registry import PROBES

if TYPE_CHECKING:
    from fedpriv.attacks.endpoint.extraction import AffineScores
    from fedpriv.attacks.questions import Questions
    from fedpriv.attacks.scene import ProbeReferee, ProbeScene
    from fedpriv.core.figure import CurvePoint

# How many times d + 1 questions, for answers that are not exact.
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 10.0)

_PROVEN = "d + 1 exact answers determine every number up to a common shift (Tramer et al. 2016, Section 4.1)"
_UNPROVEN = "nothing is proven for fewer than d + 1 answers, or for answers that are not exact"
_PERFECT = "0 is a perfect copy"


@PROBES.register
class EquationSolving(ModelAttack):
    """Random images; one linear system for all classes."""

    name: ClassVar[str] = "equation-solving"
    title: ClassVar[str] = "Extraction by equation solving"
    reference: ClassVar[str] = (
        "Tramer, Zhang, Juels, Reiter and Ristenpart: Stealing Machine Learning Models via Prediction APIs, USENIX "
        "Security 2016"
    )

    @override
    def refusal(self, scene: "ProbeScene") -> str | None:
        from fedpriv.attacks.endpoint.extraction import is_affine

        if scene.labels_only:
            return f"{self.name} solves for probabilities, and this policy names labels only"
        if not is_affine(scene):
            return f"{self.name} is for models whose logits are affine in the image (mlp with hidden = [])"
        return None

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        from fedpriv.attacks.endpoint.extraction import affine_scores, agreement_figures, never_asked
        from fedpriv.core.figure import Figure, Interval

        needed, endpoint = scene.pixels + 1, scene.open()
        solution, curve, exact = self._solve(scene, referee, endpoint)
        figures = agreement_figures(
            referee, solution.logits, never_asked(scene), 1.0 if exact else None, _PROVEN if exact else _UNPROVEN
        )
        error = solution.error(affine_scores(referee.truth, scene.shape))
        last = Figure("error of the numbers", Interval(error, None, None), theorem=_PERFECT, unit="number")
        sentence = (
            f"{endpoint.asked} answers (of exact ones {needed} are enough) give all {scene.classes * needed} "
            f"numbers with an error of {error:.1e} of the largest."
        )
        return (self.outcome(endpoint.asked, (*figures, last), sentence, curve=tuple(curve)),)

    def _solve(
        self, scene: "ProbeScene", referee: "ProbeReferee", endpoint: "Questions"
    ) -> "tuple[AffineScores, list[CurvePoint], bool]":
        """Ask more and more; the last solution, how well each did, and whether answers were exact and enough."""
        import numpy as np

        from fedpriv.attacks.endpoint.extraction import agreement, solved_scores
        from fedpriv.attacks.scene import rounding_unit, uniform_images
        from fedpriv.core.errors import InputError
        from fedpriv.core.figure import CurvePoint
        from fedpriv.core.randomness import numpy_stream

        needed = scene.pixels + 1
        counts = [max(1, int(times * needed)) for times in MULTIPLES if times * needed <= scene.budget]
        counts = counts or [scene.budget]
        images = uniform_images(counts[-1], scene.shape, numpy_stream(scene.seed, "probe-equations"))
        shown, curve = np.empty((0, scene.classes)), []
        for count in counts:
            answers = endpoint.ask(images[len(shown) : count])
            if answers.probabilities is None or np.isnan(answers.probabilities).any():
                raise InputError(f"{self.name} needs every probability, and this policy withholds some")
            shown = np.concatenate([shown, answers.probabilities])
            solution = solved_scores(images[:count], shown)
            curve.append(CurvePoint(count, agreement(referee, solution.logits, referee.held.images).value))
            if count >= needed and not rounding_unit(shown):  # more answers say nothing new
                return solution, curve, True
        return solution, curve, False
