"""What an attack on an own model is told, checked: its settings, and what is public of the upload."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from operator import index
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fedpriv.attacks.access import Access
from fedpriv.attacks.observation import Candidates
from fedpriv.attacks.own_model.tensors import one_line, to_array, trained
from fedpriv.attacks.reconstruction import Reconstruction
from fedpriv.attacks.settings import AttackSettings
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ATTACKS, suggestion
from fedpriv.core.settings import wrong_value
from fedpriv.mechanisms import MechanismSettings, mechanism_settings


def attack_config(attack: str, settings: Mapping[str, Any]) -> Any:
    """Return an attack's settings."""
    if not isinstance(attack, str) or attack not in ATTACKS:
        raise InputError(f"attack {attack!r} is not known{suggestion(str(attack), tuple(ATTACKS))}")
    kind = ATTACKS[attack]
    for key in settings:
        if key not in kind.model_fields:
            raise InputError(f"{attack} has no setting {key!r}{suggestion(key, tuple(kind.model_fields))}")
    try:
        return kind.model_validate(dict(settings))
    except ValidationError as error:
        raise wrong_value(error.errors()[0]) from None


def image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (C, H, W)."""
    try:
        channels, height, width = (index(side) for side in shape)
    except (TypeError, ValueError):
        channels = height = width = 0
    if min(channels, height, width) < 1 or any(isinstance(side, bool) for side in shape):
        raise InputError(
            key="shape", given=shape, allowed="(C, H, W) of one image is wanted, three whole numbers from 1"
        )
    return channels, height, width


def logit_count(model: nn.Module, shape: tuple[int, int, int], classes: int | None) -> int:
    """Try a blank image; running statistics stay as they are."""
    parameters = trained(model)
    if not parameters:
        raise InputError("the model has no trained parameters, so there is nothing to attack")
    reference = next(iter(parameters.values()))
    modes = {layer: layer.training for layer in model.modules()}
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, *shape, device=reference.device, dtype=reference.dtype))
    except Exception as error:
        raise InputError(f"the model does not take images of shape {(1, *shape)}: {one_line(error)}") from error
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 1 or output.shape[1] < 2:
        given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"the model gives {given} for one image; logits (1, classes) are wanted, at least two classes")
    if classes is not None and classes != output.shape[1]:
        raise InputError(key="classes", given=classes, allowed=f"the model has {output.shape[1]} logits")
    return int(output.shape[1])


def per_channel(name: str, given: float | Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one number a channel."""
    try:
        values = tuple(float(value) for value in np.atleast_1d(np.asarray(given, dtype=np.float64)))
    except (TypeError, ValueError):
        raise InputError(
            key=name, given=given, allowed="a number, or a list of one for each channel, is wanted"
        ) from None
    if len(values) == 1:
        values *= channels
    if len(values) != channels:
        raise InputError(f"{name} has {len(values)} numbers; one, or one for each of the {channels} channels is wanted")
    if not all(math.isfinite(value) for value in values) or (name == "std" and min(values) <= 0):
        raise InputError(
            key=name, given=values, allowed=f"finite numbers are wanted{', above zero' if name == 'std' else ''}"
        )
    return values


def wanted(name: str, value: Any, holds: bool, words: str) -> Any:
    """Return an argument that is what is wanted.

    Raises:
        InputError: it is something else.
    """
    if not holds:
        raise InputError(key=name, given=value, allowed=f"{words} is wanted")
    return value


def number(name: str, value: object, words: str, holds: Callable[[float], bool]) -> float:
    """Return a number of which something holds.

    Args:
        name: of the argument.
        value: given.
        words: what is wanted.
        holds: whether a number is that.
    """
    fits = not isinstance(value, bool) and isinstance(value, Real) and holds(float(value))
    return float(wanted(name, value, fits, words))


def seed_of(value: object) -> int:
    """Return a seed."""
    fits = not isinstance(value, bool) and isinstance(value, (int, np.integer)) and 0 <= int(value) < 2**63
    return int(wanted("seed", value, fits, "a whole number from 0 to 2^63 - 1"))


def pairs_of(given: Any) -> list[tuple[Any, Any]]:
    """Return what is a sequence of pairs."""
    try:
        return [(before, sent) for before, sent in given]
    except (TypeError, ValueError):
        raise InputError("repeats: a list of pairs (parameters, upload) is wanted") from None


def count(name: str, value: int) -> int:
    """Return a whole number from 1."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return int(wanted(name, value, fits, "a whole number from 1"))


def learning_rate_of(value: float | None, local_steps: int) -> float:
    """Return the learning rate; 1 for a gradient."""
    if value is None and local_steps != 1:
        raise InputError(
            key="local_steps", given=local_steps, allowed="for a change of parameters: give its learning_rate, too"
        )
    rate = 1.0 if value is None else value
    return number("learning_rate", rate, "a finite number above zero", lambda value: 0 < value < math.inf)


def example_count(examples: int | None, batch_size: int, local_steps: int) -> int:
    """Return how many distinct examples are behind the upload."""
    if examples is None:
        return batch_size * local_steps
    if not batch_size <= count("examples", examples) <= batch_size * local_steps:
        raise InputError(
            key="examples",
            given=examples,
            allowed=f"{local_steps} batches of {batch_size} hold from {batch_size} to "
            f"{batch_size * local_steps} distinct examples",
        )
    return examples


def mechanism_of(given: MechanismSettings | Mapping[str, Any] | None) -> MechanismSettings:
    """Return a mechanism's settings, with the noise itself."""
    if given is None:
        return mechanism_settings({})
    if not isinstance(given, (MechanismSettings, Mapping)):
        raise InputError(
            key="mechanism", given=given, allowed="its settings are wanted, such as {'name': 'gaussian', 'sigma': 1.0}"
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


def known_labels(labels: Sequence[int] | None, examples: int, classes: int) -> tuple[int, ...] | None:
    """Return the labels, ascending."""
    return None if labels is None else tuple(sorted(_labels("labels", labels, examples, classes)))


def _labels(name: str, labels: Sequence[int], examples: int, classes: int) -> tuple[int, ...]:
    try:
        known = tuple(index(label) for label in labels)
    except TypeError:
        raise InputError(key=name, given=labels, allowed="whole numbers, one for each example, are wanted") from None
    if len(known) != examples:
        raise InputError(f"{len(known)} {name} for {examples} examples")
    if min(known) < 0 or max(known) >= classes:
        wrong = next(label for label in known if not 0 <= label < classes)
        raise InputError(f"{name}: numbers from 0 to {classes - 1} are wanted; given is {wrong}")
    return known


@dataclass(frozen=True)
class Bounds:
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


def bounds_of(given: tuple[float, float] | None) -> Bounds:
    """Return the range; from 0 to 1 unless given."""
    if given is None:
        return Bounds()
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        raise InputError(
            key="value_range", given=given, allowed="two numbers, the lowest and the highest value, are wanted"
        ) from None
    if not (high - low <= torch.finfo(torch.float32).max and low < high):
        raise InputError(key="value_range", given=given, allowed="finite numbers are wanted, the lower one first")
    return Bounds(low, high)


def on_scale(reconstruction: Reconstruction, bounds: Bounds, clipped: str) -> Reconstruction:
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
    images: Any, labels: Any, examples: int, classes: int, shape: tuple[int, int, int], bounds: Bounds
) -> Candidates | None:
    """Return one list of all records for each image of the upload; ``None``: none are given."""
    if images is None:
        return None
    records = pictures("candidates", images, shape, bounds)
    if len(records) < 2:
        raise InputError("candidates: 1 record; 2 or more are wanted, the image among them")
    given = _labels("candidate_labels", [0] * len(records) if labels is None else labels, len(records), classes)
    return Candidates.of_all(records, torch.tensor(given), examples)


def pictures(name: str, given: Any, shape: tuple[int, int, int], bounds: Bounds) -> Tensor:
    """Return images (M, C, H, W), moved to [0, 1]."""
    try:
        images = given.detach().cpu() if isinstance(given, Tensor) else torch.from_numpy(to_array(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} is not an array of numbers: {one_line(error)}") from None
    if images.ndim != 4 or tuple(images.shape[1:]) != shape or len(images) == 0:
        raise InputError(f"{name} has the shape {tuple(images.shape)}; (M, {', '.join(map(str, shape))}) is wanted")
    if not images.is_floating_point() or not bool(((images >= bounds.low) & (images <= bounds.high)).all()):
        raise InputError(f"{name}: floating-point numbers from {bounds.low:g} to {bounds.high:g} are wanted")
    return ((images - bounds.low) / bounds.width).float()
