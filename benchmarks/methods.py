"""One training step in each of the ways that are compared: plain, privatised by fedpriv, privatised by Opacus.

Each builder returns a function without arguments that does a whole step on one fixed batch: forward, backward, noise,
update of the parameters.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from fedpriv.core.config import Experiment
from fedpriv.core.federated import example_losses
from fedpriv.core.randomness import Secret, numpy_stream, torch_stream
from fedpriv.core.world import network_of
from fedpriv.data.datasets import Dataset
from fedpriv.diagnosis.cost import Step, private_step, releasing, sgd, sgd_step, stepping
from fedpriv.diagnosis.diagnose import CLASSES, fitting
from fedpriv.gradients import GradientOperator, Vector
from fedpriv.gradients.dense import dense_gradients
from fedpriv.gradients.normal import standard_normal
from fedpriv.mechanisms.gaussian import GaussianMechanism
from fedpriv.mechanisms.machinery.base import Mechanism
from fedpriv.mechanisms.machinery.vmf_sampling import draw_cosines
from fedpriv.mechanisms.vmf import VmfMechanism

SHORT = 6  # tokens of texts that are attacked: two fill less than the 16 dimensions of most rows, which DAGER needs


@dataclass(frozen=True)
class RandomNetwork:
    """A network, with its library before its name in a table of zoos."""

    name: str
    given: str  # what ``fedpriv model`` is given, words without spaces in them

    @property
    def asked(self) -> argparse.Namespace:
        """The same as the command reads it."""
        parser = argparse.ArgumentParser()
        parser.add_argument("model")
        parser.add_argument("--shape", default="3,32,32")
        parser.add_argument("--batch", type=int, default=16)
        parser.add_argument("--set", action="append", default=[])
        return parser.parse_args(self.given.split())

    @property
    def takes_texts(self) -> bool:
        """Whether the shape is a number of tokens."""
        return str(self.asked.shape).isdecimal()

    def fitting(self, attacks: Sequence[str] = ()) -> tuple[Experiment, Dataset]:
        """Return an experiment with the network and these attacks, and random examples."""
        asked = self.asked
        shape = (SHORT,) if attacks and self.takes_texts else tuple(map(int, asked.shape.split(",")))
        overrides = (*asked.set, f"adversary.attacks=[{', '.join(attacks)}]")
        return fitting(asked.model, overrides, shape, CLASSES, asked.batch)

    def network(self) -> nn.Module:
        """Return the network, each time with the same numbers."""
        return network_of(*self.fitting())

    def batch(self, examples: int) -> tuple[Tensor, Tensor]:
        """Return random inputs as the network takes them, and labels; texts fill their length."""
        _, dataset = self.fitting()
        inputs, labels = dataset.random(examples, torch_stream(0, "benchmark batch", examples))
        return dataset.normalise(inputs), labels


CLIP_NORM, SIGMA, KAPPA = 1.0, 1.0, 50.0
LOSS = example_losses  # a sequence's is the mean over its tokens


_SIZES = "hidden_size=512,num_hidden_layers=6,num_attention_heads=8,intermediate_size=1408"
_NEXT = "--shape 64 --set data.text.task=next --set"
MODELS = {
    name: RandomNetwork(name, given)
    for name, given in {
        "lenet": "lenet",
        "mlp(1024,1024)": "mlp --set model.hidden=[1024,1024]",
        "mlp(128)": "mlp --shape 1,28,28 --set model.hidden=[128]",
        "convnet": "convnet",
        "gpt(4,256)": f"gpt {_NEXT} model.width=256",
        "gpt(4,256), lora": f"gpt {_NEXT} model.width=256 --set model.lora_rank=4",
        "vit_tiny, 224": "timm:vit_tiny_patch16_224 --shape 3,224,224",
        "llama(6,512)": f"transformers:llama {_NEXT} model.config={{{_SIZES}}}",
    }.items()
}


def _releasing(row: RandomNetwork, batch: int, release: Callable[[nn.Module, Tensor, Tensor], Vector]) -> Step:
    """A step along what is released of the model's gradients at a batch."""
    model, (x, y) = row.network(), row.batch(batch)
    return releasing(model, lambda: release(model, x, y))


def _sgd(row: RandomNetwork, batch: int) -> Step:
    return sgd_step(row.network(), LOSS, *row.batch(batch))


def _ghost(mechanism: Mechanism, row: RandomNetwork, batch: int) -> Step:
    return private_step(row.network(), LOSS, *row.batch(batch), mechanism)


def _vmf_dense(row: RandomNetwork, batch: int) -> Step:
    """The way of every implementation known to us: B gradients of K numbers, and a draw of K numbers for each."""
    draws = torch_stream(0, "benchmark noise"), numpy_stream(0, "benchmark noise")
    return _releasing(
        row,
        batch,
        lambda model, x, y: _separate_draws(dense_gradients(model, LOSS, x, y, "the benchmark's reference"), *draws),
    )


def _separate_draws(gradients: GradientOperator, generator: torch.Generator, rng: np.random.Generator) -> Vector:
    """The mean of one von Mises-Fisher draw an example, each made of K normal numbers of its own."""
    cosines = draw_cosines(KAPPA, gradients.dimension(), gradients.examples, rng)
    total = {name: torch.zeros(shape) for name, shape in gradients.shapes.items()}
    for index in range(gradients.examples):
        own = {name: value[0] for name, value in gradients.rows(index, index + 1).items()}
        noise = {name: torch.randn(shape, generator=generator) for name, shape in gradients.shapes.items()}
        squared = _inner(own, own)
        share = _inner(own, noise) / squared
        length = math.sqrt(_inner(noise, noise) - share**2 * squared)
        cosine, sine = float(cosines.cosine[index]), float(cosines.sine[index])
        along = cosine / math.sqrt(squared) - sine * share / length
        for name, value in total.items():
            value.add_(own[name], alpha=along / gradients.examples)
            value.add_(noise[name], alpha=sine / length / gradients.examples)
    return total


def _inner(left: Vector, right: Vector) -> float:
    return sum(float(torch.dot(value.flatten(), right[name].flatten())) for name, value in left.items())


def opacus_hooks(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step of Opacus by its hooks."""
    model = GradSampleModule(network)
    optimizer = DPOptimizer(sgd(model), **_noise_of_opacus(len(x)))
    return stepping(optimizer, lambda: functional.cross_entropy(model(x).flatten(0, -2), y.flatten()))


def opacus_ghost(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step of Opacus by its ghost clipping."""
    accepted = _accepted_by_opacus(network)
    model = GradSampleModuleFastGradientClipping(accepted, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(sgd(model), **_noise_of_opacus(len(x)))
    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())

    def loss() -> Any:
        outputs = model(x)
        shape = None if outputs.ndim == 2 else outputs.shape
        return criterion(outputs.flatten(0, -2), y.flatten(), shape=shape)

    return stepping(optimizer, loss)


Lap = Callable[[str], None]
"""Called with the name of a part of a step that is done."""


def least_step(network: nn.Module, x: Tensor, y: Tensor, lap: Lap = lambda part: None) -> Step:
    """Return what a private step cannot do without, in the fewest calls of PyTorch, to bound what any costs.

    Hooks keep what layers are given, a backward pass goes to their outputs, one to four calls a layer make the
    gradients of each example; then come norms, a look for any that is not finite, a weighted sum and our noise. Nothing
    else is checked, and of other layers than Linear, LayerNorm and Embedding nothing is computed.
    """
    trained = {name: value for name, value in network.named_parameters() if value.requires_grad}
    sizes, noise = [value.numel() for value in trained.values()], Secret.of_seed(0).stream("noise of the least step")
    kept: list[tuple[nn.Module, tuple[Tensor, ...], GradientEdge]] = []
    for layer in network.modules():
        if any(value is not None and value.requires_grad for value in layer._parameters.values()):
            layer.register_forward_hook(lambda own, given, made: kept.append((own, given, get_gradient_edge(made))))

    def release() -> Vector:
        lap("start")
        kept.clear()
        total = LOSS(network(x), y).sum()
        errors = torch.autograd.grad(total, [edge for _, _, edge in kept], allow_unused=True)
        lap("passes")
        with torch.no_grad():
            made: dict[int, Tensor] = {}
            for (layer, given, _), error in zip(kept, errors, strict=True):
                if given and error is not None and len(error) == len(x):
                    _add_rows(made, layer, given[0], error)
            lap("gradients")
            rows = torch.cat([made[id(value)].flatten(1) for value in trained.values() if id(value) in made], dim=1)
            norms = torch.linalg.vector_norm(rows, dim=1)
            weights = (CLIP_NORM / norms).clamp_(max=1) if norms.isfinite().all() else torch.zeros_like(norms)
            lap("norms")
            drawn = standard_normal(sum(sizes), noise, rows.dtype)
            lap("noise")
            drawn[: rows.shape[1]].addmv_(rows.T, weights)
            parts = drawn.div_(len(x)).split(sizes)
            lap("sum")
        return {name: part.view_as(value) for (name, value), part in zip(trained.items(), parts, strict=True)}

    return releasing(network, release)


def _add_rows(made: dict[int, Tensor], layer: nn.Module, x: Tensor, error: Tensor) -> None:
    """Add a layer's gradients for each example, (B, *shape), to those of its parameters by their ids."""
    if not isinstance(layer, nn.Linear | nn.LayerNorm | nn.Embedding):
        return
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if isinstance(layer, nn.Embedding):
        rows = made.setdefault(id(weight), error.new_zeros(len(error), *weight.shape))
        places = x + torch.arange(0, len(error) * len(weight), len(weight))[:, None]
        rows.view(-1, rows.shape[2]).index_add_(0, places.flatten(), error.flatten(0, 1))
        return
    x, error = (side.reshape(len(side), -1, side.shape[-1]) for side in (x, error))
    if weight.requires_grad and isinstance(layer, nn.Linear):
        rows = torch.bmm(error.mT, x)
        made[id(weight)] = rows if id(weight) not in made else made[id(weight)].add_(rows)
    elif weight.requires_grad:
        made[id(weight)] = functional.layer_norm(x, x.shape[2:]).mul_(error).sum(dim=1)
    if bias is not None and bias.requires_grad:
        made[id(bias)] = error.sum(dim=1)


def _by_opacus(way: Callable[[nn.Module, Tensor, Tensor], Step], row: RandomNetwork, batch: int) -> Step:
    return way(row.network(), *row.batch(batch))


def _accepted_by_opacus(model: nn.Module) -> nn.Module:
    """Give layers that share a weight one each, and lay out what embeddings look up: ghost clipping refuses others."""
    seen: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        for name, value in layer._parameters.items():
            if value is not None and id(value) in seen:
                setattr(layer, name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
            seen.add(id(value))
    return model


def _noise_of_opacus(batch: int) -> dict[str, Any]:
    return {
        "noise_multiplier": SIGMA,
        "max_grad_norm": CLIP_NORM,
        "expected_batch_size": batch,
        "generator": torch_stream(0, "benchmark noise"),
    }


METHODS: dict[str, Callable[[RandomNetwork, int], Step]] = {
    "sgd": _sgd,
    "gaussian-ghost": partial(_ghost, GaussianMechanism(SIGMA, CLIP_NORM)),
    "vmf-ghost": partial(_ghost, VmfMechanism(KAPPA)),
    "vmf-dense": _vmf_dense,
    "opacus-hooks": partial(_by_opacus, opacus_hooks),
    "opacus-ghost": partial(_by_opacus, opacus_ghost),
}
