"""What a GPU brings: steps, attacks, clients side by side, certificates and audits, within five minutes.

Without a GPU the same is measured on the CPU; ``--tiny`` takes small networks and few repeats, and needs seconds: it
shows that the script works, not how fast anything is. Each part gets an equal share of the seconds that are left; what
no longer fits is named. A part that fails is named, and the exit code is 1.

- steps: milliseconds of a training step, by the clock, as a multiple of plain SGD's (target: directional at most 1.5
  for ResNet-18 and GPT at batch 64); Opacus' ghost clipping where Opacus is installed.
- attacks: milliseconds of an iteration for all victims together on the GPU, one after the other, compiled (iga, not in
  the tiny mode: it takes a minute), and for one thread on the CPU (target: 50 times as fast), PSNR of both.
- stacked: seconds of a federation whose clients train together, next to one whose clients train in turns.
- ray: seconds of a federation with four clients at a time, a quarter of the GPU each, next to one at a time (target:
  2.5 times as fast, the same accuracy), and how busy the GPU was.
- commands: seconds of certify and audit, on the GPU and on the CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import in_turns, medians, options, report, save
from benchmarks.methods import RandomNetwork
from fedpriv.attacks import metrics
from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.reconstruction import AttackJob, matching, run_attack
from fedpriv.attacks.settings import known_attack
from fedpriv.core.federated import example_losses
from fedpriv.core.randomness import torch_stream
from fedpriv.diagnosis.cost import Step, private_step, sgd_step
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.machinery.base import Mechanism
from fedpriv.mechanisms.vmf import VmfMechanism
from fedpriv.models import model_settings
from fedpriv.models.machinery.build import build_model
from studies.arguments import whole

ROOT = Path(__file__).parents[1]
BATCH, CLASSES, SHAPE = 64, 10, (3, 32, 32)
_GPT = "--shape 128 --set data.text.task=next --set"
NETWORKS = {
    "mlp": "mlp --set model.hidden=[1024,1024]",
    "lenet": "lenet",
    "resnet18": "torchvision:resnet18 --set model.norm=group",
    "vit-tiny": "timm:vit_tiny_patch16_224 --set model.arguments={patch_size=4}",
    "gpt-20m": f"gpt {_GPT} model.width=512 --set model.depth=6 --set model.heads=8",
}
TINY = {
    "mlp": "mlp --set model.hidden=[16]",
    "gpt-20m": f"gpt {_GPT} model.width=16 --set model.depth=1 --set model.heads=2",
}
MECHANISMS: dict[str, Mechanism] = {
    "gaussian": GaussianMechanism(1.0, 1.0),
    "directional": VmfMechanism(50.0),
    "directional size:16": VmfMechanism(50.0, blocks="size:16"),
}
ATTACKS = ("iga", "dlg", "map")
Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """Where is measured, how much of it, and until when."""

    device: torch.device
    is_tiny: bool
    end: float  # of this part, by time.monotonic()

    def has_time(self) -> bool:
        """Whether this part may go on."""
        return time.monotonic() < self.end

    @property
    def victims(self) -> int:
        """How many victims are attacked together."""
        return 2 if self.is_tiny else 64

    @property
    def repeats(self) -> int:
        """How many steps of each kind are timed."""
        return 2 if self.is_tiny else 15


def main() -> None:
    """Measure each part, print its rows, and write all of them."""
    parser = options("gpu", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=whole(1), default=300, help="of all parts together")
    parser.add_argument("--tiny", action="store_true", help="small networks and few repeats")
    with parser.parsed() as asked:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        Console(stderr=True).print(f"measured on: {name}", style="dim")
        end, rows, failed = time.monotonic() + asked.seconds, list[Row](), dict[str, str]()
        for number, part in enumerate(asked.parts):
            now = time.monotonic()
            setup = Setup(device, asked.tiny, now + (end - now) / (len(asked.parts) - number))
            try:
                rows += [{"part": part, **row} for row in PARTS[part](setup)]
            except Exception as error:  # noqa: BLE001 - minutes on a GPU are dear: the other parts are still measured
                failed[part] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        columns = {"part": "{part}", "case": "{case}", "way": "{way}", "value": "{value}", "times": "{times}"}
        report({**columns, "note": "{note}"}, [_shown(row) for row in rows], words=3)
        for part, reason in failed.items():
            print(f"{part} failed: {reason}")
        save(asked.json, device=name, torch=torch.__version__, tiny=asked.tiny, rows=rows, failed=failed)
    sys.exit(1 if failed else 0)


def _row(case: str, way: str, value: float | None, unit: str = "s", times: str = "", note: str = "") -> Row:
    return {"case": case, "way": way, "value": value, "unit": unit, "times": times, "note": note}


def _shown(row: Row) -> Row:
    value = "" if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
    return {"times": "", "note": "", **row, "value": value}


def clock(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call by the clock, until the GPU is done."""
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def steps(setup: Setup) -> Iterator[Row]:
    """Yield the milliseconds of steps, as multiples of SGD's."""
    for name, given in (TINY if setup.is_tiny else NETWORKS).items():
        if not setup.has_time():
            yield _row(name, "all", None, "ms", note="left out: no time left")
            continue
        ways = _ways(RandomNetwork(name, given), setup)
        for step in ways.values():
            for _ in range(2):
                step()
        timed = {way: partial(clock, step, setup.device) for way, step in ways.items()}
        times = medians(in_turns(timed, setup.repeats))
        for way, seconds in times.items():
            ratio = f"{seconds / times['sgd']:.2f} x SGD"
            yield _row(f"{name}, batch {BATCH}", way, 1e3 * seconds, "ms", ratio)


def _ways(row: RandomNetwork, setup: Setup) -> dict[str, Step]:
    """A step of each kind, of a network of its own."""
    x, y = (values.to(setup.device) for values in row.batch(BATCH))
    ways: dict[str, Step] = {"sgd": sgd_step(row.network().to(setup.device), example_losses, x, y)}
    for way, mechanism in MECHANISMS.items():
        ways[way] = private_step(row.network().to(setup.device), example_losses, x, y, mechanism)
    if find_spec("opacus") is not None:
        from benchmarks.methods import opacus_ghost

        ways["opacus ghost"] = opacus_ghost(row.network().to(setup.device), x, y)
    return ways


def attacks(setup: Setup) -> Iterator[Row]:
    """Yield the milliseconds of an iteration and victim: on the GPU in several ways, and on a core of the CPU."""
    model = build_model(model_settings({"name": "lenet" if setup.is_tiny else "convnet"}), SHAPE, CLASSES, seed=0)
    images, heard = _uploads(model, setup.victims)
    threads = torch.get_num_threads()
    for name in ATTACKS:
        if not setup.has_time():
            yield _row(name, "all", None, "ms", note="left out: no time left")
            continue
        ms, quality = _attacked(name, heard, images, model, setup.device, setup.is_tiny)
        alone_ms, _ = _attacked(name, heard[:1], images[:1], model, setup.device, setup.is_tiny)
        torch.set_num_threads(1)
        few = 2 if setup.is_tiny else 8
        cpu_ms, cpu_quality = _attacked(name, heard[:few], images[:few], model, torch.device("cpu"), True)
        torch.set_num_threads(threads)
        row = partial(_row, f"{name}, {setup.victims} victims", unit="ms")
        yield row(f"{setup.device.type}, batched", ms, note=f"PSNR {quality:.1f} dB")
        yield row(f"{setup.device.type}, one after the other", alone_ms, times=f"{alone_ms / ms:.1f} x batched")
        note = f"{few} victims, PSNR {cpu_quality:.1f} dB"
        yield row("one core, batched", cpu_ms, note=note, times=f"{cpu_ms / ms:.1f} x that")
    if not setup.is_tiny and setup.has_time():
        with _compiled():
            ms, quality = _attacked("iga", heard, images, model, setup.device, False)
        way = f"{setup.device.type}, compiled if that is faster"
        yield _row(f"iga, {setup.victims} victims", way, ms, "ms", note=f"PSNR {quality:.1f} dB")


@contextmanager
def _compiled() -> Iterator[None]:
    """Have attacks compile at once, instead of where they would take long."""
    usual, matching.LONG = matching.LONG, 0.0
    try:
        yield
    finally:
        matching.LONG = usual


def _uploads(model: nn.Module, count: int) -> tuple[Tensor, list[Observation]]:
    """Smooth random images on [0, 1], and what is heard of the gradient of each."""
    generator = torch_stream(0, "benchmark victims", count)
    coarse = torch.rand(count, SHAPE[0], 8, 8, generator=generator)
    images = functional.interpolate(coarse, size=SHAPE[1:], mode="bilinear")
    mean, std = (0.5,) * SHAPE[0], (0.25,) * SHAPE[0]
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    public = PublicSettings(
        model={"name": "own"}, shape=SHAPE, classes=CLASSES, mean=mean, std=std, algorithm="fedsgd", batch_size=1,
        local_steps=1, learning_rate=0.1, optimizer="sgd", momentum=0.0, client_examples=1, mechanism={"name": "none"},
    )  # fmt: skip
    heard = []
    for number, image in enumerate(images):
        label = torch.tensor([number % CLASSES])
        loss = functional.cross_entropy(model((image[None] - 0.5) / 0.25), label)
        gradient = dict(zip(parameters, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        heard.append(Observation(1, number, parameters, gradient, public, labels=(number % CLASSES,)))
    return images, heard


def _attacked(
    name: str, heard: Sequence[Observation], images: Tensor, model: nn.Module, device: torch.device, is_short: bool
) -> tuple[float, float]:
    """Milliseconds of one more iteration for each victim, and the mean PSNR after the longer run."""
    short, long = (2, 12) if is_short else (50, 250)

    def run(iterations: int) -> tuple[float, list[Tensor]]:
        settings = known_attack(name).model_validate({"iterations": iterations})
        began = time.perf_counter()
        found = run_attack(AttackJob(name, heard, model.to(device), settings, 0))
        return time.perf_counter() - began, [each.images.cpu().clamp(0, 1) for each in found]

    run(short)
    (before, _), (after, found) = run(short), run(long)
    model.to("cpu")
    quality = float(metrics.psnr(images[: len(found)], torch.cat(found)).mean())
    return 1e3 * max(after - before, 1e-9) / (long - short) / len(heard), quality


def stacked(setup: Setup) -> Iterator[Row]:
    """Yield the seconds of a federation with clients trained together and in turns."""
    yield from _runs({"in turns": ["engine.name=inline"], "stacked": ["engine.name=stacked"]}, setup, "in turns")


def ray(setup: Setup) -> Iterator[Row]:
    """Yield the seconds of a federation on Ray, four clients on the GPU at a time and one at a time."""
    if find_spec("ray") is None:
        yield _row("federation", "ray", None, note="Ray is not installed")
        return
    on_gpu = setup.device.type == "cuda"
    share = "gpus_per_client" if on_gpu else "cpus_per_client"
    whole_, quarter = ("1", "0.25") if on_gpu else (str(os.cpu_count()), str((os.cpu_count() or 1) / 4))
    rest = ["engine.cpus_per_client=0.5"] if on_gpu else []
    one = ["engine.name=ray", f"engine.{share}={whole_}", *rest]
    four = ["engine.name=ray", f"engine.{share}={quarter}", *rest]
    yield from _runs({"one at a time": one, "four at a time": four}, setup, "one at a time")


def _runs(ways: dict[str, list[str]], setup: Setup, first: str) -> Iterator[Row]:
    """Run the same federation in each way, each in a process of its own."""
    rounds, clients = ("1", "4") if setup.is_tiny else ("10", "16")
    shared = [f"federation.rounds={rounds}", f"federation.clients={clients}", "adversary.attacks=[]"]
    shared += ["model.name=mlp"] if setup.is_tiny else ["model.name=convnet", "training.batch_size=64"]
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, flags in ways.items():
            if times and not setup.has_time():
                yield _row("federation", way, None, note="no time left")
                continue
            command = ["run", "configs/quickstart.toml", *_set([*shared, *flags]), "--out", f"{folder}/{way}", "--json"]
            with _utilisation(setup.device) as busy:
                began = time.monotonic()
                summary = json.loads(_fedpriv(command, setup))
                times[way] = time.monotonic() - began
            note = f"accuracy {summary['test_accuracy']:.4f}"
            note += f", GPU busy {sum(busy) / len(busy):.0f} %" if busy else ""
            ratio = f"{times[first] / times[way]:.2f} x as fast"
            case = f"{clients} clients, {rounds} rounds"
            yield _row(case, way, times[way], times=ratio, note=note)


def commands(setup: Setup) -> Iterator[Row]:
    """Yield the seconds of certify and audit, on the GPU and on the CPU."""
    few = ["--examples", "2", "--votes", "100"] if setup.is_tiny else ["--examples", "50", "--votes", "2000"]
    references = ["--references", "6", "--pairs", "10"] if setup.is_tiny else ["--references", "16"]
    verbs = {"certify": [*few, "--noise", "0.25", "--place", "input"], "audit": references}
    devices = dict.fromkeys((setup.device.type, "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        for device in devices:
            flags = ["federation.rounds=2", "adversary.attacks=[]", f"engine.device={device}", "engine.name=inline"]
            _fedpriv(["run", "configs/quickstart.toml", *_set(flags), "--out", f"{folder}/{device}", "--json"], setup)
            for verb, given in verbs.items():
                began = time.monotonic()
                _fedpriv([verb, f"{folder}/{device}", *given, "--json"], setup)
                yield _row(verb, device, time.monotonic() - began)


def _set(flags: Sequence[str]) -> list[str]:
    return [part for flag in flags for part in ("--set", flag)]


def _fedpriv(command: Sequence[str], setup: Setup) -> str:
    """Run a command of the program, and return what it prints."""
    left = max(30.0, 2 * (setup.end - time.monotonic()))
    done = subprocess.run(
        [sys.executable, "-m", "fedpriv", *command], cwd=ROOT, capture_output=True, text=True, timeout=left
    )
    if done.returncode:
        raise RuntimeError(f"fedpriv {' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout


@contextmanager
def _utilisation(device: torch.device) -> Iterator[list[float]]:
    """Collect how busy the GPU is, in percent, twice a second."""
    busy, done = list[float](), Event()

    def look() -> None:
        while not done.wait(0.5):
            busy.append(float(torch.cuda.utilization()))

    watching = Thread(target=look, daemon=True)
    if device.type == "cuda" and find_spec("pynvml") is not None:
        watching.start()
    try:
        yield busy
    finally:
        done.set()


PARTS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "steps": steps,
    "attacks": attacks,
    "stacked": stacked,
    "ray": ray,
    "commands": commands,
}


if __name__ == "__main__":
    main()
