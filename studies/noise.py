"""Attacks on single images behind Gaussian noise, and the guess that needs no upload.

Each victim is a client of the lab with one image, clipped to norm 1, in the first round; networks are untrained, labels
are inferred. The public images are 2,000 test images. Medians with 95 % bootstrap intervals over the victims.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fedpriv.attacks.intervals import median_interval
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, run_attack
from fedpriv.attacks.settings import AttackSettings
from fedpriv.core.config import Experiment, validated
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import World, build_world
from fedpriv.models import MODEL
from studies.arguments import StudyParser, whole
from studies.leakage import heard

ATTACKS = ("closed_form", "iga", "map")
PUBLIC = 2000  # test images that the adversary has


def measure(options: argparse.Namespace, model: str, data: str, sigma: float) -> Iterator[dict[str, Any]]:
    """Yield one row for the guess and one for each attack that can be used."""
    world = build_world(_experiment(options, model, data, sigma))
    clients = range(options.victims)
    originals = torch.cat([world.dataset.x_train[world.uploaded_rows(client, 1)] for client in clients]).float() / 255
    labels = torch.cat([world.dataset.y_train[world.uploaded_rows(client, 1)] for client in clients])
    public = world.dataset.x_test[:PUBLIC].float() / 255
    case = {"model": model, "data": data, "sigma": sigma, "victims": options.victims, "seed": options.seed}
    guess = public.mean(dim=0).expand_as(originals)
    yield {**case, "method": "guess", **_figures(options.seed, guess, originals)}
    for name in options.attacks:
        try:
            yield {**case, **_attack(options, name, world, public, originals, labels)}
        except AttackRefused as error:
            print(f"{model}: {error}", file=sys.stderr)


def _attack(
    options: argparse.Namespace,
    name: str,
    world: World,
    public: Tensor,
    originals: Tensor,
    labels: Tensor,
) -> dict[str, Any]:
    settings, uploads = _settings(options)[name], heard(world)
    began = time.perf_counter()
    made = run_attack(AttackJob(name, uploads, world.model, settings, options.seed, public_images=public))
    seconds = time.perf_counter() - began
    right = torch.cat([each.labels for each in made]) == labels
    images = torch.cat([each.images for each in made])
    figures = _figures(options.seed, images, originals)
    steps = {"iterations": getattr(settings, "iterations", 1)}
    return {"method": name, **figures, **steps, "labels": float(right.float().mean()), "seconds": seconds}


def _figures(seed: int, images: Tensor, originals: Tensor) -> dict[str, Any]:
    """MSE (of each victim, its mean, and its median with an interval) on the [0, 1] scale."""
    errors = (images.clamp(0, 1) - originals).square().flatten(1).mean(dim=1).tolist()
    median = median_interval(errors, numpy_stream(seed, "benchmark interval"))
    mean = sum(errors) / len(errors)
    return {"mse": median.value, "mse_low": median.low, "mse_high": median.high, "mse_mean": mean, "errors": errors}


def _settings(options: argparse.Namespace) -> dict[str, AttackSettings]:
    iga = {"iterations": options.iga_steps, "tv_start": 0.0, "prior": options.prior}  # as documented
    return {
        "closed_form": ClosedFormSettings(prior=options.prior),
        "iga": validated(IgaSettings, iga, "--iga-steps"),
        "map": validated(MapSettings, {"iterations": options.map_steps}, "--map-steps"),
    }


def _experiment(options: argparse.Namespace, model: str, data: str, sigma: float) -> Experiment:
    return validated(
        Experiment,
        {
            "seed": options.seed,
            "data": {"name": data, "train_examples": options.victims},
            "model": MODEL.read_keys({"name": model, "hidden": options.hidden}),
            "federation": {"clients": options.victims, "rounds": 1},
            "training": {"batch_size": 1},
            "mechanism": {"name": "gaussian", "sigma": sigma, "clip_norm": 1.0},
            "adversary": {"victims": options.victims},
        },
        "these arguments",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one line of JSON for each method and case."""
    parser = StudyParser("studies.noise", __doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet", "convnet"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 1024])
    parser.add_argument("--data", nargs="+", default=["fashion-mnist", "cifar10"])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[1e-3, 1e-2])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--victims", type=whole(1), default=16)
    parser.add_argument("--iga-steps", type=whole(1), default=2400)
    parser.add_argument("--map-steps", type=whole(1), default=400)
    parser.add_argument("--seed", type=whole(0), default=11)
    parser.add_argument("--prior", default="", help="file of a trained prior, for closed_form and iga")
    with parser.parsed(arguments) as options:
        _settings(options)  # wrong ones end it before anything is measured
        for case in product(options.models, options.data, options.sigmas):
            for row in measure(options, *case):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
