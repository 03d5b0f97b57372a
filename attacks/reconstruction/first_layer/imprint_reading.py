"""What an active server reads in the gradient of the parameters that it has made (see ``imprint``).

Rows of the first layer's gradient are the same from one occupied bin to the next, and the step between two such levels
is one bin's image times an unknown amplitude. Without noise the bias tells the amplitude, and the image is a quotient.

With noise four things help. The image is known to have the brightness of its bin, which tells the amplitude far better
than the one number of the bias does. All rows of a level are averaged. Which bins are occupied is told from the noise
in the empty ones. And what is left of the noise is weighed against what public images look like.

Where fewer images stand out than there are examples, the rest of the answer is the mean of the public images, which
counts for no more than the guess that it is; labels that are not read are -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedpriv.attacks.methods.imprint import ImprintSettings
from fedpriv.attacks.reconstruction.dummy_gradients.routes import dummy_gradients
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.first_layer.imprint import ImprintLayers, find_imprint_layers, is_crafted
from fedpriv.attacks.reconstruction.priors import GaussianPrior
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim

__all__ = ["UNREAD", "Imprint", "read_imprint", "run_imprint"]

UNREAD = -1  # in place of a label that is not read

# A bin whose difference is so many times the rounding of the sums holds an image with an error below 1 / 256.
ROUNDINGS = 256
# With noise, an amplitude of so many standard deviations is taken for an image: 2e-9 a bin by chance.
DEVIATIONS = 6.0
# The same for the length of a whole row, whose distribution has a heavier tail than a normal one.
LENGTHS = 9.0
# The noise is read off the empty bins; these are most of them if there are so many times more bins than examples.
EMPTY = 4
# Mean distance from the valid range, on the [0, 1] scale, above which what a bin holds is no image.
OUTSIDE = 0.05
MEDIAN = 0.6745  # of the absolute value of a standard normal number
UNIFORM = 12**0.5  # the length of an interval over the standard deviation of what is drawn from it
OUTER = 4  # the two outer bins have no end; how wide they are taken to be, over the widest other one
ENDLESS = 2**40


@dataclass(frozen=True, eq=False)
class Imprint:
    """What was read off one upload.

    Attributes:
        images: (R, C, H, W), normalised, by brightness; R may be 0.
        amplitudes: (R,), the bias gradient that belongs to each.
        bins: the number of each image's bin, int64 (R,).
        unexplained: the share of the first layer's gradient, in squares of the steps between rows, that the images
            leave; the attack's own objective.
        exact: whether nothing but rounding disturbs the gradient.
    """

    images: Tensor
    amplitudes: Tensor
    bins: Tensor
    unexplained: float
    exact: bool

    def note(self, examples: int) -> str:
        """Say for a person what the figures rest on."""
        found = len(self.images)
        text = f"active server, crafted parameters: {found} of {examples} images stand out"
        if not self.exact:
            text += " from the noise"
        if found < examples:
            text += "; for the others the mean public image is offered, and two of one bin show as a mixture"
        return text


def run_imprint(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: ImprintSettings, report: Report
) -> Outcome:
    """Run the attack on victims, one after the other.

    Args:
        scene: what is public.
        rows: the victims.
        images: not read: nothing starts at random.
        logits: likewise.
        config: was used when the parameters were made.
        report: told how it goes.

    Raises:
        AttackRefused: the network has no such layers, an upload is of several local steps, or the parameters that a
            client was sent were not made for this attack.
    """
    layers = find_imprint_layers(scene.network.model, scene.shape)
    found = [read_imprint(scene, victim, layers) for victim in rows]
    labels = [_labels(scene, victim, layers, one) for victim, one in zip(rows, found, strict=True)]
    count = max(max(len(one.images), victim.model.examples) for victim, one in zip(rows, found, strict=True))
    losses = torch.tensor([one.unexplained for one in found], dtype=torch.float64)
    report(1, losses)
    filler = _mean_image(scene)
    return Outcome(
        torch.stack([_filled(one.images, filler, count) for one in found]),
        torch.stack([_filled(one, torch.tensor(UNREAD), count) for one in labels]),
        losses,
        torch.ones(len(rows), dtype=torch.long),
        tuple(one.note(victim.model.examples) for victim, one in zip(rows, found, strict=True)),
    )


def read_imprint(scene: Scene, victim: Victim, layers: ImprintLayers) -> Imprint:
    """Read the images off one upload, or off a sum of several.

    A bin holds an image if its difference of gradients stands out from rounding, and from the noise of the empty bins,
    and if what it holds lies in the valid range and in the bin itself. The truth has no part in this.

    Raises:
        AttackRefused: the upload is of several local steps, there are several, or the parameters were not crafted.
    """
    title = f"client {victim.client}, round {victim.round}"
    if victim.model.training is not None:
        raise AttackRefused(f"{title}: imprint reads one gradient, and this is an update of local training")
    if victim.more:
        raise AttackRefused(f"{title}: imprint reads one upload at a time; attack each round's by itself")
    if not is_crafted(victim.parameters, layers):
        raise AttackRefused(f"{title}: the parameters that the clients were sent were not made for imprint")
    rows = _Rows.of(victim, layers)
    rounding = ROUNDINGS * torch.finfo(victim.gradient[layers.bias].dtype).eps * float(rows.bias.abs().max())
    steps = rows.steps
    many = len(rows.bias) >= EMPTY * victim.model.examples
    noise = _Noise.of(steps)
    exact = not victim.model.mechanism.protects and not (many and noise.bias * DEVIATIONS > rounding)
    if exact:
        bins = (steps.bias.abs() > rounding).nonzero().flatten()
        amplitudes = steps.bias[bins]
        flat = steps.weight[bins] / amplitudes[:, None]
    else:
        bins = _occupied(rows, noise, victim.one_scale)
        amplitudes, flat = _denoised(rows, bins, noise, victim.one_scale, scene.prior)
    images = flat.unflatten(1, scene.shape)
    kept = _is_image(scene, images) & rows.in_bin(flat, bins, OUTSIDE / float(scene.std.min()))
    bins, flat, amplitudes = bins[kept], flat[kept], amplitudes[kept]
    images = images[kept].to(scene.mean)
    return Imprint(images, amplitudes, bins.cpu(), _unexplained(steps, bins, amplitudes, flat), exact)


@dataclass(frozen=True, eq=False)
class _Steps:
    """Differences of the mean of some rows and of the mean of those after them.

    Attributes:
        weight: (N, P).
        bias: (N,).
        measured: (N,): for an image alone its brightness times its amplitude.
        variances: (N,) of the noise, relative to that in a step between two single rows.
    """

    weight: Tensor
    bias: Tensor
    measured: Tensor
    variances: Tensor


@dataclass(frozen=True, eq=False)
class _Rows:
    """The gradient of the first layer, in float64, and what the server knows of its bins.

    Attributes:
        weight: (bins, P).
        bias: (bins,).
        brightness: (P,), the measurement.
        cuts: (bins,), the lower ends of the bins.
    """

    weight: Tensor
    bias: Tensor
    brightness: Tensor
    cuts: Tensor

    @staticmethod
    def of(victim: Victim, layers: ImprintLayers) -> "_Rows":
        """Read a victim's upload; rows that are no bins let nothing through and hold nothing."""
        upload, parameters = victim.gradient, victim.parameters
        return _Rows(
            upload[layers.weight].double(),
            upload[layers.bias].double(),
            parameters[layers.weight][0].double(),
            -parameters[layers.bias].double(),
        )

    @property
    def steps(self) -> _Steps:
        """What each row has and the next has not; after the last row comes zero."""
        every = torch.arange(len(self.bias), device=self.bias.device)
        return self.between(every - 1, every, every + 1)

    def between(self, start: Tensor, middle: Tensor, end: Tensor) -> _Steps:
        """The mean of rows after ``start`` up to ``middle`` minus that of the rows after it up to ``end``, (N,) each.

        Rows after the last one are zero, and without noise.
        """
        before, after = (middle - start).double(), (end - middle).double()
        rows = torch.cat([self.weight, self.bias[:, None]], dim=1)
        sums = torch.cat([torch.zeros_like(rows[:1]), rows.cumsum(dim=0)])
        last = len(self.bias)
        there = (end + 1).clamp(max=last)
        first = (sums[middle + 1] - sums[start + 1]) / before[:, None]
        steps = first - (sums[there] - sums[middle + 1]) / after[:, None]
        noisy = (there - middle - 1).double() / after.square()
        weight = steps[:, :-1]
        return _Steps(weight, steps[:, -1], weight @ self.brightness, (1 / before + noisy) / 2)

    @property
    def middles(self) -> Tensor:
        """The measurement of a typical image of each bin, (bins,): the outer bins have no end of their own."""
        width = self.cuts[1:] - self.cuts[:-1]
        middles = torch.cat([self.cuts[:-1] + width / 2, self.cuts[-1:]])
        middles[0] = self.cuts[1]
        return middles

    @property
    def widths(self) -> Tensor:
        """By how much images of one bin differ in their measurement, (bins,)."""
        inner = self.cuts[2:] - self.cuts[1:-1]
        outer = OUTER * inner.max().expand(1)
        return torch.cat([outer, inner, outer])

    def in_bin(self, flat: Tensor, bins: Tensor, slack: float) -> Tensor:
        """Whether images (R, P) measure what their bins (R,) say, but for ``slack`` on the scale of the input."""
        upper = torch.cat([self.cuts[1:], self.cuts.new_full((1,), torch.inf)])
        measured, room = flat @ self.brightness, slack * float(self.brightness.sum())
        return (measured > self.cuts[bins] - room) & (measured < upper[bins] + room)


@dataclass(frozen=True)
class _Noise:
    """The noise in a step between two single rows, most of which hold nothing else.

    Attributes:
        bias: its standard deviation in the bias.
        measured: its standard deviation in the measurement.
        length: the squared length that it gives the weight.
        spread: the standard deviation of that.
        weight: its standard deviation in a number of the weight.
    """

    bias: float
    measured: float
    length: float
    spread: float
    weight: float

    @staticmethod
    def of(steps: _Steps) -> "_Noise":
        """Read it off medians over the bins."""
        lengths = steps.weight.square().sum(dim=1)
        usual = lengths.median()
        return _Noise(
            _deviation(steps.bias),
            _deviation(steps.measured),
            float(usual),
            _deviation(lengths - usual),
            float((usual / steps.weight.shape[1]).sqrt()),
        )


def _deviation(values: Tensor) -> float:
    """A standard deviation around zero that few large values do not change."""
    return float(values.abs().median()) / MEDIAN


def _occupied(rows: _Rows, noise: _Noise, one_scale: bool) -> Tensor:
    """The bins at which the rows change by more than noise: narrow windows first, then what only wider ones show.

    As in narrowest-over-threshold change-point detection (Baranowski, Chen and Fryzlewicz 2019), with windows of 1, 2,
    4, ... rows on both sides, none of which may hold a change that was found before.
    """
    bins = len(rows.bias)
    every = torch.arange(bins, device=rows.bias.device)
    found: list[int] = []
    width = 1
    while width < bins:
        steps = rows.between((every - width).clamp(min=-1), every, every + width)
        amplitudes, precision = _amplitudes(steps, noise, rows.middles, one_scale)
        by_length = steps.weight.square().sum(dim=1) / steps.variances - noise.length
        clear = (amplitudes.abs() * precision.sqrt() / DEVIATIONS).maximum(by_length / (LENGTHS * noise.spread))
        for known in found:
            clear[max(0, known - width + 1) : known + width] = 0
        while float(clear.max()) > 1:
            best = int(clear.argmax())
            found.append(best)
            clear[max(0, best - width + 1) : best + width] = 0
        width *= 2
    return torch.tensor(sorted(found), dtype=torch.long, device=every.device)


def _amplitudes(
    steps: _Steps, noise: _Noise, middles: Tensor, one_scale: bool, doubt: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Amplitudes (N,) of steps by least squares, and their precisions (N,).

    Args:
        steps: N of them.
        noise: in steps between single rows.
        middles: what the images are expected to measure, (N,).
        one_scale: whether the bias tells the amplitude too.
        doubt: standard deviation of what is measured because of what is expected being wrong, (N,); ``None``: zero.
    """
    measured = steps.variances * noise.measured**2
    if doubt is not None:
        measured = measured + doubt.square()
    by_weight = middles.square() / measured
    by_bias = 1 / (steps.variances * noise.bias**2) if one_scale else torch.zeros_like(middles)
    precision = by_weight + by_bias
    return (middles * steps.measured / measured + steps.bias * by_bias) / precision, precision


def _denoised(rows: _Rows, bins: Tensor, noise: _Noise, one_scale: bool, prior: GaussianPrior) -> tuple[Tensor, Tensor]:
    """Amplitudes (R,) and images (R, P) of the occupied bins from the means of the rows between them."""
    if len(bins) == 0:
        return rows.bias[:0], rows.weight[:0]
    # Above the last image there is nothing: rows after the last one are zero, as many as one likes.
    start, end = torch.cat([bins.new_tensor([-1]), bins[:-1]]), torch.cat([bins[1:], bins.new_tensor([ENDLESS])])
    steps = rows.between(start, bins, end)
    middles = rows.middles[bins]
    first, _ = _amplitudes(steps, noise, middles, one_scale)
    amplitudes, _ = _amplitudes(steps, noise, middles, one_scale, first * rows.widths[bins] / UNIFORM)
    images = steps.weight / amplitudes[:, None]
    wide = prior.to(images)
    deviations = noise.weight * steps.variances.sqrt() / amplitudes.abs()
    return amplitudes, torch.stack([_posterior(wide, *pair) for pair in zip(images, deviations, strict=True)])


def _posterior(prior: GaussianPrior, image: Tensor, deviation: Tensor) -> Tensor:
    """The mean of an image (P,) that was seen with noise of this standard deviation in each number."""
    along = prior.variances / (prior.variances + deviation**2)
    outside = prior.rest / (prior.rest + deviation**2)
    return prior.mean + prior.shrink(image - prior.mean, along, outside)


def _is_image(scene: Scene, images: Tensor) -> Tensor:
    """Whether normalised images (R, C, H, W) lie in the valid range, but for a little."""
    shown = images * scene.std + scene.mean
    return (shown - shown.clamp(0, 1)).abs().flatten(1).mean(dim=1) < OUTSIDE


def _unexplained(steps: _Steps, bins: Tensor, amplitudes: Tensor, flat: Tensor) -> float:
    total = steps.weight.square().sum() + steps.bias.square().sum()
    if not float(total):
        return 1.0
    left = total - steps.weight[bins].square().sum() - steps.bias[bins].square().sum()
    left = left + (steps.weight[bins] - amplitudes[:, None] * flat).square().sum()
    left = left + (steps.bias[bins] - amplitudes).square().sum()
    return max(float(left / total), 0.0)


def _labels(scene: Scene, victim: Victim, layers: ImprintLayers, found: Imprint) -> Tensor:
    """The labels (R,) with which the images have the amplitudes that were read."""
    if victim.model.unit == "update" or not len(found.images) or not victim.one_scale:
        return torch.full((len(found.images),), UNREAD)
    likely = sorted(set(victim.labels.tolist())) if victim.labels is not None else range(scene.classes)
    candidates = torch.tensor(list(likely), device=found.images.device)
    expected = torch.stack([_expected(scene, victim, layers, found, label) for label in candidates], dim=1)
    return candidates[(expected - found.amplitudes[:, None]).abs().argmin(dim=1)].cpu()


def _expected(scene: Scene, victim: Victim, layers: ImprintLayers, found: Imprint, label: Tensor) -> Tensor:
    """The amplitudes (R,) that the images would have with this label."""
    model, count = victim.model, len(found.images)
    targets = F.one_hot(label, scene.classes).to(found.images).expand(count, -1)
    others = {name: value for name, value in victim.parameters.items() if name != layers.bias}

    def loss(bias: Tensor, image: Tensor, target: Tensor) -> Tensor:
        logits = functional_call(scene.network.model, {**others, layers.bias: bias}, (image[None],))
        return scene.network.losses(logits, target[None]).sum()

    errors = vmap(grad(loss), in_dims=(None, 0, 0))(victim.parameters[layers.bias], found.images, targets)
    # The first row lets every image through.
    amplitudes: Tensor = errors[:, 0].double() / model.examples
    scales = model.mechanism.scales(scene.network.names)
    if not model.protects_examples or scales is None:
        return amplitudes
    gradients = dummy_gradients(scene.network, victim.parameters, found.images[:, None], targets[:, None], each=False)
    weights = {name: weight[:, 0] for names, weight in model.weights(gradients, scales) for name in names}
    shares: Tensor = weights[layers.bias].double() / scales[layers.bias]
    return amplitudes * shares


def _mean_image(scene: Scene) -> Tensor:
    """The mean of the public images (C, H, W), normalised; grey, where there are none."""
    if scene.public_images is None or len(scene.public_images) == 0:
        shown = scene.mean.new_full(scene.shape, 0.5)
    else:
        shown = scene.public_images.double().mean(dim=0).to(scene.mean)
    return (shown - scene.mean) / scene.std


def _filled(values: Tensor, filler: Tensor, count: int) -> Tensor:
    """Values (R, ...) and as many fillers (...) as are missing to ``count``."""
    return torch.cat([values, filler.to(values).expand(count - len(values), *filler.shape)])
