"""Seconds until a picture is recovered: ours and breaching's, of the same weights, images and gradients.

breaching is installed into an environment of its own, FOLDER, unless it is there already. A case is an untrained
network with a batch of CIFAR-10 as in :mod:`benchmarks.inversion` (``FEDPRIV_DATA``), ``NETWORK:IMAGES``, or
torchvision's ResNet-18 with GroupNorm and one photograph of 128 pixels a side: by the seed scikit-learn's flower or
china, or matplotlib's Grace Hopper.

Nobody who attacks knows when to stop, so a time is that of a whole run: each way has runs of more and more steps, each
with its schedule for so many, and the first whose last images reach a level (PSNR in dB on [0, 1], mean over the batch,
matched one to one) gives the seconds of processor time. Ours are those that docs/attacks.md names for the network;
"features" is ``iga_fast`` with one step after its features, else it has as many as on features. breaching has its
presets ``invertinggradients`` and ``modern``. The better way of each side counts. A way ends where its next run would
take more than ``--most`` seconds.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.functional import center_crop

from benchmarks.inversion import Gradient, figures, gradient_of, make_case, run_ours, runs_of_theirs
from benchmarks.measure import options, save, show
from fedpriv.data.datasets import Dataset
from fedpriv.models.convnet import ConvnetSettings
from fedpriv.models.lenet import LenetSettings
from fedpriv.models.machinery.settings import ModelSettings
from fedpriv.models.timm import TimmSettings
from fedpriv.models.torchvision import TorchvisionSettings
from studies.arguments import whole

PACKAGES = ("breaching==0.1.2", "torch==2.15.0", "torchvision==0.29.2", "timm==1.0.31")
SIDE, CLASSES = 128, 10
GROWTH = 1.5  # of the steps from run to run
FIRST_OURS, FIRST_THEIRS = 12, 40
NETWORKS: dict[str, ModelSettings] = {
    "convnet": ConvnetSettings(),
    "lenet": LenetSettings(),
    "vit_tiny": TimmSettings.model_validate({"name": "timm:vit_tiny_patch16_224", "arguments": {"patch_size": 4}}),
}
DEFAULT = (*(f"{network}:{images}" for network in NETWORKS for images in (1, 4, 8)), "resnet18")
CASES = ("resnet18", *(f"{network}:{images}" for network in NETWORKS for images in range(1, CLASSES + 1)))
OURS = {
    "features": "iga_fast,feature_iterations={}",
    "iga_fast": "iga_fast,feature_iterations={}",
    "idlg": "idlg,restarts=1",
    "closed_form": "closed_form",
}
PRESETS = ("invertinggradients", "modern")
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


def resnet_case(seed: int) -> Gradient:
    """The gradient of ResNet-18 for the middle of a photograph."""
    from matplotlib.cbook import get_sample_data
    from matplotlib.image import imread
    from sklearn.datasets import load_sample_image

    photographs = (
        partial(load_sample_image, "flower.jpg"),
        partial(load_sample_image, "china.jpg"),
        lambda: imread(str(get_sample_data("grace_hopper.jpg", asfileobj=False))),
    )
    made = torch.tensor(photographs[seed % len(photographs)]()).permute(2, 0, 1)
    middle = center_crop(made, [min(made.shape[1:])] * 2)
    picture = torch.nn.functional.interpolate(middle[None].float(), (SIDE, SIDE), mode="area").round().byte()
    label = torch.tensor([3])
    names = tuple(map(str, range(CLASSES)))
    dataset = Dataset("photograph", picture, label, picture, label, names, (0.5,) * 3, (0.25,) * 3, "a photograph")
    return gradient_of(dataset, picture, label, TorchvisionSettings(name="torchvision:resnet18", norm="group"), seed)


def ways_of(case: str) -> tuple[str, ...]:
    """Ours for the network and the number of images."""
    network, _, count = case.partition(":")
    if network == "lenet":
        return ("idlg",)
    return ("closed_form",) if (network, count) == ("vit_tiny", "1") else ("features", "iga_fast")


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


def climb(case: Gradient, way: str, runs: Runs, first: int, together: int, most: float, best: float) -> list[Reached]:
    """Runs of more and more steps, until one reaches ``best``."""
    found: list[Reached] = []
    while not found or (max(each.psnr for each in found) < best and found[-1].seconds * GROWTH <= most):
        steps = [round(first * GROWTH ** (len(found) + number)) for number in range(together)]
        if found:
            steps = [each for each in steps if each * found[-1].seconds / found[-1].steps <= 1.05 * most]
        for number, (images, seconds) in zip(steps, runs(steps), strict=True):
            found.append(Reached(way, number, seconds, *figures(case, images)))
            print(f"{len(case.images)} images: {found[-1]}", flush=True)
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
    if name not in CASES:
        raise argparse.ArgumentTypeError(f"{name}: allowed: resnet18, {'|'.join(NETWORKS)}:1 to {CLASSES}")
    return name


def _text(reached: Reached | None) -> str:
    return "not reached" if reached is None else f"{reached.seconds:.1f} s ({reached.way}, {reached.steps})"


def main() -> None:
    """Measure and print a table."""
    parser = options("inversion_time", __doc__)
    parser.add_argument("--environment", required=True, type=Path, help="folder of the environment with breaching")
    parser.add_argument("--cases", type=_case, nargs="+", default=list(DEFAULT), help="networks and batches")
    parser.add_argument("--seeds", type=whole(0), nargs="+", default=[0], help="of weights, starts and which images")
    parser.add_argument("--levels", type=float, nargs="+", default=[20.0, 25.0, 30.0], help="PSNR in dB")
    parser.add_argument("--presets", choices=PRESETS, nargs="+", default=PRESETS, help="of breaching")
    parser.add_argument("--most", type=float, default=120.0, help="seconds that a run may take")
    with parser.parsed() as asked:
        torch.set_num_threads(1)
        python = environment(asked.environment.absolute())
        rows, kept = [], []
        for name in asked.cases:
            for seed in asked.seeds:
                network, _, images = name.partition(":")
                case = make_case(int(images), seed, NETWORKS[network]) if images else resnet_case(seed)
                made = []
                for way in ways_of(name):
                    ours(case, way)([2])  # what is done once a process
                    made += climb(case, way, ours(case, way), FIRST_OURS, 1, asked.most, max(asked.levels))
                for preset in asked.presets:
                    theirs = partial(runs_of_theirs, case, preset, python=python)
                    made += climb(case, preset, theirs, FIRST_THEIRS, TOGETHER, asked.most, max(asked.levels))
                kept += [{"case": name, "seed": seed, **vars(each)} for each in made]
                for level in asked.levels:
                    best, other = (
                        fastest([each for each in made if (each.way in OURS) == mine], level) for mine in (True, False)
                    )
                    ratio = "" if best is None or other is None else f"{best.seconds / other.seconds:.2f}"
                    rows.append((name, seed, f"{level:g}", _text(best), _text(other), ratio))
        show(("case", "seed", "dB", "ours", "breaching", "ratio"), rows, words=1)
        save(asked.json, runs=kept)
