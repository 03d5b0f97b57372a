"""What is proven about an endpoint's answers where the bounds of the table were estimated of its rows before."""

from dataclasses import replace

from fedpriv.accounting.estimated import with_bounds
from fedpriv.errors import InputError
from fedpriv.records import Guarantee, Ledger, shown_epsilon
from fedpriv.service.policies import AnswerPolicy
from fedpriv.service.policies.votes import NoisyVotes
from fedpriv.world import World

__all__ = ["check_answers", "with_estimate"]


def check_answers(policy: AnswerPolicy, world: World, ledger: Ledger) -> None:
    """Refuse a run whose answers could not be what the policy says they are.

    Args:
        policy: of the endpoint.
        world: the run's experiment, built.
        ledger: of the run.

    Raises:
        InputError: they could not, or the policy protects whole clients, which an estimate of bounds does not.
    """
    policy.check(ledger)
    if world.experiment.data.bounds_epsilon and isinstance(policy, NoisyVotes) and not policy.shards:
        raise InputError(
            "data.table.bounds_epsilon does not go with service.shards = 0, votes that protect whole clients: it is "
            "about single rows; set service.shards, or tell bounds that are public"
        )


def with_estimate(guarantee: Guarantee, policy: AnswerPolicy, world: World) -> Guarantee:
    """Return what is proven of the answers and of the estimate together; the run's own ledger has it already.

    Heads and voters are trained on rows that were scaled by the bounds.
    """
    bounds = world.experiment.data.bounds_epsilon
    if not bounds or policy.source == "network" or guarantee.epsilon is None:
        return guarantee
    note = (
        f"epsilon {shown_epsilon(bounds)} of it is of the estimate of the table's bounds (data.table.bounds_epsilon); "
        "service.target_epsilon is of the answers alone"
    )
    return with_bounds(replace(guarantee, notes=(*guarantee.notes, note)), bounds)
