"""Networks by what ``fedpriv model`` is given, with random weights and random examples."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fedpriv.core.config import Experiment
from fedpriv.core.randomness import torch_stream
from fedpriv.core.world import network_of
from fedpriv.data.datasets import Dataset
from fedpriv.diagnosis.diagnose import CLASSES, fitting

SHORT = 6  # tokens of texts that are attacked: two fill less than the 16 dimensions of most rows, which DAGER needs


@dataclass(frozen=True)
class RandomNetwork:
    """A network, with its library before its name in a table of zoos."""

    name: str
    given: str  # what ``fedpriv model`` is given, words without spaces in them

    @property
    def asked(self) -> argparse.Namespace:
        """The same as the command reads it."""
        parser = argparse.ArgumentParser()
        parser.add_argument("model")
        parser.add_argument("--shape", default="3,32,32")
        parser.add_argument("--batch", type=int, default=16)
        parser.add_argument("--set", action="append", default=[])
        return parser.parse_args(self.given.split())

    @property
    def takes_texts(self) -> bool:
        """Whether the shape is a number of tokens."""
        return str(self.asked.shape).isdecimal()

    def fitting(self, attacks: Sequence[str] = ()) -> tuple[Experiment, Dataset]:
        """Return an experiment with the network and these attacks, and random examples."""
        asked = self.asked
        shape = (SHORT,) if attacks and self.takes_texts else tuple(map(int, asked.shape.split(",")))
        overrides = (*asked.set, f"adversary.attacks=[{', '.join(attacks)}]")
        return fitting(asked.model, overrides, shape, CLASSES, asked.batch)

    def network(self) -> nn.Module:
        """Return the network, each time with the same numbers."""
        return network_of(*self.fitting())

    def batch(self, examples: int) -> tuple[Tensor, Tensor]:
        """Return random inputs as the network takes them, and labels; texts fill their length."""
        _, dataset = self.fitting()
        inputs, labels = dataset.random(examples, torch_stream(0, "benchmark batch", examples))
        return dataset.normalise(inputs), labels
