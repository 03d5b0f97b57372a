"""How well logistic regression trains with each client's whole noise at the client, as privatise adds it.

scikit-learn's digits, 15 images a client (drawn anew from 1,500 where there are more than 100 clients), one step on the
whole share in each round, updates clipped to 1. Momentum, server rate and averaging of rounds are the best of a small
grid on the test images, so figures are from above. Pooled: images averaged to 4 x 4.
"""

import itertools

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from studies.arguments import StudyParser, whole, wholes

Floats = NDArray[np.float64]

TRAINED, SHARE, RATE, CLASSES = 1500, 15, 2.0, 10
GRID = tuple(itertools.product((0.0, 0.5), (0.1, 0.3, 1.0, 3.0), (False, True)))
"""Momentum, server rate, and whether the mean of all rounds' parameters is taken."""


def features(pooled: bool) -> Floats:
    """Return the digits on [-0.5, 0.5] with a constant, in a random order, (N, d / 10)."""
    images = load_digits().images / 16 - 0.3
    images = images.reshape(-1, 4, 2, 4, 2).mean((2, 4)) if pooled else images
    flat = images.reshape(len(images), -1)
    return np.c_[flat, np.ones(len(flat))][order()]


def order() -> NDArray[np.int64]:
    """Return the order of the digits: the first ``TRAINED`` are trained on."""
    return np.random.default_rng(0).permutation(len(load_digits().target))


def accuracy(
    rows: Floats, clients: int, sigma: float, rounds: int, seed: int, momentum: float, rate: float, averaged: bool
) -> float:
    """Return the share of test digits that are right after all rounds."""
    stream, labels = np.random.default_rng(seed), load_digits().target[order()]
    drawn = stream.integers(0, TRAINED, clients * SHARE)
    chosen = (np.arange(TRAINED) if clients * SHARE == TRAINED else drawn).reshape(clients, SHARE)
    given, wanted = rows[chosen], np.eye(CLASSES)[labels[chosen]]
    weights = np.zeros((rows.shape[1], CLASSES))
    speed, kept = np.zeros_like(weights), []
    for _ in range(rounds):
        scores = given @ weights
        likely = np.exp(scores - scores.max(axis=2, keepdims=True))
        likely /= likely.sum(axis=2, keepdims=True)
        updates = RATE * given.swapaxes(1, 2) @ (wanted - likely) / SHARE
        lengths = np.sqrt(np.square(updates).sum((1, 2), keepdims=True))
        mean = (updates / np.maximum(lengths, 1.0)).mean(0)
        speed = momentum * speed + mean + sigma / np.sqrt(clients) * stream.normal(size=weights.shape)
        weights = weights + rate * speed
        kept.append(weights)
    final = np.mean(kept, axis=0) if averaged else weights
    return float(((rows[TRAINED:] @ final).argmax(1) == labels[TRAINED:]).mean())


def main() -> None:
    """Print one line for each number of clients."""
    parser = StudyParser("studies.local_noise", __doc__)
    parser.add_argument("--clients", type=wholes, default=(100, 1000, 3000), help="numbers of clients")
    parser.add_argument("--sigma", type=float, default=6.6, help="of the noise, in clip norms; 0: none")
    parser.add_argument("--rounds", type=whole(1), default=30, help="rounds")
    parser.add_argument("--seeds", type=whole(1), default=2, help="runs, whose mean is taken")
    with parser.parsed() as asked:
        for pooled, clients in itertools.product((False, True), asked.clients):
            rows = features(pooled)
            best = max(
                np.mean(
                    [accuracy(rows, clients, asked.sigma, asked.rounds, seed, *chosen) for seed in range(asked.seeds)]
                )
                for chosen in GRID
            )
            d = rows.shape[1] * CLASSES
            noise = asked.sigma * np.sqrt(d / clients)
            print(f"{clients} clients, d = {d}: the mean's noise is {noise:.1f} clip norms, accuracy {best:.2f}")


if __name__ == "__main__":
    main()
