"""The most probable images given an upload, noise and prior: maximum a posteriori, adapted to the mechanism.

The objective is ``posterior.likelihood``'s; it has no weights. It is minimised by Adam in
coordinates in which the prior is standard normal: where the upload says nothing, images stay at the prior's mean, and
pixels that belong together average the noise. Two things keep the search away from local optima. The likelihood's share
grows from where it just moves the start to its full weight, as if the noise fell from large to its true level. And
kinks of the network are smoothed at first (``posterior.smoothing``). Where a first Linear
layer gives the images in closed form, or the last one a batch's features, the last part of the search, with the network
as it is, starts there too. A
sharper part counts only where it gains more than noise would explain: kinks offer many narrow peaks, and the highest is
not where most of the probability lies. The most probable of all starts' results is kept.

Where an upload pins down no direction of an image, the posterior's mean is taken in place of its mode, which is worse
than the prior's mean there (``posterior.averaging``); without kinks only, since it needs
derivatives.

Behind kinks such searches mostly make the closed form's image worse: one that is slightly off has some units wrong, and
the likelihood takes each for strong evidence against it, so that images far off with lucky units are more probable.
There the units are read from the upload together with the image (``posterior.relu_gates``),
by all layers. That starts at the closed form's image, at its negative and at the prior's mean, with every label that
may be right: an upload that says little of an image says even less of the label while the image is wrong. The answer is
the mean of all these readings, weighted by their probabilities. Where the units cannot be unknowns of their own, as
after several local steps, the closed form is the answer itself wherever it explains the upload at all.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.features.inversion import read_feature_starts
from fedpriv.attacks.reconstruction.first_layer.closed_form import read_starts
from fedpriv.attacks.reconstruction.labels.last_layer import JOINT
from fedpriv.attacks.reconstruction.matching.memory import chunks
from fedpriv.attacks.reconstruction.posterior.label_evidence import likely_labels, open_labels
from fedpriv.attacks.reconstruction.posterior.likelihood import Whitening
from fedpriv.attacks.reconstruction.posterior.relu_gates import can_be_gated, read_gated
from fedpriv.attacks.reconstruction.posterior.search import SMOOTH, TURNS, Ended, Search, Start, Tell
from fedpriv.attacks.reconstruction.posterior.smoothing import SmoothKinks
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model.model import UploadModel, Victim
from fedpriv.gradients.operator import wide_type

__all__ = ["run_map"]

SPREAD = 0.1  # of starts around the prior's mean, in its standard deviations: enough to tell equal images apart
PROBED = 4  # random images that tell whether the network has kinks
PROBE = 20240521  # their seed; it decides nothing else
PLAUSIBLE = 20.0  # readings start where the posterior's logarithm is at most this much below that of the best start
MOST_READINGS = 30  # of one upload: ten labels, each from three images


def run_map(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: MapSettings, report: Report
) -> Outcome:
    """Run the attack on rows of (victim, restart) together.

    Args:
        scene: what is public, the prior included.
        rows: the victim of each row.
        images: standard normal numbers (N, B, C, H, W): the starts, in the prior's coordinates.
        logits: starts of the labels' logits (N, B, classes), for rows whose labels cannot be read off.
        config: steps and learning rate.
        report: told how it goes.

    Raises:
        AttackRefused: the noise went through Adam's steps, of which no density is known.
    """
    for victim in rows:
        _refuse(victim.model)
    lowest = torch.full((len(rows),), math.inf, dtype=wide_type(images), device=images.device)

    def teller(tried: Sequence[Start], of: int, before: int, begin: float, end: float) -> Tell:
        index = torch.tensor([start.row for start in tried], device=images.device)

        def tell(share: float, losses: Tensor) -> None:
            done = begin + (end - begin) * (before + share * len(tried)) / of
            report(int(done * config.iterations), lowest.scatter_reduce_(0, index, losses, "amin"))

        return tell

    starts = _starts(scene, rows, images, logits)
    read = _found(scene, rows)
    settled: list[Ended] = []
    readable = [start for start in _there(starts, read) if _speaks_for_itself(scene, start.victim)]
    unread = [_unread(start) for start in readable if can_be_gated(scene, start.victim)]
    for part in _parts(scene, [*readable, *_mirrored(scene, readable), *unread]):
        settled += Search(scene, config, part, _silent).stay()
    settled = [
        *_gated(scene, [result for result in settled if can_be_gated(scene, result.start.victim)], config),
        *(result for result in settled if not can_be_gated(scene, result.start.victim) and _explains(result)),
    ]
    done = {result.start.row for result in settled}
    starts = _likely(scene, [start for start in starts if start.row not in done])
    annealed: list[Start] = []
    for part in _parts(scene, starts):
        annealed += Search(scene, config, part, teller(part, len(starts), len(annealed), 0.0, TURNS[1])).anneal()
    starts = [*annealed, *_there(starts, read)]
    ended: list[Ended] = []
    for part in _parts(scene, starts):
        ended += Search(scene, config, part, teller(part, len(starts), len(ended), TURNS[1], 1.0)).finish()
    most_probable = _best([*settled, *ended])
    best = [most_probable[row] for row in range(len(rows))]
    pictures = scene.box(torch.stack([result.images for result in best]))
    labels = torch.stack([result.labels for result in best])
    losses = torch.stack([result.loss for result in best])
    report(config.iterations, losses)
    joint = [(JOINT if result.start.labels is None else "", result.note) for result in best]
    notes = tuple("; ".join(text for text in texts if text) for texts in joint)
    return Outcome(pictures, labels, losses, torch.full((len(rows),), config.iterations), notes)


def _refuse(model: UploadModel) -> None:
    adam = model.training is not None and model.training.optimizer == "adam"
    if adam and model.protects_examples:
        raise AttackRefused("map needs the distribution of the upload; that of noise behind Adam's steps is not known")


def _best(ended: Iterable[Ended]) -> dict[int, Ended]:
    """The most probable result of each row; a NaN only where there is nothing else."""
    best: dict[int, Ended] = {}
    for result in ended:
        other = best.get(result.start.row)
        if other is None or bool(result.loss < other.loss) or bool(other.loss.isnan()):
            best[result.start.row] = result
    return best


def _parts(scene: Scene, starts: Sequence[Start]) -> Iterator[Sequence[Start]]:
    """Cut searches into pieces that fit into memory."""
    if not starts:
        return
    victims = [start.victim for start in starts]
    written = any(victim.needs_writing for victim in _distinct(victims))
    for part in chunks(scene.network, victims, scene.shape, scene.classes, written=written):
        yield starts[part.start : part.stop]


def _distinct(rows: Sequence[Victim]) -> list[Victim]:
    return list({id(victim): victim for victim in rows}.values())


# ---- starts ---------------------------------------------------------------------------------------------------------


def _starts(scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor) -> list[Start]:
    """For each row a start with every set of labels that may be right."""
    return [
        Start(row, rows[row], labels, SPREAD * images[row], logits[row])
        for row, choices in enumerate(open_labels(scene, rows))
        for labels in choices
    ]


def _likely(scene: Scene, starts: Sequence[Start]) -> list[Start]:
    """The starts that are worth a search: of a single example's labels those that the upload makes likely."""
    kept: dict[int, set[int]] = {}
    for victim in _distinct([start.victim for start in starts]):
        mine = [start.labels for start in starts if start.victim is victim and start.labels is not None]
        single = {int(labels): labels for labels in mine if len(labels) == 1}
        kept[id(victim)] = {int(labels) for labels in likely_labels(scene, victim, list(single.values()))}
    return [
        start
        for start in starts
        if start.labels is None or len(start.labels) > 1 or int(start.labels) in kept[id(start.victim)]
    ]


def _found(scene: Scene, rows: Sequence[Victim]) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Coordinates (B, C, H, W) and labels (B,) of the victims, by their ids, whose first or last layer can be read."""
    whitening = Whitening(scene.prior, scene.shape)
    starts: dict[int, tuple[Tensor, Tensor | None]] = {}
    for victim in _distinct(rows):
        for read in (read_starts, read_feature_starts) if victim.model.examples > 1 else (read_starts,):
            try:
                (reading,) = read(scene, [victim])
            except AttackRefused:  # the network or the upload is not of the kind: then there is no such start
                continue
            starts[id(victim)] = whitening.coordinates(reading.images), reading.labels
            break
    return starts


def _there(starts: Sequence[Start], read: Mapping[int, tuple[Tensor, Tensor | None]]) -> list[Start]:
    """The starts at images in closed form; a batch's labels are in their order, a single one is tried as it was."""
    there = []
    for start in starts:
        if id(start.victim) in read:
            coordinates, labels = read[id(start.victim)]
            keep = labels is None or (start.labels is not None and len(start.labels) == 1)
            there.append(replace(start, coordinates=coordinates, labels=start.labels if keep else labels))
    return there


def _mirrored(scene: Scene, starts: Sequence[Start]) -> list[Start]:
    """The starts with the images' sign turned: a first layer's matrix tells an image but for that, its bias may not."""
    whitening = Whitening(scene.prior, scene.shape)
    turned = [whitening.coordinates(-whitening.images(start.coordinates)) for start in starts]
    return [replace(start, coordinates=coordinates) for start, coordinates in zip(starts, turned, strict=True)]


def _unread(start: Start) -> Start:
    """The start at the prior's mean."""
    return replace(start, coordinates=torch.zeros_like(start.coordinates))


def _speaks_for_itself(scene: Scene, victim: Victim) -> bool:
    """Whether contrast can be read from the first layer, behind kinks.

    Its matrix and bias tell it where they lie on one scale; the prior tells it of small blocks, each of its own length.
    """
    if victim.model.examples > 1 or not (victim.one_scale or victim.in_small_blocks):
        return False
    generator = torch.Generator().manual_seed(PROBE)
    images = torch.randn(PROBED, *scene.shape, generator=generator).to(scene.mean)
    with torch.no_grad():
        plain = scene.network.logits(victim.parameters, images)
        with SmoothKinks(SMOOTH):
            smooth = scene.network.logits(victim.parameters, images)
    return not torch.equal(plain, smooth)


def _explains(result: Ended) -> bool:
    """Whether it explains the upload better than nothing at all."""
    return bool(result.loss < result.start.coordinates.square().sum() / 2)


def _gated(scene: Scene, ended: Sequence[Ended], config: MapSettings) -> list[Ended]:
    """For each row the image that is read together with the units: the mean of all that may be right."""
    alike: dict[tuple[int, UploadModel], list[Start]] = {}
    for result in _plausible(ended):
        victim = result.start.victim
        start = replace(result.start, labels=result.labels)
        alike.setdefault((id(victim.parameters), victim.model), []).append(start)
    read: list[Ended] = []
    for part in (part for starts in alike.values() for part in _parts(scene, starts)):
        victims = [start.victim for start in part]
        labels = torch.stack([start.labels for start in part if start.labels is not None])
        begin = torch.stack([start.coordinates for start in part])
        means = read_gated(scene, victims, labels, begin, config.iterations, config.learning_rate)
        there = [replace(start, coordinates=means[number]) for number, start in enumerate(part)]
        read += Search(scene, config, there, _silent).stay()
    return [result for part in _parts(scene, _averaged(read)) for result in Search(scene, config, part, _silent).stay()]


def _plausible(ended: Sequence[Ended]) -> list[Ended]:
    """The most probable results of each row; a NaN only where there is nothing else."""
    kept = []
    for row, best in _best(ended).items():
        near = [other for other in ended if other.start.row == row and bool(other.loss <= best.loss + PLAUSIBLE)]
        kept += sorted(near, key=lambda result: float(result.loss))[:MOST_READINGS] or [best]
    return kept


def _averaged(ended: Sequence[Ended]) -> list[Start]:
    """For each row the most probable labels, and the mean of all its images, weighted by their probabilities."""
    averaged, plausible = [], _plausible(ended)
    for row, best in _best(ended).items():
        results = [result for result in plausible if result.start.row == row]
        behind = torch.stack([best.loss - result.loss for result in results])
        weights = behind.nan_to_num(0.0).softmax(dim=0)  # a NaN is alone
        coordinates = torch.stack([result.start.coordinates for result in results])
        averaged.append(replace(best.start, coordinates=torch.tensordot(weights.to(coordinates), coordinates, dims=1)))
    return averaged


def _silent(done: float, losses: Tensor) -> None:
    """Tell nobody."""
