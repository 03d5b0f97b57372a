"""An attack on one gradient or update of your own model, without anything else of this project.

The upload may be what autograd returns, what an optimiser changed, or what a Flower client sent: tensors or arrays by
name, or in the order of the model's parameters. Flower itself is not needed.
"""

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch.func import vmap

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.reconstruction import AttackJob, Progress, Reconstruction, preflight
from fedpriv.attacks.reconstruction.dummy_gradients.network import Loss, soft_cross_entropy
from fedpriv.attacks.reconstruction.upload_model.preflight import whole_numbers
from fedpriv.errors import InputError
from fedpriv.gradients import Vector
from fedpriv.mechanisms import MechanismSettings, mechanism_settings
from fedpriv.registry import ATTACKS

__all__ = ["AttackWarning", "reconstruct"]

Arrays = Mapping[str, Any] | Iterable[Any]
"""Tensors or numpy arrays: by name, or in the order of the model's parameters (or of its ``state_dict``)."""

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits (B, classes), label probabilities (B, classes)) -> the mean or the sum of the examples' losses."""

TRIED = 3  # examples with which a loss is tried out


class AttackWarning(UserWarning):
    """Something that makes the attack mean less than it seems to."""


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
    repeats: Sequence[tuple[Arrays, Arrays]] = (),
    seed: int = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> Reconstruction:
    """Reconstruct the images behind a gradient, or behind the change that training made, of your own model.

    Args:
        model: maps images (B, C, H, W) to logits (B, classes); on the device to use, in the mode (``train`` or
            ``eval``) in which the upload was computed. It is not changed.
        loss: what was minimised, of logits and labels, such as ``torch.nn.functional.cross_entropy``; it must take
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
        std: what they were divided by then.
        value_range: the lowest and the highest value that an image can have before ``mean`` is subtracted: results are
            clipped to it. ``None``: pictures, from 0 to 1. Standardised rows of a table reach further: (-6, 6), say.
        public_images: (M, C, H, W) tensor or array with values in that range: images of the same kind, not the
            victims', for attacks that use what images look like; from about a hundred on they say more than nothing,
            thousands are better. ``None``: the adversary has none.
        repeats: (parameters, upload) of further uploads of the very same batch, in the same forms as ``parameters`` and
            ``upload``: from the same parameters they are averaged, from others matched at once.
        seed: of the random starts.
        progress: told about a hundred times: (iterations done, all iterations, loss).
        **settings: of the attack, such as ``iterations``, ``restarts`` or ``tv``.

    Returns:
        The reconstruction: ``images`` (B, C, H, W) on the scale of ``value_range``, ``labels``, and every restart's own
        loss; ``note`` says how many values lie on a bound of the range.

    Raises:
        InputError: an argument does not fit the model or is out of range, or the attack cannot be made; one line.

    Warns:
        AttackWarning: something makes the result mean less than it seems to, such as active dropout, or values on a
            bound where neither range nor normalisation was given.
    """
    config = _config(attack, settings)
    size = _shape(shape)
    if (reason := whole_numbers(model)) is not None:
        raise InputError(reason)
    count = _classes(model, size, classes)
    criterion = _criterion(loss, count)
    bounds = _bounds(value_range)
    public = PublicSettings(
        model={},
        shape=size,
        classes=count,
        mean=tuple(bounds.to_unit(value) for value in _per_channel("mean", mean, size[0])),
        std=tuple(value / bounds.width for value in _per_channel("std", std, size[0])),
        algorithm="fedsgd" if learning_rate is None else "fedavg",
        batch_size=_count("batch_size", batch_size),
        local_steps=_count("local_steps", local_steps),
        learning_rate=_learning_rate(learning_rate, local_steps),
        optimizer=_optimizer(optimizer),
        momentum=_momentum(momentum),
        client_examples=_examples(examples, batch_size, local_steps),
        mechanism=_mechanism(mechanism).model_dump(mode="json", exclude_none=True),
    )
    before = _before(model) if parameters is None else _named(parameters, model, "parameters")
    pairs = [(before, _named(upload, model, "upload"))]
    for number, (earlier, sent) in enumerate(repeats, 1):
        where = f"repeats, {number}"
        pairs.append((_named(earlier, model, f"{where}: parameters"), _named(sent, model, f"{where}: upload")))
    known_labels, share = _labels(labels, public.examples, count), 1 / batch_size if criterion.sums else 1.0
    try:
        heard = tuple(
            Observation(
                number, 0, start, {name: share * value for name, value in sent.items()}, public, None, known_labels
            )
            for number, (start, sent) in enumerate(pairs, 1)
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    for text in preflight(model, public, [attack], criterion.each):
        warnings.warn(text, AttackWarning, stacklevel=2)
    known = None if public_images is None else _public(public_images, size, bounds)
    try:
        campaign = attack_each(AttackJob(attack, [heard], model, config, seed, progress, criterion.each, known))
    except RuntimeError as error:
        raise InputError(f"attack {attack} does not get through the model: {_one_line(error)}") from error
    if campaign.failures:
        raise InputError(f"attack {attack}: {campaign.failures[0]}")
    clipped = bounds.touched(campaign.found[0].images)
    if clipped and value_range is None and {*public.mean} == {0.0} and {*public.std} == {1.0}:
        advice = "which is assumed of the model's inputs; give value_range = (lowest, highest) if that is wrong"
        warnings.warn(f"{clipped}, {advice}", AttackWarning, stacklevel=2)
    return _on_scale(campaign.found[0], bounds, clipped)


# ---- the attack and what is public ----------------------------------------------------------------------------------


def _config(attack: str, settings: Mapping[str, Any]) -> Any:
    if attack not in ATTACKS:
        raise InputError(f"attack {attack!r} is not known; known: {', '.join(ATTACKS)}")
    kind = ATTACKS[attack]
    for key in settings:
        if key not in kind.model_fields:
            raise InputError(f"{attack} has no setting {key!r}{_suggestion(key, kind.model_fields)}")
    try:
        return kind.model_validate(dict(settings))
    except ValidationError as error:
        detail = error.errors()[0]
        raise InputError(f"{'.'.join(map(str, detail['loc']))} = {detail['input']!r}: {detail['msg']}") from None


def _suggestion(word: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


def _shape(shape: Sequence[int]) -> tuple[int, int, int]:
    if len(tuple(shape)) != 3 or any(isinstance(side, bool) or int(side) != side or side < 1 for side in shape):
        raise InputError(f"shape = {tuple(shape)}: (C, H, W) of one image is wanted, three whole numbers from 1")
    channels, height, width = (int(side) for side in shape)
    return channels, height, width


def _classes(model: nn.Module, shape: tuple[int, int, int], classes: int | None) -> int:
    """Try a blank image; running statistics stay as they are."""
    trained = _trained(model)
    if not trained:
        raise InputError("the model has no trained parameters, so there is nothing to attack")
    reference = next(iter(trained.values()))
    modes = {layer: layer.training for layer in model.modules()}
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, *shape, device=reference.device, dtype=reference.dtype))
    except Exception as error:
        raise InputError(f"the model does not take images of shape {(1, *shape)}: {_one_line(error)}") from error
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 1 or output.shape[1] < 2:
        given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"the model gives {given} for one image; logits (1, classes) are wanted, at least two classes")
    if classes is not None and classes != output.shape[1]:
        raise InputError(f"classes = {classes}, but the model has {output.shape[1]} logits")
    return int(output.shape[1])


@dataclass(frozen=True)
class _Bounds:
    """The lowest and the highest value of an image; the attacks themselves work from 0 to 1."""

    low: float = 0.0
    high: float = 1.0

    @property
    def width(self) -> float:
        return self.high - self.low

    def to_unit(self, value: float) -> float:
        return (value - self.low) / self.width

    def touched(self, images: Tensor) -> str:
        """Say how many values of images on [0, 1] lie on a bound; empty for none."""
        count = int(((images <= 0) | (images >= 1)).sum())
        return f"{count} of {images.numel()} values lie on a bound of [{self.low:g}, {self.high:g}]" if count else ""


def _bounds(given: tuple[float, float] | None) -> _Bounds:
    if given is None:
        return _Bounds()
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        raise InputError(
            f"value_range = {given!r}: two numbers, the lowest and the highest value, are wanted"
        ) from None
    if not (math.isfinite(high - low) and low < high):
        raise InputError(f"value_range = {given!r}: finite numbers are wanted, the lower one first")
    return _Bounds(low, high)


def _on_scale(found: Reconstruction, bounds: _Bounds, clipped: str) -> Reconstruction:
    attempts = tuple(replace(attempt, images=attempt.images * bounds.width + bounds.low) for attempt in found.attempts)
    return replace(found, attempts=attempts, note="; ".join(text for text in (found.note, clipped) if text))


def _per_channel(name: str, given: float | Sequence[float], channels: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in np.atleast_1d(np.asarray(given, dtype=np.float64)))
    if len(values) == 1:
        values *= channels
    if len(values) != channels:
        raise InputError(f"{name} has {len(values)} numbers; one, or one for each of the {channels} channels is wanted")
    if not all(math.isfinite(value) for value in values) or (name == "std" and min(values) <= 0):
        raise InputError(f"{name} = {values}: finite numbers are wanted{', above zero' if name == 'std' else ''}")
    return values


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} = {value!r}: a whole number from 1 is wanted")
    return value


def _learning_rate(value: float | None, local_steps: int) -> float:
    if value is None and local_steps != 1:
        raise InputError(f"local_steps = {local_steps} is for a change of parameters: give its learning_rate, too")
    if value is not None and not (math.isfinite(value) and value > 0):
        raise InputError(f"learning_rate = {value}: a finite number above zero is wanted")
    return 1.0 if value is None else float(value)


def _optimizer(name: Literal["sgd", "adam"]) -> Literal["sgd", "adam"]:
    if name not in ("sgd", "adam"):
        raise InputError(f"optimizer = {name!r}: sgd or adam is wanted")
    return name


def _momentum(value: float) -> float:
    if not 0 <= value < 1:
        raise InputError(f"momentum = {value}: a number from 0 to below 1 is wanted")
    return float(value)


def _examples(examples: int | None, batch_size: int, local_steps: int) -> int:
    if examples is None:
        return batch_size * local_steps
    if not batch_size <= _count("examples", examples) <= batch_size * local_steps:
        raise InputError(
            f"examples = {examples}: {local_steps} batches of {batch_size} hold from {batch_size} to "
            f"{batch_size * local_steps} distinct examples"
        )
    return examples


def _mechanism(given: MechanismSettings | Mapping[str, Any] | None) -> MechanismSettings:
    if given is None:
        return mechanism_settings({})
    try:
        config = given if isinstance(given, MechanismSettings) else mechanism_settings(given)
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(["mechanism", *map(str, detail["loc"])])
        raise InputError(f"{where}: {detail['msg'].removeprefix('Value error, ')}") from None
    if config.parameter and config.noise is None:
        raise InputError(f"mechanism {config.name}: give the noise itself ({config.parameter}) and not a target")
    return config


def _labels(labels: Sequence[int] | None, examples: int, classes: int) -> tuple[int, ...] | None:
    if labels is None:
        return None
    try:
        known = tuple(sorted(index(label) for label in labels))
    except TypeError:
        raise InputError(f"labels = {labels!r}: whole numbers, one for each example, are wanted") from None
    if len(known) != examples:
        raise InputError(f"{len(known)} labels for {examples} examples")
    if known[0] < 0 or known[-1] >= classes:
        raise InputError(f"labels {list(known)}: numbers from 0 to {classes - 1} are wanted")
    return known


def _public(given: Any, shape: tuple[int, int, int], bounds: _Bounds) -> Tensor:
    try:
        images = given.detach().cpu() if isinstance(given, Tensor) else torch.from_numpy(_array(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"public_images is not an array of numbers: {_one_line(error)}") from None
    if images.ndim != 4 or tuple(images.shape[1:]) != shape or len(images) == 0:
        raise InputError(
            f"public_images has the shape {tuple(images.shape)}; (M, {', '.join(map(str, shape))}) is wanted"
        )
    if not images.is_floating_point() or not bool(((images >= bounds.low) & (images <= bounds.high)).all()):
        raise InputError(f"public_images: floating-point numbers from {bounds.low:g} to {bounds.high:g} are wanted")
    return ((images - bounds.low) / bounds.width).float()


# ---- the loss -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Criterion:
    """A loss as the attacks use it: of each example, and whether the given one adds examples up."""

    each: Loss
    sums: bool


def _criterion(loss: Criterion, classes: int) -> _Criterion:
    """Try a loss on random logits: it must take probabilities and be the mean or the sum over examples."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TRIED, classes, generator=generator, dtype=torch.float64)
    numbers = torch.arange(TRIED) % classes
    probabilities = F.one_hot(numbers, classes).double()
    try:
        together = loss(logits, probabilities)
        alone = torch.stack([loss(logits[k : k + 1], probabilities[k : k + 1]) for k in range(TRIED)])
    except Exception as error:
        raise InputError(
            f"the loss cannot be computed from logits and label probabilities, both (B, {classes}): {_one_line(error)}"
        ) from error
    if not isinstance(together, Tensor) or together.ndim != 0 or not bool(torch.isfinite(together)):
        raise InputError("the loss must be one finite number for a batch (reduction = 'mean' or 'sum')")
    sums = bool(torch.isclose(together, alone.sum()))
    if not sums and not torch.isclose(together, alone.mean()):
        raise InputError("the loss of a batch is neither the mean nor the sum of its examples' losses")
    _check_numbers(loss, logits, numbers, together)
    usual = soft_cross_entropy(logits, probabilities)
    if torch.allclose(alone, usual) and torch.allclose(_soft(loss, logits), soft_cross_entropy(logits, _even(logits))):
        return _Criterion(soft_cross_entropy, sums)
    return _Criterion(vmap(lambda row, label: loss(row[None], label[None])), sums)


def _check_numbers(loss: Criterion, logits: Tensor, numbers: Tensor, wanted: Tensor) -> None:
    """A loss that takes class numbers must mean the same by them (class weights are averaged otherwise)."""
    try:
        found = loss(logits, numbers)
    except Exception:  # noqa: BLE001 - a loss that takes probabilities only is fine, whatever it raises
        return
    if not torch.allclose(found, wanted):
        raise InputError(
            "the loss gives another value for class numbers than for the same labels as probabilities (class weights?)"
        )


def _even(logits: Tensor) -> Tensor:
    return torch.full_like(logits, 1 / logits.shape[1])


def _soft(loss: Criterion, logits: Tensor) -> Tensor:
    return torch.stack([loss(row[None], _even(row[None])) for row in logits])


# ---- tensors --------------------------------------------------------------------------------------------------------


def _trained(model: nn.Module) -> Vector:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _before(model: nn.Module) -> Vector:
    return {name: value.detach().cpu().clone() for name, value in _trained(model).items()}


def _named(given: Arrays, model: nn.Module, what: str) -> Vector:
    """Bring tensors in any of the accepted forms into a mapping of the trained parameters' names, on the CPU."""
    trained = _trained(model)
    if isinstance(given, Mapping) and set(given) != {str(number) for number in range(len(given))}:
        values = _by_name(given, model, what)
    else:
        values = _in_order(list(given.values()) if isinstance(given, Mapping) else list(given), model, what)
    return {name: _tensor(values[name], like, f"{what}: {name}") for name, like in trained.items()}


def _by_name(given: Mapping[str, Any], model: nn.Module, what: str) -> Mapping[str, Any]:
    trained = _trained(model)
    known = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    if unknown := [name for name in given if name not in known]:
        raise InputError(f"{what}: the model has no layer with {unknown[0]!r}{_suggestion(unknown[0], trained)}")
    if missing := [name for name in trained if name not in given]:
        raise InputError(f"{what}: {missing[0]!r} is missing")
    return given


def _in_order(given: Sequence[Any], model: nn.Module, what: str) -> Mapping[str, Any]:
    """Name a list by the model's trained parameters, all its parameters, or its ``state_dict``, as it fits."""
    if given and all(value is None for value in given):
        raise InputError(f"{what}: every entry is None; call loss.backward() first")
    orders: list[Mapping[str, Tensor]] = [_trained(model), dict(model.named_parameters()), model.state_dict()]
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
    try:
        value = given.detach().cpu().to_dense() if isinstance(given, Tensor) else torch.from_numpy(_array(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} is not an array of numbers: {_one_line(error)}") from None
    if not value.is_floating_point():
        raise InputError(f"{what} has the type {value.dtype}; floating-point numbers are wanted")
    if value.shape != like.shape:
        raise InputError(f"{what} has the shape {tuple(value.shape)}, in the model {tuple(like.shape)}")
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"{what} has a NaN or infinity")
    return value.to(like.dtype).clone()


def _array(given: Any) -> np.ndarray:
    """A numpy array of anything that is one or can say so, such as the ``Array`` of Flower."""
    convert = getattr(given, "numpy", None)
    return np.array(convert() if callable(convert) else given)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
