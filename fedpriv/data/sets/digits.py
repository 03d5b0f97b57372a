"""Optical digits, 8x8, which come with scikit-learn."""

from typing import TYPE_CHECKING

from typing_extensions import override

from fedpriv.core.registry import DATASETS
from fedpriv.data.source import Packaged

if TYPE_CHECKING:
    from fedpriv.data.files import Arrays


@DATASETS.register
class Digits(Packaged):
    """Levels 0 to 16, scaled to 0 to 255; a fixed stratified fifth of them is the test set."""

    name = "digits"
    title = "scikit-learn digits"
    class_names = tuple("0123456789")
    where = "embedded in scikit-learn"
    examples = 1797

    @classmethod
    @override
    def arrays(cls) -> "Arrays":
        import numpy as np
        from sklearn.datasets import load_digits  # a second to import, and only this data set needs it

        from fedpriv.data.files import stratified

        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        return stratified(images, digits.target, 0.2, cls.class_names)
