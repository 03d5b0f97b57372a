"""Gradient matching: the batched engine against a plain loop of one victim at a time, in milliseconds per iteration.

One iteration is what Inverting Gradients does: gradients of the dummies, cosine distance to the upload plus total
variation, its gradient with respect to the image, a step of Adam on the sign, a box. Images are 3x32x32, one example a
victim; the networks have their default initialisation.

- loop: one victim after the other, eager PyTorch, gradients from torch.autograd.grad(create_graph=True): as the peers
  write it.
- batched: all victims at once through attacks.reconstruction, as a run does it.
- batched-compiled: the same, traced and compiled; compiling itself is not in the figure but in a line of its own.

All methods run with the same number of threads in one process, alternating; each figure is the median over the turns.
With restarts, "victim" counts each restart. The loop runs at most LOOPED victims in a turn: more cost the same each.
Peak memory is that of a process of its own, over what it had before the first iteration.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import in_own_process, medians, options, save, seconds
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.matching import Evaluator, Matcher, angle, total_variation
from fedpriv.attacks.reconstruction.upload_model import UploadModel, Victim
from fedpriv.diagnosis.cost import peak_mib
from fedpriv.mechanisms.none import NoMechanism
from fedpriv.models.convnets import ConvnetSettings, LenetSettings
from fedpriv.models.machinery.build import build_model
from fedpriv.models.perceptrons import MlpSettings
from studies.arguments import listed, whole, wholes

MODELS = {
    "lenet": LenetSettings(),
    "mlp": MlpSettings(hidden=(1024, 1024)),
    "convnet": ConvnetSettings(),
}
SHAPE, CLASSES = (3, 32, 32), 10
TV, RATE, LIMIT = 1e-4, 0.1, 2.0
METHODS = ("loop", "batched", "batched-compiled")
LOOPED = 8
SECONDS = 4  # of all turns of a case


@dataclass(frozen=True)
class AttackCase:
    """What is attacked: so many victims of a network, with so many restarts each."""

    model: str
    victims: int
    restarts: int


Step = Callable[[], None]


def _uploads(model: nn.Module, count: int) -> list[dict[str, Tensor]]:
    """Gradients of random images."""
    generator = torch.Generator().manual_seed(1)
    named = dict(model.named_parameters())
    uploads = []
    for _ in range(count):
        image = torch.randn(1, *SHAPE, generator=generator)
        label = torch.randint(CLASSES, (1,), generator=generator)
        gradients = torch.autograd.grad(F.cross_entropy(model(image), label), list(named.values()))
        uploads.append(dict(zip(named, gradients, strict=True)))
    return uploads


def _starts(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 1, *SHAPE, generator=generator), torch.arange(count) % CLASSES


def _loop(model: nn.Module, uploads: list[dict[str, Tensor]], restarts: int) -> tuple[Step, int]:
    """One victim at a time, as peers do it; return a step of all and how many these are."""
    images, labels = _starts(min(len(uploads) * restarts, LOOPED))
    parameters = list(model.parameters())
    states = []
    for number, image in enumerate(images):
        leaf = image.clone().requires_grad_()
        heard = list(uploads[number // restarts].values())
        states.append((leaf, labels[[number]], heard, torch.optim.Adam([leaf], lr=RATE)))

    def step() -> None:
        for leaf, label, heard, adam in states:
            adam.zero_grad()
            gradients = torch.autograd.grad(F.cross_entropy(model(leaf), label), parameters, create_graph=True)
            pairs = list(zip(gradients, heard, strict=True))
            dot = torch.stack([(ours * theirs).sum() for ours, theirs in pairs]).sum()
            lengths = [
                torch.stack([value.square().sum() for value in vector]).sum().sqrt() for vector in (gradients, heard)
            ]
            across, down = leaf[..., 1:] - leaf[..., :-1], leaf[..., 1:, :] - leaf[..., :-1, :]
            loss = 1 - dot / lengths[0] / lengths[1] + TV * (across.abs().mean() + down.abs().mean())
            leaf.grad = torch.autograd.grad(loss, leaf)[0].sign()
            adam.step()
            with torch.no_grad():
                leaf.clamp_(-LIMIT, LIMIT)

    return step, len(states)


def _batched(
    model: nn.Module, uploads: list[dict[str, Tensor]], restarts: int, compiled: bool
) -> tuple[Step, int, Evaluator]:
    """All victims and restarts at once; return a step of all, how many these are, and what evaluates them."""
    network = Network(model)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    upload_model = UploadModel(NoMechanism(), "example", 1.0, 1, 1)
    victims = [Victim(1, number, parameters, upload, upload_model, "") for number, upload in enumerate(uploads)]
    matcher = Matcher(network, [victim for victim in victims for _ in range(restarts)], angle)
    images, labels = _starts(len(victims) * restarts)
    known = F.one_hot(labels, CLASSES).float()[:, None]
    evaluate = Evaluator(
        lambda pictures: matcher(pictures, known) + TV * total_variation(pictures), 1, "always" if compiled else "never"
    )
    adam = torch.optim.Adam([images], lr=RATE)

    def step() -> None:
        _, (gradient,) = evaluate(images)
        images.grad = gradient.sign()
        adam.step()
        images.clamp_(-LIMIT, LIMIT)

    return step, len(images), evaluate


def _prepare(case: AttackCase, method: str) -> tuple[Step, int, Evaluator | None]:
    model = build_model(MODELS[case.model], SHAPE, CLASSES, seed=0)
    uploads = _uploads(model, case.victims)
    if method == "loop":
        return *_loop(model, uploads, case.restarts), None
    return _batched(model, uploads, case.restarts, method == "batched-compiled")


def _measure_peak(case: AttackCase, method: str, threads: int) -> float:
    """The peak memory of a few steps, in MiB, over that of what was made before; in a process of its own."""
    torch.set_num_threads(threads)
    _prepare(AttackCase(case.model, 1, 1), METHODS[0])[0]()  # libraries are loaded
    step, _, _ = _prepare(case, method)
    before = peak_mib()
    step()
    step()
    return peak_mib() - before


def _measure(case: AttackCase, methods: tuple[str, ...], threads: int) -> list[dict[str, Any]]:
    """Alternate between the methods for some seconds and return the median of each."""
    ready = {method: _prepare(case, method) for method in methods}
    for method, (step, _, evaluator) in ready.items():
        step()
        step()
        if evaluator is not None and evaluator.compiled:
            print(f"  {case.model}, {case.victims} x {case.restarts}: compiled in {evaluator.compile_seconds:.1f} s")
        elif evaluator is not None and evaluator.note:
            print(f"  {case.model}, {case.victims} x {case.restarts}, {method}: {evaluator.note}")
    times: dict[str, list[float]] = {method: [] for method in methods}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[methods[0]]) < 3:
        for method, (step, count, _) in ready.items():
            times[method].append(1e3 * seconds(step) / count)
    peaks = [in_own_process(_measure_peak, case, method, threads) for method in methods]
    ms = medians(times)
    return [
        {**asdict(case), "method": method, "ms_per_iteration_and_victim": ms[method], "peak_mib": peak}
        for method, peak in zip(methods, peaks, strict=True)
    ]


def main() -> None:
    """Measure and print a table."""
    parser = options("attack", __doc__)
    parser.add_argument("--models", type=listed(MODELS), default=tuple(MODELS), help="networks, by commas")
    parser.add_argument("--victims", type=wholes, default=(1, 16, 64), help="numbers of victims, by commas")
    parser.add_argument(
        "--restarts", type=whole(0), default=64, help="restarts of one victim, in a case of its own; 0: none"
    )
    parser.add_argument("--methods", type=listed(METHODS), default=METHODS, help="by commas")
    parser.add_argument("--threads", type=whole(1), default=os.cpu_count() or 1, help="of the CPU")
    with parser.parsed() as asked:
        torch.set_num_threads(asked.threads)
        rows: list[dict[str, Any]] = []
        for model in asked.models:
            cases = [AttackCase(model, count, 1) for count in asked.victims]
            cases += [AttackCase(model, 1, asked.restarts)] if asked.restarts else []
            for case in cases:
                rows += _measure(case, asked.methods, asked.threads)
                _print(rows[-len(asked.methods) :])
        save(asked.json, rows=rows)


def _print(rows: list[dict[str, Any]]) -> None:
    times = {row["method"]: row["ms_per_iteration_and_victim"] for row in rows}
    loop = times.get(METHODS[0], float("nan"))
    for row in rows:
        print(
            "{model:<8} {victims:>3} victims x {restarts:>2}  {method:<17}{ms_per_iteration_and_victim:>9.3f} ms"
            "  {faster:>7.1f} times the loop  {peak_mib:>7.0f} MiB".format(**row, faster=loop / times[row["method"]]),
            flush=True,
        )


if __name__ == "__main__":
    main()
