"""Rounds of uploads: FedSGD, FedAvg, and the base of other algorithms whose server takes means of uploads."""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedpriv.core.algorithm import Algorithm
from fedpriv.core.registry import ALGORITHMS

if TYPE_CHECKING:
    from fedpriv.accounting import Ledger
    from fedpriv.core.progress import Progress
    from fedpriv.core.runs import RunFolder
    from fedpriv.core.world import World
    from fedpriv.server.exchange import Clients


class Rounds(Algorithm):
    """Ask clients round by round, and step by the mean of their uploads."""

    @override
    def serve(self, clients: "Clients", world: "World", folder: "RunFolder", progress: "Progress") -> None:
        from fedpriv.server.rounds import run_rounds

        run_rounds(clients, world, folder, progress)

    @override
    def ledger(self, world: "World", folder: "RunFolder") -> "Ledger":
        from fedpriv.algorithms.rounds.ledger import run_ledger

        return run_ledger(world, folder)


class _Usual(Rounds):
    trains_in_steps: ClassVar[bool] = True

    @override
    def warnings(self, world: "World") -> tuple[str, ...]:
        from fedpriv.algorithms.rounds.ledger import upload_warnings

        return upload_warnings(world)


@ALGORITHMS.register
class FedAvg(_Usual):
    """Upload the change of the parameters after local training."""

    name: ClassVar[str] = "fedavg"
    rank: ClassVar[int] = 2
    about: ClassVar[str] = "upload the change after local training"


@ALGORITHMS.register
class FedSgd(_Usual):
    """Upload the gradient of one batch."""

    name: ClassVar[str] = "fedsgd"
    rank: ClassVar[int] = 1
    about: ClassVar[str] = "upload one batch's gradient"
