"""Gradient matching built from parts: objective, priors, variables, optimiser, start and labels.

Each attack names one part of each kind (:class:`Recipe`): L-BFGS, as in DLG, in float64 where the device has it, or
Adam on the gradient or its sign, as in Inverting Gradients. Weights of priors may fall from step to step; losses are
compared with the weights of the last one. Each row keeps its iterate with the lowest loss.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpriv.attacks import metrics
from fedpriv.attacks.baselines import most_frequent
from fedpriv.attacks.reconstruction.features import ITERATIONS, read_feature_starts
from fedpriv.attacks.reconstruction.first_layer.closed_form import read_starts
from fedpriv.attacks.reconstruction.labels import JOINT, read_labels, with_passes
from fedpriv.attacks.reconstruction.lbfgs import Minimum, differentiable, minimise
from fedpriv.attacks.reconstruction.matching import (
    Evaluator,
    Matcher,
    Objective,
    angle,
    opponent_variation,
    squared_distance,
    total_variation,
)
from fedpriv.attacks.reconstruction.posterior import misfit
from fedpriv.attacks.reconstruction.results import AttackRefused, Outcome
from fedpriv.attacks.reconstruction.scene import Report, Scene, Start, time_is_up
from fedpriv.attacks.reconstruction.upload_model import Victim, by_victim
from fedpriv.attacks.reconstruction.variables import Coordinates, Relaxation, coordinates_of, relaxation_of
from fedpriv.attacks.settings import Recipe
from fedpriv.core.columns import slices
from fedpriv.gradients.operator import wide

# The parts that gradient matching is made of.

# Addressed to torch's developers: torch.func.jvp itself calls it.
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)

MILESTONES = (3 / 8, 5 / 8, 7 / 8)  # of the steps; at each the learning rate falls to a tenth
AROUND = 0.1  # standard deviation of starts around an image: enough to tell apart the examples of a batch
SMOOTHED = 0.1  # deviation of the noise for which a trained prior is asked, on the [0, 1] scale
FEW_STEPS = 30  # take as long as the trial which routes are open
TILE = 4  # pixels along a side of the square that a patterned start repeats


OBJECTIVES: Mapping[str, Objective] = {"squared-distance": squared_distance, "cosine": angle, "likelihood": misfit}
"""Comparison -> (N,)."""


def _public_mean(scene: Scene, images: Tensor) -> Tensor:
    """Mean squared distance of the pixels from the mean of public images, or from grey without any."""
    middle = scene.prior.mean.to(images).view(scene.shape)
    return (images - middle).square().flatten(1).mean(dim=1)


def _gaussian(scene: Scene, images: Tensor) -> Tensor:
    """Squared distance from that mean in the public images' standard deviations, for each pixel."""
    return scene.prior.to(images).energy(images).mean(dim=1) / scene.pixels


def _denoiser(scene: Scene, images: Tensor) -> Tensor:
    """What a trained prior says, for each pixel, of images that are smoothed a little; nothing without one."""
    if scene.trained is None:
        return images.new_zeros(len(images))
    noise = images.new_full((len(images),), SMOOTHED)
    return scene.trained.energy(images * scene.std + scene.mean, noise) / images[0].numel()


PRIORS: Mapping[str, Callable[[Scene, Tensor], Tensor]] = {
    "tv": lambda scene, images: total_variation(images),
    "opponents": lambda scene, images: opponent_variation(images),
    "public_mean": _public_mean,
    "gaussian": _gaussian,
    "denoiser": _denoiser,
}
"""(scene, normalised images (N, B, C, H, W)) -> (N,); differentiable."""


SCHEDULES: Mapping[str, Callable[[int, int], float]] = {
    "constant": lambda done, steps: 1.0,
    "steps": lambda done, steps: 0.1 ** sum(done >= int(share * steps) for share in MILESTONES),
    "cosine": lambda done, steps: (1 + math.cos(math.pi * done / steps)) / 2,
}
"""(steps that were made, all steps) -> factor of the learning rate."""


def warmed(done: int, steps: int) -> float:
    """The factor of the learning rate while it rises over the first ``steps`` steps, of which ``done`` were made."""
    return min((done + 1) / steps, 1.0) if steps else 1.0


def annealed(start: float, end: float, done: int, steps: int) -> float:
    """The weight of a prior that falls from ``start`` to ``end``: smooth pictures first, their details later."""
    return max(end, start * (1 - done / steps) ** 2)


def _softened(gradients: Tensor, share: float) -> Tensor:
    """Large gradients are cut at 1 / share: nowhere at the end of the steps."""
    return (share * gradients).tanh() / share


SIGNS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "adam": lambda gradients, share: gradients,
    "signed-adam": lambda gradients, share: gradients.sign(),
    "soft-signed-adam": _softened,
}
"""(gradients, share of the steps that are left, above 0) -> what Adam sees."""


def _uniform(scene: Scene, rows: Sequence[Victim], numbers: Tensor) -> Tensor:
    return (torch.special.ndtr(numbers) - scene.mean) / scene.std


def _patterned(scene: Scene, rows: Sequence[Victim], numbers: Tensor) -> Tensor:
    """One small square of each image, repeated (Wei et al. 2020)."""
    height, width = numbers.shape[-2:]
    down, across = (torch.arange(side, device=numbers.device) % TILE for side in (height, width))
    return numbers[..., down[:, None], across]


def _around_mean(scene: Scene, rows: Sequence[Victim], numbers: Tensor) -> Tensor:
    return scene.prior.mean.to(numbers).view(scene.shape) + AROUND * numbers


FOUND: Mapping[str, Callable[[Scene, Sequence[Victim], Any], Sequence[Start]]] = {
    "closed-form": lambda scene, victims, config: read_starts(scene, victims),
    "features": lambda scene, victims, config: read_feature_starts(
        scene, victims, getattr(config, "feature_iterations", ITERATIONS)
    ),
}
"""Starts at images that were found, each with its label: (scene, distinct victims, settings) -> one a victim."""


STARTS: Mapping[str, Callable[[Scene, Sequence[Victim], Tensor], Tensor] | None] = {
    "normal": None,
    "uniform": _uniform,
    "patterned": _patterned,
    "public-mean": _around_mean,
}
"""(scene, rows, standard normal numbers (N, B, C, H, W)) -> normalised images; ``None``: these are the variables."""


# What a recipe minimises: one number a row, as a function of the images' variables and the labels' logits.


NO_LABELS = "labels are not known and cannot be read off the last layer, and this attack does not optimise them"


class Labels:
    """Label probabilities of each row: of labels that are known or read off, else a softmax that is optimised."""

    def __init__(
        self, scene: Scene, rows: Sequence[Victim], sources: Sequence[str], found: Sequence[Tensor | None]
    ) -> None:
        is_open = any(labels is None for labels in found)  # reading takes seconds on networks such as ResNet-18
        read = read_labels(scene, rows) if "read" in sources and is_open else [victim.labels for victim in rows]
        given = [other if own is None else own for own, other in zip(found, read, strict=True)]
        fixed = [labels is not None for labels in given]
        if "optimised" not in sources and not all(fixed):
            raise AttackRefused(NO_LABELS)
        unknown = torch.zeros(rows[0].model.examples, dtype=torch.long, device=scene.network.device)
        known = torch.stack([unknown if labels is None else labels for labels in given])
        self._fixed = torch.tensor(fixed, device=known.device)
        self.settled = all(fixed)  # whether nothing is left to optimise
        self._known = F.one_hot(known, scene.classes).to(scene.mean)
        self.notes = tuple("" if labels is not None or "read" not in sources else JOINT for labels in given)

    def select(self, rows: Tensor) -> "Labels":
        """Return the labels of some of the rows (n,)."""
        chosen, rows = copy(self), rows.to(self._fixed.device)
        chosen._fixed, chosen._known = self._fixed[rows], self._known[rows]
        return chosen

    def probabilities(self, logits: Tensor) -> Tensor:
        """(N, B, classes)."""
        if self.settled:
            return self._known
        return torch.where(self._fixed[:, None, None], self._known.to(logits), logits.softmax(dim=2))

    def final(self, logits: Tensor) -> Tensor:
        """The labels (N, B) that belong to these logits."""
        return self.probabilities(logits).argmax(dim=2)


class MatchProblem:
    """Objective plus weighted priors."""

    def __init__(self, recipe: Recipe, scene: Scene, rows: Sequence[Victim], config: Any) -> None:
        precise = recipe.optimiser == "lbfgs" and scene.network.device.type != "mps"
        if "read" in recipe.labels and recipe.start not in FOUND:
            rows = with_passes(scene, rows)
        self._scene = scene
        self._dtype = torch.float64 if precise else scene.mean.dtype
        self._victims = rows
        self._matcher = Matcher(
            scene.network,
            rows,
            OBJECTIVES[recipe.objective],
            "float64" if precise else None,
            often=config.iterations > FEW_STEPS,
        )
        self._coordinates: Coordinates | Relaxation | None = None
        if recipe.variables == "relaxed":
            self._coordinates = relaxation_of(scene)
        if recipe.variables == "decorrelated":
            self._coordinates = coordinates_of(scene.shape).to(scene.mean.double() if precise else scene.mean)
        weights = {
            name: (float(getattr(config, f"{name}_start", 0.0)), getattr(config, name)) for name in recipe.priors
        }
        if scene.trained is None:
            weights.pop("denoiser", None)
        used = {name: pair for name, pair in weights.items() if any(pair)}
        self._penalties = [PRIORS[name] for name in used]
        self._weights = tuple(used.values())
        self._rows = len(rows)
        # Steps of Adam in pixels are followed by a projection; elsewhere the objective sees the projected images.
        self._projects = recipe.box and recipe.variables == "pixels" and recipe.optimiser != "lbfgs"
        self._inside = recipe.box and not self._projects
        self._starts = _found(recipe.start, scene, rows, config)
        read = [None if start is None or "read" not in recipe.labels else start.labels for start in self._starts]
        self.labels = Labels(scene, rows, recipe.labels, read)
        # Whether each update is one of several steps on batches with known labels, without noise, of few parameters.
        few = sum(value.numel() for value in rows[0].gradient.values()) <= PARAMETERS
        self.unrolled = few and self.labels.settled and all(_is_unrolled(victim) for victim in rows)

    @property
    def regular(self) -> bool:
        """Whether there is more to minimise than the mismatch."""
        return bool(self._penalties)

    def weights(self, done: int, steps: int) -> Tensor:
        """Return the priors' weights (N, k), the same in each row, after so many of all steps."""
        values = [annealed(start, end, done, steps) for start, end in self._weights]
        return torch.tensor(values, dtype=self._dtype, device=self._scene.mean.device).expand(self._rows, -1)

    def select(self, rows: Tensor) -> "MatchProblem":
        """Return the problem of some of the rows, by their numbers (n,)."""
        chosen = copy(self)
        chosen._matcher, chosen.labels = self._matcher.select(rows), self.labels.select(rows)
        chosen._victims, chosen._rows = [self._victims[row] for row in rows.tolist()], len(rows)
        return chosen

    def losses(self, variables: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
        """Return what is minimised, (N,): variables (N, B, C, H, W), logits (N, B, classes), priors' weights (N, k)."""
        images = self.images(variables)
        total = self._matcher(images, self.labels.probabilities(logits))
        for number, penalty in enumerate(self._penalties):
            total = total + weights[:, number] * penalty(self._scene, images)
        return total

    def coarsest(self, shape: torch.Size) -> Tensor:
        """The numbers of the coarsest coordinates of each image of a batch (B, C, H, W), flattened."""
        count, *image = shape
        strengths = torch.ones(image)
        if isinstance(self._coordinates, Coordinates):
            strengths = self._coordinates.strengths
        mine = strengths.flatten().argsort(descending=True, stable=True)[: max(1, DIRECTIONS // count)]
        return (torch.arange(count)[:, None] * strengths.numel() + mine.cpu()).flatten().to(self._scene.mean.device)

    def jacobian(self, row: int, variables: Tensor, logits: Tensor, places: Tensor) -> Tensor:
        """How the update of one row changes with some of its variables (B, C, H, W): float32 (places, parameters)."""
        labels = self.labels.select(torch.tensor([row])).probabilities(logits[None])
        matcher = Matcher(self._scene.network, self._victims[row : row + 1], squared_distance, "float32")

        def sent(variables: Tensor) -> Tensor:
            (update,) = matcher.updates(self.images(variables[None]), labels)
            return torch.cat([value.flatten() for value in update.values()])

        def along(place: Tensor) -> Tensor:
            direction = F.one_hot(place, variables.numel()).to(variables).view_as(variables)
            return torch.func.jvp(sent, (variables,), (direction,))[1]

        return torch.cat([torch.func.vmap(along)(part) for part in places.split(AT_ONCE_ALONG)])

    def linearised(self, row: int, variables: Tensor, logits: Tensor) -> "_Linearised":
        """The update of one row near its variables (B, C, H, W): its derivatives in float32."""
        labels = self.labels.select(torch.tensor([row])).probabilities(logits[None])
        leaf = variables.detach().requires_grad_()
        with torch.no_grad():
            (exact,) = self._matcher.select(torch.tensor([row])).updates(self.images(leaf[None]), labels)
        matcher = Matcher(self._scene.network, self._victims[row : row + 1], squared_distance, "float32")
        with torch.enable_grad():
            (update,) = matcher.updates(self.images(leaf[None]), labels)
            sent = torch.cat([value.flatten() for value in update.values()])
            dual = torch.zeros_like(sent).requires_grad_()
            (pulled,) = torch.autograd.grad(sent, leaf, dual, create_graph=True)
        gradient = self._victims[row].gradient
        rest = torch.cat([(gradient[name] - value).flatten() for name, value in exact.items()])
        return _Linearised(leaf, sent, dual, pulled, rest.to(sent))

    def pairing(self, row: int) -> tuple[int, tuple[int, ...]]:
        """A row's upload, and the dummies of its steps in turn; no dummies where they are taken as they are."""
        victim = self._victims[row]
        return id(victim.gradient), () if victim.orders is None else tuple(victim.orders.flatten().tolist())

    def together(self, row: int, pair: Tensor) -> bool:
        """Whether each of the steps of a row's only client holds both of two dummies (2,), or neither."""
        victim, training = self._victims[row], self._victims[row].model.training
        if training is None or training.clients > 1:
            return False
        orders = torch.tensor(training.batches(victim.model.examples)) if victim.orders is None else victim.orders
        held = (orders[..., None] == pair.to(orders.device)).any(dim=1)
        return bool((held[:, 0] == held[:, 1]).all())

    def alike(self, variables: Tensor, logits: Tensor) -> Tensor:
        """Make standard normal variables (N, B, C, H, W) nearly the same for images of one label."""
        labels = self.labels.final(logits)
        first = (labels[:, :, None] == labels[:, None]).int().argmax(dim=2)  # the first image of each one's label
        shared = variables[torch.arange(len(variables), device=first.device)[:, None], first]
        near = (1 - APART**2) ** 0.5 * shared + APART * variables
        alone = first == torch.arange(first.shape[1], device=first.device)
        return torch.where(alone[:, :, None, None, None], variables, near)

    def images(self, variables: Tensor) -> Tensor:
        """Map variables to normalised images, both (N, B, C, H, W)."""
        images = variables if self._coordinates is None else self._coordinates.images(variables)
        return self._scene.box(images) if self._inside else images

    def project(self, variables: Tensor) -> Tensor:
        """Return the nearest variables that are allowed."""
        return self._scene.box(variables) if self._projects else variables

    def start(self, name: str, rows: Sequence[Victim], numbers: Tensor) -> Tensor:
        """Return the variables (N, B, C, H, W) to start from, given standard normal numbers."""
        make = STARTS.get(name)
        started = [start.images for start in self._starts if start is not None]
        if not started and make is None:
            return self.project(numbers)
        images = make(self._scene, rows, numbers) if make is not None else _around(started, rows, numbers)
        images = self._scene.box(images)
        return images if self._coordinates is None else self._coordinates.of(images.to(self._dtype))


def _is_unrolled(victim: Victim) -> bool:
    training = victim.model.training
    several = training is not None and training.steps > 1
    return several and not (victim.model.mechanism.protects or victim.more)


def _found(name: str, scene: Scene, rows: Sequence[Victim], config: Any) -> list[Start | None]:
    """Each row's start at images that were found, where the recipe asks for such."""
    if name not in FOUND:
        return [None] * len(rows)
    distinct = [victim for victim, _ in by_victim(rows)]
    starts = dict(zip(map(id, distinct), FOUND[name](scene, distinct, config), strict=True))
    return [starts[id(victim)] for victim in rows]


def _around(images: Sequence[Tensor], rows: Sequence[Victim], numbers: Tensor) -> Tensor:
    """Images (N, B, C, H, W) around those found; each victim's first row starts at the very images."""
    first = [number == 0 or rows[number - 1] is not victim for number, victim in enumerate(rows)]
    spread = torch.where(torch.tensor(first, device=numbers.device), 0.0, AROUND)
    return torch.stack(list(images)) + spread[:, None, None, None, None] * numbers


# A mismatch of so much of what an image of zeros would have is a match: float32 cannot tell much more apart.
SOLVED = 1e-12


def run_recipe(
    recipe: Recipe, scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: Any, report: Report
) -> Outcome:
    """Run a recipe on rows of (victim, restart) together, from standard normal numbers (N, B, C, H, W) and logits."""
    recipe = replace(recipe, start=getattr(config, "start", recipe.start))
    try:
        problem = MatchProblem(recipe, scene, rows, config)
    except AttackRefused as refused:
        if not recipe.otherwise:
            raise
        other = replace(recipe, start=recipe.otherwise, otherwise="")
        outcome = run_recipe(other, scene, rows, images, logits, config, report)
        why = f"started without features: {refused}"
        return replace(outcome, notes=tuple("; ".join(filter(None, (note, why))) for note in outcome.notes))
    start = problem.start(recipe.start, rows, images)
    if recipe.optimiser == "lbfgs":
        return _lbfgs(problem, rows, start, logits, config.iterations, recipe.objective, report)
    return _adam(problem, start, logits, config, recipe, report)


def _lbfgs(
    problem: MatchProblem,
    rows: Sequence[Victim],
    variables: Tensor,
    logits: Tensor,
    iterations: int,
    objective: str,
    report: Report,
) -> Outcome:
    """Minimise variables and logits in one vector a row; the logits of rows with fixed labels have no effect."""
    points = _RowPoints(problem, variables, logits)
    start = wide(torch.cat([variables.flatten(1), logits.flatten(1)], dim=1))
    # A likelihood has no least value that is known.
    known = not problem.regular and objective != "likelihood"
    if problem.unrolled and not problem.regular and objective == "squared-distance":
        minimum = _by_curvature(problem, points, start, rows, iterations, report)
    else:
        minimum = minimise(points, start, iterations, report, SOLVED * _size(rows, objective) if known else None)
    ended, last = points.split(minimum.points)
    return Outcome(
        problem.images(ended), problem.labels.final(last), minimum.values, minimum.iterations, problem.labels.notes
    )


# Of several steps an update says much about few coordinates of the images and little about most, and L-BFGS goes along
# the few. Images of one label in one batch differ only along the others, so the rest of the steps are Gauss-Newton
# steps, solved by conjugate gradients: the curvature of the coarsest coordinates is known as a whole, of the others one
# by one. It depends on which examples share a step: a victim's pairings have one each. There are more pixels than
# parameters. What the update leaves open is kept piecewise smooth (total variation, by weighted squares), for two
# photographs that are mixed have the edges of both.
PARAMETERS = 2**17  # of a network, at most: the change of all of them is kept for each direction
DIRECTIONS = 1024  # of a batch's variables, the coarsest of each image, whose curvature is computed exactly, at most
AT_ONCE_ALONG = 16  # of them, together
ROUNDING = 1e-5  # share of each direction's curvature that is added to it: sums are made in float32
PROBES = 20  # random combinations of the update from which the curvature along the others is estimated
PROBE = 20261129  # their seed
HEAVIEST, LIGHTEST = 1e-5, 1e-9  # weights of the variation, where the mismatch is a share
LIGHTER = 0.1  # times the weight of the step before
FIRST = 5  # the share of the steps that L-BFGS takes, one in so many
STEPS = 10, 20  # that one of Gauss-Newton counts as: so many that there are ROUNDS, within these bounds
ROUNDS = 12
PRODUCTS = 300, 150, 100  # of conjugate gradients in it, where one restart is left, two or more
FLAT = 0.1  # of the mean length of differences: below it they are no edges
LEVEL = 0.01  # weight of the variables' squares, next to the variation, which does not feel their level
HALVINGS = 8  # of a step that leads up
QUARTERS = 4  # of the steps; after each, the better half of a victim's restarts goes on
APART = 0.1  # of the start of an image that it does not share with those of its label
CROSSINGS = 8  # of the best restart with another that are tried, at most
ALIKE = 0.9  # cosine of two images' differences in two restarts, from which there is nothing to exchange
AHEAD, AHEAD_PRODUCTS = 2, 60  # steps until crossings are compared, and products in each


def _by_curvature(
    problem: MatchProblem,
    points: "_RowPoints",
    start: Tensor,
    rows: Sequence[Victim],
    iterations: int,
    report: Report,
) -> Minimum:
    """Minimise the mismatch from ``start`` (N, D): L-BFGS first, then Gauss-Newton steps of each victim's best rows."""
    later = iterations - -(-iterations // FIRST)
    counted = min(max(STEPS[0], later // ROUNDS), STEPS[1])
    rounds = later // counted
    quarter = max(1, rounds // QUARTERS)
    weights = [max(LIGHTEST, HEAVIEST * LIGHTER**turn) for turn in range(rounds - 1)] + [LIGHTEST]
    variables, logits = points.split(start)
    descent = _Descent(problem, problem.alike(variables, logits), logits, _size(rows, "squared-distance"))
    values = descent.begin(range(len(rows)), iterations - rounds * counted, report)
    running = [numbers for _, numbers in by_victim(rows)]
    for turn in range(rounds):
        for members in running:
            for row in members:
                descent.step(row, weights[turn], len(members))
                descent.made[row] += counted
        values = descent.values()
        if not report(int(descent.made.max()), values):
            break
        if (turn + 1) % quarter == 0:  # restarts that are behind end here
            running = [
                sorted(members, key=lambda row: float(values[row]))[: -(-len(members) // 2)] for members in running
            ]
        if turn + 1 == quarter < rounds:
            descent.pair_alike(running, weights[:quarter], iterations - rounds * counted, counted)
            for members in running:
                descent.cross(members, weights[turn])
    return Minimum(torch.cat([descent.variables.flatten(1), descent.logits.flatten(1)], dim=1), values, descent.made)


class _Descent:
    """Where rows stand, and the curvature of each victim and pairing where the first of its rows stood."""

    def __init__(self, problem: "MatchProblem", start: Tensor, logits: Tensor, sizes: Tensor) -> None:
        self.problem, self.logits = problem, logits
        self.start, self.variables = start, start.clone()  # (N, B, C, H, W)
        self.made = torch.zeros(len(start), dtype=torch.long, device=start.device)  # (N,), steps
        self._sizes = sizes
        self._known: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def begin(self, rows: Sequence[int], steps: int, report: Report) -> Tensor:
        """Go some steps of L-BFGS from the rows' starts, and return their mismatches (n,)."""
        index = torch.tensor(list(rows), device=self.start.device)
        points = _RowPoints(self.problem.select(index), self.start[index], self.logits[index])
        start = torch.cat([self.start[index].flatten(1), self.logits[index].flatten(1)], dim=1)
        minimum = minimise(points, start, steps, report, SOLVED * self._sizes[index])
        self.variables[index], _ = points.split(minimum.points)
        self.made[index] = minimum.iterations
        return minimum.values

    def step(self, row: int, weight: float, compared: int) -> None:
        """Make a Gauss-Newton step with one row, of so many of its victim's that are compared."""
        products = PRODUCTS[min(compared, len(PRODUCTS)) - 1]
        self.variables[row] = self._stepped(row, self.variables[row], weight, products)

    def _stepped(self, row: int, variables: Tensor, weight: float, products: int) -> Tensor:
        """Return where such a step leads a row from any variables (B, C, H, W)."""
        problem, size, logits = self.problem, float(self._sizes[row]), self.logits[row]
        places, key = problem.coarsest(variables.shape), problem.pairing(row)
        if key not in self._known:
            along = problem.jacobian(row, variables, logits, places)
            self._known[key] = wide(along @ along.mT) / size
        near, variation = problem.linearised(row, variables, logits), _Variation.at(problem, variables, weight)
        change = _solved(near, variation, size, places, self._known[key], products)
        return _downhill(problem, row, variables, change, logits, variation, size)

    def values(self) -> Tensor:
        """The mismatches, (N,)."""
        with torch.no_grad():
            return self.problem.losses(self.variables, self.logits, self.problem.weights(1, 1))

    def pair_alike(self, running: Sequence[Sequence[int]], weights: Sequence[float], steps: int, counted: int) -> None:
        """Let rows with another pairing than their victim's first start anew with that one."""
        leaders, again = list(range(len(self.variables))), []
        for first, *others in running:
            for row in others:
                if self.problem.pairing(row) != self.problem.pairing(first):
                    leaders[row] = first
                    again.append(row)
        if not again:
            return
        self.problem = self.problem.select(torch.tensor(leaders))
        self.begin(again, steps, lambda *_: not time_is_up())
        for weight in weights:
            for row in again:
                self.step(row, weight, len(again))
                self.made[row] += counted

    def cross(self, members: Sequence[int], weight: float) -> None:
        """Give the best of a victim's rows pairs of images of its others, of one pairing, where it then gets lower."""
        values = self.values()
        first, *others = sorted(members, key=lambda row: float(values[row]))
        offered = self._unlike(first, others)[:CROSSINGS]
        if not offered:
            return
        taken = self.variables[first].clone()
        best, lowest = self._ahead(first, taken, weight)
        for pair, row in offered:
            if time_is_up():
                break
            tried = taken.index_copy(0, pair, self.variables[row, pair])
            ended, value = self._ahead(first, tried, weight)
            if value < lowest:
                taken, best, lowest = tried, ended, value
        self.variables[first] = best

    def _unlike(self, first: int, others: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Two images of one label, and a row where they differ otherwise than in the first; the most unlike first."""
        labels, images = self.problem.labels.final(self.logits)[first], self.problem.images(self.variables)
        found = []
        for pair in torch.combinations(torch.arange(len(labels), device=labels.device)):
            if labels[pair[0]] == labels[pair[1]]:
                apart = (images[:, pair[0]] - images[:, pair[1]]).flatten(1)
                alike = F.cosine_similarity(apart, apart[first : first + 1])
                # Where they share all steps, it is the same upload when they are exchanged.
                alike = alike.abs() if self.problem.together(first, pair) else alike
                found += [(float(alike[row]), pair, row) for row in others if alike[row] < ALIKE]
        return [(pair, row) for _, pair, row in sorted(found, key=lambda each: each[0])]

    def _ahead(self, row: int, variables: Tensor, weight: float) -> tuple[Tensor, float]:
        """Where a few steps lead a row from these variables (B, C, H, W), and the mismatch there."""
        for _ in range(AHEAD):
            variables = self._stepped(row, variables, weight, AHEAD_PRODUCTS)
        here = self.problem.select(torch.tensor([row]))
        with torch.no_grad():
            return variables, float(here.losses(variables[None], self.logits[row][None], here.weights(1, 1)))


@dataclass(frozen=True, eq=False)
class _Linearised:
    """The update (P,) as a linear function of changes of variables (B, C, H, W)."""

    leaf: Tensor
    sent: Tensor
    dual: Tensor  # (P,)
    pulled: Tensor  # J^T dual, whose derivative along the dual is J
    rest: Tensor  # what was heard less what would be sent

    def push(self, change: Tensor) -> Tensor:
        """J change, (P,)."""
        return torch.autograd.grad(self.pulled, self.dual, change, retain_graph=True)[0]

    def pull(self, along: Tensor) -> Tensor:
        """J^T along, like the variables."""
        return torch.autograd.grad(self.sent, self.leaf, along, retain_graph=True)[0]

    def squares(self) -> Tensor:
        """Estimate how much the update changes, squared, with each of the variables."""
        generator = torch.Generator().manual_seed(PROBE)
        total = torch.zeros_like(self.leaf)
        for _ in range(PROBES):
            # The gradient of a random combination: its mean square is the diagonal of J^T J (Hutchinson 1990).
            along = torch.randn(len(self.sent), generator=generator, dtype=torch.float64).to(self.sent)
            total += self.pull(along).square() / PROBES
        return total


@dataclass(frozen=True, eq=False)
class _Variation:
    """Weighted squares of differences of neighbours, which have the value and slope of their lengths' sum."""

    problem: MatchProblem
    weights: Tensor  # (B, 1, H, W), the same for all channels and directions of a place
    unmixed: Tensor  # (C, C), after which photographs' channels are independent
    weight: float  # of one variable

    @staticmethod
    def at(problem: MatchProblem, variables: Tensor, weight: float) -> "_Variation":
        """Weigh differences down by their length at these variables (B, C, H, W)."""
        unmixed = torch.linalg.inv(coordinates_of(variables.shape[1:]).channels).to(variables)  # type: ignore[arg-type]
        plain = _Variation(problem, variables.new_ones(1), unmixed, weight)
        squares = plain.differences(variables).square().sum(dim=(0, 2)).unsqueeze(1)
        lengths = squares.sqrt()
        weights = 1 / (lengths + FLAT * lengths.mean() + torch.finfo(lengths.dtype).tiny)
        total = (weights * squares).sum().clamp(min=torch.finfo(lengths.dtype).tiny)
        return replace(plain, weights=weights * variables.numel() / 2 / total)

    def differences(self, variables: Tensor) -> Tensor:
        """Across and down, (2, B, C, H, W)."""
        images = torch.einsum("dc,bchw->bdhw", self.unmixed, self.problem.images(variables[None])[0])
        return torch.stack([F.pad(images.diff(dim=3), (0, 1)), F.pad(images.diff(dim=2), (0, 0, 0, 1))])

    def energy(self, variables: Tensor) -> Tensor:
        """A quadratic form, ()."""
        squares = (self.weights * self.differences(variables).square()).sum() + LEVEL * variables.square().sum()
        return self.weight / variables.numel() * squares

    def slope(self, variables: Tensor) -> Tensor:
        """Half its gradient; linear in the variables (B, C, H, W)."""
        leaf = variables.detach().requires_grad_()
        return torch.autograd.grad(self.energy(leaf), leaf)[0] / 2


def _solved(
    near: _Linearised, variation: _Variation, size: float, places: Tensor, known: Tensor, products: int
) -> Tensor:
    """Return the change of the variables (B, C, H, W) that is best to first order, by conjugate gradients."""
    floor = variation.weight / near.leaf.numel()
    curvature = known.clone()
    curvature.diagonal().mul_(1 + ROUNDING).add_(floor)
    factor, failed = torch.linalg.cholesky_ex(curvature)
    factor = curvature.diagonal().sqrt().diag() if failed else factor
    scales = near.squares().flatten() / size + floor

    def eased(rest: Tensor) -> Tensor:
        flat = rest.flatten()
        exact = torch.cholesky_solve(flat[places, None], factor)[:, 0]
        return (flat / scales).index_copy(0, places, exact).view_as(rest)

    rest = near.pull(near.rest) / size - variation.slope(near.leaf)
    change, direction = torch.zeros_like(rest), eased(rest)
    length = (rest * direction).sum()
    for _ in range(products):
        if not float(length) > 0:
            break
        product = near.pull(near.push(direction)) / size + variation.slope(direction)
        step = length / (direction * product).sum()
        change, rest = change + step * direction, rest - step * product
        easier = eased(rest)
        before, length = length, (rest * easier).sum()
        direction = easier + length / before * direction
    return change


def _downhill(
    problem: MatchProblem,
    row: int,
    variables: Tensor,
    change: Tensor,
    logits: Tensor,
    variation: _Variation,
    size: float,
) -> Tensor:
    """Return the first of variables + change, half of it, and so on, that is better."""
    here = problem.select(torch.tensor([row]))

    def value(tried: Tensor) -> float:
        with torch.no_grad():
            mismatch = here.losses(tried[None], logits[None], here.weights(1, 1))[0]
            return float(mismatch) / size + float(variation.energy(tried))

    best = value(variables)
    for halving in range(HALVINGS):
        tried = variables + 0.5**halving * change
        if value(tried) < best:
            return tried
    return variables


class _RowPoints:
    """Values and gradients of some rows' points, as :func:`minimise` asks for them."""

    def __init__(self, problem: MatchProblem, variables: Tensor, logits: Tensor) -> None:
        self._all = self._problem = problem
        self._index = torch.arange(len(variables))
        self._shape, self._logits = variables.shape[1:], logits.shape[1:]

    def __call__(self, points: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.equal(index.cpu(), self._index):
            self._index, self._problem = index.cpu(), self._all.select(index)
        leaf = points.detach().requires_grad_()
        values = self._problem.losses(*self.split(leaf), self._problem.weights(1, 1))
        (gradients,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach(), gradients

    def split(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Variables (M, B, C, H, W) and logits (M, B, classes) of points (M, D)."""
        pixels = self._shape.numel()
        return points[:, :pixels].unflatten(1, self._shape), points[:, pixels:].unflatten(1, self._logits)


def _size(rows: Sequence[Victim], objective: str) -> Tensor:
    """What each row's objective is about, where nothing matches: (N,)."""
    if objective != "squared-distance":
        return torch.tensor([float(len(victim.uploads)) for victim in rows])
    lengths = [
        torch.stack([wide(value).square().sum() for sent in victim.uploads for value in sent.gradient.values()]).sum()
        for victim in rows
    ]
    return torch.stack(lengths)


def _adam(
    problem: MatchProblem, variables: Tensor, logits: Tensor, config: Any, recipe: Recipe, report: Report
) -> Outcome:
    variables, logits = variables.clone(), logits.clone()
    adam = torch.optim.Adam([variables, logits], lr=config.learning_rate)
    steps, factor, signs = config.iterations, SCHEDULES[recipe.schedule], SIGNS[recipe.optimiser]
    warm_up, last = getattr(config, "warm_up", 0), problem.weights(1, 1)
    best = Best(variables, logits)
    evaluate = Evaluator(problem.losses, steps)
    for step in range(steps):
        adam.param_groups[0]["lr"] = config.learning_rate * warmed(step, warm_up) * factor(step, steps)
        weights = problem.weights(step, steps)
        losses, (*gradients, penalties) = evaluate(variables, logits, weights)
        best.keep(losses + ((last - weights) * penalties).sum(dim=1), variables, logits)
        variables.grad, logits.grad = (signs(gradient, 1 - step / steps) for gradient in gradients)
        adam.step()
        variables.copy_(problem.project(variables))
        if not report(step + 1, best.losses):
            break
    best.keep(problem.losses(variables, logits, last).detach(), variables, logits)
    iterations = torch.full((len(variables),), step + 1)
    images, labels = problem.images(best.variables), problem.labels.final(best.logits)
    ended = f"stopped after {step + 1} of {steps} steps, since time was up" if step + 1 < steps else ""
    notes = tuple("; ".join(text for text in (note, evaluate.note, ended) if text) for note in problem.labels.notes)
    return Outcome(images, labels, best.losses, iterations, notes)


class Best:
    """The iterate of each row whose own loss was the lowest so far, with that loss; a NaN never is the lowest."""

    def __init__(self, variables: Tensor, logits: Tensor) -> None:
        self.variables = variables.detach().clone()
        self.logits = logits.detach().clone()
        self.losses = variables.new_full((len(variables),), torch.inf, requires_grad=False)

    def keep(self, losses: Tensor, variables: Tensor, logits: Tensor) -> None:
        """Compare the losses (N,) at these very iterates with the lowest ones so far."""
        lower = losses < self.losses
        self.losses = torch.where(lower, losses, self.losses)
        self.variables = torch.where(lower[:, None, None, None, None], variables.detach(), self.variables)
        self.logits = torch.where(lower[:, None, None], logits.detach(), self.logits)


# The most probable row of a table behind noise: each value by how frequent it is and how well it explains the upload.
#
# Matching follows noise as readily as rows: behind much of it, what it reads is worse than a guess. Here each column is
# decided in turn, all others as they are (iterated conditional modes, Besag 1986), by the mechanism's own density and
# the shares of values among public rows. Where an upload says nothing, the most frequent value and the median are left.


LIKELY = Recipe("likelihood", "lbfgs", box=True)
POLISHED = 200  # iterations
SURE = 1e3  # logit of a label that is settled
SWEEPS = 4  # over all columns, at most: later ones change hardly anything
AT_ONCE = 64  # values that are compared together
ROUND = 0.1  # deviations from the median within which its density is rounded, for searches along derivatives
NARROWEST = 1e-3  # of a number's range: the least deviation of a column that is nearly constant


@dataclass(frozen=True, eq=False)
class NumberPrior:
    """Laplace distributions of numbers around their medians, normalised: many a column is mostly one number."""

    middle: Tensor  # (numbers,)
    deviation: Tensor  # (numbers,), mean absolute ones, above 0

    def energy(self, numbers: Tensor) -> Tensor:
        """Return minus the log-density (N,) of numbers (N, B, numbers), but for a constant."""
        return (((numbers - self.middle) / self.deviation).square() + ROUND**2).sqrt().sum(dim=(1, 2))


@dataclass(frozen=True, eq=False)
class _Choice:
    """The values of one category or flag."""

    places: slice  # the features
    values: Tensor  # (values, places), normalised
    surprise: Tensor  # (values,), minus the logarithms of their shares


@dataclass(frozen=True, eq=False)
class _RowPrior:
    """What public rows say about each column, taken as independent."""

    middle: Tensor  # (1, 1, features), the most frequent values and medians, normalised
    choices: tuple[_Choice, ...]  # of categories, flags, and whether a number is missing
    places: list[int]  # features that are numbers
    numbers: NumberPrior  # their distribution

    @staticmethod
    def of(scene: Scene, public: Tensor) -> "_RowPrior":
        """Count public rows (M, 1, 1, features) on the [0, 1] scale."""
        rows = public.to(wide(scene.mean))
        flat, mean, std = rows.flatten(1), wide(scene.mean).flatten(), wide(scene.std).flatten()
        discrete = [where for where, _ in _discrete(scene)]
        choices = tuple(_choice(flat[:, where], where, one_hot, mean, std) for where, one_hot in _discrete(scene))
        taken = {place for where in discrete for place in range(where.start, where.stop)}
        places = [place for place in range(flat.shape[1]) if place not in taken]
        middle = (most_frequent(scene.columns, rows) - mean) / std
        spread = (((flat - mean) / std)[:, places] - middle.flatten()[places]).abs().mean(dim=0)
        numbers = NumberPrior(middle.flatten()[places], spread.clamp(min=float(NARROWEST / std)))
        return _RowPrior(middle, choices, places, numbers)


def _discrete(scene: Scene) -> Iterator[tuple[slice, bool]]:
    """Features that hold one of a few values, and whether exactly one of them is 1."""
    for column, where in slices(scene.columns):
        if not column.is_number:
            yield where, column.kind == "category"
        elif column.optional:
            yield slice(where.stop - 1, where.stop), False


def _choice(rows: Tensor, where: slice, one_hot: bool, mean: Tensor, std: Tensor) -> _Choice:
    """Count the values of a column's rows (M, places); one that never occurs counts as half a row."""
    width = rows.shape[1] if one_hot else 2
    values = torch.eye(width).to(rows) if one_hot else torch.tensor([[0.0], [1.0]]).to(rows)
    counts = rows.sum(dim=0) if one_hot else torch.stack([(1 - rows).sum(), rows.sum()])
    shares = (counts + 0.5) / (len(rows) + width / 2)
    return _Choice(where, (values - mean) / std, -shares.log())


def decoded(scene: Scene, rows: Sequence[Victim], images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return what is decided from rows (N, B, 1, 1, features) if they explain more than noise, else frequent values."""
    if scene.public_images is None or not len(scene.public_images):
        return images
    prior = _RowPrior.of(scene, scene.public_images)
    made = [
        _decided(_Posterior(scene, victim, known, config, prior), wide(start))
        if victim.model.mechanism.protects and victim.model.has_density
        else start
        for victim, start, known in zip(rows, images, labels, strict=True)
    ]
    return torch.stack(made).to(images)


class _Posterior:
    """Minus the logarithm of how probable rows of one victim are."""

    def __init__(self, scene: Scene, victim: Victim, labels: Tensor, config: Any, prior: _RowPrior) -> None:
        self.scene, self.prior = scene, prior
        self.problem = MatchProblem(LIKELY, scene, [victim], config)
        self.labels = SURE * wide(F.one_hot(labels, scene.classes).to(scene.mean))

    def misfits(self, images: Tensor) -> Tensor:
        """Of rows (N, B, 1, 1, features): (N,)."""
        parts = []
        with torch.no_grad():
            for part in images.split(AT_ONCE):
                problem = self.problem.select(torch.zeros(len(part), dtype=torch.long))
                logits = self.labels.expand(len(part), *self.labels.shape)
                parts.append(problem.losses(part, logits, problem.weights(1, 1)))
        return torch.cat(parts)

    def energy(self, images: Tensor) -> float:
        """Of rows (B, 1, 1, features)."""
        chosen = (_nearest(images, choice) for choice in self.prior.choices)
        surprise = sum(float(each.surprise[at].sum()) for each, at in zip(self.prior.choices, chosen, strict=True))
        numbers = self.prior.numbers.energy(images[None, :, 0, 0, self.prior.places])
        return float(self.misfits(images[None])) + surprise + float(numbers)

    def with_numbers(self, images: Tensor) -> Tensor:
        """The same rows (B, 1, 1, features) with the most probable numbers."""
        logits = self.labels[None]
        return fitted_numbers(self.problem, images[None], logits, self.prior.places, self.prior.numbers)[0]


def _nearest(images: Tensor, choice: _Choice) -> Tensor:
    """Which value each of the rows (B, 1, 1, features) holds, (B,)."""
    return torch.cdist(images[:, 0, 0, choice.places], choice.values).argmin(dim=1)


def _decided(posterior: _Posterior, start: Tensor) -> Tensor:
    """The decision for one victim's rows: what was read counts if it gains half a unit a number (Wilks 1938)."""
    middle = posterior.prior.middle.expand_as(start)
    read, guessed = (_settled(posterior, posterior.with_numbers(begin)) for begin in (start, middle))
    gain = posterior.energy(guessed) - posterior.energy(read)
    return posterior.scene.box(read if gain > start.numel() / 2 else guessed)


def _settled(posterior: _Posterior, images: Tensor) -> Tensor:
    """Decide each value of each row in turn, then all numbers, until nothing changes."""
    for _ in range(SWEEPS):
        before = images
        for example in range(len(images)):
            for choice in posterior.prior.choices:
                tried = images.repeat(len(choice.values), 1, 1, 1, 1)
                tried[:, example, 0, 0, choice.places] = choice.values
                images = tried[int((posterior.misfits(tried) + choice.surprise).argmin())]
        if torch.equal(before, images):
            break
        images = posterior.with_numbers(images)
    return images


def fitted_numbers(
    problem: MatchProblem, images: Tensor, logits: Tensor, places: list[int], prior: NumberPrior | None = None
) -> Tensor:
    """Return rows (N, B, 1, 1, features) with the same categories, and those numbers that fit best."""
    if not places:
        return images
    images, logits = wide(images), wide(logits)

    def with_numbers(points: Tensor, index: Tensor) -> Tensor:
        """The rows (n, B, 1, 1, features) with these numbers (n, B x numbers)."""
        rows = images[index].clone()
        rows[..., places] = points.view(*rows.shape[:-1], len(places))
        return rows

    def losses(points: Tensor, index: Tensor) -> Tensor:
        chosen, rows = problem.select(index), with_numbers(points, index)
        values = chosen.losses(rows, logits[index], chosen.weights(1, 1))
        return values if prior is None else values + prior.energy(rows[:, :, 0, 0, places])

    ended = minimise(differentiable(losses), images[..., places].flatten(1), POLISHED).points
    return with_numbers(ended, torch.arange(len(images)))


# Many restarts on one upload of rows, put together: each row of a batch as most of them see it.
#
# Rows of a batch come in no order, so each restart's are matched with those of the restart with the lowest loss (Vero
# et al.: TabLeak, ICML 2023, section 4.2). The pool is offered where the attack's own objective says that it is better.
# Behind noise, public rows decide with the upload, so that nothing is read into noise alone.


RELAXED = Recipe("cosine", "adam", "cosine", variables="relaxed")
POLISH = Recipe("squared-distance", "lbfgs", box=True)


def run_ensemble(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: Any, report: Report
) -> Outcome:
    """Run the attack; arguments and errors are those of :func:`run_recipe`.

    The rows of each restart are made hard: one value a category. The pool of all restarts of a victim takes the place
    of the best of them if its loss is lower.
    """
    relaxation = relaxation_of(scene)
    outcome = run_recipe(RELAXED, scene, rows, images, logits, config, report)
    made, labels = _whole(outcome.images), _whole(outcome.labels)
    hard = relaxation.hard(made)
    losses = _losses(scene, rows, hard, labels, config)
    for _, members in by_victim(rows):
        best = min(members, key=lambda row: float(losses[row]))
        orders = [metrics.match(made[best], made[row]) for row in members]
        pool = relaxation.pooled([made[row][order.to(made.device)] for row, order in zip(members, orders, strict=True)])
        loss = _losses(scene, [rows[best]], pool[None], labels[best][None], config)[0]
        if loss < losses[best]:
            hard[best], losses[best] = pool, loss
    offered = [min(members, key=lambda row: float(losses[row])) for _, members in by_victim(rows)]
    victims = [rows[row] for row in offered]
    polished = _polished(scene, victims, hard[offered], labels[offered], config)
    # Restarts are chosen by how well they match; what is decided for the chosen one matches less well, on purpose.
    losses[offered] = _losses(scene, victims, polished, labels[offered], config)
    hard[offered] = decoded(scene, victims, polished, labels[offered], config)
    return replace(outcome, images=hard, losses=losses)


def _polished(scene: Scene, rows: Sequence[Victim], images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Rows with the same categories, and those numbers that match best."""
    logits = SURE * F.one_hot(labels, scene.classes).to(images)
    places = relaxation_of(scene).free(images.shape[-1])
    return scene.box(fitted_numbers(MatchProblem(POLISH, scene, rows, config), images, logits, places)).to(images)


def _whole(values: Tensor | tuple[Tensor, ...]) -> Tensor:
    return values if isinstance(values, Tensor) else torch.stack(values)


def _losses(scene: Scene, rows: Sequence[Victim], images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """How far from what was heard these rows and labels are, (N,)."""
    problem = MatchProblem(replace(RELAXED, variables="pixels"), scene, rows, config)
    sure = SURE * F.one_hot(labels, scene.classes).to(images)
    with torch.no_grad():
        return problem.losses(images, sure, problem.weights(1, 1))
