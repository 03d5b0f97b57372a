"""Images read off the gradient of a first Linear layer, without optimisation.

The gradient of its weight is the sum of ``e x^T`` over the examples, the gradient of its bias the sum of ``e``. One
example is read here, with or without noise; ``first_layer.batch`` reads several, ``first_layer.vmf_blocks`` reads draws
on blocks. Local training with SGD changes the errors e, not the images, so that updates of several steps can be read
too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.reconstruction.first_layer.batch import read_batch, stacked
from fedpriv.attacks.reconstruction.first_layer.input_layer import InputLayer, find_input_layer
from fedpriv.attacks.reconstruction.first_layer.vmf_blocks import read_blocks
from fedpriv.attacks.reconstruction.labels import read_labels
from fedpriv.attacks.reconstruction.matching import Compared, compared, squared_distance
from fedpriv.attacks.reconstruction.priors import GaussianPrior
from fedpriv.attacks.reconstruction.results import AttackRefused, Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene, Start
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.gradients.operator import in_double
from fedpriv.mechanisms.machinery.vmf_sampling import mean_cosine

# The image x of one example from the matrix ``e x^T`` and the bias ``e`` of a first Linear layer.
#
# With noise, errors e and image x are estimated in turn: given one, the other is a projection, shrunk by what the prior
# leaves open (variational Bayes for rank one, e on a sphere: Smidl and Quinn 2007). The length of e, and with it the
# contrast of the image, follows from the bias, and from the prior where noise covers the bias.


EXACT = 1e-12  # squared distance to a matrix of rank one, relative, that rounding alone explains
PROVING_ROWS = 64  # rows with the largest errors, on which that is tested
POWER_STEPS = 30  # of the power method for the first direction
TURNS = 40  # most turns of errors and image
SETTLED = 1e-4  # relative change of the image in a turn after which it stays
WIDE = 61  # lengths of the errors, of each sign, that are tried first
NARROW = 17  # lengths around the best one that are tried then
ZOOMS = 8  # times
SCALES = 801  # values of v that are summed over
LEAST_SPREAD = 0.1  # of the logarithm of an image's power over the prior's


@dataclass(frozen=True, eq=False)
class RankOne:
    """What the matrix (outputs, P) and the bias of a first layer say."""

    image: Tensor  # (P,), on the scale of the network's input
    errors: Tensor  # (outputs,), the derivative with respect to the layer's output
    deviation: float  # the noise in each entry, as seen in what is not of rank one


def quotient(weight: Tensor, bias: Tensor) -> RankOne:
    """Return the quotient of matrix (outputs, P) and bias, rows weighted by the squared bias: right without noise."""
    image = (weight.mT @ bias) / bias.square().sum()
    rows = bias.abs().topk(min(PROVING_ROWS, len(bias))).indices
    rest = weight[rows] - torch.outer(bias[rows], image)
    return RankOne(image, bias, float(rest.square().mean().sqrt()))


def exact(weight: Tensor, bias: Tensor | None) -> RankOne | None:
    """Return the quotient if the rows with the largest errors are of rank one up to rounding, else ``None``."""
    if bias is None or not bool(bias.any()):
        return None
    estimate = quotient(weight, bias)
    squared = float(bias.abs().topk(min(PROVING_ROWS, len(bias))).values.square().mean())
    size = squared * float(estimate.image.square().mean())
    return estimate if estimate.deviation**2 <= EXACT * size else None


def rank_one(weight: Tensor, bias: Tensor | None, prior: GaussianPrior, bias_noise: float = 1.0) -> RankOne:
    """Estimate image and errors; without a bias on the matrix' scale, contrast and sign are guesses of the prior."""
    return exact(weight, bias) or _Estimate(weight, bias, prior, bias_noise).settle()


class _Estimate:
    """Image and errors in turn."""

    def __init__(self, weight: Tensor, bias: Tensor | None, prior: GaussianPrior, bias_noise: float) -> None:
        self._weight = weight
        self._bias = bias
        self._bias_noise = bias_noise
        self._prior = prior
        self._precise = in_double(weight)
        self._squared = float(self._precise.square().sum())
        self._lengths = _Lengths(prior)

    def settle(self) -> RankOne:
        """Take turns until the image stays."""
        unit, certainty = self._first_direction(), 1.0
        image, length, deviation = self._prior.mean, 0.0, 0.0
        for _ in range(TURNS):
            seen = self._weight.mT @ unit
            deviation = self._deviation(unit)
            bias_seen = None if self._bias is None else certainty * float(self._bias @ unit)
            inferred = self._lengths.infer(certainty * seen, bias_seen, deviation, self._bias_noise * deviation)
            change = float((inferred.image - image).norm() / inferred.image.norm())
            image, length = inferred.image, inferred.length
            unit, size = self._direction(inferred)
            certainty = mean_cosine(size / deviation**2, len(unit))
            if change < SETTLED:
                break
        return RankOne(image, length * unit, deviation)

    def _first_direction(self) -> Tensor:
        """The unit vector of errors that explains most, were the image drawn from the prior (power method)."""
        prior = self._prior
        columns = (self._weight @ prior.basis) * prior.variances.sqrt()
        if self._bias is not None:
            middle = self._weight @ prior.mean + self._bias
            columns = torch.cat([columns, middle[:, None]], dim=1)
        direction = columns[:, columns.square().sum(dim=0).argmax()]
        for _ in range(POWER_STEPS):
            direction = columns @ (columns.mT @ _unit(direction))
        return _unit(direction)

    def _direction(self, inferred: "_Inferred") -> tuple[Tensor, float]:
        """The errors' direction given the image, and how strongly it is seen in units of the squared noise."""
        seen = self._weight @ inferred.product
        if self._bias is not None:
            seen = seen + inferred.length / self._bias_noise**2 * self._bias
        return _unit(seen), float(seen.norm())

    def _deviation(self, unit: Tensor) -> float:
        """The noise in what is left of the matrix when its part along a direction is taken away."""
        rows, pixels = self._weight.shape
        # A difference of large numbers: the rounding of a projection in float32 would be seen in it.
        precise = in_double(unit)
        rest = self._squared - float(
            (self._precise.mT @ precise).square().sum() / precise.square().sum().clamp(min=1e-30)
        )
        return math.sqrt(max(rest, EXACT * self._squared, 1e-60) / (max(rows - 1, 1) * pixels))


@dataclass(frozen=True, eq=False)
class _Inferred:
    """Means over what the lengths of errors, contrasts and images may be."""

    length: float  # of the errors; negative where they point the other way
    product: Tensor  # (P,), length times image
    image: Tensor  # (P,)


class _Lengths:
    """How long the errors are, from ``length * image + noise`` and ``length + noise``, and so the image (float64, CPU).

    The image has the prior's distribution, its covariance times an unknown log-normal power. With v the squared length
    times that power, the log evidence is a polynomial of the length; lengths and v are summed over on grids.
    """

    def __init__(self, prior: GaussianPrior) -> None:
        self._prior = prior
        self._variances = prior.variances.cpu().double()
        self._mean_along = (prior.basis.mT @ prior.mean).cpu().double()
        self._mean_outside = float(prior.mean.square().sum()) - float(self._mean_along.square().sum())
        self._outside = prior.pixels - len(self._variances)
        total = float(self._variances.sum()) + self._outside * prior.rest
        self._typical = math.sqrt(float(prior.mean.square().sum()) + total)
        self._spread = max(prior.contrast, LEAST_SPREAD)

    def infer(self, seen: Tensor, bias_seen: float | None, deviation: float, bias_deviation: float) -> _Inferred:
        """Infer them from length times image plus noise, (P,)."""
        prior = self._prior
        along = (prior.basis.mT @ seen).cpu().double()
        squared = float(seen.double().square().sum())
        typical = max(math.sqrt(squared) / self._typical, 1e-30)
        scales = typical**2 * torch.logspace(-5, 2, SCALES, dtype=torch.float64)
        inside, rest = scales[:, None] * self._variances, scales * prior.rest
        noisy, noisy_rest = inside + deviation**2, rest + deviation**2
        outside = max(squared - float(along.square().sum()), 0.0)
        product = float(seen.double() @ prior.mean.double()) - float(along @ self._mean_along)
        constant = (along.square() / noisy + noisy.log()).sum(dim=1) + outside / noisy_rest
        constant = constant + self._outside * noisy_rest.log()
        linear = (along * self._mean_along / noisy).sum(dim=1) + product / noisy_rest
        square = (self._mean_along.square() / noisy).sum(dim=1) + self._mean_outside / noisy_rest

        def evidence(lengths: Tensor) -> Tensor:
            """Its logarithm for lengths (n,), with all v: (n, v)."""
            column = lengths[:, None]
            powers = (scales / column.square()).log() / self._spread
            exponent = constant - 2 * column * linear + column.square() * square + powers.square()
            if bias_seen is not None:
                exponent = exponent + ((bias_seen - column) / bias_deviation).square()
            return -exponent / 2

        lengths = _grid(evidence, typical, bias_seen)
        shares = (evidence(lengths) + _widths(lengths).log()[:, None]).flatten().softmax(dim=0).view(-1, SCALES)
        kept, kept_rest = inside / noisy, rest / noisy_rest

        def shrunk(weights: Tensor, vector: Tensor) -> Tensor:
            return prior.shrink(vector, (weights @ kept).to(seen), (weights @ kept_rest).to(seen))

        length = float((shares.sum(dim=1) * lengths).sum())
        sums, over, times = shares.sum(dim=0), (shares / lengths[:, None]).sum(dim=0), lengths @ shares
        image = prior.mean + shrunk(over, seen) - shrunk(sums, prior.mean)
        return _Inferred(length, length * prior.mean + shrunk(sums, seen) - shrunk(times, prior.mean), image)


def _grid(evidence: Callable[[Tensor], Tensor], typical: float, bias_seen: float | None) -> Tensor:
    """Lengths of both signs, ascending, that lie close together where there is evidence."""
    wide = typical * torch.logspace(-2, 1, WIDE, dtype=torch.float64)
    lengths = torch.cat([-wide, wide, wide.new_tensor([bias_seen] if bias_seen else [])])
    width = 10 ** (3 / (WIDE - 1)) - 1
    best, most, near, every = lengths[0], -math.inf, lengths, [lengths]
    for _ in range(ZOOMS):
        found = evidence(near).logsumexp(dim=1)
        if float(found.max()) > most:
            best, most = near[found.argmax()], float(found.max())
        near = best * (1 + width * torch.linspace(-1, 1, NARROW, dtype=torch.float64))
        every.append(near)
        width /= NARROW / 4
    distinct: Tensor = torch.cat(every).unique()
    return distinct


def _widths(lengths: Tensor) -> Tensor:
    """How much each point of an ascending grid stands for, on a logarithmic scale of each sign."""
    widths = torch.empty_like(lengths)
    for sign in (lengths < 0, lengths > 0):
        logarithms = lengths[sign].abs().log()
        if len(logarithms):
            padded = torch.cat([logarithms[:1], logarithms, logarithms[-1:]])
            widths[sign] = (padded[2:] - padded[:-2]).abs() / 2
    return widths


def _unit(vector: Tensor) -> Tensor:
    unit: Tensor = vector / vector.norm().clamp(min=1e-30)
    return unit


FACTORS = 25  # factors of an image that are tried at once
FACTOR_ZOOMS = 3  # times
CLEAR = 0.3  # of an image's noise, on the [0, 1] scale: above, its contrast is too uncertain for a trained prior
NO_LAYER = "closed_form needs a network whose first layer multiplies the image itself (Linear behind flattening)"


def run_closed_form(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: ClosedFormSettings, report: Report
) -> Outcome:
    """Run the attack."""
    answers = _read_all(scene, rows)
    labels = _complete(scene, rows, answers)
    losses = _losses(scene, rows, answers, labels)
    report(1, losses)
    notes = tuple(answer.note for answer in answers)
    return Outcome(tuple(answer.images for answer in answers), labels, losses, torch.ones(len(rows)).long(), notes)


def read_starts(scene: Scene, victims: Sequence[Victim]) -> list[Start]:
    """Return where attacks start: the images that the first layer shows, then the prior's mean without labels."""
    answers = _read_all(scene, victims)
    labels = _complete(scene, victims, answers)
    return [
        Start.of(scene, answer.images, known, victim.model.examples)
        for victim, answer, known in zip(victims, answers, labels, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Read:
    """Images (n, C, H, W), labels (n,) unless the last layer tells them, and of a batch the share that is left."""

    images: Tensor
    labels: Tensor | None
    note: str = ""
    unexplained: float | None = None


def _read_all(scene: Scene, rows: Sequence[Victim]) -> list[_Read]:
    layers: dict[int, InputLayer | None] = {}
    for victim in rows:
        if id(victim.parameters) not in layers:
            layers[id(victim.parameters)] = find_input_layer(scene.network, victim.parameters, scene.shape)
    return [_read(scene, victim, layers[id(victim.parameters)]) for victim in rows]


def _read(scene: Scene, victim: Victim, layer: InputLayer | None) -> _Read:
    """What the first layer says."""
    if layer is None:
        lone = victim.model.examples == 1 and victim.model.training is None and victim.one_scale
        patches = read_patches(scene, victim) if lone else None
        if patches is None or patches.misfit > SOLVED:
            raise AttackRefused(_without_layer(scene, victim))
        return _Read(scene.box(patches.image[None]), None)
    if victim.model.training is not None and victim.model.training.optimizer == "adam":
        raise AttackRefused("closed_form reads sums of gradients; Adam's steps are none")
    if victim.in_small_blocks:
        image, label = read_blocks(scene, victim, layer)
        return _Read(scene.box(image[None]), label[None])
    if victim.model.examples > 1 or victim.pool:
        batch = read_batch(scene, victim, layer)
        return _Read(batch.images, batch.labels, batch.note, batch.unexplained)
    weight, bias = stacked(victim, layer)
    usable = bias if victim.one_scale else None
    clean = exact(weight, usable)
    if clean is not None:
        return _Read(scene.box(clean.image.view(1, *scene.shape)), None)
    estimate = rank_one(weight, usable, scene.prior, _bias_noise(victim, layer))
    image = estimate.image.view(1, *scene.shape)
    length = estimate.errors.norm()
    noise = estimate.deviation / length
    if scene.trained is not None and float(noise * scene.std.mean()) < CLEAR:
        noisy = (weight.mT @ estimate.errors / length.square()).view_as(image)
        image = scene.denoised(noisy, noise[None])
    if usable is None:
        image = _scaled(scene, victim, image)
    return _Read(scene.box(image), _label(scene, victim, image))


# The one image of a vision transformer: the gradient of its table of positions is the error of each patch, and that of
# the patches' kernels the sum of products of errors and patches. With fewer patches than channels that can be solved.


ROUNDING = 1e-6  # of features, relative to their root mean square
SOLVED = 1e-5  # misfit of linear equations of float32 numbers that have a solution


@dataclass(frozen=True, eq=False)
class Patched:
    """The image that a table of positions shows."""

    image: Tensor  # (C, H, W)
    misfit: float  # the share of the kernels' gradient that it leaves
    error: float  # what that and rounding can change of it, on the scale of the network's input


def read_patches(scene: Scene, victim: Victim) -> Patched | None:
    """The image from the gradients of a table of positions and of the patches' kernels; ``None``: there are none."""
    _, height, width = scene.shape
    for name, layer in scene.network.model.named_modules():
        weight = victim.gradient.get(f"{name}.weight")
        if not isinstance(layer, nn.Conv2d) or weight is None or layer.kernel_size != layer.stride:
            continue
        size = (int(layer.kernel_size[0]), int(layer.kernel_size[1]))
        count, wide = (height // size[0]) * (width // size[1]), len(weight)
        tables = [
            value.double()[0]
            for value in victim.gradient.values()
            if value.ndim == 3 and len(value) == 1 and value.shape[1] >= count and value.shape[2] == wide
        ]
        if len(tables) != 1 or count >= wide or weight[0].numel() * count != scene.pixels:
            continue
        errors, products = tables[0][-count:].mT, weight.double().flatten(1)
        patches = torch.linalg.lstsq(errors, products).solution
        least, largest = torch.linalg.svdvals(errors)[[-1, 0]].tolist()
        missing = float((errors @ patches - products).square().mean().sqrt())
        rounded = ROUNDING * largest * float(patches.square().mean().sqrt())
        image = nn.functional.fold(patches.mT, (height, width), size, stride=size).to(scene.mean)
        misfit = missing / max(float(products.square().mean().sqrt()), 1e-300)
        return Patched(image, misfit, (missing * wide**0.5 + rounded) / max(least, 1e-300))
    return None


def _without_layer(scene: Scene, victim: Victim) -> str:
    """Why no uploaded layer multiplies the image."""
    network = scene.network
    frozen = {name: value for name, value in network.model.named_parameters() if name not in network.names}
    layer = find_input_layer(network, victim.parameters | frozen, scene.shape) if frozen else None
    if layer is None:
        return NO_LAYER
    return f"closed_form reads images in the gradient of {layer.weight}, which is frozen: clients do not upload it"


def _complete(scene: Scene, rows: Sequence[Victim], answers: Sequence[_Read]) -> tuple[Tensor, ...]:
    """Each row's labels (n,), those read off the last layer included; where there is none, those that match best."""
    open_rows = [victim for victim, answer in zip(rows, answers, strict=True) if answer.labels is None]
    read = iter(read_labels(scene, open_rows)) if open_rows else iter(())
    labels = []
    for victim, answer in zip(rows, answers, strict=True):
        known = next(read) if answer.labels is None else answer.labels
        labels.append(_label(scene, victim, answer.images) if known is None else known)
    return tuple(labels)


def _losses(scene: Scene, rows: Sequence[Victim], answers: Sequence[_Read], labels: Sequence[Tensor]) -> Tensor:
    """What the images leave unexplained (N,), relative: of single ones in all layers, of batches in the first."""
    losses = torch.tensor([answer.unexplained or 0.0 for answer in answers], dtype=torch.float64)
    single = [row for row, answer in enumerate(answers) if answer.unexplained is None]
    if single:
        pictures = torch.stack([answers[row].images for row in single])
        known = torch.stack([labels[row] for row in single])
        losses[single] = (
            compared(scene, [rows[row] for row in single], relative_distance, pictures, known).cpu().double()
        )
    return losses


def _bias_noise(victim: Victim, layer: InputLayer) -> float:
    """The noise in the bias over that in the weight."""
    if layer.bias is None:
        return 1.0
    deviations = victim.model.mechanism.deviations((layer.bias, layer.weight))
    bias, weight = (value.square().mean() for value in deviations.values())
    return float((bias / weight).sqrt())


def _scaled(scene: Scene, victim: Victim, image: Tensor) -> Tensor:
    """An image (1, C, H, W) known but for its length, with the factor that matches the whole upload best."""
    (label,) = read_labels(scene, [victim])
    if label is None:
        return image
    exponents = torch.linspace(-3, 3, FACTORS).to(image)
    factors = torch.cat([exponents.exp(), -exponents.exp()])
    width = 6 / (FACTORS - 1)
    best = image.new_tensor(1.0)
    for _ in range(FACTOR_ZOOMS):
        labels = label.expand(len(factors), 1)
        distances = compared(
            scene,
            [victim] * len(factors),
            relative_distance,
            factors[:, None, None, None, None] * image,
            labels,
        )
        best = factors[distances.argmin()]
        factors = best * (width * torch.linspace(-1, 1, FACTORS).to(image)).exp()
        width *= 2 / (FACTORS - 1)
    return best * image


def _label(scene: Scene, victim: Victim, image: Tensor) -> Tensor:
    """The label (1,) with which an image (1, C, H, W) matches the upload best."""
    if victim.labels is not None:
        return victim.labels
    labels = torch.arange(scene.classes, device=image.device)[:, None]
    images = image.expand(scene.classes, *image.shape)
    distances = compared(scene, [victim] * scene.classes, relative_distance, images, labels)
    return labels[distances.argmin()]


def relative_distance(comparison: Compared) -> Tensor:
    """The squared distance of gradients over the upload's own square (N,)."""
    return squared_distance(comparison).clamp(min=0) / comparison.heard.sum(dim=1).clamp(min=1e-30)
