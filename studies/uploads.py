"""Attacks on uploads with Gaussian noise, or of several local steps, and the guesses that need no upload.

Each victim is a client of the lab, in the first round; networks are untrained, labels are inferred. With --epochs
clients upload what so many passes over their images change (FedAvg), else the gradient of one batch, clipped to norm 1
where there is noise. Each guess and attack gets one line of JSON: medians over images with 95 % bootstrap intervals,
for which whole uploads are drawn. The weight of the total variation is for iga alone: choose it with one seed, that is
on some images, and report another's figures.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from fedpriv.attacks.baselines import guesses
from fedpriv.attacks.intervals import median_interval
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, run_attack
from fedpriv.attacks.referee import score, score_guesses
from fedpriv.attacks.settings import AttackSettings
from fedpriv.core.config import Experiment, validated
from fedpriv.core.errors import InputError
from fedpriv.core.lab.victims import UploadTarget, truth
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.records import Score
from fedpriv.core.registry import ATTACKS
from fedpriv.core.world import build_world
from fedpriv.models import MODEL
from studies.arguments import StudyParser, whole
from studies.leakage import FIRST, heard

KINDS = ("closed_form", "dlg", "idlg", "iga", "map")
PUBLIC = 2000  # test images that the adversary has
SUCCESS = 0.6  # SSIM from which an image counts as recovered


def measure(options: argparse.Namespace, model: str, data: str, sigma: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each guess, then one for each attack that can be made."""
    world = build_world(_experiment(options, model, data, sigma))
    uploads, truths = heard(world), [truth(world, UploadTarget(FIRST, (client,))) for client in range(options.victims)]
    public, std = world.dataset.x_test[:PUBLIC].float() / 255, world.dataset.std
    offered = guesses(public)
    case = {"model": model, "data": data, "sigma": sigma, "seed": options.seed}
    guessed = [line for truth in truths for line in score_guesses(offered, truth, std, perceptual=False).scores]
    for guess in offered:
        lines = [line for line in guessed if line.attack == guess.name]
        yield {**case, "attack": guess.name, **_figures(lines, options.seed)}
    for settings in _settings(options):
        began = time.process_time()
        try:
            job = AttackJob(settings.name, uploads, world.model, settings, options.seed, public_images=public)
            made = run_attack(job)
        except AttackRefused as error:
            print(f"{model}: {error}", file=sys.stderr)
            continue
        seconds = time.process_time() - began
        pairs = zip(made, truths, strict=True)
        scored = [score(one, "protected", truth, offered, std, SUCCESS, perceptual=False) for one, truth in pairs]
        lines = [line for each in scored for line in each.scores if line.chosen]
        yield {
            **case,
            "attack": settings.name,
            **settings.model_dump(),
            "local_steps": uploads[0].settings.local_steps,
            **_figures(lines, options.seed),
            "labels": sum(bool(line.label_correct) for line in lines) / len(lines),
            "loss": sum(each.loss or 0.0 for each in made) / len(made),
            "seconds": seconds,
        }


def _figures(lines: Sequence[Score], seed: int) -> dict[str, Any]:
    """Medians with intervals over images on the [0, 1] scale, each image's error, and how many were recovered."""
    found: dict[str, Any] = {}
    for figure in ("mse", "psnr"):
        known = [getattr(line, figure) for line in lines]
        stream = numpy_stream(seed, "benchmark interval")
        median = median_interval(known, stream, groups=[line.client for line in lines])
        found |= {figure: median.value, f"{figure}_low": median.low, f"{figure}_high": median.high}
    return {**found, "errors": [line.mse for line in lines], "recovered": sum(line.recovered for line in lines)}


def _settings(options: argparse.Namespace) -> Iterator[AttackSettings]:
    """The settings of each attack, of iga for each weight of the total variation."""
    given = {"iterations": options.steps, "restarts": options.restarts, "prior": options.prior}
    for name in options.attacks:
        for weight in options.tv if name == "iga" else options.tv[:1]:
            keys = {**given, "tv": weight, "tv_start": 0.0}  # constant, as documented
            taken = ATTACKS[name].model_fields
            known = {key: value for key, value in keys.items() if key in taken and value is not None}
            yield validated(ATTACKS[name], known, "these arguments")


def _experiment(options: argparse.Namespace, model: str, data: str, sigma: float) -> Experiment:
    training: dict[str, Any] = {"batch_size": options.batch}
    if options.epochs:
        training |= {"local_epochs": options.epochs, "learning_rate": options.rate}
        training |= {"optimizer": options.optimizer, "momentum": options.momentum}
    tree = {
        "seed": options.seed,
        "data": {"name": data, "train_examples": options.victims * options.examples},
        "model": MODEL.read_keys({"name": model, "hidden": options.hidden}),
        "federation": {
            "clients": options.victims,
            "algorithm": "fedavg" if options.epochs else "fedsgd",
            "rounds": 1,
        },
        "training": training,
        "mechanism": {"name": "gaussian", "sigma": sigma, "clip_norm": 1.0} if sigma else {"name": "none"},
        "adversary": {"victims": options.victims},
    }
    return validated(Experiment, tree, "these arguments")


def _refuse_uneven(options: argparse.Namespace) -> None:
    """Refuse what attacks do not simulate: batches of several sizes, and noise in each step of several passes."""
    if options.examples % options.batch:
        raise InputError(key="--batch", given=options.batch, allowed=f"a divisor of --examples, {options.examples}")
    if options.epochs > 1 and any(options.sigmas):
        raise InputError(key="--sigmas", given=options.sigmas, allowed="0, with several --epochs")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one line of JSON for each guess and attack in each case."""
    parser = StudyParser("studies.uploads", __doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet", "convnet"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 1024], help="of mlp")
    parser.add_argument("--data", nargs="+", default=["fashion-mnist", "cifar10"])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[1e-3, 1e-2], help="0: without noise")
    parser.add_argument("--attacks", nargs="+", default=["closed_form", "iga", "map"], choices=KINDS)
    parser.add_argument("--victims", type=whole(1), default=16)
    parser.add_argument("--examples", type=whole(1), default=1, help="of each victim")
    parser.add_argument("--batch", type=whole(1), default=1)
    parser.add_argument("--epochs", type=whole(0), default=0, help="of local training; 0: one gradient")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--tv", type=float, nargs="+", default=[1e-4])
    parser.add_argument("--steps", type=whole(1), help="of the attacks; default: as many as each makes by default")
    parser.add_argument("--restarts", type=whole(1), default=1)
    parser.add_argument("--seed", type=whole(0), default=11)
    parser.add_argument("--prior", default="", help="file of a trained prior, for closed_form and iga")
    with parser.parsed(arguments) as options:
        _refuse_uneven(options)
        list(_settings(options))  # wrong ones end it before anything is measured
        for case in product(options.models, options.data, options.sigmas):
            for row in measure(options, *case):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
