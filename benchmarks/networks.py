"""What a private step of small and middle networks by name costs next to SGD's, and what it cannot do without.

All parts take turns; reported are medians of the CPU time on one thread over that of a step of SGD. The floor is what
is left where computing on what layers get and give costs nothing but its products: forward and backward to the layers'
outputs, with hooks that keep both, then norms, a weighted sum, the noise and the update. Directional noise needs inner
products of all pairs of gradients in place of norms, and those with a vector. The steps of small networks, and the
parts of the least one, are also compared with a step of Opacus' hooks. Needs timm, transformers, peft and Opacus.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from benchmarks.measure import in_turns, medians, options, report, save
from benchmarks.methods import RandomNetwork, least_step, opacus_hooks
from fedpriv.core.federated import example_losses
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.threads import keep_freed_memory
from fedpriv.core.world import network_of
from fedpriv.diagnosis.cost import cpu_seconds, private_step, sgd, sgd_step
from fedpriv.diagnosis.diagnose import random_batch
from fedpriv.gradients import find_route, per_example_gradients
from fedpriv.gradients.calls import until_the_end
from studies.arguments import whole
from studies.zoo import rows

_NEXT = "--shape 16 --set data.text.task=next --set model.config="
_SIDES = "hidden_size=128,intermediate_size=256,num_hidden_layers=4,num_attention_heads=4"
NETWORKS = {
    "ViT of torchvision, width 32": "torchvision/vit (small)",
    "ViT of transformers, width 16": "transformers/vit",
    "ConvNeXt of torchvision, widths 16 and 32": "torchvision/convnext (small)",
    "ConvNeXt of transformers": "transformers/convnext",
    "Swin V2 of transformers": "transformers/swinv2",
    "ViT of transformers, width 128, four layers": f"transformers:vit --set model.config={{{_SIDES}}}",
    "Llama of transformers, width 128, four layers": f"transformers:llama {_NEXT}{{{_SIDES}}}",
    "Mistral of transformers, width 128, four layers": f"transformers:mistral {_NEXT}{{{_SIDES}}}",
}
SMALL = (
    "transformers/roberta, label",
    "peft/lora with biases, bert, label",
    "transformers/bloom, next",
    "transformers/phi, next",
    "transformers/gpt_neox, next",
)
PARTS = ("passes", "gradients", "norms", "noise", "sum")
BATCH = 16
DIRECTIONAL = {"name": "vmf", "kappa": 500.0}


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = options("networks", __doc__)
    parser.add_argument("--repeats", type=whole(1), default=15, help="rounds in which every part takes a turn")
    with parser.parsed() as asked:
        torch.set_num_threads(1)
        keep_freed_memory()
        known = {row.name: row for row in rows()}
        made = [
            {"network": name, **times_of(known.get(given, RandomNetwork(name, given)), asked.repeats)}
            for name, given in NETWORKS.items()
        ]
        columns = {"network": "{network}", "million parameters": "{millions:.2f}"}
        parts = ("passes", "norms", "sum", "noise", "update", "pairs", "products")
        ratios = ("Gaussian noise", "directional noise", "floor", *parts)
        report({**columns, **{ratio: f"{{{ratio}:.2f}}" for ratio in ratios}}, made)
        small = [{"network": name, **shares_of(known[name], asked.repeats)} for name in SMALL]
        shares = ("private step", "least step", *PARTS, "plain SGD")
        report({"network": "{network}", **{share: f"{{{share}:.2f}}" for share in shares}}, small)
        save(asked.json, rows=made, shares=small, torch=torch.__version__)


def times_of(row: RandomNetwork, repeats: int) -> dict[str, float]:
    """CPU times of a network's steps and of their parts over that of a step of SGD."""
    experiment, dataset = row.fitting()
    model = network_of(experiment, dataset)
    x, y = (values[:BATCH] for values in random_batch(dataset, BATCH))
    directional = MECHANISMS["vmf"](**DIRECTIONAL).mechanism()
    noise, route = Secret.of_seed(0).stream("benchmark"), find_route(model, example_losses, x, y)
    held = [per_example_gradients(model, example_losses, x, y, route=route)]
    drawn = held[0].numbers(noise)[None]
    ways: dict[str, Callable[[], object]] = {
        "SGD": sgd_step(model, example_losses, x, y),
        "Gaussian noise": private_step(model, example_losses, x, y, experiment.mechanism.mechanism()),
        "directional noise": private_step(model, example_losses, x, y, directional),
        "passes": partial(_passes, model, x, y),
        "norms": lambda: held[0].norms(),
        "sum": lambda: held[0].combine(torch.ones(BATCH)),
        "noise": lambda: held[0].draw(noise),
        "pairs": lambda: held[0].grams(1, precise=False),
        "products": lambda: held[0].dots_laid(drawn),
        "update": sgd(model).step,
    }

    def timed(way: Callable[[], object]) -> float:
        held[0] = per_example_gradients(model, example_losses, x, y, route=route)  # which keep what was computed once
        return cpu_seconds(way)

    taken = medians(in_turns({name: partial(timed, way) for name, way in ways.items()}, repeats + 1))
    times = {name: seconds / taken["SGD"] for name, seconds in taken.items()}
    floor = sum(times[part] for part in ("passes", "norms", "sum", "noise", "update"))
    return {"millions": sum(value.numel() for value in model.parameters()) / 1e6, "floor": floor, **times}


def shares_of(row: RandomNetwork, repeats: int) -> dict[str, float]:
    """CPU times of steps of a network, and of parts of the least one, over that of Opacus' hooks."""
    experiment, dataset = row.fitting()
    x, y = random_batch(dataset, BATCH)
    done: dict[str, list[float]] = {part: [] for part in ("start", *PARTS)}  # the CPU time then
    steps: dict[str, Callable[[], None]] = {
        "private step": private_step(row.network(), example_losses, x, y, experiment.mechanism.mechanism()),
        "least step": least_step(row.network(), x, y, lambda part: done[part].append(time.process_time())),
        "plain SGD": sgd_step(row.network(), example_losses, x, y),
        "Opacus": opacus_hooks(row.network(), x, y),
    }
    taken = in_turns({name: partial(cpu_seconds, step) for name, step in steps.items()}, repeats + 1)
    for before, part in pairwise(done):
        taken[part] = [end - began for began, end in zip(done[before], done[part], strict=True)]
    return {
        name: median(mine / theirs for mine, theirs in zip(own, taken["Opacus"], strict=True))
        for name, own in taken.items()
    }


def _passes(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A forward pass with hooks that keep what layers with parameters get and give, and a backward pass to these."""
    edges: list[GradientEdge] = []
    kept: list[object] = []

    def keep(layer: nn.Module, given: object, output: Tensor) -> None:
        kept.append(given)
        edges.append(get_gradient_edge(output))

    layers = [layer for layer in model.modules() if layer._parameters and not list(layer.children())]
    with until_the_end([layer.register_forward_hook(keep) for layer in layers]):
        total = example_losses(model(x), y).sum()
        torch.autograd.grad(total, edges, allow_unused=True)


if __name__ == "__main__":
    main()
