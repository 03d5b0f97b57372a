"""The plans of clients: one frozen object samples, releases and accounts, so that claims cannot drift from deeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedpriv.accounting import Guarantee, Release, guarantee
from fedpriv.accounting.correlated import noise_factors
from fedpriv.accounting.proofs import PADDING_TAIL
from fedpriv.accounting.release import Correlation
from fedpriv.accounting.skellam import LEVELS
from fedpriv.core.algorithm import ModelRelease, algorithm_of
from fedpriv.core.config import Experiment
from fedpriv.core.config.rules import correlation_of, noise_places
from fedpriv.core.errors import InputError
from fedpriv.core.names import SamplingName
from fedpriv.core.numbers import several
from fedpriv.core.randomness import NoiseStream, Secret, numpy_stream
from fedpriv.data.sampling import Sampling
from fedpriv.gradients import DenseGradients, GradientOperator, StackedGradients, Vector
from fedpriv.mechanisms import MechanismSettings
from fedpriv.mechanisms.machinery.base import Mechanism, NoiseAt, Target
from fedpriv.mechanisms.machinery.quantisation import NoiseShare
from fedpriv.mechanisms.machinery.redistribution import Redistribution


@dataclass(frozen=True)
class Plan:
    """What one client does with its data over a whole run."""

    client: int  # the partition's number, from 0
    sampling: Sampling  # how batches are drawn from the client's examples
    steps_per_round: int  # gradient steps in a round; 1 for FedSGD
    # the mechanism's settings with the noise itself (sigma, scale or kappa) in place of any target. Mechanism and
    # ledger both read it here and nowhere else; this is how the adversary knows it, too.
    config: MechanismSettings
    tensors: tuple[int, ...]  # the number of coordinates of each parameter tensor, in the model's order
    seed: int  # that batches are drawn by: the experiment's, or a secret one
    redistribution: Redistribution | None = None  # r, for hgm
    # where what this client releases gets noise before anybody else reads it. By default at the client alone: whoever
    # masks it, or adds noise at the server, has to say so.
    noise_places: tuple[NoiseAt, ...] = ("clients",)
    correlation: Correlation | None = None  # of the noise of several rounds; `None`: it is independent

    def __post_init__(self) -> None:
        self.config.require_noise_at(*self.noise_places)
        if self.config.noise is not None and self.config != self.config.with_noise(self.config.noise):
            raise ValueError(f"the settings in the plan of client {self.client} hold more than the noise itself")
        if self.config.on_gradients:
            self.config.mechanism(self.redistribution)

    def steps(self, round_number: int) -> range:
        """The numbers, from 0 over the whole run, of the gradient steps of a round (counted from 1)."""
        first = (round_number - 1) * self.steps_per_round
        return range(first, first + self.steps_per_round)

    def batch(self, step: int) -> np.ndarray:
        """The examples of one step, as positions in the client's partition."""
        return self.sampling.batch(self.seed, self.client, step)

    @cached_property
    def mechanism(self) -> Mechanism:
        """What releases this client's gradients: the mechanism with its noise, the ``r`` of hgm, and any padding."""
        mechanism = self.config.mechanism(self.redistribution)
        if self.sampling.kind != "balls-in-bins" or self.is_whole:
            return mechanism
        return mechanism.padded(self.sampling.most(PADDING_TAIL))

    @property
    def asks_often(self) -> bool:
        """Whether the mechanism asks more of a batch's gradients than norms and a sum."""
        return self.mechanism.asks_often

    def release_gradient(self, gradients: GradientOperator, noise: NoiseStream) -> Vector:
        """Privatise the batch of one step: one noisy mean gradient, divided by the public batch size."""
        return self._release(gradients, self.sampling.batch_size, noise)

    def release_gradients(self, gradients: StackedGradients, noises: Sequence[NoiseStream]) -> Vector:
        """Privatise the batches of one step of M clients that do as this one does, (M, *shape)."""
        self._check_sizes(gradients)
        return self.mechanism.release_each(gradients, self.sampling.batch_size, noises)

    def release_update(self, update: Vector, noise: NoiseStream) -> Vector:
        """Privatise a whole update (unit = update): the mechanism sees it as the gradient of one example."""
        column = DenseGradients({name: value.unsqueeze(0) for name, value in update.items()})
        return self._release(column, 1, noise)

    def norm_bound(self, tail: float) -> float:
        """Return what the norm of one release exceeds with probability ``tail`` at most; infinite where none holds."""
        whole = self.config.unit == "update"
        examples, divisor = (1, 1) if whole else (self.sampling.most(tail / 2), self.sampling.batch_size)
        return self.mechanism.norm_bound(examples, divisor, self.tensors, tail / 2)

    def participations(self, rounds: Sequence[int]) -> int:
        """The most often one unit can have been used after the client was selected in ``rounds`` (counted from 1)."""
        if self.correlation is not None:
            return self._patterned(max(rounds, default=0))
        if self.is_whole:
            return len(rounds)
        return self.sampling.participations([step for number in rounds for step in self.steps(number)])

    def further_participations(self, last_round: int, round_number: int) -> int:
        """What one more round adds to :meth:`participations`."""
        if self.correlation is not None:
            return self._patterned(round_number) - self._patterned(last_round)
        if self.is_whole:
            return 1
        steps = self.steps(round_number)
        if not self.sampling.in_passes:
            return len(steps)
        # The batches of one pass are disjoint: only passes that this round begins count.
        per_pass = self.sampling.steps_per_epoch
        begun = self.steps(last_round)[-1] // per_pass if last_round else -1
        return steps[-1] // per_pass - max(begun, steps[0] // per_pass - 1)

    def guarantee(self, rounds: Sequence[int]) -> Guarantee:
        """What is proven about this client after it was selected in ``rounds`` (counted from 1)."""
        return guarantee(self.accounted(rounds))

    def accounted(self, rounds: Sequence[int]) -> Release:
        """What the ledger has to know of this client's releases in ``rounds`` (counted from 1)."""
        config = self.config
        # A step that was asked twice, with other noise, shows more of who is in it than one of two passes does.
        shown = self.sampling_name == "balls-in-bins" and len(set(rounds)) < len(rounds)
        return Release(
            mechanism=config.name,
            unit=config.unit,
            sampling="shuffled" if shown else self.sampling_name,
            rate=self.sampling.rate,
            participations=self.participations(rounds),
            dimensions=self.dimensions,
            noise=config.noise,
            delta=config.delta,
            adjacency="replace-one" if shown else config.adjacent,
            law=config.law,
            correlation=self.correlation,
        )

    @property
    def noise_factors(self) -> tuple[float, ...]:
        """What the noise of a round, and of those before it, is multiplied with in the round's sum."""
        return (1.0,) if self.correlation is None else noise_factors(self.correlation.band)

    @property
    def share_of_noise(self) -> NoiseShare:
        """What this client adds to its rounded update, where the noise is whole in the sum of a round alone."""
        if self.config.noise_at != "sum":
            raise ValueError(f"mechanism {self.config.name} has no noise in shares")
        bound = self.config.bound
        return NoiseShare(bound, (self.config.noise_on_mean(1, bound) * LEVELS) ** 2, self.config.least_in_sum)

    def released(self) -> dict[str, dict[str, object]]:
        """Return what makes one release of this client what it is: mechanism, noise and sampling, as plain values."""
        keys = {"name", "unit", *self.config.effective} - {"delta"}
        mechanism = self.config.model_dump(mode="json", include=keys, exclude_none=True)
        if self.correlation is not None:
            mechanism["band"] = self.correlation.band
        sampling = {"kind": self.sampling_name, "batch_size": self.sampling.batch_size}
        return {"mechanism": mechanism, "sampling": {**sampling, "examples": self.sampling.examples}}

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The numbers of coordinates of the parts of a gradient that get a draw of their own."""
        return self.config.dimensions(self.tensors)

    @property
    def sampling_name(self) -> SamplingName:
        """How the unit is sampled: a whole update, or model, is not, and with correlated noise no sampling counts."""
        return "full" if self.is_whole or self.correlation is not None else self.sampling.kind

    @property
    def is_whole(self) -> bool:
        """Whether a round releases one whole update or model, of all of the client's examples."""
        return self.config.unit == "update" or not self.config.on_gradients

    @property
    def least_draws(self) -> int:
        """How many draws a step of balls-in-bins has, whoever is in it, where each example gets a draw of its own."""
        return self.mechanism.least_draws

    def _patterned(self, last_round: int) -> int:
        """In how many rounds up to this one a unit may be; an example is also in one step of a pass at most."""
        most = 0 if self.correlation is None else self.correlation.most(last_round)
        if self.is_whole or not self.sampling.in_passes:
            return most
        return min(most, -(-last_round // self.sampling.steps_per_epoch))

    def _release(self, gradients: GradientOperator, divisor: int, noise: NoiseStream) -> Vector:
        self._check_sizes(gradients)
        return self.mechanism.release(gradients, divisor, noise)

    def _check_sizes(self, gradients: GradientOperator) -> None:
        sizes = tuple(shape.numel() for shape in gradients.shapes.values())
        if sizes != self.tensors:
            raise ValueError(f"gradients of tensors of {sizes} numbers; planned and accounted for: {self.tensors}")


def participants(
    experiment: Experiment, round_number: int, left: Sequence[int] | None = None, secret: Secret | None = None
) -> tuple[int, ...]:
    """The clients selected in a round, ascending; a function of the seed, or of the secret, and of ``left``."""
    among = range(experiment.federation.clients) if left is None else left
    federation = experiment.federation
    asked = federation.clients_per_round
    if asked is None or asked >= len(among):
        return tuple(among)
    hidden = secret is not None and experiment.hides_participants
    seed = secret.seed("participants") if secret is not None and hidden else experiment.seed
    stream = numpy_stream(seed, "participants", round_number)
    if federation.client_sampling == "turns":
        order = numpy_stream(seed, "turns").permutation(len(among))
        first = (round_number - 1) * asked
        return tuple(sorted(among[each] for each in order.take(range(first, first + asked), mode="wrap").tolist()))
    if federation.client_sampling == "poisson":
        drawn = stream.random(len(among)) < asked / federation.clients
        return tuple(client for client, is_asked in zip(among, drawn.tolist(), strict=True) if is_asked)
    chosen = stream.choice(len(among), size=asked, replace=False)
    return tuple(among[position] for position in sorted(chosen.tolist()))


def plan_client(
    experiment: Experiment,
    client: int,
    examples: int,
    tensors: Sequence[int],
    redistribution: Redistribution | None = None,
) -> Plan:
    """Bind one client's sampling and mechanism, calibrating the noise where the settings give a target."""
    draft = draft_plan(experiment, client, examples, tensors, redistribution)
    numbers = range(1, experiment.federation.rounds + 1)
    if experiment.mechanism.target is None or experiment.mechanism.noise_at != "clients":
        return with_noise(experiment, draft, numbers)
    return with_noise(experiment, draft, [n for n in numbers if client in participants(experiment, n)])


def draft_plan(
    experiment: Experiment,
    client: int,
    examples: int,
    tensors: Sequence[int],
    redistribution: Redistribution | None = None,
    secret: Secret | None = None,
) -> Plan:
    """Return the plan of a client but for its noise: any will do to ask it for what calibration needs to know."""
    training, config = experiment.training, experiment.mechanism
    batch_size = examples if isinstance(algorithm_of(experiment), ModelRelease) else training.batch_size
    if experiment.data.is_natural:
        batch_size = min(batch_size, examples)
    if batch_size > examples:
        larger = f"larger than the data of client {client}: {several(examples, 'example')}"
        raise experiment.wrong("training.batch_size", larger, "lower it, or federation.clients")
    if training.sampling == "balls-in-bins":
        batch_size = examples // (examples // batch_size)  # the public mean of a step, of which sums are divided
    sampling = Sampling(training.sampling, batch_size, examples)
    fedavg = experiment.federation.algorithm == "fedavg"
    steps = sampling.steps_per_epoch * training.local_epochs if fedavg else 1
    seed = secret.seed("batches") if secret is not None and experiment.hides_batches else experiment.seed
    places, correlation = noise_places(experiment), correlation_of(experiment)
    noisy = config.with_some_noise()
    return Plan(client, sampling, steps, noisy, tuple(tensors), seed, redistribution, places, correlation)


def with_noise(experiment: Experiment, draft: Plan, rounds: Sequence[int]) -> Plan:
    """Return a plan with its noise, calibrated for these rounds where the settings ask for that."""
    config = experiment.mechanism
    if config.parameter is None:
        return draft
    noisy = config.with_noise(_noise(experiment, draft, rounds))
    return replace(draft, config=noisy.shared_by(experiment.federation.asked))


def _noise(experiment: Experiment, draft: Plan, rounds: Sequence[int]) -> float:
    """Return sigma, scale or kappa: as given, from a nominal epsilon, or calibrated."""
    config = experiment.mechanism
    if config.noise is not None:
        return config.noise
    if config.target is None:
        return config.nominal_noise()
    return _calibrated(draft, config.target, rounds)


def _calibrated(draft: Plan, target: Target, rounds: Sequence[int]) -> float:
    """The least noise with which the ledger's figure for the rounds that will ask the client is at most the target."""
    planned = draft.accounted(rounds)
    # A client that is never asked releases nothing; any noise will do, and that of one participation is at hand.
    planned = replace(planned, participations=max(1, planned.participations))
    try:
        return _least_noise(target, planned)
    except InputError as error:
        raise InputError(f"mechanism.{target.key} = {target.value:g} for client {draft.client}: {error}") from None


# Calibration takes up to seconds, and most clients of a run share one answer.
_least_noise = lru_cache(maxsize=1024)(Target.least_noise)


@dataclass(frozen=True)
class Schedule:
    """In which rounds a client will be selected if no client stops, as far as that is public."""

    rounds: range  # of the whole run
    # client -> its rounds, where the seed draws some clients for each round; clients that are in none are missing.
    # `None`: all clients are in every round, or a secret draws them, so that any may be.
    drawn: Mapping[int, tuple[int, ...]] | None

    @staticmethod
    def of(experiment: Experiment) -> "Schedule":
        """Return the schedule of a run: a function of its settings and seed, never of its secret."""
        federation = experiment.federation
        rounds = range(1, federation.rounds + 1)
        everyone = federation.clients_per_round is None or federation.clients_per_round >= federation.clients
        if everyone or experiment.hides_participants:
            return Schedule(rounds, None)
        drawn: dict[int, list[int]] = {}
        for number in rounds:
            for client in participants(experiment, number):
                drawn.setdefault(client, []).append(number)
        return Schedule(rounds, {client: tuple(mine) for client, mine in drawn.items()})

    def of_client(self, client: int) -> Sequence[int]:
        """The rounds of one client."""
        return self.rounds if self.drawn is None else self.drawn.get(client, ())

    @property
    def longest(self) -> Sequence[int]:
        """The rounds of a client that is selected in most of them."""
        return self.rounds if self.drawn is None else max(self.drawn.values(), key=len, default=())


@dataclass(frozen=True, eq=False)
class Plans(Sequence[Plan]):
    """One plan for each client."""

    experiment: Experiment  # the settings
    sizes: NDArray[np.int64]  # (C,), how many examples each client holds
    tensors: tuple[int, ...]  # the number of coordinates of each parameter tensor, in the model's order
    redistribution: Redistribution | None = None  # r, for hgm
    # the run's, which batches are drawn by where they must be hidden; `None`: all follows from the seed
    secret: Secret | None = None
    seed: int | None = None  # that batches are drawn by instead; `None`: what follows from the settings

    def check(self) -> None:
        """Make one plan of each kind, so that a run that could not go on does not begin."""
        for client in sorted(np.unique(self.kinds, return_index=True)[1].tolist()):
            self[client]

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """(C,): clients with the same number have the same plan, but for their own number."""
        _, first, kinds = np.unique(self.sizes, return_index=True, return_inverse=True)
        if not self._is_calibrated or self._is_shared or self._schedule.drawn is None:
            return kinds.astype(np.int64)
        # Noise that is calibrated depends on how often an example of the client will be used.
        drafts = [self._draft(client) for client in first.tolist()]
        planned = np.zeros(len(kinds), dtype=np.int64)
        for client, rounds in self._schedule.drawn.items():
            planned[client] = drafts[kinds[client]].participations(rounds)
        return np.unique(kinds * (planned.max() + 1) + planned, return_inverse=True)[1].astype(np.int64)

    @property
    def _is_calibrated(self) -> bool:
        return self.experiment.mechanism.target is not None

    @property
    def _is_shared(self) -> bool:
        """Whether one noise is for all clients of a sum."""
        return self.experiment.mechanism.noise_at != "clients"

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule.of(self.experiment)

    def _rounds(self, client: int) -> Sequence[int]:
        """What the client's noise is calibrated for, if it is: public rounds, because everybody knows the noise."""
        if not self._is_calibrated:
            return ()
        return self._schedule.longest if self._is_shared else self._schedule.of_client(client)

    @cached_property
    def _made(self) -> dict[int, Plan]:
        """Kind -> the plan of the first of these clients that was looked at."""
        return {}

    @override
    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Plan: ...

    @overload
    def __getitem__(self, client: slice) -> tuple[Plan, ...]: ...

    @override
    def __getitem__(self, client: int | slice) -> Plan | tuple[Plan, ...]:
        if isinstance(client, slice):
            return tuple(self[each] for each in range(*client.indices(len(self))))
        client = range(len(self))[client]
        kind = int(self.kinds[client])
        if kind not in self._made:
            self._made[kind] = with_noise(self.experiment, self._draft(client), self._rounds(client))
        known = self._made[kind]
        return known if known.client == client else replace(known, client=client)

    def _draft(self, client: int) -> Plan:
        examples = int(self.sizes[client])
        draft = draft_plan(self.experiment, client, examples, self.tensors, self.redistribution, self.secret)
        return draft if self.seed is None else replace(draft, seed=self.seed)


def noise_divisor(experiment: Experiment, plans: Sequence[Plan]) -> int:
    """Return by what noise at the server is divided, which is public: a round's clients, or the examples in it."""
    asked = experiment.federation.asked
    if experiment.mechanism.unit == "update":
        return asked
    each_kind = np.unique(kinds_of(plans), return_index=True)[1].tolist()
    return int(asked * min(plans[client].sampling.batch_size for client in each_kind))


def with_seed(plans: Sequence[Plan], seed: int) -> Sequence[Plan]:
    """Return the plans with another seed that batches are drawn by."""
    return replace(plans, seed=seed) if isinstance(plans, Plans) else tuple(replace(plan, seed=seed) for plan in plans)


def kinds_of(plans: Sequence[Plan]) -> NDArray[np.int64]:
    """Return (C,): clients with the same number have the same plan, but for their own number."""
    return plans.kinds if isinstance(plans, Plans) else np.arange(len(plans), dtype=np.int64)
