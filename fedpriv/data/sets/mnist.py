"""MNIST and the data sets in its format: greyscale pictures, 28x28."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from typing_extensions import override

from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays
from fedpriv.data.torchvision_files import IDX_FILES, IdxFiles


@DATASETS.register
class Mnist(IdxFiles):
    """Handwritten numerals (LeCun, Cortes and Burges); mean and standard deviation are of the complete training set."""

    name = "mnist"
    title = "MNIST"
    folder = "MNIST/raw"
    fetcher = "MNIST"
    mean = (0.1307,)
    std = (0.3081,)
    class_names = tuple("0123456789")
    classes = 10


@DATASETS.register
class FashionMnist(IdxFiles):
    """Garments (Xiao, Rasul and Vollgraf 2017); mean and standard deviation are of the complete training set."""

    name = "fashion-mnist"
    title = "Fashion-MNIST"
    folder = "FashionMNIST/raw"
    fetcher = "FashionMNIST"
    mean = (0.2860,)
    std = (0.3530,)
    class_names = (
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
    classes = 10


@DATASETS.register
class Emnist(IdxFiles):
    """EMNIST, balanced: handwritten numerals and letters (Cohen et al. 2017).

    47 classes, letters whose cases look alike joined; the files hold each picture on its side.
    """

    name = "emnist"
    title = "EMNIST, balanced"
    folder = "EMNIST/raw"
    fetcher = "EMNIST"
    options = MappingProxyType({"split": "balanced"})
    stems = tuple(f"emnist-balanced-{stem.replace('t10k', 'test')}" for stem in IDX_FILES)
    mean = (0.1751,)
    std = (0.3332,)
    class_names = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
    classes = 47

    @classmethod
    @override
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        arrays = super().read_folder(folder, memory)
        return replace(arrays, x_train=arrays.x_train.transpose(0, 2, 1), x_test=arrays.x_test.transpose(0, 2, 1))
