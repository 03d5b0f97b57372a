"""What other libraries say of one question about noise, each with what it protects, beside the truth.

The truth is that of the pair which dominates: in closed form without sampling, else composed on a grid fine enough for
0.02 %. "Add or remove" has the figures of the ledger's zero-out. Where an example is replaced, the sum moves by twice
the norm that an example is clipped to; libraries that count noise per change take it to move by that norm alone.
"""

import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

from fedpriv.accounting.gaussian import gaussian_epsilon
from fedpriv.accounting.guarantees import guarantee
from fedpriv.accounting.numerical import composed_epsilon
from fedpriv.accounting.pairs import LaplacePair, Pair, PoissonGaussianPair, zero_out_pair
from fedpriv.accounting.release import release_with
from fedpriv.core.errors import InputError, one_line
from fedpriv.core.names import AdjacencyName

Neighbours = Literal["add or remove", "replace"]
Promise = Literal["bound", "approximation"]
Verdict = Literal["below the truth", "the truth", "above the truth", "another question", "no figure"]

NEIGHBOURS: tuple[Neighbours, ...] = ("add or remove", "replace")

_FINE = 0.01  # of a loss's standard deviation
SAME = 1e-3  # relative; a smaller difference is not told
PER_RECORD = "noise per record"
PER_CHANGE = "noise per change"


@dataclass(frozen=True)
class Question:
    """Noise on the sums of a run, of examples that are clipped to norm 1."""

    mechanism: Literal["gaussian", "laplace"]
    noise: float  # standard deviation, or scale, from 0.05 to 1e6
    rate: float  # of Poisson batches, in (0, 1]; 1: each step uses every example
    steps: int  # from 1 to 1e7
    delta: float  # from 1e-15 to below 1

    @classmethod
    def of(cls, sigma: float | None, scale: float | None, rate: float, steps: int, delta: float) -> "Question":
        """Return the question about normal or, with ``scale``, Laplace noise; exactly one of the two is given."""
        if scale is not None:
            return cls("laplace", scale, rate, steps, delta)
        if sigma is None:
            raise ValueError("no noise is given")
        return cls("gaussian", sigma, rate, steps, delta)

    def __post_init__(self) -> None:
        _within("noise", self.noise, 0.05 <= self.noise <= 1e6, "from 0.05 to 1e6")
        _within("rate", self.rate, 0 < self.rate <= 1, "above 0, up to 1")
        _within("steps", self.steps, 1 <= self.steps <= 10**7, "from 1 to 10,000,000")
        _within("delta", self.delta, 1e-15 <= self.delta < 1, "from 1e-15 to below 1")
        if self.mechanism == "laplace" and self.rate < 1:
            raise InputError(key="rate", given=self.rate, allowed="sampled batches are compared for gaussian noise")


@dataclass(frozen=True)
class Opinion:
    """A library's figure for a question."""

    library: str  # with its version
    method: str
    neighbours: Neighbours
    unit: str  # what the noise is a multiple of
    promise: Promise  # whether the library calls its figure an upper bound
    epsilon: float | None
    truth: float | None  # for these neighbours, noise per record
    note: str = ""  # why there is no figure, or which other question it answers

    @property
    def verdict(self) -> Verdict:
        """How the figure relates to the truth, to 0.1 %."""
        if self.epsilon is None:
            return "no figure"
        if self.truth is None:
            return "another question"
        claimed = max(self.epsilon, 0.0)  # below 0 nothing is known of what holds
        if claimed < self.truth * (1 - SAME):
            return "below the truth"
        return "above the truth" if claimed > self.truth * (1 + SAME) else "the truth"


@dataclass(frozen=True)
class _Accountant:
    library: str
    method: str
    neighbours: Neighbours
    epsilon: Callable[[Question], float]
    unit: str = PER_RECORD
    promise: Promise = "bound"
    mechanisms: tuple[str, ...] = ("gaussian",)
    other: str = ""  # what it answers instead of the question


@cache
def truth(question: Question, neighbours: Neighbours) -> float | None:
    """Return the smallest epsilon that holds at delta, at most about 0.02 % too large; None: out of reach."""
    moved = 1.0 if neighbours == "add or remove" else 2.0
    if question.mechanism == "gaussian" and question.rate == 1:
        return gaussian_epsilon(question.delta, moved * question.steps**0.5 / question.noise)
    pairs: tuple[Pair, ...]
    if question.mechanism == "laplace":
        pairs = (LaplacePair(moved / question.noise),)
    elif neighbours == "replace":
        pairs = (PoissonGaussianPair(question.noise, question.rate),)
    else:
        goes = zero_out_pair(question.noise, question.rate)
        pairs = (goes, goes.exchanged)
    known = ledger(question, neighbours)
    if not known:
        return known
    found = [composed_epsilon(((pair, question.steps),), question.delta, known, _FINE) for pair in pairs]
    epsilons = [epsilon for epsilon in found if epsilon is not None]
    return max(epsilons) if len(epsilons) == len(found) else None


@cache
def ledger(question: Question, neighbours: Neighbours) -> float | None:
    """Return the figure of a run's ledger."""
    removes = neighbours == "add or remove"
    sampled = question.rate < 1
    adjacency: AdjacencyName = "zero-out" if removes and sampled else "replace-one"
    release = release_with(
        question.noise * (2 if removes and not sampled else 1),  # which moves the sum half as far
        question.delta,
        mechanism=question.mechanism,
        sampling="poisson" if sampled else "full",
        rate=question.rate,
        participations=question.steps,
        dimensions=(1,),
        adjacency=adjacency,
    )
    return guarantee(release).epsilon


def opinions(question: Question, libraries: Sequence[str]) -> list[Opinion]:
    """Ask libraries, of :data:`LIBRARIES` and installed, one after the other."""
    for name in libraries:
        if name not in LIBRARIES:
            raise InputError(key="with", given=name, allowed=f"allowed are {', '.join(LIBRARIES)}")
        _version(name)
    truths = {neighbours: truth(question, neighbours) for neighbours in NEIGHBOURS}
    asked = [
        accountant
        for accountant in ACCOUNTANTS
        if accountant.library in libraries and not (accountant.other and question.rate == 1)
    ]
    return [_opinion(accountant, question, truths[accountant.neighbours]) for accountant in asked]


def _opinion(accountant: _Accountant, question: Question, true: float | None) -> Opinion:
    epsilon, note = None, accountant.other
    if question.mechanism not in accountant.mechanisms:
        note = f"{question.mechanism} noise is unknown to it"
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                epsilon = float(accountant.epsilon(question))
        except Exception as error:  # noqa: BLE001 (each library fails in its own way)
            note = one_line(error)
    return Opinion(
        f"{accountant.library} {_version(accountant.library)}",
        accountant.method,
        accountant.neighbours,
        accountant.unit,
        accountant.promise,
        epsilon,
        None if accountant.other else true,
        note,
    )


def _version(library: str) -> str:
    package = PACKAGES.get(library, library)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        hint = f"pip install {package}"
        raise InputError(key="with", given=library, allowed="this library is not installed", hint=hint) from None


def _within(key: str, given: float, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise InputError(key=key, given=given, allowed=f"allowed is {allowed}")


# ---- the libraries --------------------------------------------------------------------------------------------------


def _opacus(name: str) -> Callable[[Question], float]:
    def epsilon(question: Question) -> float:
        from opacus import accountants

        accountant = getattr(accountants, name)()
        accountant.history = [(question.noise, question.rate, question.steps)]
        return float(accountant.get_epsilon(question.delta))

    return epsilon


def _dp_accounting(kind: str, relation: str, sampling: Literal["poisson", "fixed"] = "poisson") -> Callable[..., float]:
    def epsilon(question: Question) -> float:
        import dp_accounting
        from dp_accounting import pld, rdp

        noise = {"gaussian": dp_accounting.GaussianDpEvent, "laplace": dp_accounting.LaplaceDpEvent}
        event = noise[question.mechanism](question.noise)
        if sampling == "fixed":
            share = Fraction(question.rate).limit_denominator(10**9)
            event = dp_accounting.SampledWithoutReplacementDpEvent(share.denominator, share.numerator, event)
        elif question.rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(question.rate, event)
        neighbours = dp_accounting.NeighboringRelation[relation]
        accountants = {"PLD": pld.PLDAccountant, "RDP": rdp.RdpAccountant}
        accountant = accountants[kind](neighboring_relation=neighbours).compose(event, question.steps)
        return float(accountant.get_epsilon(question.delta))

    return epsilon


def _riskcal(question: Question) -> float:
    from riskcal.accountants.ctd import CTDAccountant

    accountant = CTDAccountant()
    accountant.history = [(question.noise, question.rate, question.steps)]
    return float(accountant.get_epsilon(delta=question.delta))


def _prv(question: Question) -> float:
    import prv_accountant

    step = {
        "gaussian": lambda: prv_accountant.PoissonSubsampledGaussianMechanism(question.rate, question.noise),
        "laplace": lambda: prv_accountant.LaplaceMechanism(1 / question.noise),
    }[question.mechanism]()
    accountant = prv_accountant.PRVAccountant(
        prvs=[step], max_self_compositions=[question.steps], eps_error=0.01, delta_error=question.delta / 1000
    )
    return float(accountant.compute_epsilon(question.delta, [question.steps])[2])


_BOTH = ("gaussian", "laplace")
_FIXED = "batches of a fixed size, and noise per change"

ACCOUNTANTS = (
    _Accountant("opacus", "GDP", "add or remove", _opacus("GaussianAccountant"), promise="approximation"),
    _Accountant("opacus", "PRV", "add or remove", _opacus("PRVAccountant")),
    _Accountant("opacus", "RDP", "add or remove", _opacus("RDPAccountant")),
    _Accountant("dp-accounting", "PLD", "add or remove", _dp_accounting("PLD", "ADD_OR_REMOVE_ONE"), mechanisms=_BOTH),
    _Accountant("dp-accounting", "PLD", "replace", _dp_accounting("PLD", "REPLACE_ONE"), mechanisms=_BOTH),
    _Accountant("dp-accounting", "RDP", "add or remove", _dp_accounting("RDP", "ADD_OR_REMOVE_ONE"), mechanisms=_BOTH),
    _Accountant("dp-accounting", "RDP", "replace", _dp_accounting("RDP", "REPLACE_ONE"), PER_CHANGE, mechanisms=_BOTH),
    _Accountant(
        "dp-accounting",
        "RDP, fixed size",
        "replace",
        _dp_accounting("RDP", "REPLACE_ONE", "fixed"),
        PER_CHANGE,
        other=_FIXED,
    ),
    _Accountant("riskcal", "PLD", "add or remove", _riskcal),
    _Accountant("prv", "PRV", "add or remove", _prv, mechanisms=_BOTH),
)
LIBRARIES = tuple(dict.fromkeys(accountant.library for accountant in ACCOUNTANTS))
PACKAGES = {"prv": "prv-accountant"}  # where they have another name
