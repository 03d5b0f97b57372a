"""CIFAR-10 with all of its 60,000 images, also where they lie in two .npz files: some of them, and the others."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.sets.cifar10 import Cifar10


@DATASETS.register
class Cifar10Complete(Cifar10):
    """A name of its own: what the first file is under its name must not depend on whether the second is there."""

    name = "cifar10-complete"
    title = "CIFAR-10, complete"
    parts = (Cifar10.name, f"{Cifar10.name}_rest")
