"""The guarantee of answers by vote, or how much noise or how many answers a target allows."""

import math
from dataclasses import dataclass, replace
from typing import Any

from fedpriv.accounting.aggregators import (
    MOST_ANSWERS,
    Aggregator,
    ConfidentMax,
    LaplaceMax,
    NoisyMax,
    SampledUse,
    least_sigma,
    most_answers,
)
from fedpriv.core.cli.account.votes import PollOptions
from fedpriv.core.errors import InputError
from fedpriv.core.names import Adjacency

_ANY_THRESHOLD = 0.0  # no figure depends on it


@dataclass(frozen=True)
class PollAnswer:
    """The figures."""

    poll: PollOptions  # what was asked, noise and numbers of questions filled in
    aggregator: str  # its title
    is_pure: bool  # whether `spent` is pure epsilon and not mu of Gaussian differential privacy
    spent: float  # by the answers
    epsilon: float  # proven for any answers, as many as questions
    epsilon_answered: float  # of the answers given; a claim only where a budget was fixed beforehand
    theorem: str  # what they rest on
    notes: tuple[str, ...]  # what a reader must know with the figures

    adjacency = Adjacency.REPLACE_ONE_VOTER.worded("all votes of one voter, in all questions, become any others")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, None where a figure does not apply."""
        return {
            "aggregator": self.aggregator,
            **vars(self.poll),
            "mu": None if self.is_pure else self.spent,
            "pure_epsilon": self.spent if self.is_pure else None,
            "epsilon": self.epsilon,
            "epsilon_answered": self.epsilon_answered,
            "adjacency": self.adjacency,
            "theorem": self.theorem,
            "notes": list(self.notes),
        }


_FILTER = (
    "The figure of the answers given may be claimed where a budget at or above it was fixed beforehand and answering "
    "stops before it (Gaussian filters: Smith and Thakurta 2022; Koskela, Tobaben and Honkela 2022)."
)
_SECRET_DRAWS = (
    "Each answer has a fixed number of voters, drawn without replacement from all, and nobody may know who they are. "
    "mu is of voters who are drawn every time."
)
_INDEPENDENT = "No figure here depends on the votes themselves; one that does is as private as they are."


def answered_poll(poll: PollOptions) -> PollAnswer:
    """Find the noise, or how many answers there may be, and what is proven."""
    _check(poll)
    if poll.sampling_rate is not None:
        return _sampled(poll, poll.sampling_rate)
    if poll.answers is not None and poll.target_epsilon is not None and poll.sigma is None and poll.scale is None:
        sigma = least_sigma(max(1, poll.answers), poll.target_epsilon, poll.delta, poll.votes)
        return _answered(poll, NoisyMax(sigma), poll.answers, poll.answers)
    aggregator = _aggregator(poll)
    if poll.answers is not None:
        return _answered(poll, aggregator, poll.answers if poll.asked is None else poll.asked, poll.answers)
    if poll.target_epsilon is None:
        raise InputError("votes needs --answers, or --target-epsilon to find how many there may be")
    if poll.asked is not None:
        raise InputError("--asked needs --answers: with --target-epsilon every question may be answered")
    most = most_answers(aggregator, poll.target_epsilon, poll.delta, poll.votes)
    return _answered(poll, aggregator, most, most)


def _check(poll: PollOptions) -> None:
    if poll.votes < 1:
        raise InputError(key="--votes-per-client", given=poll.votes, allowed="allowed are whole numbers from 1 on")
    if not 0 < poll.delta < 1:
        raise InputError(key="--delta", given=poll.delta, allowed="allowed is between 0 and 1, both excluded")
    if poll.target_epsilon is not None and not 0 < poll.target_epsilon < math.inf:
        raise InputError(
            key="--target-epsilon", given=poll.target_epsilon, allowed="allowed are finite numbers above 0"
        )
    for option, count in (("--answers", poll.answers), ("--asked", poll.asked)):
        if count is not None and not 0 <= count <= MOST_ANSWERS:
            raise InputError(key=option, given=count, allowed=f"allowed are whole numbers from 0 to {MOST_ANSWERS:,}")
    if poll.asked is not None and poll.answers is not None and poll.answers > poll.asked:
        raise InputError(f"--answers {poll.answers} is more than --asked {poll.asked}")
    if poll.asked is not None and poll.threshold_sigma is None:
        raise InputError("--asked is for confident answers: give --threshold-sigma, too, or leave it out")


def _sampled(poll: PollOptions, rate: float) -> PollAnswer:
    """Answers by a few voters, of whom nobody knows who they are."""
    others = {"--threshold-sigma": poll.threshold_sigma, "--scale": poll.scale, "--asked": poll.asked}
    given = [option for option, value in others.items() if value is not None]
    if given or poll.votes != 1:
        raise InputError(
            f"--sampling-rate is for normal noise and one vote each, not for {(*given, '--votes-per-client')[0]}"
        )
    if poll.answers is None or (poll.sigma is None) == (poll.target_epsilon is None):
        raise InputError("--sampling-rate needs --answers, and exactly one of --sigma and --target-epsilon")
    use = SampledUse(math.sqrt(2), rate, poll.answers, poll.delta)
    sigma = poll.sigma if poll.target_epsilon is None else use.least_sigma(poll.target_epsilon)
    aggregator = NoisyMax(sigma or 0.0)
    proven = use.guarantee(aggregator.sigma)
    if proven.epsilon is None:
        raise InputError(key="--sigma", given=aggregator.sigma, allowed="nothing finite is proven")
    return PollAnswer(
        poll=replace(poll, sigma=aggregator.sigma, asked=poll.answers),
        aggregator=aggregator.title,
        is_pure=False,
        spent=aggregator.spent(poll.answers, poll.answers),
        epsilon=proven.epsilon,
        epsilon_answered=proven.epsilon,
        theorem=proven.theorem["epsilon"],
        notes=(_SECRET_DRAWS, _INDEPENDENT),
    )


def _aggregator(poll: PollOptions) -> Aggregator:
    if (poll.sigma is None) == (poll.scale is None):
        raise InputError(
            "votes needs exactly one of --sigma and --scale, or --answers and --target-epsilon to find the noise"
        )
    if poll.scale is not None:
        if poll.threshold_sigma is not None:
            raise InputError("--threshold-sigma goes with --sigma, not with --scale")
        return LaplaceMax(poll.scale)
    sigma = NoisyMax(poll.sigma or 0.0)
    if poll.threshold_sigma is None:
        return sigma
    return ConfidentMax(_ANY_THRESHOLD, poll.threshold_sigma, sigma.sigma)


def _answered(poll: PollOptions, aggregator: Aggregator, asked: int, answered: int) -> PollAnswer:
    any_answers = aggregator.claim(asked, asked, poll.delta, poll.votes)
    given = aggregator.claim(asked, answered, poll.delta, poll.votes)
    noise = {"sigma": aggregator.sigma} if isinstance(aggregator, NoisyMax) else {}
    filled = {**vars(poll), **noise, "asked": asked, "answers": answered}
    return PollAnswer(
        poll=PollOptions(**filled),
        aggregator=aggregator.title,
        is_pure=isinstance(aggregator, LaplaceMax),
        spent=poll.votes * aggregator.spent(asked, answered),
        epsilon=any_answers.epsilon,
        epsilon_answered=given.epsilon,
        theorem=any_answers.theorem,
        notes=(_FILTER, _INDEPENDENT) if answered < asked else (_INDEPENDENT,),
    )
