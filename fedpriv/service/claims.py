"""What is proven about an endpoint's answers together with what was released of the same data before them."""

from dataclasses import replace

from fedpriv.accounting.estimated import with_bounds
from fedpriv.core.errors import InputError
from fedpriv.core.records import Guarantee, Ledger, shown_epsilon
from fedpriv.core.world import World
from fedpriv.service.endpoint import Endpoint
from fedpriv.service.policies import AnswerPolicy, Facts
from fedpriv.service.policies.votes import NoisyVotes
from fedpriv.service.proof import with_run
from fedpriv.service.settings import ServiceConfig

REPRODUCIBLE = (
    "noise = 'reproducible': the noise follows from the seed, and anyone who knows or guesses the seed can subtract "
    "it; the proof holds against everybody else"
)


def check_answers(policy: AnswerPolicy, world: World, ledger: Ledger) -> None:
    """Refuse a run whose answers could not be what the policy says they are."""
    policy.check(ledger)
    if world.experiment.data.bounds_epsilon and isinstance(policy, NoisyVotes) and not policy.shards:
        raise InputError(
            "data.table.bounds_epsilon does not go with service.shards = 0, votes that protect whole clients: it is "
            "about single rows; set service.shards, or tell bounds that are public"
        )


def with_earlier(guarantee: Guarantee, policy: AnswerPolicy, world: World, facts: Facts) -> Guarantee:
    """Return what is proven of answers together with the features' network and an estimate of a table's bounds."""
    if facts.learnt is not None:
        guarantee = with_run(guarantee, facts.learnt)
    bounds = world.experiment.data.bounds_epsilon
    if not bounds or policy.source == "network" or guarantee.epsilon is None:
        return guarantee
    note = (
        f"epsilon {shown_epsilon(bounds)} of it is of the estimate of the table's bounds (data.table.bounds_epsilon); "
        "service.target_epsilon is of the answers alone"
    )
    return with_bounds(replace(guarantee, notes=(*guarantee.notes, note)), bounds)


def claim_of(endpoint: Endpoint, world: World, ledger: Ledger) -> Guarantee | None:
    """Return what is proven about an endpoint's answers as such; ``None``: nothing."""
    policy, service = endpoint.policy, ServiceConfig.of(world.experiment)
    delta = getattr(policy, "delta", None)
    answers = 1 if service is None else service.answers
    claim = policy.guarantee(
        endpoint.facts, answers, world.experiment.mechanism.delta if delta is None else delta, ledger
    )
    return None if claim.epsilon is None else with_earlier(claim, policy, world, endpoint.facts)
