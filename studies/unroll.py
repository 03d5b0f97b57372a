"""Attacks on FedAvg updates of several local steps, which are unrolled on the dummies.

Each victim is a client of the lab with so many CIFAR-10 images, in the first round. Labels are inferred. The weight of
the total variation is for iga alone: choose it with one seed, that is on some images, and report another's figures.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from fedpriv.attacks.baselines import best_guess_mse, guesses
from fedpriv.attacks.intervals import median_interval
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.dlg import DlgSettings, IdlgSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.referee import Truth, score
from fedpriv.attacks.settings import AttackSettings, MatchingSettings
from fedpriv.core.config import Experiment, validated
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.world import build_world
from studies.arguments import StudyParser, whole
from studies.leakage import heard

SUCCESS = 0.6  # SSIM from which an image counts as recovered


def measure(options: argparse.Namespace, tv: float) -> dict[str, Any]:
    """Return one row: the figures of all victims with one weight of the total variation."""
    world = build_world(_experiment(options))
    uploads, config = heard(world), _settings(options, tv)
    began = time.process_time()
    made = run_attack(AttackJob(options.attack, uploads, world.model, config, options.seed))
    seconds = time.process_time() - began
    guess = guesses(world.dataset.x_test[:1000].float() / 255)
    scores, guessed = [], []
    for client, reconstruction in enumerate(made):
        rows = world.uploaded_rows(client, 1)
        truth = Truth(1, client, world.dataset.x_train[rows].float() / 255, world.dataset.y_train[rows])
        scored = score(reconstruction, "unprotected", truth, guess, world.dataset.std, SUCCESS, perceptual=False)
        scores += [line for line in scored.scores if line.chosen]
        guessed.append(-10 * best_guess_mse(guess, truth.images, truth.labels).log10())
    generator = numpy_stream(options.seed, "benchmark interval")
    known = [(line.psnr, line.client) for line in scores if line.psnr is not None]
    psnr = median_interval([level for level, _ in known], generator, groups=[client for _, client in known])
    asked = {key: value for key, value in vars(options).items() if key not in ("tv", "rate", "steps")}
    return {
        **asked,
        "learning_rate": options.rate,
        "iterations": options.steps,
        "local_steps": uploads[0].settings.local_steps,
        "tv": tv if options.attack == "iga" else None,
        "psnr": psnr.value,
        "psnr_low": psnr.low,
        "psnr_high": psnr.high,
        "guess_psnr": float(torch.cat(guessed).quantile(0.5)),  # of what is offered without an upload
        "recovered": sum(line.recovered for line in scores),
        "labels": sum(bool(line.label_correct) for line in scores) / len(scores),
        "loss": sum(each.loss or 0.0 for each in made) / len(made),
        "seconds": seconds,
    }


def _settings(options: argparse.Namespace, tv: float) -> AttackSettings:
    if options.attack == "closed_form":
        return ClosedFormSettings()
    kinds: dict[str, type[MatchingSettings]] = {"dlg": DlgSettings, "idlg": IdlgSettings, "iga": IgaSettings}
    variation = {"tv": tv, "tv_start": 0.0} if options.attack == "iga" else {}
    wanted = {"iterations": options.steps, "restarts": options.restarts, **variation}
    return validated(kinds[options.attack], wanted, "these arguments")


def _experiment(options: argparse.Namespace) -> Experiment:
    return validated(
        Experiment,
        {
            "seed": options.seed,
            "data": {"name": "cifar10", "train_examples": options.victims * options.examples},
            "model": {"name": options.model},
            "federation": {"clients": options.victims, "algorithm": "fedavg", "rounds": 1},
            "training": {
                "batch_size": options.batch,
                "local_epochs": options.epochs,
                "learning_rate": options.rate,
                "optimizer": options.optimizer,
                "momentum": options.momentum,
            },
            "adversary": {"victims": options.victims},
        },
        "these arguments",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one line of JSON for each weight."""
    parser = StudyParser("studies.unroll", __doc__)
    parser.add_argument("--attack", default="idlg", choices=["dlg", "idlg", "iga", "closed_form"])
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--victims", type=whole(1), default=8)
    parser.add_argument("--examples", type=whole(1), default=4)
    parser.add_argument("--batch", type=whole(1), default=1)
    parser.add_argument("--epochs", type=whole(1), default=1)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--tv", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--steps", type=whole(1), default=300)
    parser.add_argument("--restarts", type=whole(1), default=1)
    parser.add_argument("--seed", type=whole(0), default=1)
    with parser.parsed(arguments) as options:
        for tv in options.tv:
            print(json.dumps(measure(options, tv)), flush=True)


if __name__ == "__main__":
    main()
