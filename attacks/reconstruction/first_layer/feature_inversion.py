"""Feature inversion: layers that let all of an image through, and the image from what a later layer gets of it.

The features are linear equations for the pixels, or, behind max pooling and curves such as sigmoids, the goal of a
search from two starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.first_layer.closed_form import ROUNDING
from fedpriv.attacks.reconstruction.lbfgs import minimise
from fedpriv.attacks.reconstruction.priors import FEWEST_IMAGES, MOST_IMAGES, GaussianPrior, fit_prior
from fedpriv.attacks.reconstruction.results import AttackRefused
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.reconstruction.variables import coordinates_of
from fedpriv.core.randomness import fixed_normal
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied, until_the_end

KERNELS = 20260329  # the seed of kernels; it decides nothing else
FLAT = 0.9  # how much of a kernel's mean is taken out of it, so that it stresses details
ROOM = 1.1  # how far a bias lifts what reaches a ReLU, relative to what it takes on public images
SHOWN = 256  # public images that are sent through the network at once
PLAIN = (nn.Conv2d, nn.Linear, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Identity)
PASSING = (nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)

SAME = 1 / 256  # root mean square distance of images on the [0, 1] scale that count as one
SOLVED = 1e-3  # mean square distance of features, relative to their spread, that a certified image has at most
MOST_PIXELS = 4096  # of an image whose equations are written out
RIDGE = 1e-12  # of the largest eigenvalue of the equations
REFINED = 3  # times that a solution is refined, which takes the ridge out of it
STRAIGHT = 1e-4  # how much two equal steps of a linear map may differ, relative
SEARCH = 600  # L-BFGS iterations


def why_not_plain(model: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> str | None:
    """The first layer that the server cannot make pass images on, if ReLU, pooling and ``others`` do so anyway."""
    for name, layer in model.named_modules():
        made = isinstance(layer, (nn.Conv2d, nn.Linear))
        if made and (layer.bias is None or not all(value.requires_grad for value in layer.parameters())):
            return f"{name} (without a bias, or frozen)"
        is_container = any(layer.children()) and not any(True for _ in layer.parameters(recurse=False))
        if not is_container and not isinstance(layer, (*PLAIN, *others)):
            return f"{name or 'the network'} ({type(layer).__name__})"
    return None


def clear_layers(model: nn.Module, names: Sequence[str], images: Tensor) -> Vector:
    """Kernels that stress details, and biases that let everything pass, of convolutions and Linear layers."""
    network, generator = copied(model).eval(), torch.Generator().manual_seed(KERNELS)

    def make(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        weight.copy_(_kernels(weight, generator))
        bias.zero_()
        result = layer.forward(*given)
        bias.copy_(-ROOM * result.transpose(0, 1).flatten(1).amin(dim=1))

    made = {name: network.get_submodule(name) for name in names}
    with until_the_end([layer.register_forward_pre_hook(make) for layer in made.values()]), torch.no_grad():
        network(images[:: -(-len(images) // SHOWN)])
    return {
        f"{name}.{part}": value.detach() for name, layer in made.items() for part, value in layer.named_parameters()
    }


def _kernels(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Orthogonal kernels of a weight's shape; of convolutions, most of each channel's mean is taken out."""
    drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    if drawn.ndim > 2:
        drawn = drawn - FLAT * drawn.mean(dim=(2, 3), keepdim=True)
    left, _, right = torch.linalg.svd(drawn.flatten(1), full_matrices=False)
    kernels: Tensor = left @ right
    return kernels.view_as(weight).to(weight)


def features_of(model: nn.Module, parameters: Vector, layer: str, images: Tensor) -> Tensor:
    """What a layer gets (B, F) for images (B, C, H, W)."""
    given: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given.append(inputs[0])

    with until_the_end([model.get_submodule(layer).register_forward_pre_hook(keep)]):
        functional_call(model, parameters, (images,))
    return given[0]


@dataclass(frozen=True, eq=False)
class FoundImages:
    """Images found from features, and how well they fit."""

    images: Tensor  # (n, C, H, W), normalised
    misfits: Tensor  # (n,), mean square distances of features, relative to their spread
    determined: Tensor  # bool (n,), whether the features are met, and no other image was found, or exists, for them


@dataclass(frozen=True, eq=False)
class Equations:
    """What a layer gets of P pixels as linear equations, for the coordinates in which the prior is standard normal."""

    columns: Tensor  # (P, F), what each pixel adds
    root: Tensor  # (P, P), of the prior's covariance
    scaled: Tensor  # (P, F), what each coordinate adds
    factor: Tensor  # (P, P), of the coordinates' normal equations
    rank: int  # numbers of an image that the features tell
    least: float  # the least eigenvalue of the pixels' normal equations

    @staticmethod
    def of(columns: Tensor, prior: GaussianPrior) -> "Equations":
        """Prepare them to be solved."""
        wide, outside = prior.variances.sqrt(), prior.rest**0.5
        root = (prior.basis * (wide - outside)) @ prior.basis.mT
        root.diagonal().add_(outside)
        eigenvalues = torch.linalg.eigvalsh(columns @ columns.mT)
        scaled = root @ columns
        squares = scaled @ scaled.mT
        squares.diagonal().add_(RIDGE * squares.diagonal().sum())
        rank = int((eigenvalues > RIDGE**0.5 * eigenvalues[-1]).sum())
        return Equations(columns, root, scaled, torch.linalg.cholesky(squares), rank, float(eigenvalues[0]))


@dataclass(frozen=True, eq=False)
class FeatureReader:
    """The layers before one whose inputs were read, in float64 where the device has it."""

    scene: Scene
    network: Network
    parameters: Vector
    layer: str  # the name of the layer whose inputs were read

    @staticmethod
    def of(scene: Scene, victim: Victim, layer: str) -> "FeatureReader":
        """Take the layers with the parameters that the client was sent."""
        network = scene.network.widened()
        parameters = {name: value.to(network.dtype) for name, value in victim.parameters.items()}
        return FeatureReader(scene, network, parameters, layer)

    def __call__(self, images: Tensor) -> Tensor:
        """What the layer gets (n, F) for images (n, C, H, W)."""
        return features_of(self.network.model, self.parameters, self.layer, images)

    @cached_property
    def middle(self) -> Tensor:
        """The prior's mean image (C, H, W)."""
        return self.scene.prior.mean.to(self.network.dtype).unflatten(0, self.scene.shape)

    @cached_property
    def is_linear(self) -> bool:
        """Whether features change in proportion to an image: not with max pooling or curves, layers or functions."""
        step = 0.1 * fixed_normal(KERNELS, *self.scene.shape).to(self.middle)
        with torch.no_grad():
            up, here, down = self(torch.stack([self.middle + step, self.middle, self.middle - step]))
        return float((up + down - 2 * here).norm()) < STRAIGHT * float((up - here).norm())

    @cached_property
    def equations(self) -> Equations:
        """What the layer gets as linear equations for the pixels, as long as all ReLUs are open."""
        start, units = self(self.middle[None]), torch.eye(self.scene.pixels).to(self.middle)
        parts = units.unflatten(1, self.scene.shape).split(SHOWN)
        columns = torch.cat([self(self.middle + part) - start for part in parts])
        return Equations.of(columns, self.scene.prior.to(columns))

    @cached_property
    def prior(self) -> GaussianPrior:
        """What features look like: fitted to those of the public images."""
        public = self.scene.public_images
        if public is None or len(public) < FEWEST_IMAGES:
            many = f"{FEWEST_IMAGES} public images or more"
            raise AttackRefused(f"imprint behind convolutions needs {many} to tell features from noise")
        images = self.scene.normalised(public[:MOST_IMAGES])
        with torch.no_grad():
            features = torch.cat([self(part.to(self.network.dtype)) for part in images.split(SHOWN)])
        return fit_prior(features[:, :, None, None])

    @property
    def is_solved(self) -> bool:
        """Whether images are solutions of linear equations, and not searched for."""
        return self.is_linear and self.scene.pixels <= MOST_PIXELS

    @property
    def lost(self) -> int:
        """Numbers of an image that linear equations do not tell; of a search it is not known."""
        return self.scene.pixels - self.equations.rank if self.is_solved else 0

    def inverted(self, wanted: Tensor) -> FoundImages:
        """The images of features (n, F) that are known up to rounding."""
        if self.is_solved and len(wanted):
            return self.solved(wanted)
        deviations = ROUNDING * wanted.square().mean(dim=1).sqrt()
        return self.searched(wanted, deviations, SEARCH, twice=True, ends=True)

    @torch.no_grad()
    def solved(self, wanted: Tensor) -> FoundImages:
        """The solutions of linear equations that are nearest to the prior's mean, in its deviations."""
        pixels, middle, equations = self.scene.pixels, self.middle, self.equations
        start, flat = self(middle[None]), wanted.new_zeros(len(wanted), pixels)
        for _ in range(REFINED):
            left = wanted - start - flat @ equations.columns
            flat = flat + (equations.root @ torch.cholesky_solve(equations.scaled @ left.mT, equations.factor)).mT
        images = middle + flat.unflatten(1, self.scene.shape)
        misfits = (self(images) - wanted).square().mean(dim=1)
        # What is not met, at least by rounding, may all lie along the weakest equation.
        missed = (ROUNDING**2 * wanted.square().mean(dim=1)).maximum(misfits)
        off = (missed * wanted.shape[1] / (equations.least * pixels)).sqrt() * self.scene.std.max()
        return FoundImages(images, misfits / wanted.var(dim=1), (off < SAME) & (equations.rank == pixels))

    def searched(self, wanted: Tensor, deviations: Tensor, iterations: int, *, twice: bool, ends: bool) -> FoundImages:
        """The most probable images given features (n, F) with noise of deviations (n,), and if two searches agree."""
        shape, count = self.scene.shape, len(wanted)
        if not count:
            return FoundImages(
                self.middle.expand(0, *shape), wanted.new_zeros(0), wanted.new_zeros(0, dtype=torch.bool)
            )
        coordinates = coordinates_of(shape).to(self.scene.mean.to(wanted))
        spreads = wanted.var(dim=1).clamp(min=1e-30)
        # Half the squared coordinates are the prior's energy, and noise has this variance relative to the spread.
        noise = deviations.to(wanted).square() / spreads

        def evaluate(points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            leaf, which = points.detach().requires_grad_(), index % count
            with torch.enable_grad():
                given = self(coordinates.images(leaf.unflatten(1, shape)))
                values = (given - wanted[which]).square().sum(dim=1) / spreads[which]
                values = values + noise[which] * leaf.square().sum(dim=1)
                (gradients,) = torch.autograd.grad(values.sum(), leaf)
            return values.detach() / wanted.shape[1], gradients / wanted.shape[1]

        random = fixed_normal(KERNELS, count, self.scene.pixels).to(wanted)
        starts = torch.cat([torch.zeros_like(random), random]) if twice else torch.zeros_like(random)
        target = 4 * noise.repeat(2)[: len(starts)] if ends else None
        ended = minimise(evaluate, starts, iterations, target=target)
        images = coordinates.images(ended.points.unflatten(1, shape))
        # Without a second start the last image is the first one: nothing is compared, and nothing certified.
        apart = ((images[:count] - images[-count:]) * self.scene.std).square().flatten(1).mean(dim=1).sqrt()
        determined = (apart < SAME) & (ended.values[:count] < SOLVED) & twice
        return FoundImages(images[:count], ended.values[:count], determined)
