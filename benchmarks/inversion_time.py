"""Seconds until a picture is recovered: ours and breaching's, of the same weights, images and gradients.

breaching is installed into an environment of its own, FOLDER, unless it is there already. A case is an untrained
network with a batch, ``NETWORK:IMAGES[:SIDE]``: of CIFAR-10 as in :mod:`benchmarks.inversion` (``FEDPRIV_DATA``), or
of photographs of SIDE pixels: scikit-learn's flower and china and matplotlib's Grace Hopper, then parts of them. The
network is fedpriv's ConvNet or LeNet, timm's ViT-tiny (patches of 4 pixels for CIFAR-10, else of 16) or torchvision's
ResNet-18 with GroupNorm.

Nobody who attacks knows when to stop, so a time is that of a whole run: each way has runs of more and more steps, each
with its schedule for so many, and the first whose last images reach a level (PSNR in dB on [0, 1], mean over the batch,
matched one to one) gives the seconds of processor time. Ours are those that docs/attacks.md names for the network;
"features" is ``iga_fast`` with one step after its features. breaching has its presets ``invertinggradients`` and
``modern``, of which the better counts. The last run of a way takes about ``--most`` seconds. The second table has the
best images of each side within that time.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.functional import center_crop, five_crop

from benchmarks.inversion import Gradient, figures, gradient_of, make_case, run_ours, runs_of_theirs
from benchmarks.measure import options, save, show
from fedpriv.data.datasets import Dataset
from fedpriv.models.convnets import ConvnetSettings, LenetSettings
from fedpriv.models.libraries import TimmSettings, TorchvisionSettings
from fedpriv.models.machinery.settings import ModelSettings
from studies.arguments import whole

PACKAGES = ("breaching==0.1.2", "torch==2.15.0", "torchvision==0.29.2", "timm==1.0.31")
SMALL, CLASSES = 32, 10  # pixels a side of CIFAR-10
PART = 0.6  # of a photograph's shorter side
FIRST_OURS, FIRST_THEIRS, PILOT = 12, 40, 2
VIT = "timm:vit_tiny_patch16_224"
NETWORKS: dict[str, ModelSettings] = {
    "convnet": ConvnetSettings(),
    "lenet": LenetSettings(),
    "vit_tiny": TimmSettings.model_validate({"name": VIT}),
    "resnet18": TorchvisionSettings(name="torchvision:resnet18", norm="group"),
}
DEFAULT = (*(f"{name}:{images}" for name in ("convnet", "lenet", "vit_tiny") for images in (1, 4, 8)), "resnet18:1:128")
OURS = {
    "features": "iga_fast,feature_iterations={}",
    "idlg": "idlg,restarts=1",
    "closed_form": "closed_form",
}
PRESETS = ("invertinggradients", "modern")
AT_ONCE = ("closed_form",)  # ours without steps
WORTH = 1.2  # times the steps of the last run, at least, for the next
TOGETHER = 4  # runs of breaching in one process, which takes seconds to start

Runs = Callable[[Sequence[int]], list[tuple[Tensor, float]]]
"""Steps of runs -> images and seconds of each."""


@dataclass(frozen=True)
class Reached:
    """What one way took for a level of quality."""

    way: str
    steps: int
    seconds: float
    psnr: float
    ssim: float


def case_of(name: str, seed: int) -> Gradient:
    """The gradient of ``NETWORK:IMAGES[:SIDE]``."""
    kind, images, *side = name.split(":")
    network = NETWORKS[kind]
    if not side:
        if kind == "vit_tiny":
            network = TimmSettings.model_validate({"name": VIT, "arguments": {"patch_size": 4}})
        return make_case(int(images), seed, network)
    pictures = torch.stack([photograph(seed * int(images) + number, int(side[0])) for number in range(int(images))])
    labels = (3 + torch.arange(int(images))) % CLASSES
    classes = tuple(map(str, range(CLASSES)))
    dataset = Dataset(
        "photographs", pictures, labels, pictures, labels, classes, (0.5,) * 3, (0.25,) * 3, "photographs"
    )
    return gradient_of(dataset, pictures, labels, network, seed)


def photograph(number: int, side: int) -> Tensor:
    """The middle of a photograph, and where there are no more their corners and middles: uint8 (3, side, side)."""
    from matplotlib.cbook import get_sample_data
    from matplotlib.image import imread
    from sklearn.datasets import load_sample_image

    photographs = (
        partial(load_sample_image, "flower.jpg"),
        partial(load_sample_image, "china.jpg"),
        lambda: imread(str(get_sample_data("grace_hopper.jpg", asfileobj=False))),
    )
    turn, which = divmod(number, len(photographs))
    made = torch.tensor(photographs[which]()).permute(2, 0, 1)
    least = min(made.shape[1:])
    parts = (center_crop(made, [least] * 2), *five_crop(made, [int(PART * least)] * 2))
    part = parts[turn % len(parts)][None].float()
    return torch.nn.functional.interpolate(part, (side, side), mode="area").round().byte()[0]


def way_of(case: str) -> str:
    """Ours for the network and the number of images."""
    network, count, *_ = case.split(":")
    if network == "lenet":
        return "idlg"
    return "closed_form" if (network, count) == ("vit_tiny", "1") else "features"


def ours(case: Gradient, way: str) -> Runs:
    """Runs of one of our ways with so many steps."""

    def run(steps: Sequence[int]) -> list[tuple[Tensor, float]]:
        made = []
        for number in steps:
            last = 1 if way == "features" else number
            images, milliseconds = run_ours(case, OURS[way].format(number), last)
            made.append((images, milliseconds * last / 1e3))
        return made

    return run


@dataclass(frozen=True)
class Climb:
    """Runs of more and more steps."""

    first: int
    growth: float
    together: int
    most: float  # seconds of a run

    def __call__(self, case: Gradient, way: str, runs: Runs, best: float) -> list[Reached]:
        """Go on until a run reaches ``best``; a run of few steps before tells how many are too many."""
        ((_, pilot),) = runs([PILOT])
        found: list[Reached] = []
        made, a_step, first = 0, pilot / PILOT, self.first
        while first:
            affordable = max(1, int(self.most / a_step))
            steps = {min(round(first * self.growth**number), affordable) for number in range(self.together)}
            for number, (images, seconds) in zip(sorted(steps), runs(sorted(steps)), strict=True):
                found.append(Reached(way, number, seconds, *figures(case, images)))
                print(f"{len(case.images)} images: {found[-1]}", flush=True)
            made, a_step = found[-1].steps, found[-1].seconds / found[-1].steps
            ends = way in AT_ONCE or max(each.psnr for each in found) >= best or self.most / a_step < WORTH * made
            first = 0 if ends else round(made * self.growth)
        return found


def fastest(runs: list[Reached], level: float) -> Reached | None:
    """The run that reached a level in the least time."""
    return min((each for each in runs if each.psnr >= level), key=lambda each: each.seconds, default=None)


def environment(folder: Path) -> str:
    """Return the python of an environment with breaching, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder), "--without-pip"], check=True)
        uv = shutil.which("uv")
        if uv is None:
            subprocess.run([str(python), "-m", "ensurepip", "--default-pip"], check=True, stdout=subprocess.DEVNULL)
        installer = [uv, "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
        subprocess.run([*installer, "--quiet", *PACKAGES], check=True)
    return str(python)


def _case(name: str) -> str:
    kind, *numbers = name.split(":")
    images, side = (*numbers, str(SMALL))[:2] if len(numbers) in {1, 2} else ("", "")
    given = images.isdecimal() and side.isdecimal()
    if kind not in NETWORKS or not given or not 1 <= int(images) <= CLASSES or int(side) % SMALL or not int(side):
        allowed = f"NETWORK:IMAGES[:SIDE], {'|'.join(NETWORKS)}, 1 to {CLASSES} images, sides of multiples of {SMALL}"
        raise argparse.ArgumentTypeError(f"{name}: allowed: {allowed}")
    return name


def _text(reached: Reached | None) -> str:
    return "not reached" if reached is None else f"{reached.seconds:.1f} s ({reached.way}, {reached.steps})"


def _quality(runs: list[Reached], most: float) -> str:
    best = max((each for each in runs if each.seconds <= most), key=lambda each: each.psnr, default=None)
    return "none" if best is None else f"{best.psnr:.1f} in {best.seconds:.1f} s ({best.way}, {best.steps})"


def _climbed(name: str, seed: int, asked: argparse.Namespace, python: str) -> tuple[list[Reached], list[Reached]]:
    """Our runs of a case, and theirs."""
    case, best = case_of(name, seed), max(asked.levels)
    mine = Climb(FIRST_OURS, asked.growth, 1, asked.most)
    made = mine(case, way_of(name), ours(case, way_of(name)), best)
    other = Climb(FIRST_THEIRS, asked.growth, TOGETHER, asked.most)
    presets = {preset: partial(runs_of_theirs, case, preset, python=python) for preset in asked.presets}
    return made, [each for preset, runs in presets.items() for each in other(case, preset, runs, best)]


def main() -> None:
    """Measure and print tables."""
    parser = options("inversion_time", __doc__)
    parser.add_argument("--environment", required=True, type=Path, help="folder of the environment with breaching")
    parser.add_argument("--cases", type=_case, nargs="+", default=list(DEFAULT), help="networks and batches")
    parser.add_argument("--seeds", type=whole(0), nargs="+", default=[0], help="of weights, starts and which images")
    parser.add_argument("--levels", type=float, nargs="+", default=[20.0, 25.0, 30.0], help="PSNR in dB")
    parser.add_argument("--presets", choices=PRESETS, nargs="+", default=PRESETS, help="of breaching")
    parser.add_argument("--most", type=float, default=120.0, help="seconds that a run may take")
    parser.add_argument("--growth", type=float, default=1.5, help="of the steps from run to run")
    with parser.parsed() as asked:
        torch.set_num_threads(1)
        python = environment(asked.environment.absolute())
        rows, kept, qualities = [], [], []
        for name, seed in product(asked.cases, asked.seeds):
            made, theirs = _climbed(name, seed, asked, python)
            kept += [{"case": name, "seed": seed, **vars(each)} for each in made + theirs]
            for level in asked.levels:
                best, second = fastest(made, level), fastest(theirs, level)
                ratio = "" if best is None or second is None else f"{best.seconds / second.seconds:.2f}"
                rows.append((name, seed, f"{level:g}", _text(best), _text(second), ratio))
            qualities.append((name, seed, *(_quality(each, 1.05 * asked.most) for each in (made, theirs))))
        show(("case", "seed", "dB", "ours", "breaching", "ratio"), rows, words=1)
        show(("case", "seed", "ours, dB", "breaching, dB"), qualities, words=1)
        save(asked.json, runs=kept)


if __name__ == "__main__":
    main()
