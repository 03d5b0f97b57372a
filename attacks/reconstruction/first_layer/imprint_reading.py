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
from fedpriv.attacks.reconstruction.first_layer.imprint_rows import Rows, StepNoise, Steps
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
UNIFORM = 12**0.5  # the length of an interval over the standard deviation of what is drawn from it
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
        count = len(self.images)
        text = f"active server, crafted parameters: {count} of {examples} images stand out"
        if not self.exact:
            text += " from the noise"
        if count < examples:
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
    prints = [read_imprint(scene, victim, layers) for victim in rows]
    pairs = list(zip(rows, prints, strict=True))
    count = max(max(len(read.images), victim.model.examples) for victim, read in pairs)
    losses = torch.tensor([read.unexplained for read in prints], dtype=torch.float64)
    report(1, losses)
    filler = _mean_image(scene)
    return Outcome(
        torch.stack([_filled(read.images, filler, count) for read in prints]),
        torch.stack([_filled(_labels(scene, *pair, layers), torch.tensor(UNREAD), count) for pair in pairs]),
        losses,
        torch.ones(len(rows), dtype=torch.long),
        tuple(read.note(victim.model.examples) for victim, read in pairs),
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
    rows = Rows.of(victim, layers)
    rounding = ROUNDINGS * torch.finfo(victim.gradient[layers.bias].dtype).eps * float(rows.bias.abs().max())
    steps = rows.steps
    many = len(rows.bias) >= EMPTY * victim.model.examples
    noise = StepNoise.of(steps)
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


def _occupied(rows: Rows, noise: StepNoise, one_scale: bool) -> Tensor:
    """The bins at which the rows change by more than noise: narrow windows first, then what only wider ones show.

    As in narrowest-over-threshold change-point detection (Baranowski, Chen and Fryzlewicz 2019), with windows of 1, 2,
    4, ... rows on both sides, none of which may hold a change that was found before.
    """
    bins = len(rows.bias)
    places = torch.arange(bins, device=rows.bias.device)
    changes: list[int] = []
    width = 1
    while width < bins:
        steps = rows.between((places - width).clamp(min=-1), places, places + width)
        amplitudes, precision = _amplitudes(steps, noise, rows.middles, one_scale)
        by_length = steps.weight.square().sum(dim=1) / steps.variances - noise.length
        clear = (amplitudes.abs() * precision.sqrt() / DEVIATIONS).maximum(by_length / (LENGTHS * noise.spread))
        for known in changes:
            clear[max(0, known - width + 1) : known + width] = 0
        while float(clear.max()) > 1:
            best = int(clear.argmax())
            changes.append(best)
            clear[max(0, best - width + 1) : best + width] = 0
        width *= 2
    return torch.tensor(sorted(changes), dtype=torch.long, device=places.device)


def _amplitudes(
    steps: Steps, noise: StepNoise, middles: Tensor, one_scale: bool, doubt: Tensor | None = None
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


def _denoised(
    rows: Rows, bins: Tensor, noise: StepNoise, one_scale: bool, prior: GaussianPrior
) -> tuple[Tensor, Tensor]:
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


def _unexplained(steps: Steps, bins: Tensor, amplitudes: Tensor, flat: Tensor) -> float:
    total = steps.weight.square().sum() + steps.bias.square().sum()
    if not float(total):
        return 1.0
    left = total - steps.weight[bins].square().sum() - steps.bias[bins].square().sum()
    left = left + (steps.weight[bins] - amplitudes[:, None] * flat).square().sum()
    left = left + (steps.bias[bins] - amplitudes).square().sum()
    return max(float(left / total), 0.0)


def _labels(scene: Scene, victim: Victim, read: Imprint, layers: ImprintLayers) -> Tensor:
    """The labels (R,) with which the images have the amplitudes that were read."""
    if victim.model.unit == "update" or not len(read.images) or not victim.one_scale:
        return torch.full((len(read.images),), UNREAD)
    likely = sorted(set(victim.labels.tolist())) if victim.labels is not None else range(scene.classes)
    candidates = torch.tensor(list(likely), device=read.images.device)
    expected = torch.stack([_expected(scene, victim, layers, read, label) for label in candidates], dim=1)
    return candidates[(expected - read.amplitudes[:, None]).abs().argmin(dim=1)].cpu()


def _expected(scene: Scene, victim: Victim, layers: ImprintLayers, read: Imprint, label: Tensor) -> Tensor:
    """The amplitudes (R,) that the images would have with this label."""
    model, count = victim.model, len(read.images)
    targets = F.one_hot(label, scene.classes).to(read.images).expand(count, -1)
    others = {name: value for name, value in victim.parameters.items() if name != layers.bias}

    def loss(bias: Tensor, image: Tensor, target: Tensor) -> Tensor:
        logits = functional_call(scene.network.model, {**others, layers.bias: bias}, (image[None],))
        return scene.network.losses(logits, target[None]).sum()

    errors = vmap(grad(loss), in_dims=(None, 0, 0))(victim.parameters[layers.bias], read.images, targets)
    # The first row lets every image through.
    amplitudes: Tensor = errors[:, 0].double() / model.examples
    scales = model.mechanism.scales(scene.network.names)
    if not model.protects_examples or scales is None:
        return amplitudes
    gradients = dummy_gradients(scene.network, victim.parameters, read.images[:, None], targets[:, None], each=False)
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
