"""From the options of ``fedpriv account MECHANISM`` to a line of the ledger."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fedpriv.accounting import (
    Ceiling,
    Guarantee,
    NoiseParameter,
    Release,
    calibrate,
    calibrate_ceiling,
    calibrate_membership,
    ceilings,
    equal_blocks,
    guarantee,
    membership_bound,
    nominal_noise,
    release_with,
)
from fedpriv.accounting.people import Share, person
from fedpriv.accounting.release import LARGEST_DIMENSION, Correlation
from fedpriv.core.cli.account import AccountOptions
from fedpriv.core.errors import InputError
from fedpriv.core.names import SamplingName
from fedpriv.core.records import MembershipBound, Person
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.settings import enumerated


@dataclass(frozen=True)
class Answer:
    """A line of the ledger."""

    options: AccountOptions
    release: Release  # what is accounted for, the noise with it
    guarantee: Guarantee  # what is proven
    ceilings: tuple[Ceiling, ...]  # what no attack can exceed, for each baseline
    membership_bound: MembershipBound | None  # what no test of membership can; None: it was not asked for
    person: Person | None  # what is proven about a person over several clients; None: it was not asked for

    @property
    def parameter(self) -> NoiseParameter:
        """What says how much noise there is."""
        return _parameter(self.options)


def answer(options: AccountOptions) -> Answer:
    """Find the noise and what is proven with it."""
    noise = _parameter(options).name
    target = "--epsilon" if options.target_epsilon is None else "--target-epsilon"
    with in_options({noise: f"--{noise}", "epsilon": target}):
        return _answered(options)


@contextmanager
def in_options(options: Mapping[str, str]) -> Iterator[None]:
    """Name numbers that are out of range as they were given: the accounting knows no options."""
    try:
        yield
    except InputError as error:
        option = {**_OPTIONS, **options}.get(error.key)
        raise (error if option is None else error.replaced(key=option)) from None


_OPTIONS = {
    "rate": "--sampling-rate",
    "participations": "--participations",
    "delta": "--delta",
    "band": "--band",
    "separation": "--separation",
    "rounds": "--rounds",
    "dimension": "--dimension",
    "ceiling": "--target-ceiling",
    "advantage": "--target-advantage",
    "tpr": "--target-tpr",
    "sampling": "--sampling",
}


_GUESS = "1/100"


def _answered(options: AccountOptions) -> Answer:
    option, value = _given_noise(options)
    if options.guess is not None and option != "--target-ceiling":
        raise InputError(key="--guess", given=options.guess, allowed="it is read with --target-ceiling alone")
    baselines = [_baseline("--ceiling", text) for text in options.ceiling or ()]
    rates = [_baseline("--fpr", text) for text in options.fpr or ()]
    if option == "--target-tpr" and len(rates) != 1:
        raise InputError(key="--target-tpr", given=value, allowed="it needs --fpr, the false positive rate, once")
    sampling, rate = _sampling(options)
    release = release_with(
        1.0,
        options.delta,
        mechanism=options.mechanism,
        sampling=sampling,
        rate=rate,
        participations=options.participations,
        dimensions=equal_blocks(_dimension(options), options.blocks),
        unit=options.unit,
        adjacency=options.adjacency,
        correlation=_correlation(options),
    )
    if option == "--target-epsilon":
        value = calibrate(value, release)
    elif option == "--target-ceiling":
        baselines = [k0 := _baseline("--guess", options.guess or _GUESS), *baselines]
        value = calibrate_ceiling(value, k0, release)
    elif option in ("--target-advantage", "--target-tpr"):
        value = calibrate_membership(value, release, rates[0] if option == "--target-tpr" else None)
    elif option == "--epsilon":
        value = nominal_noise(
            value,
            options.delta,
            mechanism=options.mechanism,
            calibration=options.calibration,
            sensitivity=_sensitivity(options),
        )
    release = replace(release, noise=value)
    proven = _with_nominal(guarantee(release), options)
    tests = membership_bound(release, rates) if rates or option == "--target-advantage" else None
    return Answer(options, release, proven, _ceilings(release, baselines), tests, _person(release, options.records))


def _person(release: Release, records: str | None) -> Person | None:
    if records is None:
        return None
    counts = [int(each) if each.strip().isdecimal() else 0 for each in records.split(",")]
    try:
        return person([Share(release, count) for count in counts])
    except InputError as error:
        if error.key != "records":
            raise
        allowed = f"allowed are {error.allowed}, one a client, as in 3,1"
        raise InputError(key="--records", given=records, allowed=allowed) from None


def _correlation(options: AccountOptions) -> Correlation | None:
    """The pattern of participations, where noise is correlated."""
    if not MECHANISMS[options.mechanism].proof().correlates:
        return None
    count, apart = max(options.participations, 1), max(options.separation, 1)
    rounds = (count - 1) * apart + 1 if options.rounds is None else options.rounds
    if count > -(-rounds // apart):
        allowed = f"at most {-(-rounds // apart)} of {rounds} rounds, at most every {apart} rounds"
        raise InputError(key="participations", given=count, allowed=allowed)
    band = min(apart, rounds) if options.band is None else options.band
    return Correlation(band, options.separation, count, rounds)


def _dimension(options: AccountOptions) -> int:
    if options.dimension is not None:
        return options.dimension
    if MECHANISMS[options.mechanism].by_dimension:
        raise InputError(
            f"{options.mechanism} needs --dimension, the numbers in a gradient or update, because epsilon depends on "
            f"it; allowed is from 1 to {LARGEST_DIMENSION:,}"
        )
    return 1


def _ceilings(release: Release, baselines: Sequence[float]) -> tuple[Ceiling, ...]:
    figures = ceilings(release, baselines)
    missing = [ceiling.theorem for ceiling in figures if ceiling.gamma is None]
    if missing:
        raise InputError(f"--ceiling: {missing[0]}; allowed are mechanisms whose proof has a reference")
    return figures


def _baseline(option: str, text: str) -> float:
    parts = text.split("/")
    try:
        numerator, denominator = float(parts[0]), float(parts[1]) if len(parts) == 2 else 1.0
        baseline = numerator / denominator if len(parts) <= 2 else math.nan
    except (ValueError, ZeroDivisionError):
        baseline = math.nan
    if not 0 < baseline < 1:
        raise InputError(
            key=option,
            given=text,
            allowed="allowed are numbers and fractions between 0 and 1, such as 0.1 and 1/100",
        )
    return baseline


def _given_noise(options: AccountOptions) -> tuple[str, float]:
    choices = {
        f"--{_parameter(options).name}": options.noise,
        "--epsilon": options.epsilon,
        "--target-epsilon": options.target_epsilon,
        "--target-ceiling": options.target_ceiling,
        "--target-advantage": options.target_advantage,
        "--target-tpr": options.target_tpr,
    }
    given = [(name, value) for name, value in choices.items() if value is not None]
    if len(given) != 1:
        what = f"{' and '.join(name for name, _ in given)} are given" if given else "none is given"
        raise InputError(f"{options.mechanism} needs exactly one of {', '.join(choices)}; {what}")
    return given[0]


def _sampling(options: AccountOptions) -> tuple[SamplingName, float]:
    """Return the sampling, by default the one that amplifies at this rate, and the rate, 1 where there is none."""
    amplifying: tuple[SamplingName, ...] = MECHANISMS[options.mechanism].proof().amplifying
    rate = options.sampling_rate
    usual: SamplingName = amplifying[0] if rate is not None and amplifying else "full"
    sampling = options.sampling or usual
    if sampling not in amplifying and rate is not None:
        other = f", or take --sampling {enumerated(amplifying, 'or')}" if amplifying else ""
        raise InputError(
            f"--sampling {sampling} with --sampling-rate {rate:g}: no amplification by it is proven; leave out the rate"
            f"{other}"
        )
    if sampling in amplifying and rate is None:
        raise InputError(f"--sampling {sampling} needs --sampling-rate, above 0 and at most 1")
    return sampling, 1.0 if rate is None else rate


def _parameter(options: AccountOptions) -> NoiseParameter:
    proof = MECHANISMS[options.mechanism].proof()
    if proof.parameter is None:
        raise InputError(f"nothing is proven about {options.mechanism}")
    return proof.parameter


def _sensitivity(options: AccountOptions) -> int:
    """Of a single normal release, over clip_norm."""
    return 1 if options.adjacency == "zero-out" else 2


def _with_nominal(proven: Guarantee, options: AccountOptions) -> Guarantee:
    """Say what --epsilon means for the mechanisms whose ledger has no nominal figure."""
    if options.epsilon is None or proven.nominal_epsilon is not None:
        return proven
    words = (
        f"nominal, as given: one release alone is (epsilon, delta)-private, by the {options.calibration} calibration "
        f"at sensitivity {_sensitivity(options)} clip_norm and without sampling"
    )
    return replace(proven, nominal_epsilon=options.epsilon, theorem={**proven.theorem, "nominal_epsilon": words})
