"""A mechanism of somebody else with a theorem: Laplace noise under another name."""

from typing import Literal

from pydantic import Field

from fedpriv.mechanisms.laplace import LaplaceSettings


class DoubledSettings(LaplaceSettings):
    """The same noise, and so the same proof."""

    name: Literal["doubled"] = Field("doubled", description="privacy mechanism")  # type: ignore[assignment]
