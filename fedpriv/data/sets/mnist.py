"""MNIST: handwritten numerals, 28x28 (LeCun, Cortes and Burges)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.torchvision_files import IdxFiles


@DATASETS.register
class Mnist(IdxFiles):
    """Its mean and standard deviation are those of the complete training set."""

    name = "mnist"
    title = "MNIST"
    folder = "MNIST/raw"
    fetcher = "MNIST"
    mean = (0.1307,)
    std = (0.3081,)
    class_names = tuple("0123456789")
    classes = 10
