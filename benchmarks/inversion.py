"""Attacks side by side with breaching: the same weights, images and gradients, equal steps.

breaching (github.com/JonasGeiping/breaching) is no dependency: it runs in an environment of its own, whose python is
named here: ``uv venv ENVIRONMENT && uv pip install --python ENVIRONMENT/bin/python breaching torch torchvision``.
A pair names our attack, with settings if any (``iga,tv_start=0:invertinggradients``), and theirs.

A case is one exact gradient of an untrained ConvNet, of one training image of CIFAR-10 of each of the first classes
(``FEDPRIV_DATA``); the seed is that of weights and starts, and which image of a class it is, from 0. Both attacks have
the same number of steps and one start, and both are told the labels. Images go through the same referee: PSNR in dB on
[0, 1], mean over the batch, matched one to one. Time is processor time a step, one thread each, without what a run does
once: the difference between a run of LONG and one of SHORT steps. It is the median of TURNS such pairs, ours and theirs
in turns, because the machine may be busy with something else in any one of them.
"""

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import in_turns, medians, options, save, show
from fedpriv.attacks import metrics
from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.settings import known_attack
from fedpriv.core.config import DataConfig, validated
from fedpriv.core.errors import InputError
from fedpriv.data.datasets import Dataset, load_dataset
from fedpriv.models.convnets import ConvnetSettings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.machinery.settings import ModelSettings
from studies.arguments import whole

SHORT, LONG, TURNS = 20, 100, 5
ADAPTER = Path(__file__).with_name("inversion_adapter.py")
CONVNET = ConvnetSettings()


@dataclass(frozen=True, eq=False)
class Gradient:
    """What both attack: a network, and the gradient of a batch; images (B, C, H, W) on [0, 1]."""

    dataset: Dataset
    model: nn.Module
    images: Tensor
    labels: Tensor
    gradient: dict[str, Tensor]
    seed: int
    network: ModelSettings


def make_case(batch: int, seed: int, network: ModelSettings = CONVNET) -> Gradient:
    """Return the case of a batch size."""
    dataset = load_dataset(DataConfig(name="cifar10"), 0)
    rows = [int((dataset.y_train == label).nonzero()[seed]) for label in range(batch)]
    return gradient_of(dataset, dataset.x_train[rows], dataset.y_train[rows], network, seed)


def gradient_of(dataset: Dataset, images: Tensor, labels: Tensor, network: ModelSettings, seed: int) -> Gradient:
    """Return the case of some images, uint8 (B, C, H, W)."""
    model = build_model(network, dataset.shape, dataset.classes, seed)
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = F.cross_entropy(model(dataset.normalise(images)), labels)
    gradient = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    return Gradient(dataset, model, images.float() / 255, labels, gradient, seed, network)


def run_ours(case: Gradient, attack: str, steps: int) -> tuple[Tensor, float]:
    """Return our images, and the milliseconds of the run divided by its steps."""
    public = PublicSettings(
        model=case.network.model_dump(exclude_unset=True) | {"name": case.network.name},
        shape=case.dataset.shape, classes=case.dataset.classes, mean=case.dataset.mean,
        std=case.dataset.std, algorithm="fedsgd", batch_size=len(case.images), local_steps=1, learning_rate=0.1,
        optimizer="sgd", momentum=0.0, client_examples=len(case.images), mechanism={"name": "none"},
    )  # fmt: skip
    parameters = {name: value.detach() for name, value in case.model.named_parameters()}
    heard = Observation(1, 0, parameters, case.gradient, public, labels=tuple(sorted(case.labels.tolist())))
    name, given = _named(attack)
    kind = known_attack(name)
    fixed = {"iterations": steps} if "iterations" in kind.model_fields else {}
    settings = kind.model_validate({**fixed, **given})
    began = time.process_time()
    (reconstruction,) = run_attack(AttackJob(name, [heard], case.model, settings, case.seed))
    return reconstruction.images, 1e3 * (time.process_time() - began) / steps


def runs_of_theirs(case: Gradient, attack: str, steps: Sequence[int], python: str) -> list[tuple[Tensor, float]]:
    """Return the images and seconds of runs of breaching, which all have one process under another python."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "case.npz", Path(folder) / "images.npz"
        arrays: dict[str, Any] = {
            f"parameter {name}": value.detach().numpy() for name, value in case.model.named_parameters()
        }
        arrays |= {f"gradient {name}": value.numpy() for name, value in case.gradient.items()}
        arrays |= {"mean": case.dataset.mean, "std": case.dataset.std, "shape": case.dataset.shape}
        np.savez(given, labels=case.labels.numpy(), classes=case.dataset.classes, **arrays)
        subprocess.run(
            [python, str(ADAPTER), str(given), str(made), attack, ",".join(map(str, steps)), str(case.seed)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        with np.load(made, allow_pickle=False) as result:
            return list(zip(torch.from_numpy(result["images"]), result["seconds"].tolist(), strict=True))


def compare(case: Gradient, ours: str, theirs: str, steps: int, python: str) -> dict[str, Any]:
    """Run both and score them; milliseconds are those of processor time a step."""
    images, _ = run_ours(case, ours, steps)
    ((others, _),) = runs_of_theirs(case, theirs, [steps], python)
    ways = {
        "ms": partial(_step, lambda n: run_ours(case, ours, n)[1]),
        "their_ms": partial(_step, lambda n: 1e3 * runs_of_theirs(case, theirs, [n], python)[0][1] / n),
    }
    (psnr, ssim), (their_psnr, their_ssim) = (figures(case, result) for result in (images, others))
    row = {"batch": len(case.images), "seed": case.seed, "steps": steps, "ours": ours, "psnr": psnr, "ssim": ssim}
    row |= {"theirs": theirs, "their_psnr": their_psnr, "their_ssim": their_ssim}
    return row | medians(in_turns(ways, TURNS))


def _step(mean: Callable[[int], float]) -> float:
    """Milliseconds of one more step, where ``mean`` gives those of a whole run divided by its number of steps."""
    return (LONG * mean(LONG) - SHORT * mean(SHORT)) / (LONG - SHORT)


def figures(case: Gradient, images: Tensor) -> tuple[float, float]:
    """Return PSNR and SSIM of images, the means over the batch."""
    matched = images.clamp(0, 1)[metrics.match(case.images, images.clamp(0, 1))]
    return float(metrics.psnr(case.images, matched).mean()), float(metrics.ssim(case.images, matched).mean())


def main() -> None:
    """Compare and print a table."""
    parser = options("inversion", __doc__)
    parser.add_argument("--python", required=True, type=_program, help="of the environment that has breaching")
    parser.add_argument("--batches", type=whole(1), nargs="+", default=[1, 4, 8], help="images, at most one a class")
    parser.add_argument("--steps", type=whole(1), nargs="+", default=[300])
    parser.add_argument("--seeds", type=whole(0), nargs="+", default=[0])
    parser.add_argument("--pairs", type=_pair, nargs="+", default=["iga:invertinggradients", "iga_modern:modern"])
    with parser.parsed() as asked:
        torch.set_num_threads(1)
        rows = []
        for batch, seed, steps in product(asked.batches, asked.seeds, asked.steps):
            case = make_case(batch, seed)
            for pair in asked.pairs:
                ours, _, theirs = pair.partition(":")
                rows.append(compare(case, ours, theirs, steps, asked.python))
                print(rows[-1], flush=True)
        heads = ("images", "seed", "steps", "ours", "theirs", "PSNR, dB", "breaching", "SSIM", "breaching")
        show(
            (*heads, "time of a step"),
            [
                (row["batch"], row["seed"], row["steps"], row["ours"], row["theirs"], f"{row['psnr']:.1f}",
                 f"{row['their_psnr']:.1f}", f"{row['ssim']:.3f}", f"{row['their_ssim']:.3f}",
                 f"{row['ms'] / row['their_ms']:.2f} of theirs")
                for row in rows
            ],
        )  # fmt: skip
        save(asked.json, rows=rows)


def _named(attack: str) -> tuple[str, dict[str, str]]:
    """An attack's name, and its settings: ``iga,tv_start=0``."""
    name, *given = attack.split(",")
    return name, {key: value for key, _, value in (text.partition("=") for text in given)}


def _pair(text: str) -> str:
    ours, _, theirs = text.partition(":")
    name, given = _named(ours)
    try:
        validated(known_attack(name), given, text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not theirs:
        raise argparse.ArgumentTypeError(f"{text}: expected OURS:THEIRS, such as iga:invertinggradients")
    return text


def _program(path: str) -> str:
    if shutil.which(path) is None:
        raise argparse.ArgumentTypeError(f"{path}: there is no such program")
    return path


if __name__ == "__main__":
    main()
