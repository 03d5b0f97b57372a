"""Labels read off the last layer's gradient, before any image is known.

The gradient of the cross entropy with respect to the logits is ``softmax - label``. It is the gradient of the last bias
itself, and for a last layer without bias, the gradient of its weight is that vector times the layer's input.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.matching import chunks
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import (
    LocalTraining,
    Victim,
    by_victim,
    local_optimizer,
    unrolled_update,
)
from fedpriv.core.randomness import fixed_normal
from fedpriv.gradients import Vector

# Labels of local training by trials: the training itself, on random images with candidates for the labels.
#
# After several steps an update is no sum over examples: what a label adds depends on the labels of the steps before,
# with momentum also on its step, and Adam divides by the gradients' size. So candidates are tried out.


NEIGHBOURS = 512  # candidates that are tried at once, at most


class TrialTraining:
    """Local training on random images (R, B, C, H, W) with candidate labels, against the last layer's upload."""

    def __init__(self, network: Network, victim: Victim, name: str, images: Tensor, classes: int) -> None:
        self._network = network
        self._victim = victim
        self._name = name
        self._classes = classes
        self._images = images
        self._batch = victim.model.batch

    def improve(self, candidates: Tensor) -> Tensor:
        """Exchange labels, or the places of two, of the best of (M, B) while that brings the update closer."""
        distances = self.distances(candidates)
        labels, best = candidates[distances.argmin()], float(distances.min())
        for _ in range(2 * len(labels)):
            nearby = neighbours(labels[None], self._classes, self._batch)
            # Of very many, evenly spread ones: the search then takes its steps among these.
            nearby = nearby[:: -(-len(nearby) // NEIGHBOURS)]
            distances = self.distances(nearby)
            nearest = int(distances.argmin())
            if not float(distances[nearest]) < best * (1 - 1e-6):
                break
            best, labels = float(distances[nearest]), nearby[nearest]
        return labels

    def distances(self, candidates: Tensor) -> Tensor:
        """Squared distance (M,) of what was heard and the mean update of candidates (M, B) over the random images."""
        heard = self._victim.gradient[self._name]
        repeats = len(self._images)
        rows = candidates.repeat_interleave(repeats, dim=0)
        images = self._images.repeat(len(candidates), 1, 1, 1, 1)
        updates = []
        channels, height, width = images.shape[2:]
        with torch.no_grad():
            for part in chunks(self._network, [self._victim] * len(rows), (channels, height, width), self._classes):
                labels = F.one_hot(rows[part.start : part.stop], self._classes).to(images)
                sent = self._victim.model.trained(
                    self._network, self._victim.parameters, images[part.start : part.stop], labels
                )
                updates.append(sent[self._name])
        means = torch.cat(updates).unflatten(0, (len(candidates), repeats)).mean(dim=1)
        return (means - heard).flatten(1).square().sum(dim=1)


def neighbours(labels: Tensor, classes: int, batch: int) -> Tensor:
    """Return all labels (M, B) that differ from some (N, B) in one place or by two exchanged; steps' ascend."""
    examples = labels.shape[1]
    places = torch.arange(examples, device=labels.device)
    changed = labels[:, None, None].repeat(1, examples, classes, 1)
    changed[:, places, :, places] = torch.arange(classes, device=labels.device)
    pairs = list(itertools.combinations(range(examples), 2))
    orders = places.repeat(len(pairs), 1)
    for order, (first, second) in zip(orders, pairs, strict=True):
        order[first], order[second] = second, first
    candidates = torch.cat([changed.flatten(0, 2), labels[:, orders].flatten(0, 1)])
    batch = min(batch, examples)
    if examples % batch == 0:
        candidates = candidates.unflatten(1, (-1, batch)).sort(dim=2).values.flatten(1)
    return candidates.unique(dim=0)


# Labels of local training by a search on the logits, which a step on class c moves by ``-rate k (softmax - label)``.
#
# k, the gain, is what examples' gradients have in common (of the last layer alone 1 + the squared length of its input).
# Images hardly matter before a network is trained, so thousands of label sequences are tried on logits alone.


GAINS = (0.5, 0.63, 0.79, 1.0, 1.26, 1.59, 2.0)  # images differ; times the gain at random images
NUDGE = 1e-3  # of a step, along which the gain is measured
WIDTH = 64  # sequences of labels that are improved side by side
MOST = 8192  # sequences that are tried in one round, at most


class LogitSearch:
    """Training of the logits alone, with softmax and gain of random images (R, B, C, H, W), against the upload."""

    def __init__(self, network: Network, victim: Victim, name: str, images: Tensor, classes: int) -> None:
        training = victim.model.training
        if training is None:
            raise ValueError("this upload is one gradient; there is no local training to search with")
        self._training = training
        self._classes = classes
        with torch.no_grad():
            self._logits = network.logits(victim.parameters, images.flatten(0, 1)).mean(dim=0)
            self._measure(network, victim, name, images)

    def _measure(self, network: Network, victim: Victim, name: str, images: Tensor) -> None:
        """Measure the gain on one step of single examples, and read the sum of all steps off what was heard."""
        first = replace(self._training, steps=1, batch_size=1, clients=1)
        count = len(images)
        labels = torch.arange(count, device=images.device) % self._classes
        one_hot = F.one_hot(labels, self._classes).to(images)
        update = unrolled_update(network, victim.parameters, images[:, :1], one_hot[:, None], first)
        steps = self._steps(first, labels[:, None, None], self._logits.new_zeros(1))[0]
        gains, inputs = [], []
        for row in range(count):
            moved = {key: value + NUDGE * update[key][row] for key, value in victim.parameters.items()}
            others = images[(row + 1) % count]
            change = (network.logits(moved, others) - network.logits(victim.parameters, others)).mean(dim=0) / NUDGE
            length = steps[row].square().sum()
            gains.append((change * steps[row]).sum() / length)
            inputs.append(steps[row] @ update[name][row].reshape(self._classes, -1) / length)
        gain, layer_input = torch.stack(gains).mean(), torch.stack(inputs).mean(dim=0)
        self._gains = gain * torch.tensor(GAINS).to(gain)
        # In gradient space; the bias has an input of 1.
        heard = victim.gradient[name].reshape(self._classes, -1)
        scale = victim.model.signed * victim.model.step
        self._heard = scale * (heard @ layer_input) / layer_input.square().sum()

    def _steps(self, training: LocalTraining, labels: Tensor, gains: Tensor) -> Tensor:
        """The bias' update (G, M, classes) with labels (M, clients, b) and gains (G,), averaged over the clients."""
        counts = F.one_hot(labels, self._classes).to(self._logits)
        optimizer = local_optimizer(training)
        change = self._logits.new_zeros(len(gains), *labels.shape[:2], self._classes)
        for batch in training.batches(labels.shape[2]):
            softmax = (self._logits + gains[:, None, None, None] * change).softmax(dim=3)
            step = optimizer({"bias": softmax - counts[:, :, batch].mean(dim=2)})
            change = change + step["bias"]
        return change.mean(dim=2)

    def distances(self, candidates: Tensor) -> Tensor:
        """Squared distance (M,) of what was heard and the update of candidates (M, B), at the gain that fits best."""
        labels = candidates.unflatten(1, (self._training.clients, -1))
        updates = self._steps(self._training, labels, self._gains)
        return (updates - self._heard).square().sum(dim=2).amin(dim=0)

    def search(self, start: Tensor) -> Tensor:
        """Return sequences of labels (M, B), the best first, improved from (B,) by exchanging labels and places."""
        same = torch.arange(self._classes, device=start.device)[:, None].expand(-1, len(start))
        kept = torch.cat([start[None], same])
        width = min(WIDTH, max(1, MOST // len(neighbours(kept[:1], self._classes, self._training.batch_size))))
        for _ in range(2 * len(start)):
            # Of very many, evenly spread ones: the search then takes its steps among these.
            tried = neighbours(kept[:width], self._classes, self._training.batch_size)
            tried = torch.cat([kept, tried[:: -(-len(tried) // MOST)]]).unique(dim=0)
            best = tried[self.distances(tried).argsort(stable=True)[:WIDTH]]
            if torch.equal(best, kept):
                break
            kept = best
        return kept


# Labels of several passes over a client's examples, in batches that differ from pass to pass.
#
# Before images are known they are all the public mean, and an update depends on nothing but the labels in each step.
# The sum of the steps' ``softmax - label`` in the last bias says which classes occur, and how often at least. The rest
# is tried: from random orders labels are exchanged between the steps of a pass while that brings the update closer,
# and the worse half ends after each round. The loss is linear in label probabilities: a step's batch is one mean image
# with the shares of its labels.


ROUND = 2**15  # steps that are trained in a round: there are as many starts as it has room for
ORDERS = 16  # random ones, of which each start is the nearest
FEWEST = 4  # starts, which are then followed side by side; in these, labels may also change in every pass
CHOICES = 96  # of the labels that the bias does not show, at most
UNSURE = 0.05  # by how much the softmax at an image may be below that at the public mean
JOINED = 8  # exchanges that are made together, at most
DRAWN = 50  # random exchanges of equal labels for each pairing that is asked for


@dataclass(frozen=True, eq=False)
class Passes:
    """Which labels the dummies have, and which dummies each step's batch holds."""

    labels: Tensor  # int64 (B,), in the order of the first pass
    orders: Tensor  # int64 (steps, b)

    @staticmethod
    def of(placed: Tensor, examples: int) -> "Passes":
        """Number the examples of the first pass, and find them again in the others by their labels (steps, b)."""
        first = placed.flatten()[:examples]
        passes = placed.flatten().view(-1, examples)
        # Of equal labels the first in a pass is the first in all passes.
        taken = first.argsort(stable=True)[passes.argsort(dim=1, stable=True).argsort(dim=1)]
        return Passes(first, taken.view_as(placed))

    def pairings(self, count: int) -> "list[Passes]":
        """These, then others in which examples of equal labels are exchanged: different ones, at most ``count``."""
        passes = self.orders.view(-1, len(self.labels))
        generator = torch.Generator().manual_seed(PROBE)
        found = {self._steps(passes): passes}
        for _ in range(DRAWN * (count - 1)):
            if len(found) == count:
                break
            drawn = torch.rand(passes.shape, generator=generator).argsort(dim=1)
            # Of equal labels in random order, the first stands for the first as they are numbered, and so on.
            mixed = drawn.gather(1, self.labels.cpu()[drawn].argsort(dim=1, stable=True)).to(passes.device)
            exchanged = torch.empty_like(passes).scatter_(1, self.labels.argsort(stable=True).expand_as(mixed), mixed)
            exchanged[0] = torch.arange(len(self.labels), device=passes.device)
            other = exchanged.gather(1, passes)
            found.setdefault(self._steps(other), other)
        return [Passes(self.labels, other.view_as(self.orders)) for other in found.values()]

    def _steps(self, passes: Tensor) -> tuple[tuple[int, ...], ...]:
        """The label and the step in each pass of every example: alike where only examples' numbers differ."""
        steps = passes.argsort(dim=1) // self.orders.shape[1]
        return tuple(sorted(map(tuple, torch.cat([self.labels[None], steps]).T.tolist())))


class PassSearch:
    """Labels (steps, b) of each step of several passes, against the whole upload."""

    def __init__(self, scene: Scene, victim: Victim, training: LocalTraining) -> None:
        self._scene, self._victim = scene, victim
        self._single = replace(training, batch_size=1)
        self._size = training.batch_size
        self._each = victim.model.examples // training.batch_size  # steps in a pass

    def search(self, candidates: Tensor, *, exchangeable: bool) -> Passes:
        """Start with labels (M, B) in random orders; ``exchangeable``: whether the best may have others in the end."""
        examples, steps = candidates.shape[1], self._single.steps
        moves = min(NEIGHBOURS, steps * (self._each - 1) // 2 * self._size**2)
        # Labels that are one guess may change from the outset, which many starts have no time for.
        room = FEWEST if exchangeable and len(candidates) == 1 else ROUND // (steps * moves)
        starts = range(min(max(room, FEWEST), 2 * moves))
        mixed = [self._mixed(candidates[turn % len(candidates)], turn) for turn in starts]
        kept = torch.cat([_nearest(orders, self._distances(orders), 1)[0] for orders in mixed])
        for turn in range(examples + steps):
            last = len(kept) <= FEWEST
            near = [self._moved(each, FEWEST if last else 1, changing=exchangeable and last) for each in kept]
            moved, distances = (torch.cat(parts) for parts in zip(*near, strict=True))
            before, kept = kept, _nearest(moved, distances, max(FEWEST, len(kept) // 2 if turn else len(kept)))[0]
            if last and torch.equal(kept, before):
                break
        return Passes.of(kept[0], examples)

    def _mixed(self, labels: Tensor, seed: int) -> Tensor:
        """Labels (B,) in random orders in each pass, (ORDERS, steps, b)."""
        generator = torch.Generator().manual_seed(seed)
        passes = self._single.steps // self._each
        orders = torch.rand(ORDERS, passes, len(labels), generator=generator).argsort(dim=2).to(labels.device)
        return labels[orders].view(ORDERS, -1, self._size).sort(dim=2).values

    def _moved(self, placed: Tensor, count: int, *, changing: bool) -> tuple[Tensor, Tensor]:
        """The nearest of a placing (steps, b) and those by one move or several from it, with their distances."""
        near = torch.cat([self._exchanged(placed), *([self._changed(placed)] if changing else ())])
        near = near.sort(dim=2).values.unique(dim=0)
        # Of very many, evenly spread ones: the search then takes its steps among these.
        near = torch.cat([placed[None], near[:: -(-len(near) // NEIGHBOURS) or 1]])
        distances = self._distances(near)
        better = near[distances.argsort(stable=True)[: int((distances < distances[0]).sum())]]
        together = made_together(placed, better)[:JOINED].sort(dim=2).values
        if len(together):
            near, distances = torch.cat([near, together]), torch.cat([distances, self._distances(together)])
        return _nearest(near, distances, count)

    def _exchanged(self, placed: Tensor) -> Tensor:
        """All that differ by two labels exchanged between two steps of a pass, (M, steps, b)."""
        made = []
        for start in range(0, len(placed), self._each):
            for one, other in itertools.combinations(range(start, start + self._each), 2):
                for label, second in itertools.product(placed[one].unique(), placed[other].unique()):
                    if label != second:
                        moved = placed.clone()
                        moved[one, (placed[one] == label).nonzero()[0]] = second
                        moved[other, (placed[other] == second).nonzero()[0]] = label
                        made.append(moved)
        return torch.stack(made) if made else placed.new_zeros(0, *placed.shape)

    def _changed(self, placed: Tensor) -> Tensor:
        """All in which one example has another label in every pass, (M, steps, b)."""
        passes = placed.view(-1, self._each * self._size)
        made = []
        for label in passes[0].unique():
            # The label's first place in each pass.
            places = (passes == label).int().argmax(dim=1)
            for other in range(self._scene.classes):
                moved = passes.clone()
                moved[torch.arange(len(passes), device=places.device), places] = other
                made.append(moved.view_as(placed))
        return torch.stack(made)

    def _distances(self, placed: Tensor) -> Tensor:
        """Squared distance (M,) of the upload and the update of labels (M, steps, b) with mean images."""
        scene, victim = self._scene, self._victim
        shares = F.one_hot(placed, scene.classes).to(scene.mean).mean(dim=2)
        found = []
        with torch.no_grad():
            for part in chunks(scene.network, [victim] * len(placed), scene.shape, scene.classes):
                labels = shares[part.start : part.stop]
                images = labels.new_zeros(1, 1, *scene.shape).expand(*labels.shape[:2], *scene.shape)
                update = unrolled_update(scene.network, victim.parameters, images, labels, self._single)
                sent = victim.model.gradient(update)
                parts = [(value - victim.gradient[name]).flatten(1) for name, value in sent.items()]
                found.append(torch.stack([rest.double().square().sum(dim=1) for rest in parts]).sum(dim=0))
        return torch.cat(found)


def _nearest(placed: Tensor, distances: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nearest of placings (M, steps, b), at most so many different ones, and their distances."""
    different: dict[tuple[int, ...], int] = {}
    for number in distances.argsort(stable=True).tolist():
        different.setdefault(tuple(placed[number].flatten().tolist()), number)
    numbers = torch.tensor(list(different.values())[:count], device=placed.device)
    return placed[numbers], distances[numbers]


def made_together(start: Tensor, better: Tensor) -> Tensor:
    """The best change (m, P, ...) of P places, the best two, and so on: of those that touch other places each."""
    now, touched = start, torch.zeros(len(start), dtype=torch.bool, device=start.device)
    made: list[Tensor] = []
    for moved in better:
        changed = (moved != start).reshape(len(start), -1).any(dim=1)
        if not bool((changed & touched).any()):
            now, touched = torch.where(changed.view(-1, *[1] * (start.ndim - 1)), moved, now), touched | changed
            made.append(now)
    return torch.stack(made) if made else better


def with_passes(scene: Scene, rows: Sequence[Victim]) -> list[Victim]:
    """The same rows; of a client that passes several times over its examples with the labels of each step.

    Which of the examples with equal labels is in which step is not known: a victim's rows have different pairings.
    """
    layer = find_output_layer(scene.network, rows[0].parameters, scene.shape, scene.classes)
    made = list(rows)
    for victim, numbers in by_victim(rows):
        found = _passes(scene, victim, layer)
        pairings = [] if found is None else found.pairings(len(numbers))
        for turn, number in enumerate(numbers if pairings else ()):
            pairing = pairings[turn % len(pairings)]
            made[number] = replace(victim, labels=pairing.labels, orders=pairing.orders)
    return made


def _passes(scene: Scene, victim: Victim, layer: "OutputLayer | None") -> Passes | None:
    training, model = victim.model.training, victim.model
    if training is None or not training.passes(model.examples) or model.mechanism.protects or victim.more:
        return None
    if scene.network.needs_batches:
        return None
    search = PassSearch(scene, victim, training)
    if victim.labels is not None:
        return search.search(victim.labels[None], exchangeable=False)
    return None if layer is None else search.search(_counted(scene, victim, layer), exchangeable=True)


def _counted(scene: Scene, victim: Victim, layer: "OutputLayer") -> Tensor:
    """Labels (M, B) that a client may have: those that its last bias shows, and all or some choices of the others."""
    heard, examples, training = victim.gradient[layer.name], victim.model.examples, victim.model.training
    if not layer.bias or training is None or training.optimizer != "sgd":
        signatures = label_signatures(scene.network, victim, layer, _random(victim, layer, scene.shape), scene.classes)
        return match_labels(heard.flatten(), signatures, examples)[None]
    with torch.no_grad():
        softmax = scene.network.logits(victim.parameters, scene.mean.new_zeros(1, *scene.shape))[0].softmax(dim=0)
    # A class that occurs n times adds the mean of its probability over the steps, the first known, less n / B.
    least = examples * (softmax / training.steps - heard) - UNSURE * examples / training.steps
    occurs = least.nan_to_num().ceil().clamp(heard.lt(0).to(heard), torch.full_like(heard, examples)).long()
    sure = torch.arange(scene.classes, device=heard.device).repeat_interleave(occurs)[:examples]
    classes, missing = sure.unique().tolist() or list(range(scene.classes)), examples - len(sure)
    if math.comb(len(classes) + missing - 1, missing) <= CHOICES:
        others = list(itertools.combinations_with_replacement(classes, missing))
    else:
        stream = random.Random(PROBE)
        others = [tuple(stream.choices(classes, k=missing)) for _ in range(CHOICES)]
    return torch.stack([torch.cat([sure, sure.new_tensor(more)]) for more in others])


TRIED = 4  # batches of random images on which local training is tried
CANDIDATES = 16  # for the labels of local training, out of the search on logits, that are trained with first
SEARCHED = 256  # examples at most: a search tries all pairs' places, whose memory grows with the cube
SAMPLES = 8  # random images for each class, from which a batch's labels are told
JOINT = "labels could not be read off the last layer and were optimised with the images"  # for people
PROBE = 20240229  # the seed of the images that tell which tensor is the last; it decides nothing else


@dataclass(frozen=True)
class OutputLayer:
    """The tensor whose gradient shows the labels."""

    name: str  # the parameter
    bias: bool  # whether it is added to the logits; else it is the weight (classes, features) of a layer without bias


def find_output_layer(
    network: Network, parameters: Vector, shape: tuple[int, int, int], classes: int
) -> OutputLayer | None:
    """Find the last bias (classes,), which shifts logits by its own change, or weight, whose rows scale them."""
    generator = torch.Generator().manual_seed(PROBE)
    reference = next(iter(parameters.values()))
    images = torch.randn(2, *shape, generator=generator).to(reference)
    change = torch.rand(classes, generator=generator).to(reference) + 0.5
    with torch.no_grad():
        logits = network.logits(parameters, images)
        for name in reversed(network.names):
            value = parameters[name]
            if value.shape == (classes,) and _close(
                network.logits({**parameters, name: value + change}, images), logits + change
            ):
                return OutputLayer(name, bias=True)
            if (
                value.ndim == 2
                and len(value) == classes
                and _close(network.logits({**parameters, name: value * change[:, None]}, images), logits * change)
            ):
                return OutputLayer(name, bias=False)
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    scale = float(other.abs().max())
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-5 * max(scale, 1e-30)))


def read_labels(scene: Scene, rows: Sequence[Victim]) -> list[Tensor | None]:
    """Return each row's labels (B,): known ones, else those read off once for each victim, else ``None``."""
    if all(victim.labels is not None for victim in rows):
        return [victim.labels for victim in rows]
    layer = find_output_layer(scene.network, rows[0].parameters, scene.shape, scene.classes)
    if layer is None:
        return [victim.labels for victim in rows]
    distinct = {id(victim): victim for victim in rows}
    pooled = [_pooled(victim, layer) for victim in distinct.values()]
    inferred = [infer_labels(scene.network, victim, layer, scene.shape, scene.classes) for victim in pooled]
    labels = dict(zip(distinct, inferred, strict=True))
    return [labels[id(victim)] if victim.labels is None else victim.labels for victim in rows]


def _pooled(victim: Victim, layer: OutputLayer) -> Victim:
    """The mean over several uploads of the same examples, for the last layer: labels add the same sign to each."""
    if not victim.more:
        return victim
    releases = [upload.model.releases for upload in victim.uploads]
    parts = [count * upload.gradient[layer.name] for count, upload in zip(releases, victim.uploads, strict=True)]
    mean = torch.stack(parts).sum(dim=0) / sum(releases)
    return replace(victim, gradient={**victim.gradient, layer.name: mean}, more=())


def infer_labels(
    network: Network, victim: Victim, layer: OutputLayer, shape: tuple[int, int, int], classes: int
) -> Tensor | None:
    """Guess the labels (B,) behind an upload, ascending or in local steps' order; ``None``: its scale is unknown.

    One example (iDLG, Zhao et al. 2020): the most negative entry of ``softmax - label``. Several: the labels whose
    gradients, at random images and through the mechanism, add up best (:func:`match_labels`). Several local steps, or
    Adam: the labels with which training on random images comes closest, searched for on the logits first, up to
    SEARCHED.
    """
    heard = victim.gradient[layer.name]
    if victim.model.examples == 1:
        return _output_gradient(heard, layer).argmin().reshape(1)
    if victim.model.protects_updates:
        return None
    signatures = label_signatures(network, victim, layer, _random(victim, layer, shape), classes)
    labels = match_labels(heard.flatten(), signatures, victim.model.examples)
    if victim.model.training is None or victim.model.examples > SEARCHED:
        return labels
    images = fixed_normal(PROBE, TRIED, victim.model.examples, *shape).to(heard)
    candidates = labels[None]
    if not network.needs_batches:
        kept = LogitSearch(network, victim, layer.name, images, classes).search(labels)[:CANDIDATES]
        candidates = torch.cat([candidates, kept])
    return TrialTraining(network, victim, layer.name, images, classes).improve(candidates)


def _output_gradient(heard: Tensor, layer: OutputLayer) -> Tensor:
    """softmax - label (classes,), up to a positive factor: of a weight, its leading left singular vector."""
    if layer.bias:
        return heard
    if not bool(torch.isfinite(heard).all()):
        return heard.sum(dim=1)
    leading: Tensor = torch.linalg.svd(heard, full_matrices=False).U[:, 0]
    largest = leading[leading.abs().argmax()]
    return -leading * largest.sign()


def _random(victim: Victim, layer: OutputLayer, shape: tuple[int, int, int]) -> Tensor:
    """Images (SAMPLES, C, H, W)."""
    return fixed_normal(PROBE, SAMPLES, *shape).to(victim.gradient[layer.name])


def label_signatures(network: Network, victim: Victim, layer: OutputLayer, images: Tensor, classes: int) -> Tensor:
    """Return what an example of each class adds to the last layer's gradient, on average over images: (classes, P).

    A network that raises on single examples is shown all images as one batch.
    """
    gradients = partial(network.gradients, victim.parameters, shared=True)
    if not victim.model.mechanism.protects:  # else other gradients decide how this one is clipped
        gradients = partial(gradients, of=(layer.name,))
    total = []
    for label in range(classes):
        labels = F.one_hot(torch.full((len(images),), label), classes).to(images)
        if network.needs_batches:
            expected = victim.model.expected(gradients(images[None], labels[None], each=False))
        else:
            each = gradients(images[:, None], labels[:, None], each=True)
            expected = victim.model.expected_of_examples(each)
        total.append(expected[layer.name].mean(dim=0).flatten().detach())
    return torch.stack(total)


def match_labels(heard: Tensor, signatures: Tensor, examples: int) -> Tensor:
    """Choose labels whose signatures add up best to ``examples * heard``: greedily, then by single exchanges."""
    rest = examples * heard
    chosen: list[int] = []
    for _ in range(examples):
        label = int((rest - signatures).square().sum(dim=1).argmin())
        chosen.append(label)
        rest = rest - signatures[label]
    for _ in range(examples):
        improved = _exchange(rest, signatures, chosen)
        if improved is None:
            break
        rest = improved
    return torch.tensor(sorted(chosen), device=heard.device)


def _exchange(rest: Tensor, signatures: Tensor, chosen: list[int]) -> Tensor | None:
    """Make the single exchange that shrinks the rest most, in ``chosen`` too; ``None`` where none does."""
    candidates = rest + signatures[chosen][:, None] - signatures[None]
    distances = candidates.square().sum(dim=2)
    best = int(distances.argmin())
    out, into = divmod(best, len(signatures))
    if not float(distances[out, into]) < float(rest.square().sum()) * (1 - 1e-6):
        return None
    chosen[out] = into
    return candidates[out, into]
