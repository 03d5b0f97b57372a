"""Attack one gradient or update of your own model, without the rest of this project.

The upload may be what autograd returns, what an optimiser changed, or what a Flower client sent: tensors or arrays by
name, or in the order of the model's parameters. Flower itself is not needed.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn
from torch.func import vmap

from fedpriv.attacks.campaign import attack_each, trouble
from fedpriv.attacks.observation import CandidateLists, Observation, PublicSettings, in_order
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Progress, Reconstruction, preflight
from fedpriv.attacks.reconstruction.dummy_gradients.network import Loss, soft_cross_entropy
from fedpriv.attacks.reconstruction.upload_model import whole_numbers
from fedpriv.attacks.settings import Access, AttackSettings, known_attack
from fedpriv.attacks.simulation import Sent, SimulationCheck
from fedpriv.core.columns import signal_hint
from fedpriv.core.config.error_text import validated
from fedpriv.core.errors import InputError, cut, one_line
from fedpriv.core.optimizers import make_optimizer
from fedpriv.core.randomness import fixed_normal, generator_states, seeded_generators, torch_stream
from fedpriv.core.registry import ATTACKS, suggestion
from fedpriv.core.settings import Integer, Momentum, Real, Settings, wrong_value
from fedpriv.core.world import trained_parameters
from fedpriv.gradients import Vector
from fedpriv.gradients.calls import copied, evaluating
from fedpriv.mechanisms import MechanismSettings, mechanism_settings
from fedpriv.models.machinery.weights import unwrapped

_DECAY = 0.01  # what weight decay may add to a bias, as a share of the largest change

Arrays = Mapping[str, Any] | Iterable[Any]
"""Tensors or numpy arrays: by name, or in the order of the model's parameters (or of its ``state_dict``)."""


def present(model: nn.Module) -> Vector:
    """Return a copy of the trained parameters, on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in trained_parameters(model).items()}


def named_vector(given: Arrays, model: nn.Module, what: str) -> Vector:
    """Bring tensors in any of the accepted forms into a mapping of the trained parameters' names, on the CPU."""
    parameters = trained_parameters(model)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(
            key=what, given=given, allowed="expected tensors or arrays, by name or in the order of the model's"
        )
    if isinstance(given, Mapping) and not all(isinstance(name, str) for name in given):
        raise InputError(f"{what}: its keys are {list(given)[:3]}; expected names of the model's parameters")
    if not isinstance(given, Mapping):
        values = _in_order(list(given), model, what)
    else:
        numbered = {name.removeprefix("arr_"): name for name in given}  # as numpy.savez calls arrays without a name
        if set(numbered) == {str(number) for number in range(len(given))}:
            values = _in_order([given[numbered[name]] for name in in_order(numbered)], model, what)
        else:
            values = _by_name(given, model, what)
    return {name: _tensor(values[name], like, f"{what}: {name}") for name, like in parameters.items()}


def _by_name(given: Mapping[str, Any], model: nn.Module, what: str) -> Mapping[str, Any]:
    parameters = trained_parameters(model)
    known = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    given = unwrapped(given, parameters)
    if unknown := [name for name in given if name not in known]:
        close = suggestion(unknown[0], tuple(parameters))
        raise InputError(f"{what}: the model has no layer with {unknown[0]!r}{close}")
    if missing := [name for name in parameters if name not in given]:
        raise InputError(f"{what}: {missing[0]!r} is missing")
    return given


def _in_order(given: Sequence[Any], model: nn.Module, what: str) -> Mapping[str, Any]:
    """Name a list by the model's trained parameters, all its parameters, or its ``state_dict``, as it fits."""
    if given and all(value is None for value in given):
        raise InputError(f"{what}: every entry is None; call loss.backward() first")
    orders: list[Mapping[str, Tensor]] = [trained_parameters(model), dict(model.named_parameters()), model.state_dict()]
    fitting = [order for order in orders if len(order) == len(given)]
    if not fitting:
        counts = ", ".join(dict.fromkeys(str(len(order)) for order in orders))
        raise InputError(
            f"{what}: a list of {len(given)} arrays; the model's trained parameters, parameters and state_dict have "
            f"{counts}"
        )
    matching = (order for order in fitting if _fits(given, order))
    return dict(zip(next(matching, fitting[0]), given, strict=True))


def _fits(given: Sequence[Any], order: Mapping[str, Tensor]) -> bool:
    pairs = zip(given, order.values(), strict=True)
    return all(value is None or tuple(np.shape(value)) == tuple(like.shape) for value, like in pairs)


def _tensor(given: Any, like: Tensor, what: str) -> Tensor:
    if given is None:
        return torch.zeros(like.shape, dtype=like.dtype)  # a parameter without a part in the loss
    value = _numbers(given, what)
    if not value.is_floating_point():
        raise InputError(f"{what} has the type {value.dtype}; expected floating-point numbers")
    if value.shape != like.shape:
        raise InputError(f"{what} has the shape {tuple(value.shape)}, in the model {tuple(like.shape)}")
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"{what} has a NaN or infinity")
    return value.to(like.dtype).clone()


def _numbers(given: Any, what: str) -> Tensor:
    """A tensor on the CPU of anything that is an array or can say so, such as the ``Array`` of Flower."""
    try:
        if isinstance(given, Tensor):
            return given.detach().cpu().to_dense()
        convert = getattr(given, "numpy", None)
        return torch.from_numpy(np.array(convert() if callable(convert) else given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} is not an array of numbers: {cut(one_line(error), 200)}") from None


def attack_config(attack: str, settings: Mapping[str, Any]) -> Any:
    """Return an attack's settings."""
    kind = known_attack(attack)
    for key in settings:
        if key not in kind.model_fields:
            raise InputError(f"{attack} has no setting {key!r}{suggestion(key, tuple(kind.model_fields))}")
    return validated(kind, settings, "")


def image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (C, H, W)."""
    try:
        channels, height, width = (index(side) for side in shape)
    except (TypeError, ValueError):
        channels = height = width = 0
    if min(channels, height, width) < 1 or any(isinstance(side, bool) for side in shape):
        raise InputError(
            key="shape",
            given=shape,
            allowed="expected (C, H, W) of one image, or (C, 1, T) of a signal, three whole numbers from 1",
        )
    return channels, height, width


def logit_count(model: nn.Module, shape: tuple[int, int, int], classes: int | None) -> int:
    """Try a blank image; running statistics stay as they are."""
    parameters = trained_parameters(model)
    if not parameters:
        raise InputError("the model has no trained parameters, so there is nothing to attack")
    reference = next(iter(parameters.values()))
    try:
        with evaluating(model), torch.no_grad():
            output = model(torch.zeros(1, *shape, device=reference.device, dtype=reference.dtype))
    except Exception as error:
        raise InputError(
            f"the model does not take images of shape {(1, *shape)}: {cut(one_line(error), 200)}",
            hint=signal_hint(shape),
        ) from error
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 1 or output.shape[1] < 2:
        given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"the model gives {given} for one image; expected logits (1, classes), at least two classes")
    if classes is not None and classes != output.shape[1]:
        raise InputError(key="classes", given=classes, allowed=f"the model has {output.shape[1]} logits")
    return int(output.shape[1])


def per_channel(name: str, given: float | Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one number a channel."""
    try:
        values = tuple(float(value) for value in np.atleast_1d(np.asarray(given, dtype=np.float64)))
    except (TypeError, ValueError):
        raise InputError(
            key=name, given=given, allowed="expected a number, or a list of one for each channel"
        ) from None
    if len(values) == 1:
        values *= channels
    if len(values) != channels:
        raise InputError(f"{name} has {len(values)} numbers; expected one, or one for each of the {channels} channels")
    if not all(math.isfinite(value) for value in values) or (name == "std" and min(values) <= 0):
        raise InputError(
            key=name, given=values, allowed=f"expected finite numbers{', above zero' if name == 'std' else ''}"
        )
    return values


def wanted(name: str, value: Any, holds: bool, words: str) -> None:
    """Refuse an argument of which something does not hold."""
    if not holds:
        raise InputError(key=name, given=value, allowed=f"expected {words}")


def pairs_of(given: Any) -> list[tuple[Any, Any]]:
    """Return what is a sequence of pairs."""
    try:
        return [(before, sent) for before, sent in given]
    except (TypeError, ValueError):
        raise InputError("repeats: expected a list of pairs (parameters, upload)") from None


Whole = Annotated[Integer, Field(ge=1)]
AboveZero = Annotated[Real, Field(gt=0)]


class Training(Settings):
    """How the upload was computed, and how it is attacked: arguments of :func:`reconstruct` that need no model."""

    batch_size: Whole
    local_steps: Whole
    examples: Whole | None
    learning_rate: AboveZero | None  # `None`: the upload is a gradient
    optimizer: Literal["sgd", "adam"]
    momentum: Momentum
    seed: Annotated[Integer, Field(ge=0, lt=2**63)]
    seconds: AboveZero | None

    @property
    def distinct(self) -> int:
        """How many distinct examples are behind the upload."""
        return self.batch_size * self.local_steps if self.examples is None else self.examples

    def public(
        self,
        shape: tuple[int, int, int],
        classes: int,
        scale: tuple[tuple[float, ...], tuple[float, ...]],
        mechanism: MechanismSettings,
    ) -> PublicSettings:
        """Return what attacks are told; ``scale``: mean and standard deviation of each channel, on [0, 1]."""
        return PublicSettings(
            model={},
            shape=shape,
            classes=classes,
            mean=scale[0],
            std=scale[1],
            algorithm="fedsgd" if self.learning_rate is None else "fedavg",
            batch_size=self.batch_size,
            local_steps=self.local_steps,
            learning_rate=self.learning_rate or 1.0,
            optimizer=self.optimizer,
            momentum=self.momentum,
            client_examples=self.distinct,
            mechanism=mechanism.model_dump(mode="json", exclude_none=True),
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.learning_rate is None and self.local_steps != 1:
            raise self.wrong("local_steps", "for a change of parameters: give its learning_rate, too")
        most = self.batch_size * self.local_steps
        if not self.batch_size <= self.distinct <= most:
            batches = f"{self.local_steps} batches of {self.batch_size}"
            raise self.wrong("examples", f"{batches} hold from {self.batch_size} to {most} distinct examples")
        return self


def mechanism_of(given: MechanismSettings | Mapping[str, Any] | None) -> MechanismSettings:
    """Return a mechanism's settings, with the noise itself."""
    if given is None:
        return mechanism_settings({})
    if not isinstance(given, (MechanismSettings, Mapping)):
        raise InputError(
            key="mechanism", given=given, allowed="expected its settings, such as {'name': 'gaussian', 'sigma': 1.0}"
        )
    try:
        config = given if isinstance(given, MechanismSettings) else mechanism_settings(given)
    except ValidationError as error:
        raise wrong_value(error.errors()[0], "mechanism") from None
    if config.parameter and config.noise is None:
        raise InputError(f"mechanism {config.name}: give the noise itself ({config.parameter}) and not a target")
    # The noise in the upload is meant; of one whose noise is added later, the attack would believe in none.
    config.require_noise_at("clients")
    return config


def _labels(name: str, labels: Sequence[int], examples: int, classes: int) -> tuple[int, ...]:
    try:
        known = tuple(index(label) for label in labels)
    except TypeError:
        raise InputError(key=name, given=labels, allowed="expected whole numbers, one for each example") from None
    if len(known) != examples:
        raise InputError(f"{len(known)} {name} for {examples} examples")
    if min(known) < 0 or max(known) >= classes:
        wrong = next(label for label in known if not 0 <= label < classes)
        raise InputError(f"{name}: expected numbers from 0 to {classes - 1}; given is {wrong}")
    return known


@dataclass(frozen=True)
class ValueRange:
    """The lowest and the highest value of an image; the attacks themselves work from 0 to 1."""

    low: float = 0.0
    high: float = 1.0

    @property
    def width(self) -> float:
        """From the lowest to the highest value."""
        return self.high - self.low

    def to_unit(self, value: float) -> float:
        """Return a value on the scale from 0 to 1."""
        return (value - self.low) / self.width

    def touched(self, images: Tensor) -> str:
        """Say how many values of images on [0, 1] lie on a bound; empty for none."""
        count = int(((images <= 0) | (images >= 1)).sum())
        verb = "lies" if count == 1 else "lie"
        return f"{count} of {images.numel()} values {verb} on a bound of [{self.low:g}, {self.high:g}]" if count else ""


def bounds_of(given: tuple[float, float] | None) -> ValueRange:
    """Return the range; from 0 to 1 unless given."""
    if given is None:
        return ValueRange()
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        raise InputError(
            key="value_range", given=given, allowed="expected two numbers, the lowest and the highest value"
        ) from None
    if not (high - low <= torch.finfo(torch.float32).max and low < high):
        raise InputError(key="value_range", given=given, allowed="expected finite numbers, the lower one first")
    return ValueRange(low, high)


def on_scale(reconstruction: Reconstruction, bounds: ValueRange, clipped: str) -> Reconstruction:
    """Return a reconstruction on the scale of the range, with what was clipped in its note."""
    attempts = tuple(
        replace(attempt, images=attempt.images * bounds.width + bounds.low) for attempt in reconstruction.attempts
    )
    return replace(
        reconstruction, attempts=attempts, note="; ".join(text for text in (reconstruction.note, clipped) if text)
    )


def told_candidates(config: AttackSettings, candidates: Any, labels: Any) -> AttackSettings:
    """Return an attack's settings for these candidates, whose labels it weighs where they are not given."""
    if candidates is None:
        return config
    if Access.CANDIDATES not in config.needs:
        raise InputError(f"candidates: the attack {config.name} takes none; leave them out, or choose one that picks")
    unknown = labels is None and "labels" in type(config).model_fields
    return config.model_copy(update={"labels": "unknown"}) if unknown else config


def candidate_records(
    images: Any, labels: Any, examples: int, classes: int, shape: tuple[int, int, int], bounds: ValueRange
) -> CandidateLists | None:
    """Return one list of all records for each image of the upload; ``None``: none are given."""
    if images is None:
        return None
    records = pictures("candidates", images, shape, bounds)
    if len(records) < 2:
        raise InputError("candidates: 1 record; expected 2 or more, the image among them")
    given = _labels("candidate_labels", [0] * len(records) if labels is None else labels, len(records), classes)
    return CandidateLists.of_all(records, torch.tensor(given), examples)


def pictures(name: str, given: Any, shape: tuple[int, int, int], bounds: ValueRange) -> Tensor:
    """Return images (M, C, H, W), moved to [0, 1]."""
    images = _numbers(given, name)
    if images.ndim != 4 or tuple(images.shape[1:]) != shape or len(images) == 0:
        raise InputError(f"{name} has the shape {tuple(images.shape)}; expected (M, {', '.join(map(str, shape))})")
    if not images.is_floating_point() or not bool(((images >= bounds.low) & (images <= bounds.high)).all()):
        raise InputError(f"{name}: expected floating-point numbers from {bounds.low:g} to {bounds.high:g}")
    return ((images - bounds.low) / bounds.width).float()


Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, classes), label probabilities (B, classes)) -> the mean or the sum of the examples' losses."""

TRIED = 3  # examples of a batch with which a loss is tried out
ROUNDINGS = 1000  # in which two ways to compute a loss may differ


@dataclass(frozen=True)
class TriedLoss:
    """A loss as the attacks use it."""

    each: Loss  # of each example
    sums: bool  # whether the given one adds examples up
    shows_labels: bool = True  # whether the gradient of the logits is least at the label, while logits are small


def try_loss(loss: Criterion, classes: int, like: Tensor) -> TriedLoss:
    """Try a loss on random logits like these: it must take probabilities and be the mean or the sum over examples."""
    logits = fixed_normal(0, max(TRIED, classes), classes).to(like)
    numbers = torch.arange(len(logits), device=like.device) % classes
    probabilities = F.one_hot(numbers, classes).to(like)
    try:
        together = loss(logits[:TRIED], probabilities[:TRIED])
        alone = torch.stack([loss(logits[k : k + 1], probabilities[k : k + 1]) for k in range(len(logits))])
    except Exception as error:
        both = f"logits and label probabilities, both (B, {classes})"
        raise InputError(f"the loss cannot be computed from {both}: {cut(one_line(error), 200)}") from error
    if not isinstance(together, Tensor) or together.ndim != 0 or not bool(torch.isfinite(together)):
        raise InputError("the loss must be one finite number for a batch (reduction = 'mean' or 'sum')")
    sums = _same(together, alone[:TRIED].sum())
    if not sums and not _same(together, alone[:TRIED].mean()):
        raise InputError("the loss of a batch is neither the mean nor the sum of its examples' losses")
    _check_numbers(loss, logits, numbers, together, alone)
    usual = soft_cross_entropy(logits, probabilities)
    soft = torch.stack([loss(row[None], _even(row[None])) for row in logits])
    if _same(alone, usual) and _same(soft, soft_cross_entropy(logits, _even(logits))):
        return TriedLoss(soft_cross_entropy, sums)
    each = vmap(lambda row, label: loss(row[None], label[None]))
    return TriedLoss(each, sums, _shows_labels(loss, 0.1 * logits, probabilities))


def _shows_labels(loss: Criterion, logits: Tensor, probabilities: Tensor) -> bool:
    """Whether the label of one example is where the gradient of its logits is least (Zhao et al. 2020, iDLG)."""
    leaf = logits.clone().requires_grad_()
    losses = [loss(leaf[k : k + 1], probabilities[k : k + 1]) for k in range(len(leaf))]
    (slopes,) = torch.autograd.grad(torch.stack(losses).sum(), leaf)
    return bool((slopes.argmin(dim=1) == probabilities.argmax(dim=1)).all())


def _same(one: Tensor, other: Tensor) -> bool:
    share = ROUNDINGS * torch.finfo(one.dtype).eps
    return bool(torch.allclose(one, other, rtol=share, atol=share))


def _check_numbers(loss: Criterion, logits: Tensor, numbers: Tensor, together: Tensor, alone: Tensor) -> None:
    """A loss that takes class numbers must mean the same by them, for every class; one with class weights does not."""
    try:
        batch = loss(logits[:TRIED], numbers[:TRIED])
        each = torch.stack([loss(logits[k : k + 1], numbers[k : k + 1]) for k in range(len(logits))])
    except Exception:  # noqa: BLE001 - a loss that takes probabilities only is fine, whatever it raises
        return
    if not (_same(together, batch.to(together)) and _same(alone, each.to(alone))):
        raise InputError(
            "the loss gives another value for class numbers than for the same labels as probabilities (class "
            "weights?); give reduction = 'sum', and an upload that is multiplied by the sum of its labels' weights"
        )


def _even(logits: Tensor) -> Tensor:
    return torch.full_like(logits, 1 / logits.shape[1])


@dataclass(frozen=True)
class OwnClient:
    """See :class:`fedpriv.attacks.simulation.Client`."""

    model: nn.Module
    loss: Criterion
    sums: bool  # whether the loss adds up over examples
    public: PublicSettings

    def __call__(self, parameters: Vector, batches: Sequence[tuple[Tensor, Tensor]], draw: int) -> Sent:
        """Train a copy of the model, which draws its own random numbers."""
        first = next(iter(parameters.values()))
        model = copied(self.model).to(first.device, first.dtype)
        own = trained_parameters(model)
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(parameters[name])
        seed = torch_stream(0, "simulation-draw", draw).initial_seed()
        with seeded_generators(seed, first.device), torch.enable_grad():
            start = generator_states(first.device)
            upload = self._upload(model, own, parameters, batches)
            return Sent(upload, generator_states(first.device) != start)

    def _upload(
        self, model: nn.Module, own: Vector, before: Vector, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> Vector:
        public = self.public
        if public.algorithm == "fedsgd":
            return self._gradient(model, own, *batches[0])
        optimizer = make_optimizer(public.optimizer, public.learning_rate, public.momentum)
        for inputs, labels in batches:
            optimizer.step(own, self._gradient(model, own, inputs, labels))
        return {name: value.detach() - before[name] for name, value in own.items()}

    def _gradient(self, model: nn.Module, own: Vector, inputs: Tensor, labels: Tensor) -> Vector:
        probabilities = F.one_hot(labels, self.public.classes).to(inputs)
        loss = self.loss(model(inputs), probabilities) / (len(inputs) if self.sums else 1)
        gradients = torch.autograd.grad(loss, list(own.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(own, gradients, strict=True))


class AttackWarning(UserWarning):
    """The result of the attack is less reliable than it looks."""


def reconstruct(
    model: nn.Module,
    loss: Criterion,
    upload: Arrays,
    shape: Sequence[int],
    *,
    attack: str = "iga",
    classes: int | None = None,
    labels: Sequence[int] | None = None,
    batch_size: int = 1,
    examples: int | None = None,
    parameters: Arrays | None = None,
    mechanism: MechanismSettings | Mapping[str, Any] | None = None,
    learning_rate: float | None = None,
    local_steps: int = 1,
    optimizer: Literal["sgd", "adam"] = "sgd",
    momentum: float = 0.0,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    value_range: tuple[float, float] | None = None,
    public_images: Any = None,
    candidates: Any = None,
    candidate_labels: Sequence[int] | None = None,
    repeats: Sequence[tuple[Arrays, Arrays]] = (),
    seed: int = 0,
    progress: Progress | None = None,
    seconds: float | None = None,
    **settings: Any,
) -> Reconstruction:
    """Reconstruct training images from a gradient or an update of your own model.

    Args:
        model: maps images (B, C, H, W) to logits (B, classes); on the device to use, in the mode (``train`` or
            ``eval``) in which the upload was computed. It is not changed.
        loss: the training loss of logits and labels, such as ``torch.nn.functional.cross_entropy``; it must accept
            label probabilities too, and be the mean or the sum over examples.
        upload: the gradient of the loss of a batch, or, where ``learning_rate`` is given, parameters after minus
            before. A mapping of names to tensors or arrays (a ``state_dict``, a Flower ``ArrayRecord``; buffers are
            left out), or a list in the order of ``model.parameters()`` or of the ``state_dict``.
        shape: (C, H, W) of an image.
        attack: name of the attack; see ``fedpriv attack list``.
        classes: number of classes; ``None``: as many as the model has logits.
        labels: the labels of the examples, in any order, if they are known; ``None``: the attack finds them itself.
        batch_size: examples in one batch.
        examples: distinct examples behind the upload; ``None``: ``batch_size * local_steps``.
        parameters: before the upload was computed, in the same form as the upload; ``None``: the model's own.
        mechanism: the privacy mechanism, as in an experiment file: name, the noise itself (sigma, scale or kappa),
            clip_norm, and so on; ``None``: there is none.
        learning_rate: of the local optimiser, for an upload that is a change of parameters.
        local_steps: steps that were taken, for such an upload.
        optimizer: the local optimiser: sgd, or adam with torch's defaults.
        momentum: of the local SGD.
        mean: what was subtracted from the images before the model, one number or one a channel.
        std: what the images were divided by after that, in the same form.
        value_range: the lowest and the highest value of an image before ``mean`` is subtracted; results are clipped to
            it. ``None``: pictures, from 0 to 1. Standardised rows of a table need a wider range, such as (-6, 6).
        public_images: (M, C, H, W) tensor or array with values in that range: images of the same kind as the victims',
            for attacks that use image priors. About a hundred are the least that helps; thousands are better.
            ``None``: the adversary has none.
        candidates: (N, C, H, W) tensor or array with values in that range: distinct images that contain the victims',
            for the attack that picks (``attack="candidate"``).
        candidate_labels: labels of the candidates, (N,); ``None``: unknown, all classes are weighed.
        repeats: (parameters, upload) of further uploads of exactly the same batch, in the same forms as ``parameters``
            and ``upload``: those from the same parameters are averaged, those from others are matched jointly.
        seed: of the random starts.
        progress: called about a hundred times with (iterations done, all iterations, loss).
        seconds: time limit, after which an attack by optimisation returns its best result so far, with a note;
            ``None``: no limit.
        **settings: of the attack, such as ``iterations``, ``restarts`` or ``tv``.

    Returns:
        The reconstruction: ``images`` (B, C, H, W) on the scale of ``value_range``, ``labels``, and the loss of each
        restart; ``note`` says how many values lie on a bound of the range.

    Raises:
        InputError: an argument does not fit the model or is out of range, or the attack is not possible; one line.

    Warns:
        AttackWarning: the result is less reliable than it looks, for example because of active dropout, or of values
            on a bound where neither range nor normalisation was given.
    """
    wanted("model", model, isinstance(model, nn.Module), "an instance of torch.nn.Module")
    wanted("progress", progress, progress is None or callable(progress), "None, or a function of three numbers")
    model = _bare(model)
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "local_steps": local_steps,
        "examples": examples,
        "learning_rate": learning_rate,
    }
    given |= {"optimizer": optimizer, "momentum": momentum, "seed": seed, "seconds": seconds}
    training = validated(Training, given, "")
    config = told_candidates(attack_config(attack, settings), candidates, candidate_labels)
    size = image_shape(shape)
    if (reason := whole_numbers(model, size)) is not None:
        raise InputError(reason)
    logits = logit_count(model, size, classes)
    criterion = try_loss(loss, logits, next(iter(trained_parameters(model).values())))
    if labels is None and candidates is None and not criterion.shows_labels:
        raise InputError("labels cannot be told from gradients of this loss; give labels = [...]")
    bounds = bounds_of(value_range)
    scale = (
        tuple(bounds.to_unit(value) for value in per_channel("mean", mean, size[0])),
        tuple(value / bounds.width for value in per_channel("std", std, size[0])),
    )
    public = training.public(size, logits, scale, mechanism_of(mechanism))
    before = present(model) if parameters is None else named_vector(parameters, model, "parameters")
    pairs = [(before, named_vector(upload, model, "upload")), *_repeated(repeats, model)]
    known = None if labels is None else tuple(sorted(_labels("labels", labels, public.examples, logits)))
    records = candidate_records(candidates, candidate_labels, public.examples, logits, size, bounds)
    heard = _heard(pairs, 1 / training.batch_size if criterion.sums else 1.0, public, known, records)
    doubts = _doubts(attack, OwnClient(model, loss, criterion.sums, public), heard, training.seed, criterion.each)
    if labels is None and candidates is None and public.examples > 1 and criterion.each is not soft_cross_entropy:
        text = "labels are inferred from the last layer, which may fail with this loss; give labels = [...] if known"
        doubts.insert(0, text)
    if criterion.each is soft_cross_entropy and not mechanism_of(mechanism).protects:
        doubts += _wrong_signs(heard[0])
    for text in doubts:
        warnings.warn(text, AttackWarning, stacklevel=2)
    images = None if public_images is None else pictures("public_images", public_images, size, bounds)
    limits = progress, criterion.each, images, training.seconds
    campaign = attack_each(AttackJob(attack, [heard], model, config, training.seed, *limits))
    (outcome,) = campaign.outcomes
    if outcome.result is None:
        raise _with_traceback(InputError(f"attack {attack}: {outcome.failure}"), outcome.traceback)
    reconstruction = campaign.found[0]
    clipped = "" if reconstruction.picked else bounds.touched(reconstruction.images)
    if clipped and value_range is None and {*public.mean} == {0.0} and {*public.std} == {1.0}:
        advice = "the assumed range of the model's inputs; give value_range = (lowest, highest) if it is wrong"
        warnings.warn(f"{clipped}, {advice}", AttackWarning, stacklevel=2)
    return on_scale(reconstruction, bounds, clipped)


def _bare(model: nn.Module) -> nn.Module:
    """What is inside a wrapper of Opacus, as a copy: its hooks need what a copy's parameters lack."""
    is_wrapped = hasattr(model, "to_standard_module")
    bare: nn.Module = copied(model).to_standard_module() if is_wrapped else model  # type: ignore[operator]
    return bare


def _repeated(repeats: Sequence[tuple[Arrays, Arrays]], model: nn.Module) -> Iterator[tuple[Vector, Vector]]:
    """Parameters and upload of each repetition, by the model's names."""
    for place, (earlier, sent) in enumerate(pairs_of(repeats), 1):
        where = f"repeats, {place}"
        yield named_vector(earlier, model, f"{where}: parameters"), named_vector(sent, model, f"{where}: upload")


def _heard(
    pairs: Sequence[tuple[Vector, Vector]],
    share: float,
    public: PublicSettings,
    known: tuple[int, ...] | None,
    records: CandidateLists | None,
) -> tuple[Observation, ...]:
    """The uploads as attacks are given them, each times a share: that of one example where the loss is a sum."""
    try:
        return tuple(
            Observation(
                place, 0, start, {name: share * value for name, value in sent.items()}, public, None, known, records
            )
            for place, (start, sent) in enumerate(pairs, 1)
        )
    except ValueError as error:
        raise InputError(str(error)) from None


def _wrong_signs(heard: Observation) -> Iterator[str]:
    """Doubt a gradient that is negative in the last bias, or a change that grows it, for more classes than examples.

    Cross-entropy's gradient there is, for each example, the softmax minus the label, negative for the label alone, and
    steps of SGD go against it.
    """
    name, last = list(heard.upload.items())[-1]
    examples, training = heard.settings.examples, heard.settings
    if not name.endswith("bias") or last.shape != (training.classes,):
        return
    if training.algorithm == "fedsgd" and (negative := int((last < 0).sum())) > examples:
        yield (
            f"the upload's {name} is negative for {negative} classes, which a gradient of {examples} cannot be; if it "
            "is a change of parameters, give learning_rate"
        )
    grown = int((last > _DECAY * last.abs().max()).sum())
    if training.algorithm == "fedavg" and training.optimizer == "sgd" and grown > examples:
        yield (
            f"the upload's {name} grows for {grown} classes, which training on {examples} examples cannot do; expected "
            "is a change: parameters after training minus those before"
        )


def _doubts(attack: str, client: OwnClient, heard: tuple[Observation, ...], seed: int, each: Loss) -> list[str]:
    """What makes a result mean less; raise ``InputError`` where the attack cannot be made on this network."""
    method = ATTACKS[attack]
    check = SimulationCheck(client, client.model, seed, each)
    mismatch = None if trouble(heard, client.model) else check.mismatch(method.simulation(), heard)
    if mismatch is not None and mismatch.bars(method):
        raise _with_traceback(InputError(f"attack {attack}: {mismatch.text}"), mismatch.traceback)
    try:
        misleading = preflight(client.model, client.public, [attack], each)
    except AttackRefused as error:
        raise InputError(f"attack {attack}: {error}") from None
    return [*([mismatch.text] if mismatch else []), *misleading]


def _with_traceback(error: InputError, traceback: str) -> InputError:
    """The same error, with the traceback of what led to it, which Python prints below."""
    if traceback:
        error.add_note(traceback)
    return error
