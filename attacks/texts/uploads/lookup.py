"""Tokens read off the gradient of the table of their vectors."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.texts.settings import PriorSettings
from fedpriv.core.registry import ATTACKS

if TYPE_CHECKING:
    from fedpriv.attacks.reconstruction.scene import Progress
    from fedpriv.attacks.reconstruction.upload_model import Victim
    from fedpriv.attacks.texts.scene import Reading, TextScene


@ATTACKS.register
class LookupSettings(PriorSettings):
    """Rows of the table of tokens that have a gradient, and the places that they belong to."""

    name: ClassVar[str] = "lookup"
    title: ClassVar[str] = "Rows of the table of tokens"
    label: ClassVar[str] = "Lookup"
    reference: ClassVar[str] = (
        "after Melis, Song, De Cristofaro and Shmatikov: Exploiting Unintended Feature Leakage in Collaborative "
        "Learning, S&P 2019 (section 4.1); places by the table of positions"
    )
    simulates: ClassVar[bool] = False

    @override
    def read(self, scene: "TextScene", victim: "Victim", seed: int, progress: "Progress") -> "Reading":
        from fedpriv.attacks.texts.lookup import read_lookup
        from fedpriv.attacks.texts.scene import Reading
        from fedpriv.attacks.texts.scoring import Language, Texts
        from fedpriv.attacks.texts.search import Ground

        lookup = read_lookup(scene, victim)
        language = Language.of(scene, self.language_model)
        ground = Ground.of(scene, victim)
        read = lookup.sentences(scene, victim.model.examples, language)
        return Reading((ground.sentences(Texts(read, ground.labels), 0.0, 1),), language.title)
