"""Endpoints of finished models in this process, for attacks on answers."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.attacks.questions import Endpoints, OpenEndpoint
from fedpriv.core.config.experiment import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.registry import ENDPOINTS
from fedpriv.service.policies import POLICIES
from fedpriv.service.settings import ServiceConfig

if TYPE_CHECKING:
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World


@ENDPOINTS.register
class ServiceEndpoints(Endpoints):
    """Endpoints under the policies of ``[service]``."""

    name: ClassVar[str] = "service"

    @override
    def usual(self, experiment: Experiment) -> str:
        return (ServiceConfig.of(experiment) or ServiceConfig()).method

    @override
    def title(self, policy: str) -> str:
        return str(POLICIES[policy.partition(":")[0]].title)

    @override
    def budget(self, experiment: Experiment, policy: str, wanted: int | None) -> int | None:
        own = ServiceConfig.of(experiment)
        if own is None or own.method != policy:
            return wanted
        if wanted is not None and wanted > own.answers:
            most = f"the run's endpoint answers service.answers = {own.answers} at most"
            raise InputError(key="--queries", given=wanted, allowed=most)
        return wanted or own.answers

    @override
    def open(self, folder: "RunFolder", world: "World", policy: str) -> OpenEndpoint:
        from fedpriv.service.opening import claim_of, open_endpoint

        endpoint = open_endpoint(folder, world, policy)
        return OpenEndpoint(endpoint, endpoint.policy, endpoint.exact, claim_of(endpoint, world, folder.final_ledger()))
