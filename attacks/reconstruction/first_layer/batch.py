"""A whole batch from the gradient of a first Linear layer: any activation, with noise, over several rounds.

The gradient falls into few factors (``spectrum``), of which images are combinations. Independent components give
roughly which (``components``). Where units switch off, their zeros make that exact (``switching``), and prove it
(``certificate``); elsewhere the network's own errors do (``polish``). What noise leaves open is filled in by the prior
(``denoise``).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.routes import dummy_gradients
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.first_layer import polish as newton
from fedpriv.attacks.reconstruction.first_layer.components import unmix
from fedpriv.attacks.reconstruction.first_layer.denoise import denoised, faint_scaled
from fedpriv.attacks.reconstruction.first_layer.input_layer import InputLayer
from fedpriv.attacks.reconstruction.first_layer.spectrum import Spectrum, take_apart
from fedpriv.attacks.reconstruction.first_layer.switching import FirstLayer, images_of, settle_switches
from fedpriv.attacks.reconstruction.labels.last_layer import read_labels
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model.model import Victim
from fedpriv.gradients.operator import wide_type

__all__ = ["BatchRead", "first_layer_errors", "read_batch", "stacked"]

MOST = 128  # images that are told apart
WEAK = 8.0  # times the noise's edge below which an image is searched in averaged pixels
AUDIBLE = 1e-4  # deviation of the noise in an image, on the scale of the network's input, from which the prior is asked
READINGS = 4  # turns of labels and images
CLEAR = 10.0  # times the noise in the left factors: what is left there is no more than noise
SOLVED = 0.05  # of the squared left factors: more than that is left where the model of the upload does not hold
PROBE = 20261123  # the seed of the images that tell whether units switch; it decides nothing else
PROBED = 16

NO_BIAS = "closed_form tells the images of a batch apart by the first layer's bias, on one scale with its weight"
NOTHING = "no image of the batch stands above the noise in the first layer's gradient (edge {:.3g}, largest {:.3g})"
FULL = (
    "the first layer's gradient of {} outputs has the full rank {}: the images cannot be told apart (more examples "
    "than outputs, or noise that is not public)"
)
ALIKE = "the images of the batch differ by constants alone, and cannot be told apart"
MANY = "{} images stand above the noise in the first layer's gradient; closed_form tells {} apart at most"


@dataclass(frozen=True, eq=False)
class BatchRead:
    """What the first layer says of a batch.

    Attributes:
        images: (n, C, H, W), normalised, the strongest first.
        labels: int64 (n,), each its image's.
        note: how sure that is, for people.
        unexplained: the share of the squared gradient that these images leave.
    """

    images: Tensor
    labels: Tensor
    note: str
    unexplained: float


def read_batch(scene: Scene, victim: Victim, layer: InputLayer) -> BatchRead:
    """Tell the images of a batch apart.

    Args:
        scene: what is public.
        victim: one upload, or several of the same batch or of other batches of the same images.
        layer: the first layer.

    Raises:
        AttackRefused: the layer has no bias of the weight's scale, nothing stands above the noise, or too many images
            do.
    """
    weight, bias = stacked(victim, layer)
    if bias is None or not victim.one_scale:
        raise AttackRefused(NO_BIAS)
    spectrum = _spectrum(victim, layer, torch.cat([weight, bias[:, None]], dim=1))
    components = unmix(spectrum.right[:, :-1], scene.shape, noisy=float(spectrum.values[-1]) < WEAK * spectrum.edge)
    inverse, failed = torch.linalg.inv_ex(components)
    if int(failed) or not bool(torch.isfinite(inverse).all()):
        raise AttackRefused(ALIKE)
    mixing = faint_scaled(spectrum, spectrum.values[:, None] * inverse, lambda: scene.prior)
    public, other_batches = _public_layer(victim, layer), victim.pool > 0
    notes = [_counted(spectrum, victim)]
    switching = _switches(scene, victim, layer)
    if switching or other_batches:
        settled = settle_switches(spectrum, mixing, public, switching=switching)
        mixing = settled.mixing
        notes += [settled.certificate.words] if switching else []
    separation = _Separation(scene, victim, layer, spectrum, mixing)
    separation = separation if switching or not _modelled(victim) else separation.polished()
    order = (spectrum.left @ separation.mixing).norm(dim=0).argsort(descending=True)
    images, labels = separation.images[order.to(scene.mean.device)], separation.labels[order.to(scene.mean.device)]
    return BatchRead(images, labels, "; ".join(notes), spectrum.unexplained)


def stacked(victim: Victim, layer: InputLayer) -> tuple[Tensor, Tensor | None]:
    """The layer's matrix (outputs, P) and bias (outputs,): of several uploads one below the other, as of a wider layer.

    They are scaled such that the noise is as large in all rows.
    """
    if not victim.more:
        return layer.gradients(victim.gradient)
    scales = _scales(victim, layer)
    parts = [(scale, *layer.gradients(upload.gradient)) for scale, upload in zip(scales, victim.uploads, strict=True)]
    weight = torch.cat([scale * matrix for scale, matrix, _ in parts])
    biases = [scale * vector for scale, _, vector in parts if vector is not None]
    return weight, torch.cat(biases) if biases else None


def first_layer_errors(scene: Scene, victim: Victim, bias: str, images: Tensor, labels: Tensor) -> Tensor:
    """The errors (N, B, outputs) with which the examples of dummy batches enter one upload.

    Args:
        scene: what is public.
        victim: of which one upload is meant.
        bias: the first layer's.
        images: (N, B, C, H, W), normalised.
        labels: (N, B).
    """
    dtype = wide_type(images)
    parameters = {name: value.to(dtype) for name, value in victim.parameters.items()}
    one_hot = F.one_hot(labels, scene.classes).to(dtype)
    gradients = dummy_gradients(scene.network.cast(dtype), parameters, images.to(dtype), one_hot, each=True)
    errors = gradients.rows((bias,))[bias].detach()
    scales = victim.model.mechanism.scales(gradients.names)
    if scales is None:
        return errors
    weights = next(weight for names, weight in victim.model.weights(gradients, scales) if bias in names)
    # Weights are of a mean over the dummies; the upload was divided by the public number of examples.
    return errors * (weights.detach() * images.shape[1] / victim.model.examples)[:, :, None]


def _scales(victim: Victim, layer: InputLayer) -> list[float]:
    """What the rows of each upload are multiplied with, relative to the first's.

    Averages of several releases have less noise. Where there is none, rounding errors count, which grow with what is
    rounded.
    """
    if max(victim.noise.variances, default=0.0) > 0:
        return [math.sqrt(upload.model.releases / victim.model.releases) for upload in victim.uploads]
    sizes = [float(layer.gradients(upload.gradient)[0].norm()) for upload in victim.uploads]
    return [sizes[0] / size if size > 0 and sizes[0] > 0 else 1.0 for size in sizes]


def _spectrum(victim: Victim, layer: InputLayer, matrix: Tensor) -> Spectrum:
    deviations = victim.model.mechanism.deviations((layer.weight,))[layer.weight]
    public = math.sqrt(max(victim.noise.variances, default=0.0) * float(deviations.square().mean()))
    try:
        spectrum = take_apart(matrix, public, victim.pool or victim.model.examples)
    except ValueError as error:
        raise AttackRefused(str(error)) from None
    if spectrum.examples == 0:
        raise AttackRefused(NOTHING.format(spectrum.edge, spectrum.largest))
    if spectrum.examples >= min(matrix.shape):
        raise AttackRefused(FULL.format(len(matrix), spectrum.examples))
    if spectrum.examples > MOST:
        raise AttackRefused(MANY.format(spectrum.examples, MOST))
    return spectrum


def _counted(spectrum: Spectrum, victim: Victim) -> str:
    count, of = spectrum.examples, victim.pool or victim.model.examples
    return f"{count} image{'s' if count > 1 else ''} above the noise edge (public number: {of})"


def _public_layer(victim: Victim, layer: InputLayer) -> FirstLayer:
    parts = [layer.gradients(upload.parameters) for upload in victim.uploads]
    weight = torch.cat([matrix for matrix, _ in parts]).double().cpu()
    bias = torch.cat([vector for _, vector in parts if vector is not None]).double().cpu()
    return FirstLayer(weight, bias, len(parts), victim.pool > 0)


def _switches(scene: Scene, victim: Victim, layer: InputLayer) -> bool:
    """Whether an example's error is zero at a unit exactly where the unit's output is not positive."""
    if layer.bias is None:
        return False
    generator = torch.Generator().manual_seed(PROBE)
    images = torch.randn(1, PROBED, *scene.shape, generator=generator).to(scene.mean)
    labels = (torch.arange(PROBED, device=images.device) % scene.classes)[None]
    errors = first_layer_errors(scene, victim, layer.bias, images, labels)[0].cpu()
    outputs = _public_layer(replace(victim, more=()), layer).outputs(images[0].flatten(1).double().cpu())
    closed = outputs <= 0
    return bool((errors[closed] == 0).all()) and float((errors[~closed] != 0).double().mean()) > 1 / 2


def _modelled(victim: Victim) -> bool:
    """Whether the errors in the upload are those of one gradient, on a scale that is known."""
    model = victim.model
    known = not model.protects_updates and model.mechanism.scales(tuple(victim.gradient)) is not None
    return victim.pool == 0 and model.training is None and known


@dataclass(frozen=True, eq=False)
class _Separation:
    """Images and labels that belong to a mixing (B, B)."""

    scene: Scene
    victim: Victim
    layer: InputLayer
    spectrum: Spectrum
    mixing: Tensor

    @property
    def bias(self) -> str:
        return str(self.layer.bias)

    @property
    def images(self) -> Tensor:
        """(B, C, H, W), normalised, with noise filled in by the prior."""
        inverse = torch.linalg.inv(self.mixing)
        heard = self.spectrum.deviation * float(inverse.norm(dim=1).max())
        known = images_of(self.spectrum, self.mixing)
        flat = known if heard < AUDIBLE else denoised(self.spectrum, self.mixing, self.scene.prior)
        return self.scene.box(flat.unflatten(1, self.scene.shape).to(self.scene.mean))

    @property
    def labels(self) -> Tensor:
        """(B,): those whose errors at the first layer point as those that were found."""
        cosines = self._cosines()
        if self.victim.labels is None or len(self.victim.labels) != len(self.mixing):
            return cosines.argmax(dim=0)
        return _assigned(cosines, self.victim.labels)

    def polished(self) -> "_Separation":
        """Go on with the network's own errors, and labels, until labels stay."""
        if len(self.mixing) > newton.MOST:
            return self
        best, least = self, SOLVED
        for labels in self._readings():
            current = self
            for _ in range(READINGS):
                solution = newton.polish(self.spectrum, current.mixing, self._errors(labels))
                current = replace(self, mixing=solution.mixing)
                if solution.misfit < least:
                    best, least = current, solution.misfit
                before, labels = labels, current.labels
                if torch.equal(before, labels):
                    break
            if least < CLEAR * self._noise:
                break
        return best

    @property
    def _noise(self) -> float:
        """The share of the noise in the squared left factors."""
        rows, count = self.spectrum.left.shape
        return rows * count * self.spectrum.deviation**2 / float(self.spectrum.values.square().sum())

    def _readings(self) -> Iterator[Tensor]:
        """Labels (B,) to begin with: by each image's own errors; and, where these differ, by the last layer."""
        own = self.labels
        yield own
        (read,) = read_labels(self.scene, [self.victim])
        if read is not None and len(read) == len(own):
            other = _assigned(self._cosines(), read)
            if not torch.equal(own, other):
                yield other

    def _errors(self, labels: Tensor) -> newton.Errors:
        scales = _scales(self.victim, self.layer)

        def errors(images: Tensor) -> Tensor:
            pictures = images.unflatten(2, self.scene.shape).to(labels.device)
            given = labels.expand(len(images), -1)
            parts = [
                scale * first_layer_errors(self.scene, upload, self.bias, pictures, given)
                for scale, upload in zip(scales, self.victim.uploads, strict=True)
            ]
            return torch.cat(parts, dim=2).double().cpu()

        return errors

    def _cosines(self) -> Tensor:
        """(classes, B), of errors found and errors with each label; of several uploads where they are largest."""
        images, classes = self.images, self.scene.classes
        labels = torch.arange(classes, device=images.device)[:, None].expand(-1, len(images))
        parts = (self.spectrum.left @ self.mixing).mT.to(images).chunk(len(self.victim.uploads), dim=1)
        loudest = torch.stack([part.norm(dim=1) for part in parts]).argmax(dim=0)
        cosines = images.new_zeros(classes, len(images))
        for number in loudest.unique().tolist():
            mine = loudest == number
            dummies = images[mine].expand(classes, *images[mine].shape)
            errors = first_layer_errors(self.scene, self.victim.uploads[number], self.bias, dummies, labels[:, mine])
            cosines[:, mine] = F.cosine_similarity(errors.to(images), parts[number][mine][None], dim=2)
        return cosines


def _assigned(cosines: Tensor, labels: Tensor) -> Tensor:
    """Give known labels (B,) to the images, one to one, by cosines (classes, B)."""
    rows, columns = linear_sum_assignment(-cosines[labels].cpu().double().numpy())
    order = torch.empty(len(labels), dtype=torch.long)
    order[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return labels[order.to(labels.device)]
