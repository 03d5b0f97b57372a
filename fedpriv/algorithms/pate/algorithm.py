"""PATE as an algorithm of a federation."""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.core.algorithm import Algorithm, refuse_keys
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ALGORITHMS
from fedpriv.core.sections import ExperimentSection

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fedpriv.accounting import Ledger
    from fedpriv.attacks.threat import ThreatModel
    from fedpriv.core.algorithm import Handler
    from fedpriv.core.config.experiment import Experiment
    from fedpriv.core.progress import Progress
    from fedpriv.core.records import Guarantee
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World
    from fedpriv.data.datasets import Dataset
    from fedpriv.server.exchange import Clients


@ALGORITHMS.register
class Pate(Algorithm):
    """Vote on public images, from which the model learns."""

    name: ClassVar[str] = "pate"
    rank: ClassVar[int] = 3
    about: ClassVar[str] = "vote on public images, from which the model learns (section [pate])"
    settings: ClassVar[type[ExperimentSection] | None] = PateConfig
    rounds: ClassVar[int | None] = 1
    protects: ClassVar[str] = "votes (PATE)"
    not_deployable: ClassVar[str] = "deployments have no server's secret yet"
    not_audited: ClassVar[str] = (
        "audit repeats a run's training by fedsgd or fedavg on other data, and this run learnt from votes (pate)"
    )

    @override
    def holder(self) -> "ThreatModel":
        from fedpriv.attacks.threat import PARTICIPANT

        return replace(
            PARTICIPANT,
            name="student-holder",
            listener="anyone who gets PATE's student",
            sees=("the student's parameters", "the public images that teachers voted on, and the answers"),
            withheld=("votes and their counts", "the teachers"),
        )

    @override
    def conflicts(self, experiment: "Experiment") -> None:
        federation, pate = experiment.federation, PateConfig.required(experiment)
        if experiment.adversary.attacks:
            raise InputError(
                f"adversary.attacks: {experiment.adversary.attacks[0]} reads gradients or parameters, and under pate "
                "clients upload votes; set it to []"
            )
        if experiment.mechanism.protects:
            votes = "noise on gradients or parameters, and under pate clients upload votes: the noise is that of [pate]"
            raise experiment.wrong("mechanism.name", votes, "use none")
        keys = "aggregation", "clients_per_round", "max_update_norm"
        refuse_keys(experiment, keys, "under pate clients upload votes, not parameters")
        if federation.secure_aggregation != (pate.noise_at == "clients"):
            raise InputError(
                f"federation.secure_aggregation = {str(federation.secure_aggregation).lower()} with pate.noise_at "
                f"= {pate.noise_at!r}: the server adds noise to votes that it sees, or clients do, under masks; "
                "set noise_at = 'clients' and secure_aggregation = true together"
            )
        if experiment.data.owner:
            raise experiment.wrong(
                "data.owner", "not with federation.algorithm = 'pate', whose ledger is of votes of whole clients"
            )
        if experiment.data.bounds_epsilon:
            raise InputError(
                "data.table.bounds_epsilon does not go with federation.algorithm = 'pate', whose ledger is of votes; "
                "tell bounds that are public"
            )
        if experiment.data.overlaps:
            raise experiment.wrong(
                "data.partition",
                "votes protect a client's examples with the client, and others would hold copies of them; with pate "
                "use another partition",
            )

    @override
    def check_network(self, experiment: "Experiment", dataset: "Dataset", model: "nn.Module") -> None:
        there, asked = len(dataset.x_test), PateConfig.required(experiment).queries
        if asked >= there:
            raise experiment.wrong(
                "pate.queries",
                f"{dataset.name} has {there} test images, and the student is measured on those that are not asked "
                "about",
            )

    @override
    def check_shares(self, experiment: "Experiment", dataset: "Dataset", sizes: "NDArray[np.int64]") -> None:
        if PateConfig.required(experiment).teachers_per_client > sizes.min():
            raise experiment.wrong("pate.teachers_per_client", f"a client has {sizes.min()} examples only")

    @override
    def warnings(self, world: "World") -> tuple[str, ...]:
        from fedpriv.algorithms.pate.ledger import votes_warnings

        return votes_warnings(world)

    @override
    def client_handlers(self) -> "Mapping[str, Handler]":
        from fedpriv.algorithms.pate.client import HANDLERS

        return HANDLERS

    @override
    def serve(self, clients: "Clients", world: "World", folder: "RunFolder", progress: "Progress") -> None:
        from fedpriv.algorithms.pate.server import run_knowledge

        run_knowledge(clients, world, folder, progress)

    @override
    def ledger(self, world: "World", folder: "RunFolder") -> "Ledger":
        from fedpriv.algorithms.pate.ledger import votes_ledger

        return votes_ledger(world, folder)

    @override
    def spent_rows(self, world: "World") -> "Tensor":
        from fedpriv.algorithms.pate.teachers import asked_rows

        return asked_rows(world)

    @override
    def about_claim(self, experiment: "Experiment", worst: "Guarantee") -> str:
        from fedpriv.core.records import shown_epsilon

        at_server = PateConfig.required(experiment).noise_at == "server"
        against = "anyone who sees answers and student" if at_server else "the server, too"
        asked = f"{worst.participations} questions"
        conditions = f"({worst.adjacency}; {asked}; against {against}; noise: {experiment.noise})"
        if worst.epsilon is None:
            return f"No finite epsilon is proven {conditions}."
        return f"Proven for all answers: epsilon {shown_epsilon(worst.epsilon)} at delta {worst.delta:g} {conditions}."
