"""The base of the settings of attacks on uploads of text models, which its modules enter."""

from typing import ClassVar

from pydantic import Field

from fedpriv.attacks.settings import AttackSettings


class TextAttackSettings(AttackSettings):
    """The section ``[adversary.NAME]`` of an attack on texts."""

    is_text: ClassVar[bool] = True
    # one function that reads the sentences behind one upload: (scene, victim, settings, seed, progress) -> Reading. Its
    # random starts are of ``scene.stream(seed, name, victim, restart)``.
    made_of: ClassVar[tuple[str]]
    whole: ClassVar[str] = "fedpriv.attacks.texts.scene:read_texts"
    simulated_by: ClassVar[str] = "fedpriv.attacks.texts.search:simulated_texts"  # the network itself, on tokens


class PriorSettings(TextAttackSettings):
    """The section of an attack that asks a language model how usual a sentence is."""

    language_model: str = Field(
        "", description="a stories260k.npz as prior, for texts of its tokens; empty: a GPT trained on the public texts"
    )
