"""Fashion-MNIST: garments, 28x28 (Xiao, Rasul and Vollgraf 2017)."""

from fedpriv.core.registry import DATASETS
from fedpriv.data.torchvision_files import IdxFiles


@DATASETS.register
class FashionMnist(IdxFiles):
    """Its mean and standard deviation are those of the complete training set."""

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
