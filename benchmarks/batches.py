"""Batches from one upload, and from several rounds: PSNR, images recovered and CPU seconds.

CIFAR-10 (``FEDPRIV_DATA``), untrained MLP(256), training images; a case is activation:batch size[:sigma], with sigma
the noise multiplier of the gaussian mechanism at clip norm 1. ``rounds:12:4:24`` stands for a client of 12 images that
sends 24 batches of 4; ``convnet:4`` for the ConvNet, whose images are those with the features that reach its last
layer. All else is the closed form. The adversary has 2,000 test images. Recovered: an SSIM of at least 0.6 (the lab's
default).
"""

import argparse
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import options, report, save
from fedpriv.attacks import metrics
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.custom import CustomSettings
from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.reconstruction import AttackJob, OtherBatches, run_attack
from fedpriv.core.config import DataConfig
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret, torch_stream
from fedpriv.data.datasets import Dataset, load_dataset
from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms import mechanism_settings
from fedpriv.models.convnets import ConvnetSettings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.perceptrons import MlpSettings
from studies.arguments import whole

CASES = (
    "tanh:8,tanh:16,tanh:32,sigmoid:16,relu:8,relu:16,relu:32,relu:64,tanh:64,relu:8:0.001,relu:16:0.001,tanh:8:0.001,"
    "sigmoid:8:0.001,relu:4:0.003,tanh:4:0.003,relu:8:1,rounds:12:4:24,rounds-tanh:12:4:24,convnet:4,convnet:8"
)
_CASE = re.compile(r"(tanh|sigmoid|relu|convnet):\d+(:[\d.e-]+)?|rounds(-tanh)?:\d+:\d+:\d+")
PUBLIC = 2000
RATE = 0.01  # of the model's steps between rounds
RECOVERED = 0.6


@dataclass(frozen=True, eq=False)
class Lab:
    """Uploads of a data set's images."""

    dataset: Dataset
    seed: int

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) on [0, 1] and labels."""
        order = torch.randperm(len(self.dataset.x_train), generator=torch_stream(self.seed, "batch images"))
        rows = order[:count]
        return self.dataset.x_train[rows].float() / 255, self.dataset.y_train[rows]

    def model(self, activation: str) -> nn.Module:
        """The untrained network."""
        settings = ConvnetSettings() if activation == "convnet" else MlpSettings(hidden=(256,), activation=activation)
        return build_model(settings, self.dataset.shape, self.dataset.classes, self.seed)

    def upload(
        self, model: nn.Module, images: Tensor, labels: Tensor, sigma: float, number: int = 1, own: int | None = None
    ) -> Observation:
        """One FedSGD upload, as the mechanism releases it; ``own``: the client's images, by default the batch."""
        names = [name for name, _ in model.named_parameters()]
        x = self.dataset.normalise((images * 255).round().to(torch.uint8))
        rows = [
            torch.autograd.grad(F.cross_entropy(model(x[k : k + 1]), labels[k : k + 1]), list(model.parameters()))
            for k in range(len(x))
        ]
        mechanism = {"name": "gaussian", "sigma": sigma, "clip_norm": 1.0} if sigma else {"name": "none"}
        gradients = DenseGradients({name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)})
        noise = Secret.of_seed(self.seed).stream("batch noise", number)
        upload = mechanism_settings(mechanism).mechanism().release(gradients, len(x), noise)
        parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
        data = self.dataset
        public = PublicSettings(
            model={"name": "mlp", "hidden": [256]}, shape=data.shape, classes=data.classes, mean=data.mean,
            std=data.std, algorithm="fedsgd", batch_size=len(x), local_steps=1, learning_rate=RATE, optimizer="sgd",
            momentum=0.0, client_examples=own or len(x), mechanism=mechanism,
        )  # fmt: skip
        return Observation(number, 0, parameters, upload, public)

    def rounds(self, model: nn.Module, images: Tensor, labels: Tensor, size: int, count: int) -> OtherBatches:
        """Uploads of other mini-batches in each round, while the model moves."""
        heard = []
        for number in range(1, count + 1):
            rows = torch.randperm(len(images), generator=torch_stream(self.seed, "batch round", number))[:size]
            heard.append(self.upload(model, images[rows], labels[rows], 0.0, number, len(images)))
            with torch.no_grad():
                for name, value in model.named_parameters():
                    value.sub_(RATE * heard[-1].upload[name])
        return OtherBatches(tuple(heard))


def measure(dataset: Dataset, case: str, seed: int, prior: str = "") -> dict[str, Any]:
    """Attack one case, with a trained prior if its file is given, and return its row."""
    kind, *numbers = case.split(":")
    lab = Lab(dataset, seed)
    images, labels = lab.batch(int(numbers[0]))
    if kind.startswith("rounds"):
        model = lab.model("tanh" if kind.endswith("tanh") else "relu")
        heard: Observation | OtherBatches = lab.rounds(model, images, labels, int(numbers[1]), int(numbers[2]))
    else:
        model = lab.model(kind)
        heard = lab.upload(model, images, labels, float(numbers[1]) if len(numbers) > 1 else 0.0)
    public = dataset.x_test[:PUBLIC].float() / 255
    features = CustomSettings(start="features", iterations=1)
    config = features if kind == "convnet" else ClosedFormSettings(prior=prior)
    began = time.process_time()
    try:
        (reconstruction,) = run_attack(AttackJob(config.name, [heard], model, config, 0, public_images=public))
    except InputError as error:
        figures = {"psnr": math.nan, "least": math.nan, "recovered": 0, "images": len(images), "labels": 0}
        return {"case": case, **figures, "seconds": time.process_time() - began, "note": str(error)}
    spent = time.process_time() - began
    guess = public.mean(dim=0).expand_as(images)
    offered = torch.cat([reconstruction.images, guess[: max(len(images) - len(reconstruction.images), 0)]])
    told = torch.cat([reconstruction.labels, labels.new_full((len(offered) - len(reconstruction.labels),), -1)])
    order = metrics.match(images, offered[: len(images)])
    psnr = -10 * metrics.mse(images, offered[order]).clamp(min=1e-20).log10()
    return {
        "case": case,
        "psnr": float(psnr.mean()),
        "least": float(psnr.min()),
        "recovered": int((metrics.ssim(images, offered[order]) >= RECOVERED).sum()),
        "images": len(images),
        "labels": int((told[order] == labels).sum()),
        "seconds": spent,
        "note": reconstruction.note,
    }


def main() -> None:
    """Measure and print a table."""
    parser = options("batches", __doc__)
    parser.add_argument("--cases", type=_cases, default=CASES, help="by commas")
    parser.add_argument("--seeds", type=whole(1), default=3, help="images, models and noise of so many seeds")
    parser.add_argument("--prior", default="", help="file of a trained prior, for the closed form")
    with parser.parsed() as asked:
        torch.set_num_threads(1)
        dataset = load_dataset(DataConfig(name="cifar10"), 0)
        measure(dataset, "relu:2", 0)  # libraries are loaded
        rows = []
        for case in asked.cases:
            seeds = [measure(dataset, case, seed, asked.prior) for seed in range(asked.seeds)]
            rows += seeds
            _print(seeds)
        save(asked.json, rows=rows)


def _print(seeds: Sequence[dict[str, Any]]) -> None:
    """The table of a case: means over its seeds, the least PSNR, the longest time."""
    columns = {key: [row[key] for row in seeds] for key in seeds[0]}
    added = {key: sum(columns[key]) for key in ("recovered", "images", "labels")}
    row = {**seeds[0], **added, "psnr": mean(columns["psnr"])}
    row |= {"least": min(columns["least"]), "seconds": max(columns["seconds"])}
    heads = {"case": "{case}", "note": "{note}", "PSNR": "{psnr:.1f}", "least": "{least:.1f}"}
    heads |= {"recovered": "{recovered} of {images}", "labels": "{labels}", "CPU s": "{seconds:.2f}"}
    report(heads, [row], words=2)


def _cases(text: str) -> list[str]:
    cases = text.split(",")
    if wrong := [case for case in cases if not _CASE.fullmatch(case)]:
        raise argparse.ArgumentTypeError(f"{wrong[0]}: cases are such as {CASES}")
    return cases


if __name__ == "__main__":
    main()
