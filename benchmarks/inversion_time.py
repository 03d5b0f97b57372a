"""Seconds until a picture is recovered: ours and breaching's, of the same weights, images and gradients.

Usage: python -m benchmarks.inversion_time --environment FOLDER [--cases 1 4 8 resnet18] [--seeds 0] [--most 120]
       [--levels 20 25 30] [--presets invertinggradients modern] [--json FILE]

breaching is installed into an environment of its own, FOLDER, unless it is there already. The cases are those of
:mod:`benchmarks.inversion`: a ConvNet with a batch of CIFAR-10 (``FEDPRIV_DATA``), and torchvision's ResNet-18 with
GroupNorm, untrained, with one photograph of 128 pixels a side: by the seed scikit-learn's flower or china, or
matplotlib's Grace Hopper.

Nobody who attacks knows when to stop, so a time is that of a whole run: each way has runs of more and more steps, each
with its schedule for so many, and the first whose last images reach a level (PSNR in dB on [0, 1], mean over the batch,
matched one to one) gives the seconds of processor time. Ours has ``iga_fast`` with one step after its features, and
with as many steps as it has on features; breaching has its presets ``invertinggradients`` and ``modern``. The better
way of each side counts. A way ends where its next run would take more than ``--most`` seconds.
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
from fedpriv.models.torchvision import TorchvisionSettings
from studies.arguments import whole

PACKAGES = ("breaching==0.1.2", "torch==2.15.0", "torchvision==0.29.2")
SIDE, CLASSES = 128, 10
GROWTH = 1.5  # of the steps from run to run
FIRST_OURS, FIRST_THEIRS = 12, 40
OURS = ("features", "iga_fast")
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


def ours(case: Gradient, after: bool) -> Runs:
    """``iga_fast`` with so many steps on features, and as many or one after them."""

    def run(steps: Sequence[int]) -> list[tuple[Tensor, float]]:
        made = []
        for number in steps:
            last = number if after else 1
            images, milliseconds = run_ours(case, f"iga_fast,feature_iterations={number}", last)
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
    if name != "resnet18" and name not in map(str, range(1, 11)):
        raise argparse.ArgumentTypeError(f"{name}: allowed are resnet18 and batches from 1 to 10")
    return name


def _text(reached: Reached | None) -> str:
    return "not reached" if reached is None else f"{reached.seconds:.1f} s ({reached.way}, {reached.steps})"


def main() -> None:
    """Measure and print a table."""
    parser = options("inversion_time", __doc__)
    parser.add_argument("--environment", required=True, type=Path, help="folder of the environment with breaching")
    parser.add_argument("--cases", type=_case, nargs="+", default=["1", "4", "8", "resnet18"], help="batches, resnet18")
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
                case = resnet_case(seed) if name == "resnet18" else make_case(int(name), seed)
                run_ours(case, "iga_fast,feature_iterations=2", 2)  # what is done once a process
                made = [
                    *climb(case, "features", ours(case, False), FIRST_OURS, 1, asked.most, max(asked.levels)),
                    *climb(case, "iga_fast", ours(case, True), FIRST_OURS, 1, asked.most, max(asked.levels)),
                ]
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


if __name__ == "__main__":
    main()
