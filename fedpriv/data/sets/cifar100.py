"""CIFAR-100: photographs of 100 kinds of things, 32x32 (Krizhevsky 2009)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.torchvision_files import PickledBatches


@DATASETS.register
class Cifar100(PickledBatches):
    """Its mean and standard deviation are those of the complete training set."""

    name = "cifar100"
    title = "CIFAR-100"
    folder = "cifar-100-python"
    fetcher = "CIFAR100"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    classes = 100
