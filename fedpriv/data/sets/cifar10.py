"""CIFAR-10: photographs of 10 kinds of things, 32x32 (Krizhevsky 2009)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.torchvision_files import PickledBatches


@DATASETS.register
class Cifar10(PickledBatches):
    """Its mean and standard deviation are those of the complete training set."""

    name = "cifar10"
    title = "CIFAR-10"
    folder = "cifar-10-batches-py"
    fetcher = "CIFAR10"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    classes = 10
