"""DAGER on gradients of a transformer with random weights: sentences of full length, by corpus, vocabulary and batch.

Each upload is the gradient of one batch, of four blocks of width 256 on sequences of 16 tokens, without noise. ROUGE-1
is the mean over all true sentences. Needs the folder that FEDPRIV_DATA names.
"""

import time
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.referee import Truth, score
from fedpriv.attacks.texts.uploads.gradients import DagerSettings
from fedpriv.core.config import Experiment, validated
from fedpriv.core.federated import example_losses
from fedpriv.core.names import PAD
from fedpriv.core.records import Score
from fedpriv.core.world import State, World, build_world
from fedpriv.server.tap import observe
from fedpriv.server.uploads import Upload
from studies.arguments import StudyParser, listed, whole, wholes
from studies.leakage import FIRST

LENGTH = 16
CORPORA = ("sst2", "cola")


def main() -> None:
    """Print one line for each corpus, vocabulary and batch."""
    parser = StudyParser("studies.dager", __doc__)
    parser.add_argument("--model", choices=("gpt", "encoder"), default="gpt")
    parser.add_argument("--corpora", type=listed(CORPORA), default=CORPORA)
    parser.add_argument("--vocabularies", type=wholes, default=(512, 8000))
    parser.add_argument("--batches", type=wholes, default=(1, 4, 16))
    parser.add_argument("--uploads", type=whole(1), default=3)
    with parser.parsed() as asked:
        for corpus, vocabulary, batch in product(asked.corpora, asked.vocabularies, asked.batches):
            words = measure(asked.model, corpus, vocabulary, batch, asked.uploads)
            print(asked.model, corpus, vocabulary, batch, *words, flush=True)


def measure(model: str, corpus: str, vocabulary: int, batch: int, uploads: int) -> Iterator[str]:
    """Yield mean ROUGE-1, exact sentences, and the CPU seconds of each upload."""
    lines: list[Score] = []
    seconds = []
    for number in range(uploads):
        world = build_world(_experiment(model, corpus, vocabulary, batch, number + 1))
        rows = _full(world)[number * batch : (number + 1) * batch]
        heard = _heard(world, rows)
        began = time.process_time()
        (reading,) = run_attack(AttackJob("dager", [heard], world.model, DagerSettings(), 0))
        seconds.append(time.process_time() - began)
        tokenizer = None if world.dataset.text is None else world.dataset.text.tokenizer
        truth = Truth(FIRST, 0, world.dataset.x_train[rows], world.dataset.y_train[rows], tokenizer=tokenizer)
        scored = score(reading, "unprotected", truth, (), world.dataset.std, 1.0, perceptual=False)
        lines += [line for line in scored.scores if line.chosen]
    words = [line.words for line in lines if line.words is not None]
    yield f"ROUGE-1 {sum(one.rouge1 for one in words) / len(words):.3f}"
    yield f"exact {sum(one.exact for one in words)} of {len(words)}"
    yield f"CPU seconds {min(seconds):.1f} to {max(seconds):.1f}"


def _experiment(model: str, corpus: str, vocabulary: int, batch: int, seed: int) -> Experiment:
    return validated(
        Experiment,
        {
            "seed": seed,
            "data": {"name": corpus, "text": {"tokenizer": "word", "vocabulary": vocabulary, "length": LENGTH}},
            "model": {"name": model, "width": 256, "depth": 4, "heads": 4},
            "federation": {"clients": 1},
            "training": {"batch_size": batch},
        },
        "these arguments",
    )


def _full(world: World) -> Tensor:
    """The training sequences without padding."""
    return (world.dataset.x_train != PAD).flatten(1).all(dim=1).nonzero().flatten()


def _heard(world: World, rows: Tensor) -> Observation:
    """What is heard of the gradient of one batch."""
    dataset, network = world.dataset, world.model
    loss = example_losses(network(world.network_input(dataset.x_train[rows])), dataset.y_train[rows]).mean()
    names = world.initial.parameters
    gradient = torch.autograd.grad(loss, [value for name, value in network.named_parameters() if name in names])
    upload = Upload(0, len(world.partitions[0]), State(dict(zip(names, gradient, strict=True)), {}))
    (observation,) = observe(world, FIRST, world.initial, [upload])
    return observation


if __name__ == "__main__":
    main()
