"""The network, the data, and how it is trained."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.fc1 = nn.Linear(8 * 8 * 8, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv1(x))
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))


def load_data(partition: int, partitions: int, images: int, batch_size: int) -> DataLoader:
    """Each client's own images, normalised as pictures mostly are."""
    digits = load_digits()
    rows = list(range(partition, len(digits.target), partitions))[:images]
    x = torch.tensor(digits.images[rows], dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target[rows])
    return DataLoader(TensorDataset((x - 0.5) / 0.5, y), batch_size=batch_size, shuffle=True)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(loader)


def test(net: nn.Module, loader: DataLoader) -> float:
    net.eval()
    with torch.no_grad():
        return sum(int((net(images).argmax(1) == labels).sum()) for images, labels in loader) / len(loader.dataset)
