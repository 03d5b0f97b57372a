"""Fashion-MNIST: garments, 28x28 (Xiao, Rasul and Vollgraf 2017)."""

from typing import ClassVar

from fedpriv.data.torchvision_files import IdxFiles
from fedpriv.registry import DATASETS

__all__ = ["FashionMnist"]


@DATASETS.register
class FashionMnist(IdxFiles):
    """Its mean and standard deviation are those of the complete training set."""

    name: ClassVar[str] = "fashion-mnist"
    title: ClassVar[str] = "Fashion-MNIST"
    folder: ClassVar[str] = "FashionMNIST/raw"
    fetcher: ClassVar[str] = "FashionMNIST"
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    class_names: ClassVar[tuple[str, ...]] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    classes: ClassVar[int] = 10
