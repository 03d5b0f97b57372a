"""An attack on one gradient or update of your own model, without anything else of this project.

The upload may be what autograd returns, what an optimiser changed, or what a Flower client sent: tensors or arrays by
name, or in the order of the model's parameters. Flower itself is not needed.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from fedpriv.attacks.campaign import attack_each, trouble
from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.own_model.arguments import (
    attack_config,
    bounds_of,
    candidate_records,
    count,
    example_count,
    image_shape,
    known_labels,
    learning_rate_of,
    logit_count,
    mechanism_of,
    number,
    on_scale,
    pairs_of,
    per_channel,
    pictures,
    seed_of,
    told_candidates,
    wanted,
)
from fedpriv.attacks.own_model.client import OwnClient
from fedpriv.attacks.own_model.loss import Criterion, try_loss
from fedpriv.attacks.own_model.tensors import Arrays, named_vector, present, trained
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Progress, Reconstruction, preflight
from fedpriv.attacks.reconstruction.dummy_gradients.network import soft_cross_entropy
from fedpriv.attacks.reconstruction.upload_model import whole_numbers
from fedpriv.attacks.simulation import SimulationCheck
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ATTACKS
from fedpriv.mechanisms import MechanismSettings


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
    candidates: Any = None,
    candidate_labels: Sequence[int] | None = None,
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
        candidates: (N, C, H, W) tensor or array with values in that range: records among which the images are, no two
            alike, for the attack that picks (``attack="candidate"``).
        candidate_labels: their labels (N,); ``None``: not known, all classes are weighed.
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
    wanted("model", model, isinstance(model, nn.Module), "an instance of torch.nn.Module")
    wanted("progress", progress, progress is None or callable(progress), "None, or a function of three numbers")
    seed_of(seed)
    config = told_candidates(attack_config(attack, settings), candidates, candidate_labels)
    size = image_shape(shape)
    if (reason := whole_numbers(model)) is not None:
        raise InputError(reason)
    logits = logit_count(model, size, classes)
    criterion = try_loss(loss, logits, next(iter(trained(model).values())))
    if labels is None and candidates is None and not criterion.shows_labels:
        raise InputError("labels cannot be told from gradients of this loss; give labels = [...]")
    bounds = bounds_of(value_range)
    public = PublicSettings(
        model={},
        shape=size,
        classes=logits,
        mean=tuple(bounds.to_unit(value) for value in per_channel("mean", mean, size[0])),
        std=tuple(value / bounds.width for value in per_channel("std", std, size[0])),
        algorithm="fedsgd" if learning_rate is None else "fedavg",
        batch_size=count("batch_size", batch_size),
        local_steps=count("local_steps", local_steps),
        learning_rate=learning_rate_of(learning_rate, local_steps),
        optimizer=wanted("optimizer", optimizer, optimizer in ("sgd", "adam"), "sgd or adam"),
        momentum=number("momentum", momentum, "a number from 0 to below 1", lambda value: 0 <= value < 1),
        client_examples=example_count(examples, batch_size, local_steps),
        mechanism=mechanism_of(mechanism).model_dump(mode="json", exclude_none=True),
    )
    before = present(model) if parameters is None else named_vector(parameters, model, "parameters")
    pairs = [(before, named_vector(upload, model, "upload"))]
    for place, (earlier, sent) in enumerate(pairs_of(repeats), 1):
        where = f"repeats, {place}"
        pairs.append(
            (named_vector(earlier, model, f"{where}: parameters"), named_vector(sent, model, f"{where}: upload"))
        )
    known = known_labels(labels, public.examples, logits)
    about = public.examples, logits, size, bounds
    records = candidate_records(candidates, candidate_labels, *about)
    share = 1 / batch_size if criterion.sums else 1.0
    gradients = [{name: share * value for name, value in sent.items()} for _, sent in pairs]
    try:
        heard = tuple(
            Observation(place, 0, start, gradient, public, None, known, records)
            for place, ((start, _), gradient) in enumerate(zip(pairs, gradients, strict=True), 1)
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    check = SimulationCheck(OwnClient(model, loss, criterion.sums, public), model, int(seed), criterion.each)
    mismatch = None if trouble(heard, model) else check.mismatch(ATTACKS[attack].simulation(), heard)
    if mismatch is not None and mismatch.bars(ATTACKS[attack]):
        raise _with_traceback(InputError(f"attack {attack}: {mismatch.text}"), mismatch.traceback)
    try:
        misleading = preflight(model, public, [attack], criterion.each)
    except AttackRefused as error:
        raise InputError(f"attack {attack}: {error}") from None
    if labels is None and candidates is None and public.examples > 1 and criterion.each is not soft_cross_entropy:
        text = "labels are read off the last layer as for random images, which this loss may not show; give labels"
        warnings.warn(f"{text} = [...] where they are known", AttackWarning, stacklevel=2)
    for text in (*([mismatch.text] if mismatch else []), *misleading):
        warnings.warn(text, AttackWarning, stacklevel=2)
    images = None if public_images is None else pictures("public_images", public_images, size, bounds)
    campaign = attack_each(AttackJob(attack, [heard], model, config, int(seed), progress, criterion.each, images))
    if campaign.failures:
        raise _with_traceback(InputError(f"attack {attack}: {campaign.failures[0]}"), campaign.tracebacks.get(0, ""))
    reconstruction = campaign.found[0]
    clipped = "" if reconstruction.picked else bounds.touched(reconstruction.images)
    if clipped and value_range is None and {*public.mean} == {0.0} and {*public.std} == {1.0}:
        advice = "which is assumed of the model's inputs; give value_range = (lowest, highest) if that is wrong"
        warnings.warn(f"{clipped}, {advice}", AttackWarning, stacklevel=2)
    return on_scale(reconstruction, bounds, clipped)


def _with_traceback(error: InputError, traceback: str) -> InputError:
    """The same error, with the traceback of what led to it, which Python prints below."""
    if traceback:
        error.add_note(traceback)
    return error
