"""The most probable images given an upload, noise and prior: maximum a posteriori, adapted to the mechanism.

Adam minimises the negative log-posterior in coordinates in which the prior is standard normal. Against local optima the
likelihood's share grows to its full weight, and kinks of the network are smoothed at first. The last part of the
search, with the network as it is, starts at images that first or last layers show, too. A sharper part counts only
where it gains more than noise would explain. Where an upload pins down no direction of an image, the posterior's mean
is taken in place of its mode, for networks without kinks.

With kinks an image that is slightly off has some units wrong, and images far off with lucky units are more probable.
There the units are read together with the image, from the closed form's image, its negative and the prior's mean, with
every label that may be right; the answer is the mean of these readings by their probabilities. Where units cannot be
unknowns, as after several local steps, it is the closed form wherever that explains the upload at all.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import ReluMode, ghost_obstacle, kink_inputs
from fedpriv.attacks.reconstruction.features import read_feature_starts
from fedpriv.attacks.reconstruction.first_layer.closed_form import read_starts
from fedpriv.attacks.reconstruction.labels import JOINT, OutputLayer, find_output_layer, read_labels
from fedpriv.attacks.reconstruction.matching import Compared, Evaluator, Losses, Matcher, chunks, compared
from fedpriv.attacks.reconstruction.priors import GaussianPrior, stretched
from fedpriv.attacks.reconstruction.results import AttackRefused, Outcome
from fedpriv.attacks.reconstruction.scene import ENDED, Report, Scene, time_is_up
from fedpriv.attacks.reconstruction.upload_model import UploadModel, Victim, by_victim
from fedpriv.core.randomness import fixed_normal
from fedpriv.gradients import Vector, flattened
from fedpriv.gradients.operator import wide_type

# The posterior's mean where an upload says little, from the normal distribution closest to the posterior (least
# Kullback-Leibler divergence; Kucukelbir et al. 2017), with deviations along the prior's principal directions and one
# for all others. The mode would explain the upload without details, and coarse parts would make up for them.


NARROW = 0.1  # deviation at first, in the prior's: it grows where the upload leaves images open
BETAS = (0.9, 0.99)  # of Adam, in all searches of the posterior
LAST_RATE = 0.01  # the learning rate of the last step over that of the first
POINTS_SEED = 20240527  # the seed of the points at which posteriors are compared, the same for all rows


@dataclass(frozen=True, eq=False)
class Cloud:
    """A normal distribution of images for each of n rows."""

    middle: Tensor  # coordinates (n, B, C, H, W)
    along: Tensor  # deviations (n, B, r) along the prior's principal directions, in the prior's
    rest: Tensor  # deviation (n, B, 1) along all others
    others: tuple[Tensor, ...]  # what else was fitted, without deviations

    @property
    def least(self) -> Tensor:
        """The least deviation (n,)."""
        return torch.cat([self.along, self.rest], dim=2).flatten(1).amin(dim=1)


def fit_cloud(
    posterior: Losses,  # (coordinates, *others) -> minus its logarithm (n,), the prior's standard normal one included
    coordinates: Tensor,  # (n, B, C, H, W), where it starts
    others: Sequence[Tensor],
    basis: Tensor,  # (P, r), the prior's principal directions
    steps: int,
    rate: float,
    rates: Sequence[float] = (),
) -> Cloud:
    """Fit the distribution by Adam, from pairs of opposite points, one a step."""
    rows, examples = coordinates.shape[:2]
    outside = coordinates[0, 0].numel() - basis.shape[1]
    middle = coordinates.clone()
    along = coordinates.new_full((rows, examples, basis.shape[1]), math.log(NARROW))
    rest = coordinates.new_full((rows, examples, 1), math.log(NARROW))
    fitted = tuple(value.clone() for value in others)
    generator = torch.Generator().manual_seed(POINTS_SEED)

    def divergence(middle: Tensor, along: Tensor, rest: Tensor, draw: Tensor, *fitted: Tensor) -> Tensor:
        offset = stretched(draw.flatten(-3), basis, along.exp(), rest.exp()).unflatten(-1, middle.shape[2:])
        both = posterior(middle + offset, *fitted) + posterior(middle - offset, *fitted)
        # The prior's share of it is known without drawing.
        known = _prior_and_entropy(along).sum(dim=(1, 2)) + outside * _prior_and_entropy(rest).sum(dim=(1, 2))
        return both / 2 - offset.square().flatten(1).sum(dim=1) / 2 + known

    evaluate = Evaluator(divergence, steps)
    moved = [(middle, rate), (along, rate), (rest, rate), *zip(fitted, rates, strict=False)]
    adam = torch.optim.Adam([{"params": [value], "lr": each} for value, each in moved], betas=BETAS)
    for step in range(steps):
        draw = torch.randn(coordinates.shape[1:], generator=generator).to(coordinates)
        _, (middle.grad, along.grad, rest.grad, _, *gradients) = evaluate(middle, along, rest, draw, *fitted)
        for (value, _), gradient in zip(moved[3:], gradients, strict=False):
            value.grad = gradient
        for group, (_, each) in zip(adam.param_groups, moved, strict=True):
            group["lr"] = each * rate_share(step / steps)
        adam.step()
        if time_is_up():
            break
    return Cloud(middle, along.exp(), rest.exp(), fitted)


def rate_share(done: float) -> float:
    """Return the learning rate over that of the first step, when this share of the steps is done: half a cosine."""
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def _prior_and_entropy(logarithms: Tensor) -> Tensor:
    return (2 * logarithms).exp() / 2 - logarithms


# How probable images are after an upload was heard: the noise of its mechanism, and what images look like.
#
# Minus the logarithm of ``p(upload | images, labels) p(images)``, on one scale: the noise is public, so that no weight
# between the two is left to be chosen. The upload's density is the mechanism's own (see the module
# ``fedpriv.mechanisms.machinery.law``).


def misfit(comparison: Compared) -> Tensor:
    """Return minus the log-likelihood (N,) of what was heard, over that of an expected upload of zero."""
    noise = comparison.model.noise([value.numel() for value in comparison.targets.vectors[0].values()])
    if noise.follows_from(len(comparison.blocks)):
        return noise.misfit_of_blocks(comparison.squared, comparison.dot, comparison.heard)
    return noise.misfit(flat(comparison.expected()), flat(comparison.upload()))


def flat(vectors: Vector) -> Tensor:
    """Lay tensors (N, *shape) end to end: (N, K)."""
    return torch.cat([flattened(value) for value in vectors.values()], dim=1)


@dataclass(frozen=True)
class Whitening:
    """Coordinates z of images in which the prior is standard normal: image = mean + S z, S the symmetric root."""

    prior: GaussianPrior  # of images
    shape: tuple[int, int, int]  # (C, H, W)

    @cached_property
    def _roots(self) -> tuple[Tensor, float]:
        return self.prior.variances.sqrt(), math.sqrt(self.prior.rest)

    def images(self, coordinates: Tensor) -> Tensor:
        """Map coordinates (..., C, H, W) to images (..., C, H, W); differentiable."""
        offsets = stretched(coordinates.flatten(-3), self.prior.basis, *self._roots)
        return (self.prior.mean + offsets).unflatten(-1, self.shape)

    def coordinates(self, images: Tensor) -> Tensor:
        """Map images (..., C, H, W) to their coordinates."""
        along, rest = self._roots
        flat = images.flatten(-3) - self.prior.mean
        scaled = flat / rest + ((1 / along - 1 / rest) * (flat @ self.prior.basis)) @ self.prior.basis.mT
        return scaled.unflatten(-1, self.shape)


# Which labels of a single example an upload leaves open under noise: those among the smallest entries of the last
# bias's gradient, give or take the noise, and likely at images that are drawn from the prior.


MARGIN = 5.0  # standard deviations from the smallest entry of the last bias's gradient within which labels stay open
LABEL_DRAWS = 16  # images at which labels are compared; the first is the prior's mean
SEED = 20261122  # of these images; they are no part of the result
# How much less likely than the best a label may be, as a logarithm, at the image that favours it most. Of uploads whose
# label can be told at all, the true one is mostly the best at each of the images.
BEHIND = 25.0
TRIED = 10  # labels that are searched with, at most


def open_labels(scene: Scene, rows: Sequence[Victim]) -> list[list[Tensor | None]]:
    """Return each row's sets of labels (B,) that noise leaves open, of single examples; ``None``: to be optimised."""
    layer = find_output_layer(scene.network, rows[0].parameters, scene.shape, scene.classes)
    return [_open(scene, victim, layer, read) for victim, read in zip(rows, read_labels(scene, rows), strict=True)]


def _open(scene: Scene, victim: Victim, layer: OutputLayer | None, read: Tensor | None) -> list[Tensor | None]:
    if victim.labels is not None or victim.model.examples > 1:
        return [read]
    if layer is not None and not victim.model.mechanism.protects:
        return [read]
    device = scene.network.device
    choices: list[Tensor | None] = [torch.tensor([label], device=device) for label in range(scene.classes)]
    if layer is None or not layer.bias:
        return choices
    heard = victim.gradient[layer.name]
    deviation = math.sqrt(2 * victim.noise_variance)
    deviation *= float(victim.model.mechanism.deviations((layer.name,))[layer.name].max())
    near = (heard - heard.min() <= MARGIN * deviation).tolist()
    return [labels for labels, kept in zip(choices, near, strict=True) if kept] or [read]


def likely_labels(scene: Scene, victim: Victim, labels: Sequence[Tensor]) -> list[Tensor]:
    """Return those of the labels (1,) that may be right, at most :data:`TRIED`, the likeliest on average first."""
    if len(labels) < 2:
        return list(labels)
    losses = _losses(scene, victim, torch.stack(list(labels))).nan_to_num(math.inf, math.inf)
    behind = (losses - losses.amin(dim=0)).nan_to_num(math.inf).amin(dim=1)
    order = losses.mean(dim=1).argsort(stable=True).tolist()
    kept = [number for number in order if float(behind[number]) <= BEHIND] or order
    return [labels[number] for number in kept[:TRIED]]


def _losses(scene: Scene, victim: Victim, labels: Tensor) -> Tensor:
    """Minus the log-likelihood (labels, draws) of the upload with each label at each of the drawn images."""
    coordinates = fixed_normal(SEED, LABEL_DRAWS, 1, *scene.shape).to(scene.mean)
    coordinates[0] = 0
    images = Whitening(scene.prior, scene.shape).images(coordinates).repeat(len(labels), 1, 1, 1, 1)
    rows, given = [victim] * len(images), labels.repeat_interleave(LABEL_DRAWS, dim=0)
    return compared(scene, rows, misfit, images, given, written=victim.needs_writing).view(-1, LABEL_DRAWS)


# Which units of a ReLU network are on, as unknowns next to the image: an image that is slightly off has some wrong.
#
# Each has a gate, the probability that it is on, with which the network multiplies instead of comparing with zero. A
# gate that contradicts the image costs the Kullback-Leibler divergence of two coins. Once the gates are decided, the
# network has no kinks. The image is the mean of a normal distribution, of a prior whose contrast is free.


FIRST = 8.0  # logits of the gates at first, of a unit whose input is as large as their root mean square
MOST = 6.0  # of these logits
SHARP = 32.0  # how sure an image is of its units: logits, for an input as large as their root mean square
GATE_RATE = 4.0  # the learning rate of gates over that of images
CONTRAST_RATE = 0.4  # the same for the contrast
LEAST_SPREAD = 0.05  # of the logarithm of the contrast


class Gated(ReluMode):
    """Within this context ReLUs, in the order of their calls, multiply with gates of their inputs' shape."""

    def __init__(self, gates: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self._gates = gates

    @override
    def relu(self, inputs: Tensor) -> Tensor:
        self.inputs.append(inputs)
        return inputs * self._gates[len(self.inputs) - 1]


def can_be_gated(scene: Scene, victim: Victim) -> bool:
    """Whether the dummies go through the network once, row by row, so that gates can be told apart."""
    one_pass = victim.model.training is None and not victim.more
    noisy = victim.model.mechanism.protects  # without noise closed forms are exact
    return one_pass and noisy and not ghost_obstacle(scene.network, torch.Size(scene.shape), scene.classes)


def read_gated(
    scene: Scene, victims: Sequence[Victim], labels: Tensor, coordinates: Tensor, steps: int, rate: float
) -> Tensor:
    """Infer which units are on, and the images with them, from coordinates (n, B, C, H, W) of images that were read.

    Returns the posterior's mean, or the start where that is more probable with the same units (with little noise).
    """
    whitening = Whitening(scene.prior, scene.shape)
    inputs = kink_inputs(scene.network, victims[0].parameters, whitening.images(coordinates).flatten(0, 1))
    sizes = [_size(values) for values in inputs]
    first = [(FIRST * values / size).clamp(-MOST, MOST) for values, size in zip(inputs, sizes, strict=True)]
    matcher = Matcher(scene.network, victims, misfit)
    spread = max(scene.prior.contrast / 2, LEAST_SPREAD)
    posterior = _GatePosterior(matcher, whitening, F.one_hot(labels, scene.classes).to(scene.mean), spread, sizes)
    even = coordinates.new_zeros(len(coordinates))
    rates = (CONTRAST_RATE * rate, *[GATE_RATE * rate] * len(first))
    basis = scene.prior.basis
    searched = fit_cloud(posterior.searched, coordinates, (even, *first), basis, steps // 2, rate, rates)
    gates = [(logits > 0).to(coordinates) for logits in searched.others[1:]]
    ended = fit_cloud(posterior.given(gates), coordinates, (even,), basis, steps - steps // 2, rate, rates[:1])
    mean = _contrasted(ended.middle, ended.others[0])
    with torch.no_grad():
        decided = posterior.given(gates)
        better = decided(mean, even) <= decided(coordinates, even)
    return torch.where(better[:, None, None, None, None], mean, coordinates)


@dataclass(frozen=True, eq=False)
class _GatePosterior:
    """Minus the logarithm of the posterior (n,), but for constants."""

    matcher: Matcher  # gives minus the log-likelihood
    whitening: Whitening  # of the prior
    labels: Tensor  # probabilities (n, B, classes)
    spread: float  # standard deviation of the logarithm of the contrast
    sizes: Sequence[Tensor]  # of the inputs of each ReLU, (n * B, 1, ...)

    def searched(self, coordinates: Tensor, contrast: Tensor, *logits: Tensor) -> Tensor:
        """Of images, the logarithm of their contrast (n,), and the gates' logits."""
        with Gated([gate.sigmoid() for gate in logits]) as gated:
            total = self._misfits(coordinates, contrast) + self._energies(coordinates, contrast)
        for values, size, gate in zip(gated.inputs, self.sizes, logits, strict=True):
            costs = _coins_differ(gate, SHARP * values / size).flatten(1).sum(dim=1)
            total = total + costs.view(len(total), -1).sum(dim=1)
        return total

    def given(self, gates: Sequence[Tensor]) -> Callable[..., Tensor]:
        """The same with gates that are decided."""

        def posterior(coordinates: Tensor, contrast: Tensor) -> Tensor:
            return self.misfits(coordinates, contrast, gates) + self._energies(coordinates, contrast)

        return posterior

    def misfits(self, coordinates: Tensor, contrast: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """Minus the log-likelihood alone, with gates that are decided."""
        with Gated(gates):
            return self._misfits(coordinates, contrast)

    def _misfits(self, coordinates: Tensor, contrast: Tensor) -> Tensor:
        return self.matcher(self.whitening.images(_contrasted(coordinates, contrast)), self.labels)

    def _energies(self, coordinates: Tensor, contrast: Tensor) -> Tensor:
        return (coordinates.square().flatten(1).sum(dim=1) + (contrast / self.spread).square()) / 2


def _contrasted(coordinates: Tensor, contrast: Tensor) -> Tensor:
    return contrast.exp()[:, None, None, None, None] * coordinates


def _size(values: Tensor) -> Tensor:
    """The root mean square of each row's values (R, ...), as (R, 1, ...)."""
    squares = values.square()
    mean = squares.flatten(1).mean(dim=1) if values.ndim > 1 else squares.mean()
    return mean.sqrt().clamp(min=1e-30).reshape(-1, *[1] * (values.ndim - 1))


def _coins_differ(first: Tensor, second: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of coins with these logits."""
    heads = first.sigmoid() * (F.logsigmoid(first) - F.logsigmoid(second))
    return heads + (-first).sigmoid() * (F.logsigmoid(-first) - F.logsigmoid(-second))


# Networks without kinks, for the first steps of a search.
#
# The gradient with respect to a ReLU network's parameters jumps where a unit goes on or off, and its derivative with
# respect to the image does not see the jumps: a search by derivatives never learns which units should be on. With
# softplus in place of ReLU it does.


class SmoothKinks(ReluMode):
    """Within this context every ReLU is softplus: log(1 + exp(b x)) / b."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self._sharpness = sharpness

    @override
    def relu(self, inputs: Tensor) -> Tensor:
        slope = self._sharpness / _size(inputs.detach())
        return F.softplus(inputs * slope) / slope


SMOOTH, SHARPER = 8.0, 32.0  # of kinks: their sharpness in the first and in the second part of the search
TURNS = (0.4, 0.65)  # shares of the steps at which these parts end; in the third part kinks are kinks
WARM = 0.7  # of the first part, in which the likelihood's share grows to 1
LATE = 0.4  # the learning rate of the other parts over that of the first
CHANCE = 0.5  # what a number that is fitted to noise gains on average in log-likelihood (Akaike 1974)
AVERAGED = 0.3  # of the steps: as many are made for the posterior's mean, where there are no kinks
VAGUE = 0.5  # the posterior's least deviation, in the prior's, above which its mean is taken rather than its mode

Tell = Callable[[float, Tensor], None]
"""(share of the steps done, losses (n,) so far)."""


@dataclass(frozen=True, eq=False)
class SearchStart:
    """Where a search begins."""

    row: int  # for which
    victim: Victim  # of the row
    labels: Tensor | None  # int64 (B,) that are taken for granted; None: they are optimised
    coordinates: Tensor  # (B, C, H, W)
    logits: Tensor  # (B, classes), for labels that are optimised


@dataclass(frozen=True, eq=False)
class Ended:
    """Where a search ended: images (B, C, H, W), labels (B,), minus the log-posterior (), and what is to be noted."""

    start: SearchStart
    images: Tensor
    labels: Tensor
    loss: Tensor
    note: str


class ImageSearch:
    """Adam in the prior's coordinates, from several starts together, each on its own."""

    def __init__(self, scene: Scene, config: MapSettings, starts: Sequence[SearchStart], tell: Tell) -> None:
        self._config = config
        self._starts = starts
        self._tell = tell
        self._note = ""
        self._whitening = Whitening(scene.prior, scene.shape)
        self._posterior = _SearchPosterior(scene, self._whitening, starts)
        # The closed form of a broken upload is no image; the prior's mean, which is zero here, is one.
        self._coordinates = torch.stack([start.coordinates for start in starts]).nan_to_num(0.0, 0.0, 0.0)
        self._logits = torch.stack([start.logits for start in starts])
        self._adam = torch.optim.Adam([self._coordinates, self._logits], betas=BETAS)
        self._lowest = torch.full((len(starts),), math.inf, dtype=wide_type(self._logits), device=self._logits.device)

    def anneal(self) -> list[SearchStart]:
        """Let the likelihood's share grow, with smooth kinks, then sharpen them; return where that leads to."""
        turn, end = (int(share * self._config.iterations) for share in TURNS)
        first = self._posterior.first_shares(self._coordinates, self._logits)
        evaluate = Evaluator(self._posterior.smoothed(SMOOTH), turn)
        for step in range(turn):
            self._step(evaluate, step / turn, first ** max(0.0, 1 - step / (WARM * turn)), 1.0)
            self._tell((step + 1) / end, self._lowest)
            if time_is_up():
                break
        self._climb(self._posterior.smoothed(SHARPER), end - turn, turn / max(end, 1))
        return [
            replace(start, coordinates=self._coordinates[number], logits=self._logits[number])
            for number, start in enumerate(self._starts)
        ]

    def stay(self) -> list[Ended]:
        """Stay at the starts."""
        whole = torch.ones_like(self._lowest)
        with torch.no_grad():
            return self._ended(self._posterior(self._coordinates, self._logits, whole))

    def finish(self) -> list[Ended]:
        """Search with the network as it is."""
        losses = self._climb(self._posterior, self._config.iterations - int(TURNS[1] * self._config.iterations), 0.0)
        return self._ended(self._average(losses))

    def _average(self, losses: Tensor) -> Tensor:
        """Go on to the posterior's mean where the upload pins down no direction; return the losses (n,) there."""
        smooth = self._posterior.chance(self._coordinates, self._logits) == 0
        if not bool(smooth.any()) or time_is_up():
            return losses
        steps = int(AVERAGED * self._config.iterations)
        basis, rate = self._whitening.prior.basis, self._config.learning_rate
        cloud = fit_cloud(
            self._posterior, self._coordinates, (self._logits, torch.ones_like(losses)), basis, steps, rate
        )
        vague = smooth & (cloud.least > VAGUE)
        self._coordinates.copy_(torch.where(vague[:, None, None, None, None], cloud.middle, self._coordinates))
        with torch.no_grad():
            there = self._posterior(self._coordinates, self._logits, torch.ones_like(losses))
        return torch.where(vague, there, losses)

    def _ended(self, losses: Tensor) -> list[Ended]:
        images = self._whitening.images(self._coordinates)
        labels = self._posterior.labels(self._logits).argmax(dim=2)
        return [
            Ended(start, images[number], labels[number], losses[number], self._note)
            for number, start in enumerate(self._starts)
        ]

    def _climb(self, objective: Losses, steps: int, before: float) -> Tensor:
        """Go to the best point on the way, or stay where it gains too little; return the losses (n,) there."""
        evaluate = Evaluator(objective, steps + 1)
        whole = torch.ones_like(self._lowest)
        best = start = self._coordinates.clone(), self._logits.clone()
        at_start, _ = evaluate(*start, whole)
        lowest, bar = at_start, at_start - self._posterior.chance(*start)
        for step in range(steps + 1):
            here = self._coordinates.clone(), self._logits.clone()
            losses = self._step(evaluate, step / max(steps, 1), whole, LATE)
            # A comparison with NaN is false: it never is the lowest.
            lower = (losses < lowest) & (losses < bar)
            lowest = torch.where(lower, losses, lowest)
            best = (
                torch.where(lower[:, None, None, None, None], here[0], best[0]),
                torch.where(lower[:, None, None], here[1], best[1]),
            )
            self._lowest = torch.fmin(self._lowest, lowest)
            self._tell(before + (1 - before) * step / max(steps, 1), self._lowest)
            if time_is_up():
                break
        self._note = evaluate.note
        self._coordinates.copy_(best[0])
        self._logits.copy_(best[1])
        return lowest

    def _step(self, evaluate: Evaluator, done: float, shares: Tensor, rate: float) -> Tensor:
        """Make one step; return the losses (n,) before it."""
        losses, gradients = evaluate(self._coordinates, self._logits, shares)
        # Adam remembers: one NaN would end this row's search, which can go on from the next step.
        self._coordinates.grad, self._logits.grad = (each.nan_to_num(0.0, 0.0, 0.0) for each in gradients[:2])
        self._adam.param_groups[0]["lr"] = self._config.learning_rate * rate * rate_share(done)
        self._adam.step()
        return losses


class _SearchPosterior:
    """Minus the logarithm of the posterior (n,), but for constants, of coordinates, with a share of the likelihood."""

    def __init__(self, scene: Scene, whitening: Whitening, starts: Sequence[SearchStart]) -> None:
        self._whitening = whitening
        self._matcher = Matcher(scene.network, [start.victim for start in starts], misfit)
        unknown = torch.zeros(len(starts[0].coordinates), dtype=torch.long, device=scene.network.device)
        given = torch.stack([unknown if start.labels is None else start.labels for start in starts])
        self._free = torch.tensor([start.labels is None for start in starts], device=given.device)
        self._any_free = bool(self._free.any())
        self._given = F.one_hot(given, scene.classes).to(scene.mean)

    def __call__(self, coordinates: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
        misfits = self._matcher(self._whitening.images(coordinates), self.labels(logits))
        return shares * misfits + coordinates.square().flatten(1).sum(dim=1) / 2

    def labels(self, logits: Tensor) -> Tensor:
        """Label probabilities (n, B, classes)."""
        if not self._any_free:
            return self._given
        return torch.where(self._free[:, None, None], logits.softmax(dim=2), self._given)

    def smoothed(self, sharpness: float) -> Losses:
        """The same for the network without kinks."""

        def losses(coordinates: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
            with SmoothKinks(sharpness):
                return self(coordinates, logits, shares)

        return losses

    def chance(self, coordinates: Tensor, logits: Tensor) -> Tensor:
        """What noise makes a sharper search gain (n,): nothing where the network has no kinks."""
        whole = coordinates.new_ones(len(coordinates))
        with torch.no_grad():
            kinked = self(coordinates, logits, whole) != self.smoothed(SMOOTH)(coordinates, logits, whole)
        return kinked * CHANCE * coordinates[0].numel()

    def first_shares(self, coordinates: Tensor, logits: Tensor) -> Tensor:
        """The shares (n,) with which the likelihood's pull at the start is as long as a draw from the prior."""
        whole = coordinates.new_ones(len(coordinates), dtype=wide_type(coordinates))
        _, (pull, _, _) = Evaluator(self.smoothed(SMOOTH), 1, "never")(coordinates, logits, whole)
        length = (pull - coordinates).flatten(1).norm(dim=1).to(whole)
        shares = math.sqrt(coordinates[0].numel()) / length.clamp(min=1e-30)
        return torch.where(torch.isfinite(shares), shares.clamp(max=1), 1.0)


SPREAD = 0.1  # of starts around the prior's mean, in its standard deviations: enough to tell equal images apart
PROBED = 4  # random images that tell whether the network has kinks
PROBE = 20240521  # their seed; it decides nothing else
PLAUSIBLE = 20.0  # readings start where the posterior's logarithm is at most this much below that of the best start
MOST_READINGS = 30  # of one upload: ten labels, each from three images


def run_map(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: MapSettings, report: Report
) -> Outcome:
    """Run the attack on rows of (victim, restart) together, from standard normal starts (N, B, C, H, W) and logits."""
    if not all(victim.model.has_density for victim in rows):
        raise AttackRefused("map needs the distribution of the upload; that of noise behind Adam's steps is not known")
    lowest = torch.full((len(rows),), math.inf, dtype=wide_type(images), device=images.device)

    def teller(tried: Sequence[SearchStart], of: int, before: int, begin: float, end: float) -> Tell:
        index = torch.tensor([start.row for start in tried], device=images.device)

        def tell(share: float, losses: Tensor) -> None:
            done = begin + (end - begin) * (before + share * len(tried)) / of
            report(int(done * config.iterations), lowest.scatter_reduce_(0, index, losses, "amin"))

        return tell

    starts = _starts(scene, rows, images, logits)
    read = _found(scene, rows)
    settled = _settled(scene, _there(starts, read), config)
    done = {result.start.row for result in settled}
    starts = _likely(scene, [start for start in starts if start.row not in done])
    annealed: list[SearchStart] = []
    for part in _parts(scene, starts):
        annealed += ImageSearch(scene, config, part, teller(part, len(starts), len(annealed), 0.0, TURNS[1])).anneal()
    starts = [*annealed, *_there(starts, read)]
    ended: list[Ended] = []
    for part in _parts(scene, starts):
        ended += ImageSearch(scene, config, part, teller(part, len(starts), len(ended), TURNS[1], 1.0)).finish()
    most_probable = _best([*settled, *ended])
    outcome = _outcome(scene, [most_probable[row] for row in range(len(rows))], config.iterations)
    report(config.iterations, outcome.losses)
    return outcome


def _settled(scene: Scene, read: Sequence[SearchStart], config: MapSettings) -> list[Ended]:
    """What is right where searches begin at what was read: of uploads that hardly leave a choice."""
    readable = [start for start in read if _speaks_for_itself(scene, start.victim)]
    gated = [start for start in readable if can_be_gated(scene, start.victim)]
    unread = [replace(start, coordinates=torch.zeros_like(start.coordinates)) for start in gated]  # the prior's mean
    ended: list[Ended] = []
    for part in _parts(scene, [*readable, *_mirrored(scene, readable), *unread]):
        ended += ImageSearch(scene, config, part, _silent).stay()
    return [
        *_gated(scene, [result for result in ended if can_be_gated(scene, result.start.victim)], config),
        *(result for result in ended if not can_be_gated(scene, result.start.victim) and _explains(result)),
    ]


def _outcome(scene: Scene, best: Sequence[Ended], iterations: int) -> Outcome:
    """What the attack returns, of the best result of each row."""
    reasons = [
        (JOINT if result.start.labels is None else "", result.note, ENDED if time_is_up() else "") for result in best
    ]
    return Outcome(
        images=scene.box(torch.stack([result.images for result in best])),
        labels=torch.stack([result.labels for result in best]),
        losses=torch.stack([result.loss for result in best]),
        iterations=torch.full((len(best),), iterations),
        notes=tuple("; ".join(text for text in texts if text) for texts in reasons),
    )


def _best(ended: Iterable[Ended]) -> dict[int, Ended]:
    """The most probable result of each row; a NaN only where there is nothing else."""
    best: dict[int, Ended] = {}
    for result in ended:
        other = best.get(result.start.row)
        if other is None or bool(result.loss < other.loss) or bool(other.loss.isnan()):
            best[result.start.row] = result
    return best


def _parts(scene: Scene, starts: Sequence[SearchStart]) -> Iterator[Sequence[SearchStart]]:
    """Cut searches into pieces that fit into memory."""
    if not starts:
        return
    victims = [start.victim for start in starts]
    written = any(victim.needs_writing for victim, _ in by_victim(victims))
    for part in chunks(scene.network, victims, scene.shape, scene.classes, written=written):
        yield starts[part.start : part.stop]


# ---- starts ---------------------------------------------------------------------------------------------------------


def _starts(scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor) -> list[SearchStart]:
    """For each row a start with every set of labels that may be right."""
    return [
        SearchStart(row, rows[row], labels, SPREAD * images[row], logits[row])
        for row, choices in enumerate(open_labels(scene, rows))
        for labels in choices
    ]


def _likely(scene: Scene, starts: Sequence[SearchStart]) -> list[SearchStart]:
    """The starts that are worth a search: of a single example's labels those that the upload makes likely."""
    kept: dict[int, set[int]] = {}
    for victim, _ in by_victim([start.victim for start in starts]):
        mine = [start.labels for start in starts if start.victim is victim and start.labels is not None]
        single = {int(labels): labels for labels in mine if len(labels) == 1}
        kept[id(victim)] = {int(labels) for labels in likely_labels(scene, victim, list(single.values()))}
    return [
        start
        for start in starts
        if start.labels is None or len(start.labels) > 1 or int(start.labels) in kept[id(start.victim)]
    ]


def _found(scene: Scene, rows: Sequence[Victim]) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Coordinates (B, C, H, W) and labels (B,) of the victims, by their ids, whose first or last layer can be read."""
    whitening = Whitening(scene.prior, scene.shape)
    starts: dict[int, tuple[Tensor, Tensor | None]] = {}
    for victim, _ in by_victim(rows):
        for read in (read_starts, read_feature_starts) if victim.model.examples > 1 else (read_starts,):
            try:
                (reading,) = read(scene, [victim])
            except AttackRefused:  # the network or the upload is not of the kind: then there is no such start
                continue
            starts[id(victim)] = whitening.coordinates(reading.images), reading.labels
            break
    return starts


def _there(starts: Sequence[SearchStart], read: Mapping[int, tuple[Tensor, Tensor | None]]) -> list[SearchStart]:
    """The starts at images in closed form; a batch's labels are in their order, a single one is tried as it was."""
    there = []
    for start in starts:
        if id(start.victim) in read:
            coordinates, labels = read[id(start.victim)]
            keep = labels is None or (start.labels is not None and len(start.labels) == 1)
            there.append(replace(start, coordinates=coordinates, labels=start.labels if keep else labels))
    return there


def _mirrored(scene: Scene, starts: Sequence[SearchStart]) -> list[SearchStart]:
    """The starts with the images' sign turned: a first layer's matrix tells an image but for that, its bias may not."""
    whitening = Whitening(scene.prior, scene.shape)
    turned = [whitening.coordinates(-whitening.images(start.coordinates)) for start in starts]
    return [replace(start, coordinates=coordinates) for start, coordinates in zip(starts, turned, strict=True)]


def _speaks_for_itself(scene: Scene, victim: Victim) -> bool:
    """Whether contrast can be read from the first layer, behind kinks: on one scale, or in small blocks."""
    if victim.model.examples > 1 or not (victim.one_scale or victim.in_small_blocks):
        return False
    images = fixed_normal(PROBE, PROBED, *scene.shape).to(scene.mean)
    with torch.no_grad():
        plain = scene.network.logits(victim.parameters, images)
        with SmoothKinks(SMOOTH):
            smooth = scene.network.logits(victim.parameters, images)
    return not torch.equal(plain, smooth)


def _explains(result: Ended) -> bool:
    """Whether it explains the upload better than nothing at all."""
    return bool(result.loss < result.start.coordinates.square().sum() / 2)


def _gated(scene: Scene, ended: Sequence[Ended], config: MapSettings) -> list[Ended]:
    """For each row the image that is read together with the units: the mean of all that may be right."""
    alike: dict[tuple[int, UploadModel], list[SearchStart]] = {}
    for result in _plausible(ended):
        victim = result.start.victim
        start = replace(result.start, labels=result.labels)
        alike.setdefault((id(victim.parameters), victim.model), []).append(start)
    read: list[Ended] = []
    for part in (part for starts in alike.values() for part in _parts(scene, starts)):
        victims = [start.victim for start in part]
        labels = torch.stack([start.labels for start in part if start.labels is not None])
        begin = torch.stack([start.coordinates for start in part])
        means = read_gated(scene, victims, labels, begin, config.iterations, config.learning_rate)
        there = [replace(start, coordinates=means[number]) for number, start in enumerate(part)]
        read += ImageSearch(scene, config, there, _silent).stay()
    return [
        result for part in _parts(scene, _averaged(read)) for result in ImageSearch(scene, config, part, _silent).stay()
    ]


def _plausible(ended: Sequence[Ended]) -> list[Ended]:
    """The most probable results of each row; a NaN only where there is nothing else."""
    kept = []
    for row, best in _best(ended).items():
        near = [other for other in ended if other.start.row == row and bool(other.loss <= best.loss + PLAUSIBLE)]
        kept += sorted(near, key=lambda result: float(result.loss))[:MOST_READINGS] or [best]
    return kept


def _averaged(ended: Sequence[Ended]) -> list[SearchStart]:
    """For each row the most probable labels, and the mean of all its images, weighted by their probabilities."""
    averaged, plausible = [], _plausible(ended)
    for row, best in _best(ended).items():
        results = [result for result in plausible if result.start.row == row]
        behind = torch.stack([best.loss - result.loss for result in results])
        weights = behind.nan_to_num(0.0).softmax(dim=0)  # a NaN is alone
        coordinates = torch.stack([result.start.coordinates for result in results])
        averaged.append(replace(best.start, coordinates=torch.tensordot(weights.to(coordinates), coordinates, dims=1)))
    return averaged


def _silent(done: float, losses: Tensor) -> None:
    """Tell nobody."""
