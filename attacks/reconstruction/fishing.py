"""Class fishing (after Wen et al. 2022): an *active* server reads single records off a batch, on unmodified networks.

The server sends parameters only. In the last Linear layer (weight W, bias b) all rows of W are zero but that of the
target class, and b is large for one class, the silent one, and zero for all others. So the softmax is one for the
silent class whatever the record, and a record of another class j adds -1 to row j of the bias's gradient, and minus its
features to row j of the weight's: **the bias's gradient counts the records of each class**. Where it counts one, the
row of the weight's gradient is the features of that very record. That is the certificate, and it takes no look at the
truth. Where it counts more, the row gives their mean, which is shown without a certificate. Only records of the target
class reach the layers before the last.

An image is found in one of five ways:

- In networks of Linear layers and ReLU for two classes: by bins. All rows of the first layer measure one brightness,
  with cut points as biases, and each record of the target adds the same error to all rows that it passes. So the
  differences of the bias's gradient count the records of each bin, and where they count one, the quotient is that
  record: the certificate is the count.
- The target's, if the network begins with a Linear layer: the quotient of that layer's gradients. Certified if all rows
  have the same quotient, up to rounding.
- From its features, if there are as many of them as pixels. In networks of convolutions, ReLU and pooling the server
  also makes the layers before: bias so large that ReLU lets everything pass, and kernels that stress details, so that
  the search is well posed. Certified if two searches from different starts end at the same image, and it has the
  features that were read.
- The target's, in a vision transformer: the gradient of the table of positions is the error of each patch, and that of
  the patches' kernels their sum of products with the patches: linear equations. Certified if these are solved, and
  their rounding errors are small or the image matches the gradient of all layers.
- The target's, otherwise: by matching the gradient of all layers, as DLG does for one image. Certified if an image
  is found that matches it, with twice as many equations as unknowns.

The last two of them prove that the gradient is of one record; that no other image has the same features or
gradients is no theorem.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedpriv.attacks.methods.crafted import FishingSettings
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.features import last_layer
from fedpriv.attacks.reconstruction.first_layer.batch import find_input_layer
from fedpriv.attacks.reconstruction.first_layer.closed_form import ROUNDING, exact, read_patches, relative_distance
from fedpriv.attacks.reconstruction.first_layer.feature_inversion import (
    KERNELS,
    SAME,
    SHOWN,
    FeatureReader,
    FoundImages,
    clear_layers,
    features_of,
    why_not_plain,
)
from fedpriv.attacks.reconstruction.first_layer.imprint import (
    UNREAD,
    brightness,
    cut_points,
    filled,
    mean_image,
    require_grants,
    require_one_gradient,
)
from fedpriv.attacks.reconstruction.matching import compared
from fedpriv.attacks.reconstruction.recipes import run_recipe
from fedpriv.attacks.reconstruction.results import AttackRefused, Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model import Victim
from fedpriv.attacks.settings import Recipe, StartName
from fedpriv.attacks.threat import ThreatModel
from fedpriv.core.numbers import several
from fedpriv.core.randomness import fixed_normal
from fedpriv.gradients import Vector

SILENT = 20.0  # the bias of the silent class: all others have probabilities below 2e-8 together
LARGEST = 1.0  # of the target's logit over public images

WHOLE = 1e-3  # how far a count may lie from a whole number
DEVIATIONS = 6.0  # with noise, of a row that is taken for a record's
MATCHED = 1e-8  # the same of gradients, relative to their squares
STARTS, STEPS = 4, 300  # of the search that matches gradients


def craft_fishing(
    model: nn.Module, public_images: Tensor, threat: ThreatModel, target: int, makes_body: bool
) -> Vector:
    """Make the parameters that the server sends; layers before the last only where that helps, and if it may."""
    require_grants(threat, FishingSettings)
    network, shown = Network(model), public_images[:: -(-len(public_images) // SHOWN)]
    trained = dict(model.named_parameters())
    parameters = {name: trained[name].detach().clone() for name in network.names}
    shape = (int(shown.shape[1]), int(shown.shape[2]), int(shown.shape[3]))
    with torch.no_grad():
        classes = network.logits(parameters, shown[:1]).shape[1]
    name, layer = last_layer(network, parameters, shape, classes)
    if f"{name}.weight" not in parameters:
        raise AttackRefused(f"fishing needs the gradient of {name}.weight, which is frozen: clients do not upload it")
    if target >= classes:
        raise AttackRefused(f"fishing.target = {target}: the data have {classes} classes, counted from 0")
    if makes_body and layer.in_features >= shown[0].numel() and why_not_plain(model) is None:
        made = [key for key, each in model.named_modules() if isinstance(each, (nn.Conv2d, nn.Linear)) and key != name]
        parameters |= clear_layers(model, made, shown)
    has_bins = makes_body and layer.in_features < shown[0].numel() and classes == 2 and _is_mlp(model)
    if has_bins:
        parameters |= _binned_body(model, name, shown)
    weight, bias = torch.zeros_like(parameters[f"{name}.weight"]), torch.zeros_like(parameters[f"{name}.bias"])
    bias[silent_class(target, classes)] = SILENT
    weight[target] = _target_row(network, parameters, name, shown, even=has_bins)
    return {**parameters, f"{name}.weight": weight, f"{name}.bias": bias}


def silent_class(target: int, classes: int) -> int:
    """The class whose records have no gradient at all."""
    return (target - 1) % classes


def crafted_target(parameters: Vector, layer: str) -> int | None:
    """The target class of parameters that :func:`craft_fishing` may have made, or ``None``."""
    weight, bias = parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]
    rows = weight.any(dim=1).nonzero().flatten().tolist()
    if len(rows) != 1 or bias.nonzero().flatten().tolist() != [silent_class(rows[0], len(bias))]:
        return None
    return int(rows[0])


def _is_mlp(model: nn.Module) -> bool:
    """Whether the server can make a network of at least two Linear layers with ReLU between them."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    others = any(isinstance(layer, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)) for layer in model.modules())
    return len(linear) > 1 and not others and why_not_plain(model) is None


def _binned_body(model: nn.Module, last: str, images: Tensor) -> Vector:
    """A first layer that sorts records into bins by a brightness, and means of it up to the last layer."""
    first, *middle = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != last)
    layer = model.get_submodule(first)
    rows = brightness(layer.get_parameter("weight")).detach()
    measured = images.flatten(1).double() @ rows.double()
    count = len(layer.get_parameter("bias"))
    made = {
        f"{first}.weight": rows.expand(count, -1).clone(),
        f"{first}.bias": -cut_points(measured, count, count).to(rows),
    }
    for name in middle:
        weight, bias = (model.get_submodule(name).get_parameter(part) for part in ("weight", "bias"))
        made |= {f"{name}.weight": torch.full_like(weight, 1 / weight.shape[1]), f"{name}.bias": torch.zeros_like(bias)}
    return {name: value.detach() for name, value in made.items()}


def _target_row(network: Network, parameters: Vector, layer: str, images: Tensor, *, even: bool) -> Tensor:
    """Weights, random or all the same, whose logits of public images are small next to the silent class's."""
    with torch.no_grad():
        features = features_of(network.model, parameters, layer, images)
    row = fixed_normal(KERNELS, features.shape[1]).to(features)
    row = torch.ones_like(row) if even else row
    return row * LARGEST / (features @ row).abs().max().clamp(min=1e-30)


@dataclass(frozen=True, eq=False)
class Catch:
    """The records that are alone in their class, and of classes of several records their mean."""

    layer: str  # the name of the last layer
    target: int  # the class that the layers before it show, too
    labels: Tensor  # int64 (n,)
    features: Tensor  # float64 (n, F)
    deviations: Tensor  # (n,) of the noise, or of rounding, in a feature
    alone: Tensor  # bool (n,): whether the count proves that it is one record
    is_certain: bool  # whether there is no noise, so that counts are exact


def read_catch(scene: Scene, victim: Victim) -> Catch:
    """Read the classes of which there is a record, and the mean of their features."""
    require_one_gradient(victim, FishingSettings.name)
    name, _ = last_layer(scene.network, victim.parameters, scene.shape, scene.classes)
    target = crafted_target(victim.parameters, name)
    if target is None:
        raise AttackRefused(f"{victim.title}: the parameters that the clients were sent were not made for fishing")
    if not victim.one_scale:
        raise AttackRefused(f"{victim.title}: fishing needs weight and bias of the last layer on one scale")
    rows, amplitudes = (-victim.gradient[f"{name}.{part}"].double() for part in ("weight", "bias"))
    is_certain = not victim.model.mechanism.protects
    counts = victim.model.examples * amplitudes
    if is_certain:
        seen = (counts > 0.5) & ((counts - counts.round()).abs() < WHOLE)
        noise = ROUNDING * rows.square().mean(dim=1).sqrt()
    else:
        size = victim.noise_in(f"{name}.weight")
        seen = amplitudes > DEVIATIONS * size
        noise = amplitudes.new_full(amplitudes.shape, size)
    seen[silent_class(target, scene.classes)] = False
    # Of a batch smaller than the classes no more records are offered than it has: those that stand out most.
    labels = seen.nonzero().flatten()
    strongest = amplitudes[labels].argsort(descending=True)[: victim.model.examples]
    labels = labels[strongest].sort().values
    features = rows[labels] / amplitudes[labels, None]
    alone = (counts[labels] < 1.5) & is_certain
    return Catch(name, target, labels, features, noise[labels] / amplitudes[labels], alone, is_certain)


def run_fishing(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: FishingSettings, report: Report
) -> Outcome:
    """Run the attack on victims, one after the other."""
    made: list[tuple[Tensor, Tensor, float, str]] = []
    for victim, *starts in zip(rows, images, logits, strict=True):
        catch = read_catch(scene, victim)
        binned = _from_bins(scene, victim, catch)
        if binned is None:
            landed = _landed(scene, victim, catch, (starts[0], starts[1]), config)
        else:
            landed = binned
            one = torch.ones(len(landed.images), dtype=torch.bool)
            catch = replace(catch, labels=torch.full((len(one),), catch.target), alone=one)
        count = victim.model.examples
        labels = filled(catch.labels.cpu(), torch.tensor(UNREAD), count)
        loss = float(landed.misfits.mean()) if len(landed.misfits) else 1.0
        made.append(
            (
                filled(landed.images, mean_image(scene), count),
                labels,
                loss,
                _note(catch, landed, count, "class" if binned is None else "bin"),
            )
        )
    losses = torch.tensor([loss for _, _, loss, _ in made], dtype=torch.float64)
    report(config.iterations, losses)
    return Outcome(
        torch.stack([each[0] for each in made]),
        torch.stack([each[1] for each in made]),
        losses,
        torch.full((len(rows),), config.iterations),
        tuple(note for *_, note in made),
    )


def _note(catch: Catch, landed: FoundImages, examples: int, group: str) -> str:
    made = "active server, crafted parameters"
    if not catch.is_certain:
        return (
            f"{made}: {len(catch.labels)} of {examples} records stand apart in their {group}, which noise leaves "
            "uncertain: no certificate"
        )
    lone = int(catch.alone.sum())
    means = f"; {several(len(catch.labels) - lone, 'average')} of others" if lone < len(catch.labels) else ""
    return (
        f"{made}: {lone} of {examples} records stand apart in their {group}, proven by the count; "
        f"{int(landed.determined.sum())} images certified{means}"
    )


def _landed(
    scene: Scene, victim: Victim, catch: Catch, starts: tuple[Tensor, Tensor], config: FishingSettings
) -> FoundImages:
    """The images of all records that stand apart."""
    found = _from_features(scene, victim, catch, config.iterations)
    at = (catch.labels == catch.target).nonzero().flatten()
    if not len(at) or not bool(catch.alone[at]) or bool(found.determined[at]):
        return found
    image, misfit, certified = _target_image(scene, victim, catch, int(at), starts, config)
    found.images[at], found.misfits[at], found.determined[at] = image.to(found.images), misfit, certified
    return found


def _from_bins(scene: Scene, victim: Victim, catch: Catch) -> FoundImages | None:
    """The records of the target that are alone in their bins; ``None``: there are no bins, or there is noise."""
    matrices = [name for name, value in victim.parameters.items() if name.endswith(".weight") and value.ndim == 2]
    first, rest = matrices[0], matrices[1:]
    weight, cuts = victim.parameters[first], victim.parameters.get(first.removesuffix("weight") + "bias")
    if not catch.is_certain or cuts is None or weight.shape[1] != scene.pixels or bool((weight != weight[:1]).any()):
        return None
    # What a record of the target adds to each row of the first layer that it passes.
    error = -victim.parameters[rest[-1]][catch.target].double()
    for name in reversed(rest[:-1]):
        error = error @ victim.parameters[name].double()
    heard = torch.cat([victim.gradient[first], victim.gradient[first.removesuffix("weight") + "bias"][:, None]], dim=1)
    passed = victim.model.examples * heard.double() / error[:, None]
    bins = passed - torch.cat([passed[1:], torch.zeros_like(passed[:1])])
    alone = (bins[:, -1] - 1).abs() < WHOLE
    images = (bins[alone, :-1] / bins[alone, -1:]).unflatten(1, scene.shape).to(scene.mean)
    zeros = torch.zeros(len(images))
    return FoundImages(images, zeros, zeros == 0)


def _from_features(scene: Scene, victim: Victim, catch: Catch, iterations: int) -> FoundImages:
    """The most probable images given their features, and whether a second search ends there, too."""
    reader = FeatureReader.of(scene, victim, catch.layer)
    wanted = catch.features.to(reader.network.dtype)
    provable = catch.is_certain and wanted.shape[1] >= scene.pixels
    steps = iterations if provable else min(iterations, STEPS)
    found = reader.searched(wanted, catch.deviations, steps, twice=provable, ends=catch.is_certain)
    determined = found.determined & catch.alone.to(found.determined.device)
    return replace(found, images=scene.box(found.images.to(scene.mean)), determined=determined)


def _target_image(
    scene: Scene, victim: Victim, catch: Catch, place: int, starts: tuple[Tensor, Tensor], config: FishingSettings
) -> tuple[Tensor, float, bool]:
    """The image of the target's record, from the gradient of all layers, which is its alone."""
    layer = find_input_layer(scene.network, victim.parameters, scene.shape)
    estimate = None if layer is None else exact(*layer.gradients(victim.gradient))
    if estimate is not None:
        return estimate.image.view(scene.shape), 0.0, True
    patches, alone = read_patches(scene, victim), _alone(victim, catch, place)
    if patches is not None and patches.error < SAME:
        return patches.image, 0.0, True
    enough = sum(value.numel() for value in alone.gradient.values()) >= 2 * scene.pixels
    if patches is not None:  # deep networks: the bound of the rounding errors is loose
        labels = torch.full((1, 1), catch.target)
        misfit = float(compared(scene, [alone], relative_distance, patches.image[None, None], labels))
        if misfit < MATCHED:
            return patches.image, misfit, enough
    image, misfit = _searched(scene, alone, "normal" if patches is None else "closed-form", starts, config)
    return image, misfit, enough and misfit < MATCHED


def _searched(
    scene: Scene, alone: Victim, start: StartName, starts: tuple[Tensor, Tensor], config: FishingSettings
) -> tuple[Tensor, float]:
    """The image whose gradient is nearest, and the share of the upload that it leaves."""
    recipe = Recipe("squared-distance", "lbfgs", variables="decorrelated", start=start, labels=("known",))
    images, logits = (numbers[:STARTS, None] for numbers in starts)
    steps = config.model_copy(update={"iterations": STEPS})
    outcome = run_recipe(recipe, scene, [alone] * len(images), images, logits, steps, lambda done, losses: True)
    best = int(outcome.losses.nan_to_num(nan=math.inf).argmin())
    size = sum(float(value.double().square().sum()) for value in alone.gradient.values())
    return scene.box(outcome.images[best][0]), float(outcome.losses[best]) / size


def _alone(victim: Victim, catch: Catch, place: int) -> Victim:
    """The upload that the target's record alone would have made: others are in the last layer only."""
    gradient = {name: victim.model.examples * value for name, value in victim.gradient.items()}
    features = torch.cat([catch.features[place], catch.features.new_ones(1)]).to(gradient[f"{catch.layer}.bias"])
    signs = torch.zeros_like(gradient[f"{catch.layer}.bias"])
    signs[catch.target], signs[silent_class(catch.target, len(signs))] = -1, 1
    last = signs[:, None] * features
    gradient |= {f"{catch.layer}.weight": last[:, :-1], f"{catch.layer}.bias": last[:, -1]}
    labels = torch.tensor([catch.target], device=features.device)
    return replace(victim, gradient=gradient, labels=labels, model=replace(victim.model, examples=1, batch=1))
