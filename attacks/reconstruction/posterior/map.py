"""The most probable images given an upload, noise and prior: maximum a posteriori, adapted to the mechanism.

The objective is ``posterior.likelihood``'s; it has no weights. It is minimised by Adam in
coordinates in which the prior is standard normal: where the upload says nothing, images stay at the prior's mean, and
pixels that belong together average the noise. Two things keep the search away from local optima. The likelihood's share
grows from where it just moves the start to its full weight, as if the noise fell from large to its true level. And
kinks of the network are smoothed at first (``posterior.smoothing``). Where a first Linear
layer gives the images in closed form, the last part of the search, with the network as it is, starts there too. A
sharper part counts only where it gains more than noise would explain: kinks offer many narrow peaks, and the highest is
not where most of the probability lies. The most probable of all starts' results is kept.

Where an upload pins down no direction of an image, the posterior's mean is taken in place of its mode, which is worse
than the prior's mean there (``posterior.averaging``); without kinks only, since it needs
derivatives.

Behind kinks such searches mostly make the closed form's image worse: one that is slightly off has some units wrong, and
the likelihood takes each for strong evidence against it, so that images far off with lucky units are more probable.
There the units are read from the upload together with the image (``posterior.relu_gates``),
by all layers, and the closed form's image, or its negative, is where that starts. Where the units cannot be unknowns of
their own, as after several local steps, the closed form is the answer itself wherever it explains the upload at all.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.reconstruction.errors import AttackRefused
from fedpriv.attacks.reconstruction.first_layer.closed_form import run_closed_form
from fedpriv.attacks.reconstruction.matching.evaluation import Evaluator, Losses
from fedpriv.attacks.reconstruction.matching.matcher import Matcher
from fedpriv.attacks.reconstruction.matching.memory import chunks
from fedpriv.attacks.reconstruction.posterior.averaging import fit_cloud
from fedpriv.attacks.reconstruction.posterior.label_evidence import likely_labels, open_labels
from fedpriv.attacks.reconstruction.posterior.likelihood import Whitening, misfit
from fedpriv.attacks.reconstruction.posterior.relu_gates import can_be_gated, read_gated
from fedpriv.attacks.reconstruction.posterior.smoothing import SmoothKinks
from fedpriv.attacks.reconstruction.results import Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene
from fedpriv.attacks.reconstruction.upload_model.model import UploadModel, Victim

__all__ = ["run_map"]

SPREAD = 0.1  # of starts around the prior's mean, in its standard deviations: enough to tell equal images apart
SMOOTH, SHARPER = 8.0, 32.0  # of kinks: their sharpness in the first and in the second part of the search
TURNS = (0.4, 0.65)  # shares of the steps at which these parts end; in the third part kinks are kinks
WARM = 0.7  # of the first part, in which the likelihood's share grows to 1
LATE = 0.4  # the learning rate of the other parts over that of the first
CHANCE = 0.5  # what a number that is fitted to noise gains on average in log-likelihood (Akaike 1974)
LAST_RATE = 0.01  # the learning rate of the last step over that of the first
BETAS = (0.9, 0.99)
AVERAGED = 0.3  # of the steps: as many are made for the posterior's mean, where there are no kinks
VAGUE = 0.5  # the posterior's least deviation, in the prior's, above which its mean is taken rather than its mode
PROBED = 4  # random images that tell whether the network has kinks
PROBE = 20240521  # their seed; it decides nothing else
JOINT = "labels could not be read off the last layer and were optimised with the images"

Tell = Callable[[float, Tensor], None]
"""(share of the steps done, losses (n,) so far)."""


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
    lowest = torch.full((len(rows),), math.inf, dtype=_wide(images), device=images.device)

    def teller(tried: Sequence[_Start], of: int, before: int, begin: float, end: float) -> Tell:
        index = torch.tensor([start.row for start in tried], device=images.device)

        def tell(share: float, losses: Tensor) -> None:
            done = begin + (end - begin) * (before + share * len(tried)) / of
            report(int(done * config.iterations), lowest.scatter_reduce_(0, index, losses, "amin"))

        return tell

    starts = _starts(scene, rows, images, logits)
    read = _closed_form(scene, rows, images, logits)
    settled: list[_Ended] = []
    readable = [start for start in _there(starts, read) if _speaks_for_itself(scene, start.victim)]
    for some in _parts(scene, [*readable, *_mirrored(scene, readable)]):
        settled += _Search(scene, config, some, _silent).stay()
    settled = [
        *_gated(scene, [one for one in settled if can_be_gated(scene, one.start.victim)], config),
        *(one for one in settled if not can_be_gated(scene, one.start.victim) and _explains(one)),
    ]
    done = {one.start.row for one in settled}
    starts = _likely(scene, [start for start in starts if start.row not in done])
    annealed: list[_Start] = []
    for some in _parts(scene, starts):
        annealed += _Search(scene, config, some, teller(some, len(starts), len(annealed), 0.0, TURNS[1])).anneal()
    starts = [*annealed, *_there(starts, read)]
    ended: list[_Ended] = []
    for some in _parts(scene, starts):
        ended += _Search(scene, config, some, teller(some, len(starts), len(ended), TURNS[1], 1.0)).finish()
    most_probable = _best([*settled, *ended])
    best = [most_probable[row] for row in range(len(rows))]
    pictures = scene.box(torch.stack([one.images for one in best]))
    labels = torch.stack([one.labels for one in best])
    losses = torch.stack([one.loss for one in best])
    report(config.iterations, losses)
    joint = [JOINT if one.start.labels is None else "" for one in best]
    notes = tuple("; ".join(text for text in (note, one.note) if text) for note, one in zip(joint, best, strict=True))
    return Outcome(pictures, labels, losses, torch.full((len(rows),), config.iterations), notes)


def _refuse(model: UploadModel) -> None:
    adam = model.training is not None and model.training.optimizer == "adam"
    if adam and model.protects_examples:
        raise AttackRefused("map needs the distribution of the upload; that of noise behind Adam's steps is not known")


@dataclass(frozen=True, eq=False)
class _Start:
    """Where a search begins.

    Attributes:
        row: for which.
        victim: of the row.
        labels: int64 (B,) that are taken for granted; ``None``: they are optimised.
        coordinates: (B, C, H, W).
        logits: (B, classes), for labels that are optimised.
    """

    row: int
    victim: Victim
    labels: Tensor | None
    coordinates: Tensor
    logits: Tensor


@dataclass(frozen=True, eq=False)
class _Ended:
    """Where a search ended: images (B, C, H, W), labels (B,), minus the log-posterior (), and what is to be noted."""

    start: _Start
    images: Tensor
    labels: Tensor
    loss: Tensor
    note: str


def _best(ended: Iterable[_Ended]) -> dict[int, _Ended]:
    """The most probable result of each row; a NaN only where there is nothing else."""
    best: dict[int, _Ended] = {}
    for one in ended:
        other = best.get(one.start.row)
        if other is None or bool(one.loss < other.loss) or bool(other.loss.isnan()):
            best[one.start.row] = one
    return best


def _parts(scene: Scene, starts: Sequence[_Start]) -> Iterator[Sequence[_Start]]:
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


def _starts(scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor) -> list[_Start]:
    """For each row a start with every set of labels that may be right."""
    return [
        _Start(row, rows[row], labels, SPREAD * images[row], logits[row])
        for row, choices in enumerate(open_labels(scene, rows))
        for labels in choices
    ]


def _likely(scene: Scene, starts: Sequence[_Start]) -> list[_Start]:
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


def _closed_form(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor
) -> dict[int, tuple[Tensor, Tensor]]:
    """Coordinates (B, C, H, W) and labels (B,) of the victims, by their ids, whose first layer can be read."""
    whitening = Whitening(scene.prior, scene.shape)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for model in {victim.model: None for victim in rows}:
        numbers = list({id(victim): row for row, victim in enumerate(rows) if victim.model == model}.values())
        victims = [rows[row] for row in numbers]
        try:
            read = run_closed_form(scene, victims, images[numbers], logits[numbers], ClosedFormSettings(), _silent)
        except AttackRefused:  # the network or the upload is not of the kind: then there is no such start
            continue
        coordinates = whitening.coordinates(read.images)
        found |= {id(one): (coordinates[number], read.labels[number]) for number, one in enumerate(victims)}
    return found


def _there(starts: Sequence[_Start], read: Mapping[int, tuple[Tensor, Tensor]]) -> list[_Start]:
    """The starts at images in closed form; a batch's labels are in their order, a single one is tried as it was."""
    found = []
    for start in starts:
        if id(start.victim) in read:
            coordinates, labels = read[id(start.victim)]
            single = start.labels is not None and len(start.labels) == 1
            found.append(replace(start, coordinates=coordinates, labels=start.labels if single else labels))
    return found


def _mirrored(scene: Scene, starts: Sequence[_Start]) -> list[_Start]:
    """The starts with the images' sign turned: a first layer's matrix tells an image but for that, its bias may not."""
    whitening = Whitening(scene.prior, scene.shape)
    turned = [whitening.coordinates(-whitening.images(start.coordinates)) for start in starts]
    return [replace(start, coordinates=coordinates) for start, coordinates in zip(starts, turned, strict=True)]


def _speaks_for_itself(scene: Scene, victim: Victim) -> bool:
    """Whether the first layer's matrix and bias lie on one scale, so that contrast can be read, behind kinks."""
    if victim.model.examples > 1 or not victim.one_scale:
        return False
    generator = torch.Generator().manual_seed(PROBE)
    images = torch.randn(PROBED, *scene.shape, generator=generator).to(scene.mean)
    with torch.no_grad():
        plain = scene.network.logits(victim.parameters, images)
        with SmoothKinks(SMOOTH):
            smooth = scene.network.logits(victim.parameters, images)
    return not torch.equal(plain, smooth)


def _explains(one: _Ended) -> bool:
    """Whether it explains the upload better than nothing at all."""
    return bool(one.loss < one.start.coordinates.square().sum() / 2)


def _gated(scene: Scene, ended: Sequence[_Ended], config: MapSettings) -> list[_Ended]:
    """For each row's most probable labels the image that is read together with the units."""
    alike: dict[tuple[int, UploadModel], list[_Start]] = {}
    for one in _best(ended).values():
        victim = one.start.victim
        start = replace(one.start, labels=one.labels)
        alike.setdefault((id(victim.parameters), victim.model), []).append(start)
    found: list[_Ended] = []
    for some in (part for starts in alike.values() for part in _parts(scene, starts)):
        victims = [start.victim for start in some]
        labels = torch.stack([one.labels for one in some if one.labels is not None])
        begin = torch.stack([start.coordinates for start in some])
        read = read_gated(scene, victims, labels, begin, config.iterations, config.learning_rate)
        there = [replace(start, coordinates=read[number]) for number, start in enumerate(some)]
        found += _Search(scene, config, there, _silent).stay()
    return found


def _silent(done: float, losses: Tensor) -> None:
    """Tell nobody."""


# ---- the search -----------------------------------------------------------------------------------------------------


class _Search:
    """Adam in the prior's coordinates, from several starts together, each on its own.

    Args:
        scene: what is public.
        config: how long and how fast.
        starts: where from.
        tell: told how it goes.
    """

    def __init__(self, scene: Scene, config: MapSettings, starts: Sequence[_Start], tell: Tell) -> None:
        self._config = config
        self._starts = starts
        self._tell = tell
        self._note = ""
        self._whitening = Whitening(scene.prior, scene.shape)
        self._posterior = _Posterior(scene, self._whitening, starts)
        # The closed form of a broken upload is no image; the prior's mean, which is zero here, is one.
        self._coordinates = torch.stack([start.coordinates for start in starts]).nan_to_num(0.0, 0.0, 0.0)
        self._logits = torch.stack([start.logits for start in starts])
        self._adam = torch.optim.Adam([self._coordinates, self._logits], betas=BETAS)
        self._lowest = torch.full((len(starts),), math.inf, dtype=_wide(self._logits), device=self._logits.device)

    def anneal(self) -> list[_Start]:
        """Let the likelihood's share grow, with smooth kinks, then sharpen them; return where that leads to."""
        turn, end = (int(share * self._config.iterations) for share in TURNS)
        first = self._posterior.first_shares(self._coordinates, self._logits)
        evaluate = Evaluator(self._posterior.smoothed(SMOOTH), turn)
        for step in range(turn):
            self._step(evaluate, step / turn, first ** max(0.0, 1 - step / (WARM * turn)), 1.0)
            self._tell((step + 1) / end, self._lowest)
        self._climb(self._posterior.smoothed(SHARPER), end - turn, turn / max(end, 1))
        return [
            replace(start, coordinates=self._coordinates[number], logits=self._logits[number])
            for number, start in enumerate(self._starts)
        ]

    def stay(self) -> list[_Ended]:
        """Stay at the starts."""
        whole = torch.ones_like(self._lowest)
        with torch.no_grad():
            return self._ended(self._posterior(self._coordinates, self._logits, whole))

    def finish(self) -> list[_Ended]:
        """Search with the network as it is."""
        losses = self._climb(self._posterior, self._config.iterations - int(TURNS[1] * self._config.iterations), 0.0)
        return self._ended(self._average(losses))

    def _average(self, losses: Tensor) -> Tensor:
        """Go on to the posterior's mean where the upload pins down no direction; return the losses (n,) there."""
        smooth = self._posterior.chance(self._coordinates, self._logits) == 0
        if not bool(smooth.any()):
            return losses
        steps = int(AVERAGED * self._config.iterations)
        basis, rate = self._whitening.prior.basis, self._config.learning_rate
        cloud = fit_cloud(
            self._posterior, self._coordinates, (self._logits, torch.ones_like(losses)), basis, steps, rate
        )
        vague = smooth & (cloud.least > VAGUE)
        self._coordinates.copy_(torch.where(vague[:, None, None, None, None], cloud.middle, self._coordinates))
        with torch.no_grad():
            there = self._posterior(self._coordinates, self._logits, torch.ones_like(losses))
        return torch.where(vague, there, losses)

    def _ended(self, losses: Tensor) -> list[_Ended]:
        images = self._whitening.images(self._coordinates)
        labels = self._posterior.labels(self._logits).argmax(dim=2)
        return [
            _Ended(start, images[number], labels[number], losses[number], self._note)
            for number, start in enumerate(self._starts)
        ]

    def _climb(self, objective: Losses, steps: int, before: float) -> Tensor:
        """Go to the best point on the way, or stay where it gains too little; return the losses (n,) there."""
        evaluate = Evaluator(objective, steps + 1)
        whole = torch.ones_like(self._lowest)
        best = start = self._coordinates.clone(), self._logits.clone()
        at_start, _ = evaluate(*start, whole)
        lowest, bar = at_start, at_start - self._posterior.chance(*start)
        for step in range(steps + 1):
            here = self._coordinates.clone(), self._logits.clone()
            losses = self._step(evaluate, step / max(steps, 1), whole, LATE)
            # A comparison with NaN is false: it never is the lowest.
            lower = (losses < lowest) & (losses < bar)
            lowest = torch.where(lower, losses, lowest)
            best = (
                torch.where(lower[:, None, None, None, None], here[0], best[0]),
                torch.where(lower[:, None, None], here[1], best[1]),
            )
            self._lowest = torch.fmin(self._lowest, lowest)
            self._tell(before + (1 - before) * step / max(steps, 1), self._lowest)
        self._note = evaluate.note
        self._coordinates.copy_(best[0])
        self._logits.copy_(best[1])
        return lowest

    def _step(self, evaluate: Evaluator, done: float, shares: Tensor, rate: float) -> Tensor:
        """Make one step; return the losses (n,) before it."""
        losses, gradients = evaluate(self._coordinates, self._logits, shares)
        # Adam remembers: one NaN would end this row's search, which can go on from the next step.
        self._coordinates.grad, self._logits.grad = (one.nan_to_num(0.0, 0.0, 0.0) for one in gradients[:2])
        fall = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
        self._adam.param_groups[0]["lr"] = self._config.learning_rate * rate * fall
        self._adam.step()
        return losses


class _Posterior:
    """Minus the logarithm of the posterior (n,), but for constants, of coordinates, with a share of the likelihood."""

    def __init__(self, scene: Scene, whitening: Whitening, starts: Sequence[_Start]) -> None:
        self._whitening = whitening
        self._matcher = Matcher(scene.network, [start.victim for start in starts], misfit)
        unknown = torch.zeros(len(starts[0].coordinates), dtype=torch.long, device=scene.network.device)
        given = torch.stack([unknown if start.labels is None else start.labels for start in starts])
        self._free = torch.tensor([start.labels is None for start in starts], device=given.device)
        self._any_free = bool(self._free.any())
        self._given = F.one_hot(given, scene.classes).to(scene.mean)

    def __call__(self, coordinates: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
        misfits = self._matcher(self._whitening.images(coordinates), self.labels(logits))
        return shares * misfits + coordinates.square().flatten(1).sum(dim=1) / 2

    def labels(self, logits: Tensor) -> Tensor:
        """Label probabilities (n, B, classes)."""
        if not self._any_free:
            return self._given
        return torch.where(self._free[:, None, None], logits.softmax(dim=2), self._given)

    def smoothed(self, sharpness: float) -> Losses:
        """The same for the network without kinks."""

        def losses(coordinates: Tensor, logits: Tensor, shares: Tensor) -> Tensor:
            with SmoothKinks(sharpness):
                return self(coordinates, logits, shares)

        return losses

    def chance(self, coordinates: Tensor, logits: Tensor) -> Tensor:
        """What noise makes a sharper search gain (n,): nothing where the network has no kinks."""
        whole = coordinates.new_ones(len(coordinates))
        with torch.no_grad():
            kinked = self(coordinates, logits, whole) != self.smoothed(SMOOTH)(coordinates, logits, whole)
        return kinked * CHANCE * coordinates[0].numel()

    def first_shares(self, coordinates: Tensor, logits: Tensor) -> Tensor:
        """The shares (n,) with which the likelihood's pull at the start is as long as a draw from the prior."""
        one = coordinates.new_ones(len(coordinates), dtype=_wide(coordinates))
        _, (pull, _, _) = Evaluator(self.smoothed(SMOOTH), 1, "never")(coordinates, logits, one)
        length = (pull - coordinates).flatten(1).norm(dim=1).to(one)
        shares = math.sqrt(coordinates[0].numel()) / length.clamp(min=1e-30)
        return torch.where(torch.isfinite(shares), shares.clamp(max=1), 1.0)


def _wide(values: Tensor) -> torch.dtype:
    return values.dtype if values.device.type == "mps" else torch.float64
