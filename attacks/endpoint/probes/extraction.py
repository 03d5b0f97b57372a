"""A copy of the model, trained on its answers to random, public and mixed public images; and to labels alone."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Integer

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.attacks.scene import Network, ProbeReferee, ProbeScene


@PROBES.register
class Extraction(ModelAttack):
    """The same architecture; the more answers, the more alike."""

    name: ClassVar[str] = "extraction"
    title: ClassVar[str] = "Extraction by a copy"
    reference: ClassVar[str] = (
        "Tramer et al. 2016; Orekondy, Schiele and Fritz: Knockoff Nets, CVPR 2019; Papernot et al.: Practical "
        "Black-Box Attacks against Machine Learning, 2017"
    )

    points: Annotated[Integer, Field(ge=1, le=20)] = Field(4, description="of the curve, each a fifth of the next")

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        from fedpriv.attacks.endpoint.extraction import never_asked

        guess = never_asked(scene)
        kinds = ["random"] if scene.public is None else ["random", "public", "mixed public"]
        variants = [(kind, scene.labels_only) for kind in kinds]
        if not scene.labels_only:
            variants.append((kinds[-1], True))
        return tuple(self._variant(scene, referee, guess, kind, labels) for kind, labels in variants)

    def _variant(
        self, scene: "ProbeScene", referee: "ProbeReferee", guess: "Network | None", kind: str, labels: bool
    ) -> ProbeOutcome:
        import numpy as np

        from fedpriv.attacks.endpoint.extraction import agreement, agreement_figures, trained_copy
        from fedpriv.attacks.scene import probabilities
        from fedpriv.core.figure import CurvePoint

        endpoint, images = scene.open(), _asked(scene, kind, scene.budget)
        answers = endpoint.ask(images)
        targets = np.eye(scene.classes)[answers.labels] if labels else probabilities(answers, scene.classes)
        counts = sorted({max(1, len(images) // 5**step) for step in range(self.points)})
        copies = [trained_copy(scene, images[:count], targets[:count]) for count in counts]
        curve = tuple(
            CurvePoint(count, agreement(referee, copy, referee.held.images).value)
            for count, copy in zip(counts, copies, strict=True)
        )
        figures = agreement_figures(referee, copies[-1], guess)
        variant = f"{kind} images, {'labels' if labels else 'probabilities'}"
        share, floor = figures[0].measured.value, figures[0].guess
        sentence = (
            f"After {endpoint.asked} answers to {kind} images the copy names the model's class for {share:.1%} of "
        )
        sentence += f"test images{f', {floor:.1%} without a question' if floor is not None else ''}."
        return self.outcome(endpoint.asked, figures, sentence, variant=variant, curve=curve)


def _asked(scene: "ProbeScene", kind: str, count: int) -> "Tensor":
    """The images that are asked about, (n, C, H, W); of public ones as many as there are."""
    from fedpriv.attacks.endpoint.extraction import mixed_images
    from fedpriv.attacks.scene import uniform_images
    from fedpriv.core.randomness import numpy_stream

    generator = numpy_stream(scene.seed, "probe-questions", ["random", "public", "mixed public"].index(kind))
    if kind == "random":
        return uniform_images(count, scene.shape, generator)
    public = scene.known_public()
    return public.images[:count] if kind == "public" else mixed_images(public, count, generator)
