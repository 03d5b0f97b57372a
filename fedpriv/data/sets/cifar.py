"""CIFAR-10 and CIFAR-100: photographs of things, 32x32 (Krizhevsky 2009)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.torchvision_files import PickledBatches


@DATASETS.register
class Cifar10(PickledBatches):
    """10 kinds of things; mean and standard deviation are those of the complete training set."""

    name = "cifar10"
    title = "CIFAR-10"
    folder = "cifar-10-batches-py"
    fetcher = "CIFAR10"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    classes = 10


@DATASETS.register
class Cifar10Complete(Cifar10):
    """All of the 60,000 images, also where they lie in two .npz files: some of them, and the others.

    A name of its own: what the first file is under its name must not depend on whether the second is there.
    """

    name = "cifar10-complete"
    title = "CIFAR-10, complete"
    parts = (Cifar10.name, f"{Cifar10.name}_rest")


@DATASETS.register
class Cifar100(PickledBatches):
    """100 kinds of things; mean and standard deviation are those of the complete training set."""

    name = "cifar100"
    title = "CIFAR-100"
    folder = "cifar-100-python"
    fetcher = "CIFAR100"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    classes = 100
