"""Tokens of batches, found in noisy gradients of a transformer's first layer, with a guess and a ceiling.

Each client uploads one gradient of sequences of Shakespeare's text through the pretrained Llama, or of sentences of
SST-2 through an untrained GPT or encoder of two blocks and width 256; of all parameters, or of adapters of rank 4,
whose second factors are drawn at random as if they had been trained. With noise it is clipped to 1. A token that was
found counts if it occurs in the batch; the guess names as many tokens, those that are most frequent in public texts;
the ceiling is the proven one of its rate. ``picked``: the most probable of 100 sentences for the first of each batch,
the others known, which no decision is right more often than; a guess is right in 1 %, and its ceiling is printed, too.
Ends with 1 if a rate is above its ceiling by more than chance allows (1 %). Needs the folder that FEDPRIV_DATA names.
"""

import sys
from dataclasses import replace
from itertools import product

import torch
from scipy.stats import binom

from fedpriv.accounting.ceiling import quick_ceiling
from fedpriv.attacks.texts.dager import likely_tokens
from fedpriv.core.config import Experiment, validated
from fedpriv.core.names import PAD
from fedpriv.core.world import State, World, build_world
from studies.arguments import StudyParser, listed, whole, wholes
from studies.leakage import FIRST, heard
from studies.text_search import CHANCE, LISTED, is_picked, scene_of

NOISE = (
    ("none", "", 0.0),
    ("gaussian", "sigma", 0.001),
    ("gaussian", "sigma", 0.01),
    ("gaussian", "sigma", 0.5),
    ("vmf", "kappa", 1e6),
    ("vmf", "kappa", 1e5),
    ("vmf", "kappa", 1e3),
)
NETWORKS = ("llama", "lora", "gpt", "gpt-lora", "encoder")
ADAPTED = 0.02  # the deviation of the adapters' second factors


def main() -> None:
    """Print one line for each network, batch and mechanism."""
    parser = StudyParser("studies.sparse_tokens", __doc__)
    parser.add_argument("--networks", type=listed(NETWORKS), default=NETWORKS)
    parser.add_argument("--batches", type=wholes, default=(1, 4, 16))
    parser.add_argument("--clients", type=whole(1), default=4)
    parser.add_argument("--length", type=whole(2), default=16)
    above = False
    with parser.parsed() as options:
        for network, batch, (name, key, value) in product(options.networks, options.batches, NOISE):
            mechanism: dict[str, object] = {"name": name} | ({key: value} if key else {})
            mechanism |= {"clip_norm": 1.0} if name == "gaussian" else {}
            cells, is_above = _measured(_world(network, batch, options.clients, options.length, mechanism))
            print(network, batch, name, value, *cells, sep=", ", flush=True)
            above = above or is_above
    sys.exit(int(above))


def _measured(world: World) -> tuple[list[str], bool]:
    """Tokens that occur and were found, wrong ones, the guess and its ceiling; sentences picked, and their ceiling."""
    scene, victims = scene_of(world, heard(world, _adapted(world)))
    frequent = world.dataset.x_test.flatten().long().bincount(minlength=scene.format.vocabulary)
    frequent[[PAD, *scene.opening]] = 0
    right = occurring = wrong = guessed = picked = 0
    for victim in victims:
        found = likely_tokens(scene, victim, scene.with_parameters(victim.parameters))
        named = set() if found is None else {*found.tolist()}
        rows = world.uploaded_rows(victim.client, FIRST)
        true = {*world.dataset.x_train[rows].flatten().long().tolist()} - {PAD, *scene.opening}
        right, occurring, wrong = right + len(named & true), occurring + len(true), wrong + len(named - true)
        guessed += len({*frequent.topk(len(true)).indices.tolist()} & true)
        picked += is_picked(scene, victim, world, rows)
    release = world.plans[victims[0].client].accounted((FIRST,))
    limits = [quick_ceiling(release, chance) for chance in (guessed / occurring, 1 / LISTED)]
    counts = ((right, occurring), (picked, len(victims)))
    above = any(binom.sf(count - 1, of, limit) < CHANCE for (count, of), limit in zip(counts, limits, strict=True))
    cells = [f"found {right} of {occurring}", f"wrong {wrong}", f"guess {guessed}", f"ceiling {limits[0]:.3f}"]
    return [*cells, f"picked {picked} of {len(victims)}", f"ceiling {limits[1]:.3f}"], above


def _adapted(world: World) -> State:
    """The initial state, with second factors of adapters that are not zero."""
    stream = torch.Generator().manual_seed(1)
    parameters = {
        name: torch.randn(value.shape, generator=stream) * ADAPTED if "lora_B" in name else value
        for name, value in world.initial.parameters.items()
    }
    return replace(world.initial, parameters=parameters)


def _world(network: str, batch: int, clients: int, length: int, mechanism: dict[str, object]) -> World:
    pretrained = network in ("llama", "lora")
    text = {"tokenizer": "llama", "pack": True} if pretrained else {"tokenizer": "word", "vocabulary": 4096}
    sizes = {"name": "llama"} if pretrained else {"name": network.split("-")[0], "width": 256, "depth": 2}
    tree = {
        "seed": 1,
        "data": {
            "name": "shakespeare" if pretrained else "sst2",
            "partition": "key" if pretrained else "iid",
            "text": {"length": length, "tests": 512} | text,
        }
        | ({} if pretrained else {"train_examples": 4000}),
        "model": sizes | ({"lora_rank": 4} if "lora" in network else {}),
        "federation": {"clients": clients, "rounds": 1},
        "training": {"batch_size": batch},
        "mechanism": mechanism,
        "adversary": {"victims": clients},
    }
    return build_world(validated(Experiment, tree, "these arguments"))


if __name__ == "__main__":
    main()
