"""The smoothed model of a run, final weights with noise scaled from above, and its votes over fresh draws of noise."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.attacks.evasion.steps import Loss, PlainTarget
from fedpriv.core.errors import InputError
from fedpriv.core.finished import final_state
from fedpriv.core.randomness import torch_stream
from fedpriv.core.runs import RunFolder
from fedpriv.core.threads import keep_freed_memory
from fedpriv.core.world import World
from fedpriv.data.datasets import unit_scale
from fedpriv.gradients.calls import until_the_end
from fedpriv.robustness.build import Smoothing, even_smoothing, first_layer, with_noise
from fedpriv.robustness.norms import FirstLayer, LayerNorms, layer_norms
from fedpriv.robustness.records import NoiseFacts, Robustness
from fedpriv.robustness.settings import RobustnessConfig

# Votes that are cast at once make no layer write more numbers than these: a processor's cache has room for them.
_PIECE = 1 << 19


@dataclass(frozen=True, eq=False)
class SmoothedNetwork:
    """A network that adds fresh noise in every forward pass, asked for votes."""

    first: FirstLayer  # the network, in evaluation mode, and its noise, scaled; weights do not change any more
    classes: int  # number of logits
    seed: int  # what streams of votes are made of. Votes convince nobody who lets the attacker know it.
    noisy: ClassVar[bool] = True

    @property
    def deviations(self) -> Tensor:
        """Sigma^(1/2), shaped as one example's value at the place of the noise."""
        deviations = self.first.layer.deviations
        if deviations is None:
            raise ValueError("the smoothed network has no noise")
        return deviations

    @property
    def dimension(self) -> int:
        """K, at the place of the noise."""
        return self.deviations.numel()

    def norms(self) -> LayerNorms:
        """The norms of the first layer in units of the noise, from above."""
        return layer_norms(self.first, self.deviations)

    def loss(self, draws: int, stream: torch.Generator) -> Loss:
        """Return -log of the mean over draws of the label's probability (Salman et al. 2019, SmoothAdv).

        With ``draws`` = 0 it is the cross entropy of the network without its noise, as in the paper's code.
        """
        if not draws:
            plain = PlainTarget(self.first.network, self.first.normalise, self.classes, self.dimension)
            return plain.loss(0, stream)

        def expected(images: Tensor, labels: Tensor) -> Tensor:
            logits = self.noisy_logits(images, draws, stream)
            own = functional.log_softmax(logits, dim=2).gather(2, labels.expand(draws, -1)[..., None])[..., 0]
            return math.log(draws) - own.logsumexp(dim=0)

        return expected

    def predictions(self, images: Tensor) -> Tensor:
        """Return the class (B,) of images (B, C, H, W) on [0, 1], without noise."""
        with torch.no_grad():
            logits: Tensor = self.first.network(self._inputs(images))
            return logits.argmax(dim=1).cpu()

    def noisy_logits(self, images: Tensor, draws: int, stream: torch.Generator) -> Tensor:
        """Return logits (draws, B, classes) with fresh noise in each, differentiable, the first layer computed once."""
        inputs = self.first.normalise(images)
        value = self.first.layer.value_at(self.first.network, inputs)
        logits = self._onwards(self.first.layer.drawn(value, draws, stream), inputs)
        return logits.view(draws, len(images), -1)

    def votes(self, images: Tensor, count: int, purpose: str, rows: Sequence[int]) -> Tensor:
        """Return how often each class won, (B, classes), int64, on the CPU; the first layer runs once an image."""
        keep_freed_memory()
        with torch.no_grad():
            step = max(1, _PIECE // self._widest(images[:1]))
            return torch.stack(
                [self._votes(image[None], count, step, purpose, row) for image, row in zip(images, rows, strict=True)]
            )

    def _votes(self, image: Tensor, count: int, step: int, purpose: str, row: int) -> Tensor:
        inputs = self._inputs(image)
        value = self.first.layer.value_at(self.first.network, inputs)
        stream = torch_stream(self.seed, purpose, row, device=value.device)
        won = torch.zeros(self.classes, dtype=torch.int64)
        for start in range(0, count, step):
            taken = min(step, count - start)
            z = self.first.layer.drawn(value, taken, stream)
            won += torch.bincount(self._onwards(z, inputs).argmax(dim=1).cpu(), minlength=self.classes)
        return won

    def _onwards(self, z: Tensor, inputs: Tensor) -> Tensor:
        """The logits from z; a network may look at how many images it is given, and at nothing else of them."""
        return self.first.layer.onwards(self.first.network, z, inputs[:1].detach().expand(len(z), -1, -1, -1))

    def _widest(self, image: Tensor) -> int:
        """The most numbers that a layer makes of one image (1, C, H, W)."""
        sizes = [self.dimension]

        def note(layer: nn.Module, given: object, made: object) -> None:
            sizes.append(made.numel() if isinstance(made, Tensor) else 0)

        network = self.first.network
        with until_the_end([layer.register_forward_hook(note) for layer in network.modules()]):
            network(self._inputs(image))
        return max(sizes)

    def _inputs(self, images: Tensor) -> Tensor:
        """What the network is fed of images (B, C, H, W) on [0, 1]."""
        return self.first.normalise(images.to(self.first.blank()))


_NOISE = "robustness/noise.safetensors"


@dataclass(frozen=True, eq=False)
class SmoothedModel:
    """A run's final model with noise, ready to be asked for votes."""

    network: SmoothedNetwork  # answers with votes
    noise: NoiseFacts  # what the noise is


def smoothed_model(folder: RunFolder, world: World, afterwards: float | None) -> SmoothedModel:
    """Return the final model with its own or other noise, scaled so that a margin m certifies sigma m."""
    state = final_state(folder, world, "certify")
    state.load_into(world.model)
    config = RobustnessConfig.noisy(world.experiment)
    if afterwards is not None:
        smoothing, config = _on_images(world, afterwards), None
    elif config is None or not isinstance(world.forward_noise, Smoothing):
        raise InputError(f"{folder.path}: {_without_noise(world)}; say how much, with --noise 0.25 --place input")
    else:
        smoothing = world.forward_noise
        world.model.eval()
    norms = layer_norms(smoothing.first, smoothing.spread)
    smoothing.fitted(norms.l2 if smoothing.norm == "l2" else norms.linf)
    noise = NoiseFacts(
        place=smoothing.first.layer.place,
        redistribution="uniform" if config is None else config.redistribution,
        sigma=smoothing.sigma,
        norm=smoothing.norm,
        afterwards=config is None,
        dimension=smoothing.spread.numel(),
        model=state.digest().hex(),
        epsilon=None if config is None else config.epsilon,
    )
    return SmoothedModel(_voting(world, smoothing), noise)


def write_noise(folder: RunFolder, model: SmoothedModel) -> None:
    """Write the noise and what it was made for; the folder robustness/ has to be there."""
    # One key: safetensors writes several in any order.
    metadata = {"noise": json.dumps(model.noise.to_json())}
    folder.write_bytes(_NOISE, save({"deviations": model.network.deviations.cpu().contiguous()}, metadata=metadata))


def read_smoothed(folder: RunFolder, world: World) -> SmoothedModel:
    """Return the network that the certificates in a folder are about."""
    path = folder.path / _NOISE
    if not path.exists():
        raise InputError(f"{folder.path} has no certificates: make them with fedpriv certify {folder.path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            deviations = file.get_tensor("deviations")
        noise = NoiseFacts(**json.loads(metadata["noise"]))
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    state = final_state(folder, world, "attack")
    if state.digest().hex() != noise.model:
        raise InputError(f"{path} is of another model than the checkpoint: certify again with fedpriv certify")
    robustness = folder.read(Robustness)
    if robustness is not None and robustness.noise != noise:
        raise InputError(f"{path} is of other noise than robustness.json: certify again with fedpriv certify")
    state.load_into(world.model)
    world.model.eval()
    smoothing = _on_images(world, noise.sigma) if noise.afterwards else world.forward_noise
    if not isinstance(smoothing, Smoothing) or not _shared_out(deviations, smoothing.spread):
        raise InputError(f"{path} is damaged: it is not of this network")
    smoothing.first.layer.deviations = deviations
    return SmoothedModel(_voting(world, smoothing), noise)


def _shared_out(deviations: Tensor, spread: Tensor) -> bool:
    """Whether deviations are the shares times one number above 0; other machines round shares in another way."""
    if deviations.shape != spread.shape:
        return False
    scales = deviations.double() / spread
    return 0 < float(scales.min()) <= float(scales.max()) <= 1.001 * float(scales.min()) < float("inf")


def pixel_images(world: World, rows: Tensor) -> Tensor:
    """Return test images (B, C, H, W) on [0, 1], in the numbers of the experiment, on the CPU."""
    return unit_scale(world.dataset.x_test[rows], next(iter(world.initial.parameters.values())).dtype)


def _voting(world: World, smoothing: Smoothing) -> SmoothedNetwork:
    return SmoothedNetwork(smoothing.first, world.dataset.classes, world.experiment.seed)


def _on_images(world: World, sigma: float) -> Smoothing:
    """Even noise on the image around the model; a noise layer that it has itself stays silent."""
    network = with_noise(world.model, "input", world.dataset.shape, world.experiment.seed)
    return even_smoothing(first_layer(world.dataset, network), sigma)


def _without_noise(world: World) -> str:
    if RobustnessConfig.of(world.experiment) is not None:
        return "the run's robustness.noise is 0, and without noise nothing can be certified"
    return "the run was trained without noise, which certificates rest on"
