"""The section [erm]: each client trains a convex model to its minimum and releases it once, and the server averages."""

from typing import Annotated, ClassVar

from pydantic import Field

from fedpriv.core.registry import SECTIONS
from fedpriv.core.sections import ExperimentSection
from fedpriv.core.settings import Real
from fedpriv.mechanisms.machinery.base import ClipNorm


@SECTIONS.register
class ErmConfig(ExperimentSection):
    """The objective: the mean loss of a client's examples and lambda/2 |w|^2."""

    name: ClassVar[str] = "erm"
    rank: ClassVar[int] = 3
    about: ClassVar[str] = "a convex model of each client, released once, for federation.algorithm = 'erm'; else unset"

    regularisation: Annotated[Real, Field(ge=1e-9, le=1e9)] = Field(
        1e-3, description="lambda, of lambda/2 |w|^2 in the objective, the constant feature's weight included"
    )
    clip_norm: ClipNorm | None = Field(
        None,
        description="features, a constant 1 among them, are divided by this, and shortened to length 1 where they are "
        "longer; unset: the median length of the first 1,000 test images, which are public",
    )
    tolerance: Annotated[Real, Field(ge=1e-12, le=1)] = Field(
        1e-8, description="tau, the largest length of the objective's gradient at the end of training"
    )
