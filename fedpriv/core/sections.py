"""Sections of an experiment that capabilities add: settings.py in a capability's folder registers its own."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from pydantic.fields import FieldInfo

from fedpriv.core.errors import InputError
from fedpriv.core.registry import KEYS, SECTIONS
from fedpriv.core.settings import Settings, absent

if TYPE_CHECKING:
    from torch import nn

    from fedpriv.core.config.experiment import Experiment
    from fedpriv.data.datasets import Dataset


class NoiseInPass(Protocol):
    """Noise in every forward pass of a network, shared out and scaled."""

    def drawing(self, seed: int, *numbers: int, evaluates: bool = False) -> AbstractContextManager[None]:
        """Draw fresh noise inside the block, scaled to the weights as they are now; ``numbers`` name its stream."""


class ForwardNoise(Protocol):
    """Noise that a section puts into every forward pass of the network."""

    def put_into(self, network: "nn.Module", shape: tuple[int, int, int], seed: int) -> "nn.Module":
        """Return the network with the place of its noise, which is silent, on the CPU; refused without such a place."""

    def scaled(self, experiment: "Experiment", dataset: "Dataset", network: "nn.Module") -> NoiseInPass:
        """Share the noise out and scale it, from the initial parameters and public images."""


class ExperimentSection(Settings):
    """A section that an experiment has where its file has it."""

    name: ClassVar[str]  # of the section, `[name]` in a file
    about: ClassVar[str]  # what it is, for people
    rank: ClassVar[int] = 100  # sections are in the order of these numbers
    reads_texts: ClassVar[bool] = False  # whether it goes with data that are texts

    @classmethod
    def of(cls, experiment: "Experiment") -> Self | None:
        """Return this section of an experiment; ``None`` where it has none."""
        found = getattr(experiment, cls.name)
        return found if isinstance(found, cls) else None

    @classmethod
    def required(cls, experiment: "Experiment") -> Self:
        """Return this section of an experiment; an ``InputError`` where it has none."""
        found = cls.of(experiment)
        if found is None:
            raise InputError(f"the experiment has no section [{cls.name}]")
        return found

    def conflicts(self, experiment: "Experiment") -> None:
        """Refuse settings that have no meaning with this section."""

    def forward_noise(self) -> ForwardNoise | None:
        """Return the noise that it puts into the forward pass of the network; ``None``: none."""
        return None

    def decisive(self) -> dict[str, Any]:
        """Return the settings that decide what clients release; empty: none does."""
        return self.model_dump(mode="json")


def forward_noise(experiment: "Experiment") -> ForwardNoise | None:
    """Return the noise inside the forward pass of an experiment's network; ``None``: there is none."""
    asked = (section.forward_noise() for section in given_sections(experiment).values())
    return next((noise for noise in asked if noise is not None), None)


class AddedKeys:
    """Keys that a capability adds to sections of the core."""

    name: ClassVar[str]  # of the capability
    # section -> a class that has the keys; `fedpriv.core.settings.After` says where they stand
    sections: ClassVar[Mapping[str, type[Settings]]]


def added_keys(section: str) -> Iterator[tuple[type[Settings], str, FieldInfo]]:
    """Return for each key that is added to a section of the core the class that adds it, the key and its field."""
    for added in (kind.sections[section] for kind in KEYS.values() if section in kind.sections):
        yield from ((added, key, field) for key, field in added.model_fields.items())


def added_value(section: Settings, key: str) -> Any:
    """Return the value of a key that was added to a section."""
    return getattr(section, key)


def section_fields() -> Iterator[tuple[type[ExperimentSection], str, FieldInfo]]:
    """Return for each registered section its class, its key and its field in an experiment."""
    for name, kind in SECTIONS.items():
        optional: Any = kind | None
        yield kind, name, FieldInfo(annotation=optional, default=None, exclude_if=absent, description=kind.about)


def given_sections(experiment: "Experiment") -> dict[str, ExperimentSection]:
    """Return the registered sections that an experiment has, by name."""
    found = {name: kind.of(experiment) for name, kind in SECTIONS.items()}
    return {name: section for name, section in found.items() if section is not None}
