"""Robbing the Fed (Fowl et al. 2022): an *active* server, the worst case, makes images readable in one gradient.

The server sends a network whose first two Linear layers it has made. All rows of the first measure a weighted
brightness, and their biases are cut points: row k lets an image through the ReLU if it is above the k-th. All columns
of the second are the same. So an image is in the gradients of the rows up to that of its bin, and one that is alone in
its bin is ``(dW_k - dW_{k+1}) / (db_k - db_{k+1})``, exactly.

Not in the paper: the brightness's weights differ a little from pixel to pixel, so that images of few grey levels do not
coincide, and the first layer is small and the second large, so that clipping bounds the image rather than the rest.

Behind convolutions the first Linear layer gets features in place of the image. The server makes the kernels, too, and
biases that let all through the ReLUs; so a bin holds the features of its image. These are linear equations for the
pixels, or, behind max pooling and curves such as sigmoids, the image is searched for.

A record is certified if its amplitude, which two records of one bin would add up to, is the very one that the network
gives this image and one of the labels, and its features determine the pixels: equations of full rank that are solved,
or two searches from different starts that end at one image with these features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedpriv.attacks.methods.crafted import ImprintSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import dummy_gradients
from fedpriv.attacks.reconstruction.first_layer.feature_inversion import (
    PASSING,
    SHOWN,
    FeatureReader,
    FoundImages,
    clear_layers,
    features_of,
    why_not_plain,
)
from fedpriv.attacks.reconstruction.priors import GaussianPrior
from fedpriv.attacks.reconstruction.results import AttackRefused, Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.settings import AttackSettings
from fedpriv.attacks.threat import ThreatModel
from fedpriv.core.randomness import fixed_normal
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied

UNREAD = -1  # in place of a label that is not read


def require_grants(threat: ThreatModel, attack: type[AttackSettings]) -> None:
    """Raise AttackRefused if the threat model withholds what an active attack needs."""
    reason = threat.refusal(attack.name, attack.needs)
    if reason is not None:
        raise AttackRefused(f"{reason}; {threat.conduct}")


def require_one_gradient(victim: Victim, attack: str) -> None:
    """Raise AttackRefused if an upload is anything else than one gradient."""
    if victim.model.training is not None:
        raise AttackRefused(f"{victim.title}: {attack} reads one gradient, and this is an update of local training")
    if victim.more:
        raise AttackRefused(f"{victim.title}: {attack} reads one upload at a time; attack each round's by itself")


def mean_image(scene: Scene) -> Tensor:
    """The mean of the public images (C, H, W), normalised; grey, where there are none."""
    if scene.public_images is None or len(scene.public_images) == 0:
        shown = scene.mean.new_full(scene.shape, 0.5)
    else:
        shown = scene.public_images.double().mean(dim=0)
    return scene.normalised(shown)


def filled(values: Tensor, filler: Tensor, count: int) -> Tensor:
    """Values (R, ...) and as many fillers (...) as are missing to ``count``."""
    return torch.cat([values, filler.to(values).expand(count - len(values), *filler.shape)])


PROBE = 20240409  # the seed of the images by which the layers are found; it decides nothing else
COLUMN = 20240410  # the seed of the second layer's column
BRIGHTNESS = 20240411  # the seed of the weights of the brightness
UNEVEN = 0.5  # how far the weights of the brightness lie from their mean, relative
# Of the first layer; a power of two, so that nothing is rounded. The second layer undoes it.
SMALL = 2.0**-10


@dataclass(frozen=True)
class ImprintLayers:
    """The two layers that the server makes."""

    weight: str  # name of the first layer's weight (bins, pixels)
    bias: str  # name of the first layer's bias (bins,)
    next_weight: str  # name of the weight (features, bins) of the layer that follows it after a ReLU
    body: tuple[str, ...] = ()  # the convolutions before it; none: it is given the image itself

    @property
    def first(self) -> str:
        """The name of the first layer."""
        return self.weight.removesuffix(".weight")


def find_imprint_layers(model: nn.Module, shape: tuple[int, int, int]) -> ImprintLayers:
    """Find the Linear layer that is given the image (C, H, W), or what convolutions make of it, and the next one."""
    network = copied(model).eval()
    parameter = next(network.parameters())
    images = fixed_normal(PROBE, 3, *shape).to(parameter)
    calls = _listen(network)
    with torch.no_grad():
        network(images)
    flat = images.flatten(1)
    first = next((call for call in calls if _equal(call.given, flat)), None)
    convolutions = tuple(name for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d))
    body = convolutions if first is None else ()
    if body:
        first = next(iter(calls), None)
    if first is None or first.layer.bias is None:
        raise AttackRefused(
            "imprint needs a network whose first layer is a Linear layer with bias, behind nothing but flattening or "
            "convolutions; this network has none"
        )
    passed = first.result.clamp(min=0)
    second = next((call for call in calls if _equal(call.given, passed)), None)
    if second is None:
        raise AttackRefused(
            f"imprint needs a ReLU and another Linear layer right after {first.name or 'the first'}, so that rows hold "
            "images back; fishing reads networks whose only Linear layer is the last"
        )
    return ImprintLayers(f"{first.name}.weight", f"{first.name}.bias", f"{second.name}.weight", body)


def craft_parameters(model: nn.Module, public_images: Tensor, threat: ThreatModel, bins: int | None = None) -> Vector:
    """Make the parameters that the server sends; those of all other layers stay as they are.

    Cut points are quantiles of what public images (M, C, H, W), normalised, measure: as many of them in each bin.
    """
    require_grants(threat, ImprintSettings)
    if len(public_images) < 2:
        raise ValueError(f"{len(public_images)} public image(s); cut points need at least 2")
    channels, height, width = public_images.shape[1:]
    layers = find_imprint_layers(model, (channels, height, width))
    parameters = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    names = (layers.weight, layers.bias, layers.next_weight)
    if frozen := [name for name in names if name not in parameters]:
        raise AttackRefused(f"imprint needs the gradient of {frozen[0]}, which is frozen: clients do not upload it")
    weight, bias, following = (parameters[name] for name in names)
    if layers.body and (reason := why_not_plain(model, PASSING)):
        raise AttackRefused(f"imprint cannot make {reason} pass on the image to {layers.first}")
    rows = len(weight)
    if bins is not None and bins > rows:
        raise AttackRefused(f"imprint.bins = {bins}: the first layer ({layers.weight}) has {rows} rows")
    parameters |= clear_layers(model, layers.body, public_images.to(weight))
    network = copied(model).eval()
    with torch.no_grad():
        parts = [features_of(network, parameters, layers.first, part) for part in public_images.to(weight).split(SHOWN)]
    features = torch.cat(parts).double()
    weight.copy_((SMALL * (_spread(parts[0]) if layers.body else brightness(weight))).expand_as(weight))
    measured = features @ weight[0].double()
    bias.copy_(-cut_points(measured, bins or rows, rows))
    following.copy_(_column(len(following), measured)[:, None].expand_as(following) / (bins or rows))
    return parameters


def is_crafted(parameters: Vector, layers: ImprintLayers) -> bool:
    """Whether these are parameters that :func:`craft_parameters` may have made."""
    weight, bias, following = (parameters[name] for name in (layers.weight, layers.bias, layers.next_weight))
    alike = bool((weight == weight[:1]).all()) and bool((following == following[:, :1]).all())
    return alike and bool((bias[1:] <= bias[:-1]).all()) and bool(weight.any())


def brightness(weight: Tensor) -> Tensor:
    """The weights (P,) of the pixels in the measurement: positive, 1 / P on average."""
    pixels = weight.shape[1]
    generator = torch.Generator().manual_seed(BRIGHTNESS)
    uneven = 1 + UNEVEN * (2 * torch.rand(pixels, generator=generator, dtype=torch.float64) - 1)
    return (uneven / pixels).to(weight)


def _spread(features: Tensor) -> Tensor:
    """The weights (F,) of features (M, F) by which these differ most; what biases add to all of them cancels."""
    _, _, directions = torch.linalg.svd((features - features.mean(dim=0)).double(), full_matrices=False)
    return (directions[0] / directions[0].abs().sum()).to(features)


def cut_points(measured: Tensor, bins: int, rows: int) -> Tensor:
    """Quantiles (bins,) of the measurements, the lowest below all, then cuts that no image passes: (rows,)."""
    levels = torch.arange(bins, device=measured.device, dtype=measured.dtype) / bins
    far = 2 * (measured.max() - measured.min()) + SMALL
    cuts = torch.quantile(measured, levels)
    cuts[0] = measured.min() - far
    return torch.cat([cuts, (measured.max() + far).expand(rows - bins)])


def _column(features: int, measured: Tensor) -> Tensor:
    """The second layer's column: random signs, so that neither a ReLU nor the softmax hides an image."""
    signs = fixed_normal(COLUMN, features).to(measured)
    return signs / (measured.max() - measured.min()).clamp(min=1e-6 * SMALL)


@dataclass(frozen=True, eq=False)
class _Call:
    name: str
    layer: nn.Linear
    given: Tensor
    result: Tensor


def _listen(network: nn.Module) -> list[_Call]:
    """From now on have each Linear layer of a network, a copy, write down what it is given and returns."""
    calls: list[_Call] = []

    def note(name: str, layer: nn.Linear, given: tuple[Tensor, ...], result: Tensor) -> None:
        calls.append(_Call(name, layer, given[0].clone(), result.clone()))

    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(partial(note, name))
    return calls


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))


MEDIAN = 0.6745  # of the absolute value of a standard normal number
OUTER = 4  # the two outer bins have no end; how wide they are taken to be, over the widest other one


@dataclass(frozen=True, eq=False)
class RowSteps:
    """Differences of the mean of some rows and of the mean of those after them."""

    weight: Tensor  # (N, P)
    bias: Tensor  # (N,)
    measured: Tensor  # (N,): for an image alone its brightness times its amplitude
    variances: Tensor  # (N,) of the noise, relative to that in a step between two single rows


@dataclass(frozen=True, eq=False)
class ImprintRows:
    """The gradient of the first layer, in float64, and what the server knows of its bins."""

    weight: Tensor  # (bins, P)
    bias: Tensor  # (bins,)
    brightness: Tensor  # (P,), the measurement
    cuts: Tensor  # (bins,), the lower ends of the bins

    @staticmethod
    def of(victim: Victim, layers: ImprintLayers) -> "ImprintRows":
        """Read a victim's upload; rows that are no bins let nothing through and hold nothing."""
        upload, parameters = victim.gradient, victim.parameters
        return ImprintRows(
            upload[layers.weight].double(),
            upload[layers.bias].double(),
            parameters[layers.weight][0].double(),
            -parameters[layers.bias].double(),
        )

    @property
    def steps(self) -> RowSteps:
        """What each row has and the next has not; after the last row comes zero."""
        places = torch.arange(len(self.bias), device=self.bias.device)
        return self.between(places - 1, places, places + 1)

    def between(self, start: Tensor, middle: Tensor, end: Tensor) -> RowSteps:
        """Mean of rows after start up to middle, less that of those up to end, (N,) each; zero after the last."""
        before, after = (middle - start).double(), (end - middle).double()
        rows = torch.cat([self.weight, self.bias[:, None]], dim=1)
        sums = torch.cat([torch.zeros_like(rows[:1]), rows.cumsum(dim=0)])
        last = len(self.bias)
        there = (end + 1).clamp(max=last)
        first = (sums[middle + 1] - sums[start + 1]) / before[:, None]
        steps = first - (sums[there] - sums[middle + 1]) / after[:, None]
        noisy = (there - middle - 1).double() / after.square()
        weight = steps[:, :-1]
        return RowSteps(weight, steps[:, -1], weight @ self.brightness, (1 / before + noisy) / 2)

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
        measured, room = flat @ self.brightness, slack * float(self.brightness.abs().sum())
        return (measured > self.cuts[bins] - room) & (measured < upper[bins] + room)


@dataclass(frozen=True)
class StepNoise:
    """The noise in a step between two single rows, most of which hold nothing else."""

    bias: float  # its standard deviation in the bias
    measured: float  # its standard deviation in the measurement
    length: float  # the squared length that it gives the weight
    spread: float  # the standard deviation of that
    weight: float  # its standard deviation in a number of the weight

    @staticmethod
    def of(steps: RowSteps) -> "StepNoise":
        """Read it off medians over the bins."""
        lengths = steps.weight.square().sum(dim=1)
        usual = lengths.median()
        return StepNoise(
            _deviation(steps.bias),
            _deviation(steps.measured),
            float(usual),
            _deviation(lengths - usual),
            float((usual / steps.weight.shape[1]).sqrt()),
        )


def _deviation(values: Tensor) -> float:
    """A standard deviation around zero that few large values do not change."""
    return float(values.abs().median()) / MEDIAN


# What an active server reads: rows of the gradient are equal from one occupied bin to the next, and the step between
# two levels is one bin's image times an amplitude, which the bias tells without noise.
#
# With noise, the bin's brightness tells the amplitude better, rows of a level are averaged, empty bins tell the noise,
# and the rest is weighed against the prior. Images that do not stand out are the public mean; labels not read are -1.


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
# How far the amplitude of a certified image lies from that of one record with one of the labels, relative.
LONE = 1e-4


@dataclass(frozen=True, eq=False)
class Imprint:
    """What was read off one upload."""

    images: Tensor  # (R, C, H, W), normalised, by brightness; R may be 0
    amplitudes: Tensor  # (R,), the bias gradient that belongs to each
    bins: Tensor  # the number of each image's bin, int64 (R,)
    unexplained: float  # share of the steps' squares that the images leave, the attack's objective
    exact: bool  # whether nothing but rounding disturbs the gradient
    determined: Tensor  # bool (R,), whether what was read determines the image
    lost: int  # numbers of an image that convolutions do not pass on

    def note(self, examples: int, certified: Tensor) -> str:
        """Say for a person what the figures rest on."""
        count = len(self.images)
        text = f"active server, crafted parameters: {count} of {examples} images stand out"
        text += f", {int(certified.sum())} of them certified" if self.exact else " from the noise"
        if self.lost:
            text += f"; convolutions hold back {self.lost} of {self.images.shape[1:].numel()} numbers of each"
        if count < examples:
            text += "; for the others the mean public image is offered, and two of one bin show as a mixture"
        return text


def run_imprint(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: ImprintSettings, report: Report
) -> Outcome:
    """Run the attack on victims, one after the other."""
    layers = find_imprint_layers(scene.network.model, scene.shape)
    # One for all uploads of a round.
    readers = {id(victim.parameters): FeatureReader.of(scene, victim, layers.first) for victim in rows if layers.body}
    prints = [read_imprint(scene, victim, layers, readers.get(id(victim.parameters))) for victim in rows]
    pairs = list(zip(rows, prints, strict=True))
    told = [_labels(scene, *pair, layers) for pair in pairs]
    count = max(max(len(read.images), victim.model.examples) for victim, read in pairs)
    losses = torch.tensor([read.unexplained for read in prints], dtype=torch.float64)
    report(1, losses)
    filler = mean_image(scene)
    return Outcome(
        torch.stack([filled(read.images, filler, count) for read in prints]),
        torch.stack([filled(labels, torch.tensor(UNREAD), count) for labels, _ in told]),
        losses,
        torch.ones(len(rows), dtype=torch.long),
        tuple(
            read.note(victim.model.examples, read.determined & is_lone)
            for (victim, read), (_, is_lone) in zip(pairs, told, strict=True)
        ),
    )


def read_imprint(scene: Scene, victim: Victim, layers: ImprintLayers, reader: FeatureReader | None) -> Imprint:
    """Read the images off an upload: of bins that stand out from noise, in the valid range and in their own bin."""
    require_one_gradient(victim, ImprintSettings.name)
    if not is_crafted(victim.parameters, layers):
        raise AttackRefused(f"{victim.title}: the parameters that the clients were sent were not made for imprint")
    rows = ImprintRows.of(victim, layers)
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
        prior = scene.prior if reader is None else reader.prior
        amplitudes, flat = _denoised(rows, bins, noise, victim.one_scale, prior)
    kept = rows.in_bin(flat, bins, OUTSIDE / float(scene.std.min()))
    if reader is None:
        found = FoundImages(flat.unflatten(1, scene.shape), flat.new_zeros(len(flat)), torch.ones_like(kept))
    else:
        found = reader.inverted(flat.to(reader.network.dtype))
    kept &= _is_image(scene, found.images)
    bins, flat, amplitudes = bins[kept], flat[kept], amplitudes[kept]
    return Imprint(
        found.images[kept].to(scene.mean),
        amplitudes,
        bins.cpu(),
        _unexplained(steps, bins, amplitudes, flat),
        exact,
        found.determined[kept],
        0 if reader is None else reader.lost,
    )


def _occupied(rows: ImprintRows, noise: StepNoise, one_scale: bool) -> Tensor:
    """The bins at which rows change by more than noise: narrowest windows first (Baranowski et al. 2019)."""
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
    steps: RowSteps, noise: StepNoise, middles: Tensor, one_scale: bool, doubt: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Least-squares amplitudes (N,) of steps and their precisions, for expected measurements and their deviations."""
    measured = steps.variances * noise.measured**2
    if doubt is not None:
        measured = measured + doubt.square()
    by_weight = middles.square() / measured
    by_bias = 1 / (steps.variances * noise.bias**2) if one_scale else torch.zeros_like(middles)
    precision = by_weight + by_bias
    return (middles * steps.measured / measured + steps.bias * by_bias) / precision, precision


def _denoised(
    rows: ImprintRows, bins: Tensor, noise: StepNoise, one_scale: bool, prior: GaussianPrior
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


def _unexplained(steps: RowSteps, bins: Tensor, amplitudes: Tensor, flat: Tensor) -> float:
    total = steps.weight.square().sum() + steps.bias.square().sum()
    if not float(total):
        return 1.0
    left = total - steps.weight[bins].square().sum() - steps.bias[bins].square().sum()
    left = left + (steps.weight[bins] - amplitudes[:, None] * flat).square().sum()
    left = left + (steps.bias[bins] - amplitudes).square().sum()
    return max(float(left / total), 0.0)


def _labels(scene: Scene, victim: Victim, read: Imprint, layers: ImprintLayers) -> tuple[Tensor, Tensor]:
    """The labels (R,) whose amplitudes are nearest to those that were read, and whether these are of lone records."""
    if victim.model.unit == "update" or not len(read.images) or not victim.one_scale:
        return torch.full((len(read.images),), UNREAD), torch.zeros_like(read.determined)
    likely = sorted(set(victim.labels.tolist())) if victim.labels is not None else range(scene.classes)
    candidates = torch.tensor(list(likely), device=read.images.device)
    expected = torch.stack([_expected(scene, victim, layers, read, label) for label in candidates], dim=1)
    off, best = ((expected / read.amplitudes[:, None]) - 1).abs().min(dim=1)
    return candidates[best].cpu(), off < LONE


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
