"""A data set of somebody else: bright rows, one class a row."""

from typing import ClassVar

import numpy as np

from fedpriv.data.files import Arrays
from fedpriv.data.source import Packaged


class Stripes(Packaged):
    """8x8 pixels, dark but for one row."""

    name: ClassVar[str] = "stripes"
    title: ClassVar[str] = "Bright stripes"
    mean: ClassVar[tuple[float, ...]] = (0.125,)
    std: ClassVar[tuple[float, ...]] = (0.33,)
    class_names: ClassVar[tuple[str, ...]] = tuple(f"row {row}" for row in range(8))
    where: ClassVar[str] = "made by the package outside"
    examples: ClassVar[int] = 160

    @classmethod
    def arrays(cls) -> Arrays:
        labels = np.arange(cls.examples) % 8
        images = np.zeros((cls.examples, 8, 8), np.uint8)
        images[np.arange(cls.examples), labels] = 255
        return Arrays(images[:128], labels[:128], images[128:], labels[128:], cls.class_names)
