"""Mechanisms on one scale: the noise-to-signal ratio of the mean gradient at the same proven (epsilon, delta).

The noise-to-signal ratio is the root mean square of the length of the noise in the released mean of B gradients, over
the length of the signal, which is what is released without the noise. It needs an assumption about the gradients:

- all B point the same way;
- each is as long as clipping allows, or longer (a clipped mechanism then keeps its direction only, as vmf does);
- for clipping in the L1 norm, its K coordinates are spread like normal ones, so that |g|_1 = sqrt(2 K / pi) |g|_2.

This favours no mechanism by the size of clip_norm. It does not count what clipping distorts where it acts on some
gradients only, nor that blocks of equal length are not the gradient's own, nor that the size of a Poisson batch varies
around B.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.accounting.calibration import OutOfReachError, calibrate
from fedpriv.accounting.release import LARGEST_DIMENSION, release_with
from fedpriv.core.errors import InputError
from fedpriv.core.names import SamplingName
from fedpriv.core.registry import MECHANISMS

_MOST_BLOCKS = 10_000_000
_MOST_BLOCKS_COMPARED = 1_000_000  # here calibration asks for each figure dozens of times
_MOST_BATCH_SIZE = 10**12
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Contender:
    """A mechanism that is compared.

    Attributes:
        label: for a reader.
        mechanism: as in the settings.
        dimensions: K of each block.
        sampling: full, fixed (batches of a fixed size) or poisson.
    """

    label: str
    mechanism: str
    dimensions: tuple[int, ...]
    sampling: SamplingName = "full"


@dataclass(frozen=True)
class Point:
    """One contender at one epsilon.

    Attributes:
        epsilon: proven for the whole run.
        noise: the least noise that proves it: in its own parameter; None if none in range does.
        ratio: the noise-to-signal ratio with this noise; None likewise.
        refusal: why there is none; empty if there is.
    """

    epsilon: float
    noise: float | None
    ratio: float | None
    refusal: str = ""


@dataclass(frozen=True)
class Comparison:
    """Every contender at every epsilon, all under replace-one.

    Attributes:
        delta: of every (epsilon, delta) statement.
        rate: q = B / n; None: no sampling.
        participations: how often an example is used.
        batch_size: B, gradients in a mean.
        dimension: K, numbers in a gradient.
        curves: a contender and its points in the order of the epsilons asked for.
    """

    delta: float
    rate: float | None
    participations: int
    batch_size: int
    dimension: int
    curves: tuple[tuple[Contender, tuple[Point, ...]], ...]


def equal_blocks(dimension: int, blocks: int) -> tuple[int, ...]:
    """Cut K coordinates into m blocks whose sizes differ by 1 at most, the larger ones first.

    Raises:
        InputError: a number of coordinates out of range, no block, or more blocks than coordinates or ten million.
    """
    if not 1 <= dimension <= LARGEST_DIMENSION:
        raise InputError(key="dimension", given=dimension, allowed=f"allowed is from 1 to {LARGEST_DIMENSION:,}")
    if not 1 <= blocks <= dimension:
        raise InputError(
            key="blocks", given=blocks, allowed=f"allowed is from 1 to the {dimension:,} coordinates that there are"
        )
    if blocks > _MOST_BLOCKS:
        raise InputError(key="blocks", given=blocks, allowed=f"allowed is up to {_MOST_BLOCKS:,}")
    size, larger = divmod(dimension, blocks)
    return (size + 1,) * larger + (size,) * (blocks - larger)


def noise_to_signal(contender: Contender, noise: float, batch_size: int) -> float:
    """Return the noise-to-signal ratio of the mean of B gradients, under the assumption at the top of this module.

    Args:
        contender: the mechanism.
        noise: its noise parameter, above 0.
        batch_size: B, at least 1.
    """
    proof = MECHANISMS[contender.mechanism].proof()
    return float(proof.noise_to_signal(contender.dimensions, noise, batch_size))


def compare_mechanisms(
    epsilons: Sequence[float],
    delta: float,
    *,
    dimension: int,
    batch_size: int,
    participations: int,
    rate: float | None = None,
    block_size: int | None = None,
) -> Comparison:
    """Calibrate every mechanism to the same proven epsilons and compare what is left of the signal.

    Args:
        epsilons: of the whole run, above 0.
        delta: in (0, 1).
        dimension: K, at least 1.
        batch_size: B, from 1 to 1e12.
        participations: how often an example is used, at least 1.
        rate: of batches of a fixed size, and also of Poisson batches where they amplify best; None: no sampling.
        block_size: about how many coordinates small blocks have; None: 16, or as many as there are.

    Raises:
        InputError: an argument out of range.
    """
    if not 1 <= batch_size <= _MOST_BATCH_SIZE:
        raise InputError(key="batch_size", given=batch_size, allowed=f"allowed is from 1 to {_MOST_BATCH_SIZE:,}")
    whole = equal_blocks(dimension, 1)
    small = _small_blocks(dimension, min(_BLOCK_SIZE, dimension) if block_size is None else block_size)
    sampling: SamplingName = "full" if rate is None else "fixed"
    contenders = [
        Contender(label, name, dimensions, sampling)
        for name, kind in MECHANISMS.items()
        for label, dimensions in kind.contenders(whole, small)
    ]
    if rate is not None:
        contenders += [
            Contender(f"{each.label}, Poisson", each.mechanism, each.dimensions, "poisson")
            for each in contenders
            if MECHANISMS[each.mechanism].proof().amplifying[:1] == ("poisson",)
        ]

    def point(contender: Contender, epsilon: float) -> Point:
        release = release_with(
            1.0,
            delta,
            mechanism=contender.mechanism,
            sampling=contender.sampling,
            rate=1.0 if rate is None else rate,
            participations=participations,
            dimensions=contender.dimensions,
        )
        try:
            noise = calibrate(epsilon, release)
        except OutOfReachError as error:
            return Point(epsilon, None, None, str(error))
        return Point(epsilon, noise, noise_to_signal(contender, noise, batch_size))

    curves = tuple((contender, tuple(point(contender, epsilon) for epsilon in epsilons)) for contender in contenders)
    return Comparison(delta, rate, participations, batch_size, dimension, curves)


def _small_blocks(dimension: int, block_size: int) -> tuple[int, ...]:
    if not 1 <= block_size <= dimension:
        raise InputError(
            key="block_size",
            given=block_size,
            allowed=f"allowed is from 1 to the {dimension:,} coordinates that there are",
        )
    blocks = -(-dimension // block_size)
    if blocks > _MOST_BLOCKS_COMPARED:
        least = -(-dimension // _MOST_BLOCKS_COMPARED)
        raise InputError(
            key="block_size",
            given=block_size,
            allowed=f"cuts {dimension:,} coordinates in {blocks:,} blocks; allowed is from {least:,}",
        )
    return equal_blocks(dimension, blocks)
