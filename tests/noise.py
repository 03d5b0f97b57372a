"""Noise that repeats."""

from fedpriv.core.randomness import NoiseStream, Secret

__all__ = ["stream"]


def stream(seed: int = 0) -> NoiseStream:
    """The stream of a number."""
    return Secret.of_seed(seed).stream("test")
