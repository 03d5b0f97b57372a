"""The guarantee of a run of votes (PATE), and warnings about its settings."""

import numpy as np

from fedpriv.accounting import Guarantee, Ledger, LedgerLine
from fedpriv.accounting.aggregators import ROUNDED, LaplaceMax, most_answers, votes_guarantee
from fedpriv.accounting.votes import is_smooth
from fedpriv.algorithms.pate.records import read_answers
from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.algorithms.pate.teachers import noise_of_votes, teachers
from fedpriv.core.errors import InputError
from fedpriv.core.numbers import several
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import World

_CHANGED = "all data of one client are replaced by any others, and so one example is"
_LEAST_TEACHERS = 100  # below, an epsilon of a few allows a handful of answers


def votes_ledger(world: World, folder: RunFolder) -> Ledger:
    """Account for every question that was put to the aggregator; all clients have the same figures."""
    guarantee = _guarantee(world, folder)
    pate = PateConfig.required(world.experiment)
    # Clients of one size are alike.
    groups = [np.flatnonzero(world.sizes == size).tolist() for size in np.unique(world.sizes)]
    noise = _noise(world)
    lines = [LedgerLine.of(who[0], int(world.sizes[who[0]]), guarantee, noise=noise).of_all(who) for who in groups]
    aggregator = pate.aggregator_of(teachers(world))
    parameters = {"noise_at": pate.noise_at, **vars(aggregator), "teachers": teachers(world)}
    return Ledger.of("client", f"votes ({aggregator.title})", {**parameters, "noise": world.experiment.noise}, lines)


def _noise(world: World) -> float:
    aggregator = PateConfig.required(world.experiment).aggregator_of(teachers(world))
    return aggregator.scale if isinstance(aggregator, LaplaceMax) else noise_of_votes(world)


def _guarantee(world: World, folder: RunFolder) -> Guarantee:
    pate = PateConfig.required(world.experiment)
    asked = len(read_answers(folder))
    if pate.noise_at == "clients" and folder.asked():
        asked = pate.queries  # anyone who was asked has released all counts, whether or not the run went on
    claim = pate.claim(teachers(world), asked)
    aggregator = pate.aggregator_of(teachers(world))
    return votes_guarantee(
        aggregator, claim, asked, pate.delta, pate.teachers_per_client, _CHANGED, tuple(_notes(world))
    )


def _notes(world: World) -> list[str]:
    pate = PateConfig.required(world.experiment)
    notes = ["A participation is a question that was put to the vote, answered or not."]
    if pate.noise_at == "server":
        notes.append(
            "The server sees every vote, and so does anyone who listens to it: the claim is against those who see "
            "answers and student."
        )
    else:
        notes.append(
            "The claim holds against a server that follows the protocol, too: it sees the sum of noisy counts. Nothing "
            "proves whose the clients' keys are: with keys of its own making a server reads single votes, which have "
            f"only a share of the noise. {ROUNDED}"
        )
    if pate.teachers_per_client > 1:
        notes.append(f"A client has {pate.teachers_per_client} votes; one example moves one of them.")
    return [*notes, *world.taken_as_public]


def votes_warnings(world: World) -> tuple[str, ...]:
    """Return one line for each setting of votes that misleads or makes the result of little use."""
    pate, count = PateConfig.required(world.experiment), teachers(world)
    _check(world)
    lines = []
    if pate.noise_at == "server":
        lines.append("pate.noise_at = 'server': the server sees every vote; 'clients' hides them under masks")
    if count < _LEAST_TEACHERS:
        lines.append(
            f"{several(count, 'teacher')}: below about {_LEAST_TEACHERS} votes allow few answers at a small epsilon, "
            "or wrong ones"
        )
    if _noise(world) > count / 4:
        lines.append(
            f"the noise on a count is {_noise(world):.4g} votes, more than a quarter of the {count} teachers: many "
            "answers will be chance"
        )
    if pate.target_epsilon is not None and not pate.is_affordable(count, pate.queries, pate.queries):
        most = most_answers(pate.aggregator_of(count), pate.target_epsilon, pate.delta, pate.teachers_per_client)
        lines.append(
            f"pate.target_epsilon = {pate.target_epsilon:g} allows {most} answers if every question is answered, of "
            f"pate.queries = {pate.queries}"
        )
    return tuple(lines)


def _check(world: World) -> None:
    pate, count = PateConfig.required(world.experiment), teachers(world)
    aggregator = pate.aggregator_of(count)
    if pate.sanitised and not is_smooth(pate.sigma2 * count, pate.sanitised_order, world.dataset.classes):
        raise InputError(
            f"pate.sanitised: with {count} teachers, sigma2 = {pate.sigma2:g} and sanitised_order = "
            f"{pate.sanitised_order:g} the conditions of its proof fail; more noise or a lower order may do"
        )
    if pate.target_epsilon is None:
        return
    if not pate.is_affordable(count, 1, 1):
        once = aggregator.claim(1, 1, pate.delta, pate.teachers_per_client).epsilon
        raise InputError(
            f"pate.target_epsilon = {pate.target_epsilon:g} allows no answer: with {several(count, 'teacher')} the "
            f"first one takes epsilon {once:.4g}; raise it, or the noise (sigma1, sigma2, scale), or have more teachers"
        )
    if pate.noise_at == "clients" and not pate.is_affordable(count, pate.queries, pate.queries):
        most = most_answers(aggregator, pate.target_epsilon, pate.delta, pate.teachers_per_client)
        raise InputError(
            f"pate.target_epsilon = {pate.target_epsilon:g} allows {most} questions, and with noise_at = 'clients' all "
            f"counts are released at once: set pate.queries = {most} or less"
        )
