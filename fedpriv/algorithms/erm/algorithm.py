"""Private empirical risk minimisation as an algorithm of a federation."""

from math import inf, prod, sqrt
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.algorithms.erm.settings import ErmConfig
from fedpriv.algorithms.rounds.algorithm import Rounds
from fedpriv.core.algorithm import ModelRelease, refuse_keys
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ALGORITHMS
from fedpriv.core.sections import ExperimentSection
from fedpriv.mechanisms.model_noise import ModelNoiseSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fedpriv.accounting import Ledger
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.plan import Plan
    from fedpriv.core.randomness import NoiseStream
    from fedpriv.core.records import RoundRecord
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World
    from fedpriv.data.datasets import Dataset
    from fedpriv.gradients import Vector


@ALGORITHMS.register
class Erm(Rounds, ModelRelease):
    """Upload a convex model, trained to its minimum, once."""

    name: ClassVar[str] = "erm"
    rank: ClassVar[int] = 4
    about: ClassVar[str] = "upload a convex model, trained to its minimum, once (section [erm])"
    settings: ClassVar[type[ExperimentSection] | None] = ErmConfig
    rounds: ClassVar[int | None] = 1
    not_audited: ClassVar[str] = (
        "audit follows a run's training from round to round, and under erm each client releases a finished model "
        "once; membership in it: fedpriv probe --attack membership-answers"
    )

    @override
    def conflicts(self, experiment: "Experiment") -> None:
        if experiment.mechanism.protects and experiment.mechanism.on_gradients:
            raise experiment.wrong(
                "mechanism.name",
                "noise on gradients or updates, and under erm clients upload a model: use output, objective or none",
            )
        if experiment.adversary.attacks:
            raise InputError(
                f"adversary.attacks: {experiment.adversary.attacks[0]} reads what one or a few steps of training "
                "upload, and under erm clients upload a finished model; set it to [], and use fedpriv probe afterwards"
            )
        keys = "server_optimizer", "server_learning_rate", "server_momentum"
        refuse_keys(experiment, keys, "under erm the server takes the mean of models")
        if experiment.training.weight_decay:
            raise InputError(
                "training.weight_decay is for training step by step, and under erm clients minimise; leave it out"
            )

    @override
    def check_network(self, experiment: "Experiment", dataset: "Dataset", model: "nn.Module") -> None:
        wanted = [(dataset.classes, prod(dataset.shape)), (dataset.classes,)]
        if experiment.model.is_own or [tuple(value.shape) for value in model.parameters()] != wanted:
            raise experiment.model.refusal(
                "federation.algorithm = 'erm' minimises a convex objective, for one linear layer on the inputs; use "
                "model.name = 'mlp' with hidden = []"
            )

    @override
    def check_shares(self, experiment: "Experiment", dataset: "Dataset", sizes: "NDArray[np.int64]") -> None:
        """Refuse convex problems of which nothing is proven with the mechanism, or which float64 may not solve."""
        from fedpriv.accounting.convex_models import refuse_unsolvable
        from fedpriv.algorithms.erm.training import problem_of

        config = experiment.mechanism
        if not isinstance(config, ModelNoiseSettings):
            return
        for examples in sorted(set(sizes.tolist())):
            problem = problem_of(experiment, dataset, examples)
            config.scale(problem)  # says what nothing is proven of
            about = (
                f"a client of {examples} examples with mechanism.target_epsilon = {config.target_epsilon:g} and "
                f"erm.regularisation = {problem.regularisation:g}"
            )
            refuse_unsolvable(problem, "erm", about, config.solved)

    @override
    def warnings(self, world: "World") -> tuple[str, ...]:
        config = world.experiment.mechanism
        noisy = (*_length_of_rows(world), *_long_noise(world, config)) if isinstance(config, ModelNoiseSettings) else ()
        return (*_without_effect(world), *noisy)

    @override
    def released_model(
        self, world: "World", client: int, inputs: "Tensor", labels: "Tensor", plan: "Plan", noise: "NoiseStream | None"
    ) -> "Vector":
        from fedpriv.algorithms.erm.training import bounded_features, client_problem, feature_length, trained_parameters

        length = feature_length(world)
        return trained_parameters(
            client_problem(world, client),
            bounded_features(inputs, length),
            labels.cpu().numpy(),
            plan.config,
            None if noise is None else noise.numpy(),
            length,
            world.initial.parameters,
        )

    @override
    def longest_model(self, world: "World", plan: "Plan", tail: float) -> float:
        from fedpriv.algorithms.erm.training import client_problem, feature_length

        problem = client_problem(world, plan.client)
        if not isinstance(plan.config, ModelNoiseSettings):
            return inf
        halves = sqrt(0.5) if problem.rows == 1 else 1.0
        return halves * plan.config.longest(problem, tail) / feature_length(world)

    @override
    def ledger(self, world: "World", folder: "RunFolder") -> "Ledger":
        from fedpriv.algorithms.erm.training import client_problem, feature_length
        from fedpriv.algorithms.rounds.ledger import run_ledger

        def noise(plan: "Plan") -> float | None:
            if not isinstance(plan.config, ModelNoiseSettings):
                return plan.config.noise
            return plan.config.scale(client_problem(world, plan.client))  # on the weights

        public = {}  # numbers that the noise on a model follows from
        if world.experiment.mechanism.protects:
            erm, length = ErmConfig.required(world.experiment), feature_length(world)
            public = {"regularisation": erm.regularisation, "tolerance": erm.tolerance, "feature_length": length}
        return run_ledger(world, folder, noise, public)

    @override
    def about_accuracy(self, world: "World", last: "RoundRecord | None") -> tuple[str, ...]:
        """Say whether the model is better than naming the most frequent class everywhere."""
        if last is None or last.accuracy is None or last.round == 0:
            return ()
        counts = world.dataset.y_test[world.measured_rows].bincount()
        share = float(counts.max() / counts.sum())
        place = "as good as" if last.accuracy == share else "below" if last.accuracy < share else "above"
        return (f"That is {place} guessing the majority: the most frequent class is {share:.1%} of the test data.",)


def _without_effect(world: "World") -> tuple[str, ...]:
    training = world.experiment.training
    return tuple(
        f"training.{key} is set, but erm trains to the minimum and does not read it"
        for key, field in type(training).model_fields.items()
        if getattr(training, key) != field.default
    )


def _length_of_rows(world: "World") -> tuple[str, ...]:
    data, erm = world.experiment.data, ErmConfig.required(world.experiment)
    if erm.clip_norm is not None or data.table is None or data.table.test_path:
        return ()
    return (
        "erm.clip_norm is unset: it is the median length of test rows, which are rows of data.path, and no epsilon "
        "covers it; set erm.clip_norm, or of a CSV file a public data.table.test_path",
    )


def _long_noise(world: "World", config: ModelNoiseSettings) -> tuple[str, ...]:
    import numpy as np

    from fedpriv.algorithms.erm.training import client_problem

    problems = [client_problem(world, client) for client in np.unique(world.sizes, return_index=True)[1].tolist()]
    worst = max(problems, key=lambda problem: config.shift(problem, 0.5))
    if config.shift(worst, 0.5) <= worst.longest:
        return ()
    return (
        f"mechanism.target_epsilon = {config.target_epsilon:g} with erm.regularisation = {worst.regularisation:g}: a "
        f"client of {worst.examples} examples adds noise that may be longer than any model; fewer clients, a larger "
        "epsilon or a larger regularisation leave more",
    )
