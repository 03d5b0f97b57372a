"""CIFAR-10 and CIFAR-100: photographs of things, 32x32 (Krizhevsky 2009)."""

from pathlib import Path

import numpy as np
from typing_extensions import override

from fedpriv.core.errors import InputError, one_line
from fedpriv.core.registry import DATASETS
from fedpriv.data.files import Arrays
from fedpriv.data.torchvision_files import Torchvision, torchvision_class


class PickledBatches(Torchvision):
    """Pickled batches of 60,000 images, as the CIFARs are published."""

    @classmethod
    @override
    def read_folder(cls, folder: Path, memory: int) -> Arrays:
        """Read the batches by torchvision, which compares their MD5 sums before it unpickles them."""
        read = torchvision_class(cls.fetcher)
        try:
            train, test = (read(folder.parent, train=part, download=False) for part in (True, False))
        except RuntimeError as error:
            raise InputError(f"{folder}: {one_line(error)}; delete the folder and load again") from None
        names = tuple(map(str, train.classes))
        return Arrays(train.data, np.asarray(train.targets), test.data, np.asarray(test.targets), names)

    @classmethod
    @override
    def count_folder(cls, folder: Path) -> int:
        return 60_000  # the only size that torchvision accepts


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
