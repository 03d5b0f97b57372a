"""An attack of somebody else: white images, whatever was uploaded."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.settings import AttackSettings
from fedpriv.core.settings import NonNegative


class BrightestSettings(AttackSettings):
    """Always white."""

    name: ClassVar[str] = "brightest"
    title: ClassVar[str] = "White images"
    reference: ClassVar[str] = "nobody, 2026"
    made_of: ClassVar[tuple[str]] = ("outside.brightest:_run",)
    iterations: ClassVar[int] = 1
    restarts: ClassVar[int] = 1

    light: NonNegative = Field(1.0, description="of every pixel")


def _run(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: BrightestSettings, report: Report
) -> Outcome:
    count = len(rows)
    white = ((config.light - scene.mean) / scene.std).expand_as(images).clone()
    labels = torch.zeros(images.shape[:2], dtype=torch.int64)
    return Outcome(white, labels, torch.ones(count), torch.ones(count, dtype=torch.int64), ("",) * count)
