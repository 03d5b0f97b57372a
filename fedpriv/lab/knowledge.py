"""What a run of votes (PATE) proves, what it should be warned of, and its result in words."""

import numpy as np

from fedpriv.accounting import Guarantee, Ledger, LedgerLine
from fedpriv.accounting.votes import is_smooth
from fedpriv.core.errors import InputError
from fedpriv.core.names import Adjacency
from fedpriv.core.records import Knowledge, shown_epsilon
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World
from fedpriv.votes import LaplaceMax, most_answers

__all__ = ["knowledge_sentences", "votes_ledger", "votes_warnings"]

_ADJACENCY = Adjacency.REPLACE_ONE_CLIENT.worded(
    "all data of one client are replaced by any others, and so one example is"
)
_NO_VOTE = "no participation: no answer was given"
_LEAST_TEACHERS = 100  # below, an epsilon of a few allows a handful of answers


def votes_ledger(world: World, folder: RunFolder) -> Ledger:
    """Account for every question that was put to the aggregator; all clients have the same figures."""
    guarantee = _guarantee(world, folder)
    pate = world.experiment.pate_settings
    # Clients of one size are alike.
    groups = [np.flatnonzero(world.sizes == size).tolist() for size in np.unique(world.sizes)]
    noise = _noise(world)
    lines = [LedgerLine.of(who[0], int(world.sizes[who[0]]), guarantee, noise=noise).of_all(who) for who in groups]
    aggregator = pate.aggregator_of(world.teachers)
    parameters = {"noise_at": pate.noise_at, **vars(aggregator), "teachers": world.teachers}
    return Ledger.of("client", f"votes ({aggregator.title})", {**parameters, "noise": world.experiment.noise}, lines)


def _noise(world: World) -> float:
    aggregator = world.experiment.pate_settings.aggregator_of(world.teachers)
    return aggregator.scale if isinstance(aggregator, LaplaceMax) else world.noise_of_votes


def _guarantee(world: World, folder: RunFolder) -> Guarantee:
    pate = world.experiment.pate_settings
    asked = len(folder.answers())
    if pate.noise_at == "clients" and folder.asked():
        asked = pate.queries  # whoever was asked has released all counts, whether or not the run went on
    claim = pate.claim(world.teachers, asked)
    aggregator = pate.aggregator_of(world.teachers)
    is_pure = isinstance(aggregator, LaplaceMax)
    none = "normal noise has no finite pure epsilon"
    return Guarantee(
        adjacency=_ADJACENCY,
        sampling="full",
        participations=asked,
        nominal_epsilon=None,
        pure_epsilon=pate.teachers_per_client * aggregator.spent(asked, asked) if is_pure else None,
        epsilon=claim.epsilon,
        delta=pate.delta,
        theorem={
            "nominal_epsilon": "none is claimed",
            "pure_epsilon": claim.theorem if is_pure else none,
            "epsilon": claim.theorem if asked else _NO_VOTE,
        },
        notes=tuple(_notes(world)),
    )


def _notes(world: World) -> list[str]:
    pate = world.experiment.pate_settings
    notes = ["A participation is a question that was put to the vote, answered or not."]
    if pate.noise_at == "server":
        notes.append(
            "The server sees every vote, and so does whoever listens to it: the claim is against those who see answers "
            "and student."
        )
    else:
        notes.append(
            "The claim holds against a server that follows the protocol, too: it sees the sum of noisy counts. Nothing "
            "vouches for clients' keys: with keys of its own making a server reads single votes, which have a share of "
            "the noise only. Shares are rounded before they are masked, which the theorem does not cover."
        )
    if pate.teachers_per_client > 1:
        notes.append(f"A client has {pate.teachers_per_client} votes; one example moves one of them.")
    return notes


def votes_warnings(world: World) -> tuple[str, ...]:
    """Return one line for each setting of votes that misleads or makes the result of little use.

    Raises:
        InputError: the budget allows no answer, or not all that clients release at once; or the sanitised figure has no
            proof with this noise.
    """
    pate, teachers = world.experiment.pate_settings, world.teachers
    _check(world)
    lines = []
    if pate.noise_at == "server":
        lines.append("pate.noise_at = 'server': the server sees every vote; 'clients' hides them under masks")
    if teachers < _LEAST_TEACHERS:
        lines.append(
            f"{teachers} teachers: below about {_LEAST_TEACHERS} votes allow few answers at a small epsilon, or wrong "
            "ones"
        )
    if _noise(world) > teachers / 4:
        lines.append(
            f"the noise on a count is {_noise(world):.4g} votes, more than a quarter of the {teachers} teachers: many "
            "answers will be chance"
        )
    if pate.target_epsilon is not None and not pate.is_affordable(teachers, pate.queries, pate.queries):
        most = most_answers(pate.aggregator_of(teachers), pate.target_epsilon, pate.delta, pate.teachers_per_client)
        lines.append(
            f"pate.target_epsilon = {pate.target_epsilon:g} allows {most} answers if every question is answered, of "
            f"pate.queries = {pate.queries}"
        )
    return tuple(lines)


def _check(world: World) -> None:
    pate, teachers = world.experiment.pate_settings, world.teachers
    aggregator = pate.aggregator_of(teachers)
    if pate.sanitised and not is_smooth(pate.sigma2 * teachers, pate.sanitised_order, world.dataset.classes):
        raise InputError(
            f"pate.sanitised: with {teachers} teachers, sigma2 = {pate.sigma2:g} and sanitised_order = "
            f"{pate.sanitised_order:g} the conditions of its proof fail; more noise or a lower order may do"
        )
    if pate.target_epsilon is None:
        return
    if not pate.is_affordable(teachers, 1, 1):
        once = aggregator.claim(1, 1, pate.delta, pate.teachers_per_client).epsilon
        raise InputError(
            f"pate.target_epsilon = {pate.target_epsilon:g} allows no answer: with {teachers} teachers the first one "
            f"takes epsilon {once:.4g}; raise it, or the noise (sigma1, sigma2, scale), or have more teachers"
        )
    if pate.noise_at == "clients" and not pate.is_affordable(teachers, pate.queries, pate.queries):
        most = most_answers(aggregator, pate.target_epsilon, pate.delta, pate.teachers_per_client)
        raise InputError(
            f"pate.target_epsilon = {pate.target_epsilon:g} allows {most} questions, and with noise_at = 'clients' all "
            f"counts are released at once: set pate.queries = {most} or less"
        )


def knowledge_sentences(knowledge: Knowledge) -> list[str]:
    """Say what was asked and answered, and what the answers are worth."""
    where = "the server saw their votes" if knowledge.noise_at == "server" else "nobody saw their votes"
    asked = (
        f"{knowledge.voted} teachers voted on {knowledge.planned} public images ({where}); {knowledge.asked} questions "
        f"were put and {knowledge.answered} answered"
    )
    if knowledge.right is not None:
        asked += f", {knowledge.right:.1%} of them correctly"
    sentences = [f"{asked}."]
    if knowledge.sanitised is not None:
        sentences.append(
            f"Sanitised: on these votes the answers cost about epsilon {shown_epsilon(knowledge.sanitised)} at delta "
            f"{knowledge.delta:g} (an estimate with noise on it, no bound; the ledger's figure is the claim)."
        )
    return sentences
