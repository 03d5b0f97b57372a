"""Keys of changed labels: data.label_epsilon and training.label_correction."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from fedpriv.core.names import LEAST_LABEL_EPSILON, MOST_LABEL_EPSILON
from fedpriv.core.registry import KEYS
from fedpriv.core.sections import AddedKeys, added_value
from fedpriv.core.settings import After, Real, Settings

if TYPE_CHECKING:
    from fedpriv.core.config.experiment import Experiment


class _DataKeys(Settings):
    label_epsilon: Annotated[
        Annotated[Real, Field(ge=LEAST_LABEL_EPSILON, le=MOST_LABEL_EPSILON)] | None, After("groups")
    ] = Field(
        None,
        description="each client changes its labels once, before anything else, by randomised response: pure epsilon "
        "of each label, against everybody; unset: labels are used as they are",
    )


class _TrainingKeys(Settings):
    label_correction: Literal["none", "forward"] = Field(
        "none",
        # Settings that correct no labels have the bytes that they had before labels were changed.
        exclude_if=lambda value: value == "none",
        description="with data.label_epsilon. forward: the loss is of the changed label, whose probability follows "
        "from the model's and from how labels are changed (Patrini et al. 2017); none: the changed label is taken for "
        "the true one",
    )


@KEYS.register
class LabelKeys(AddedKeys):
    """What experiments say of changed labels."""

    name: ClassVar[str] = "labels"
    sections: ClassVar[Mapping[str, type[Settings]]] = {"data": _DataKeys, "training": _TrainingKeys}


class LabelSettings(NamedTuple):
    """What an experiment says of changed labels."""

    epsilon: float | None  # of each label; `None`: labels are used as they are
    corrected: bool  # whether the loss is of the changed label

    @classmethod
    def of(cls, experiment: "Experiment") -> Self:
        """Return what an experiment says."""
        correction: str = added_value(experiment.training, "label_correction")
        return cls(added_value(experiment.data, "label_epsilon"), correction == "forward")
