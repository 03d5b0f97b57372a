"""The network of pfl-research's CIFAR-10 set-up, as its configuration describes it; 1,626,442 parameters."""

from torch import nn


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Two unpadded convolutions, max-pooling, dropout and a hidden layer, with Xavier weights, for images (C, H, W)."""
    channels, height, width = shape
    features = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    network = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(features, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return network
