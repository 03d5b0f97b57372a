"""MNIST: handwritten numerals, 28x28 (LeCun, Cortes and Burges)."""

from typing import ClassVar

from fedpriv.data.torchvision_files import IdxFiles
from fedpriv.registry import DATASETS

__all__ = ["Mnist"]


@DATASETS.register
class Mnist(IdxFiles):
    """Its mean and standard deviation are those of the complete training set."""

    name: ClassVar[str] = "mnist"
    title: ClassVar[str] = "MNIST"
    folder: ClassVar[str] = "MNIST/raw"
    fetcher: ClassVar[str] = "MNIST"
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    classes: ClassVar[int] = 10
