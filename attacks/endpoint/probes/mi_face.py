"""MI-FACE with the model in hand: whoever takes part in a federation has it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.access import Access
from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count, NonNegative, Positive, Real

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.attacks.endpoint.inversion import Auxiliary, Cost, Descent, Gradient
    from fedpriv.attacks.scene import ProbeReferee, ProbeScene


@PROBES.register
class MiFace(ModelAttack):
    """A picture of each class by going down the cost of its label."""

    name: ClassVar[str] = "mi-face"
    title: ClassVar[str] = "Model inversion (MI-FACE)"
    reference: ClassVar[str] = (
        "Fredrikson, Jha and Ristenpart: Model Inversion Attacks that Exploit Confidence Information, CCS 2015"
    )
    needs: ClassVar[tuple[Access, ...]] = (Access.MODEL,)

    cost: Literal["1-p", "log"] = Field("log", description="1-p: as printed; log: -log p")
    start: Literal["public", "grey", "black"] = Field(
        "public", description="of every class; public: mean of public images"
    )
    rate: Positive | None = Field(None, description="of a step; unset: 1.0 for log, 0.1 for 1-p")
    steps: Count = Field(120, description="at most (alpha)")
    patience: Count = Field(100, description="steps without gain after which a class ends (beta)")
    gamma: Annotated[Real, Field(gt=0, lt=1)] = Field(0.99, description="probability at which a class ends")
    blur: NonNegative = Field(0.0, description="after each step, standard deviation in pixels; 0: clamp only")
    variation: NonNegative = Field(0.0, description="AuxTerm: weight of the total variation")
    prior: NonNegative = Field(0.0, description="AuxTerm: weight of the normal distribution of public images")

    @override
    def refusal(self, scene: "ProbeScene") -> str | None:
        if scene.public is None and (self.start == "public" or self.prior):
            return (
                f"{self.name} needs public images for start = {self.start!r}, prior = {self.prior:g}, which the threat "
                "model withholds (adversary.knows_public_data = false)"
            )
        return None

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        import torch

        from fedpriv.attacks.endpoint.inversion import inversion_figures, invert, inverted_classes, two_sentences

        gradient, asked = self.gradient(scene)
        pictures, _ = invert(gradient, self._start(scene).expand(scene.classes, *scene.shape), self._descent())
        names = [f"{self.name}-{label:04d}.png" for label in range(scene.classes)]
        floor = torch.full(scene.shape, 0.5, dtype=torch.float64)
        floor = floor if scene.public is None else scene.public.images.mean(dim=0)
        inverted = inverted_classes(referee, pictures, names)
        figures = inversion_figures(referee, inverted, floor)
        shown = {shown_class.picture: pictures[shown_class.label] for shown_class in inverted}
        return (
            self.outcome(
                asked(), figures, *two_sentences(figures), variant=self._variant(), inverted=inverted,
                pictures={**shown, "floor.png": floor}, guess_picture="floor.png",
            ),
        )  # fmt: skip

    def gradient(self, scene: "ProbeScene") -> "tuple[Gradient, Callable[[], int]]":
        """Return what goes down the cost, and how many questions it has taken so far."""
        from fedpriv.attacks.endpoint.inversion import by_model

        if scene.model is None:
            raise ValueError("the scene has no model")
        return by_model(scene.model, self.costs(), self.auxiliary(scene)), lambda: 0

    def costs(self) -> "Cost":
        """The cost of a label's probability."""
        return (lambda shares: 1 - shares) if self.cost == "1-p" else (lambda shares: -shares.clamp(min=1e-300).log())

    def auxiliary(self, scene: "ProbeScene") -> "Auxiliary":
        """What unlikely images cost."""
        from fedpriv.attacks.endpoint.inversion import total_variation
        from fedpriv.attacks.reconstruction.priors import fit_prior

        energy = fit_prior(scene.known_public().images).energy if self.prior else None

        def extra(images: "Tensor") -> "Tensor":
            costs = self.variation * total_variation(images)
            return costs if energy is None else costs + self.prior * energy(images) / 2

        return extra

    def _start(self, scene: "ProbeScene") -> "Tensor":
        import torch

        if self.start == "public":
            return scene.known_public().images.mean(dim=0)
        return torch.full(scene.shape, 0.5 if self.start == "grey" else 0.0, dtype=torch.float64)

    def _descent(self) -> "Descent":
        import math

        from fedpriv.attacks.endpoint.inversion import Descent

        printed = self.cost == "1-p"
        rate = self.rate if self.rate is not None else (0.1 if printed else 1.0)
        enough = 1 - self.gamma if printed else -math.log(self.gamma)
        return Descent(rate, self.steps, self.patience, enough, self.blur)

    def _variant(self) -> str:
        parts = [f"cost {'1 - p' if self.cost == '1-p' else '-log p'}", f"start {self.start}"]
        parts += [f"{key} {value:g}" for key in ("blur", "variation", "prior") if (value := getattr(self, key))]
        return ", ".join(parts)
