"""From one client's releases to what is proven about them: figures with adjacency, sampling, count and theorem.

A figure is a claim. Where several theorems apply, each figure is the smallest they give and names the one that gave it;
where none applies it is None, and the theorem's text says why.
"""

from fedpriv.accounting.proofs import Claim, Proof, smallest, stated
from fedpriv.accounting.release import Release
from fedpriv.core.errors import InputError
from fedpriv.core.records import Guarantee
from fedpriv.core.registry import MECHANISMS

_UNUSED = Claim(0.0, "no participation: nothing that depends on this client's data was released")


def guarantee(release: Release) -> Guarantee:
    """Return what is proven about one client's releases, by mechanism and sampling.

    - Without noise: no finite figure.
    - Normal noise (``gaussian_proof``): shuffled or full: replace-one with sensitivity 2 clip_norm; T releases are one
      with sigma / (2 sqrt T), converted exactly (Balle and Wang 2018). poisson: under either adjacency the smallest of
      privacy-loss distributions, Renyi accounting and the unsampled bound.
    - Directional and Laplace noise (``pure_proof``): replace-one; pure 2 kappa a block, or 2 / scale, for each
      participation; (epsilon, delta) the smallest of the pure figure, optimal composition of pure figures, Renyi
      accounting of the exact divergence, and privacy-loss distributions of the dominating pair. poisson: the
      same of Binomial(T, q) participations.
    - fixed, all: amplified, the smallest of the same and the unsampled bound.
    - Correlated noise (:mod:`fedpriv.accounting.correlated`): one normal law for all rounds, converted exactly.
    - balls-in-bins, all: the smaller of the unsampled bound and :mod:`fedpriv.accounting.allocation`.

    Args:
        release: all that one client releases in a run.

    Raises:
        InputError: another package's proof returns a number that is no epsilon.
    """
    proof = _proof(release)
    unused = _is_unused(release)
    pure, best = (_UNUSED, _UNUSED) if unused else (_sound(proof, proof.pure()), _sound(proof, proof.best()))
    nominal = _sound(proof, proof.nominal())
    adjacency, count, delta = proof.adjacency, int(release.participations), float(release.delta)
    return stated(adjacency, count, delta, pure, best, nominal, proof.notes(), sampling_of(release))


def proven_epsilon(release: Release) -> float:
    """Return only the epsilon of :func:`guarantee`, without the work for its notes; infinite if nothing is proven."""
    proof = _proof(release)
    return 0.0 if _is_unused(release) else _sound(proof, proof.best()).epsilon


def running_epsilon(release: Release) -> float:
    """Return a proven epsilon in milliseconds, at least that of :func:`guarantee`; infinite if nothing is proven."""
    if _is_unused(release):
        return 0.0
    proof = _proof(release)
    return smallest([_sound(proof, claim) for claim in proof.running_claims()]).epsilon


def _is_unused(release: Release) -> bool:
    return release.participations == 0 and release.noise is not None


def _proof(release: Release) -> Proof:
    return MECHANISMS[release.mechanism].proof()(release)


def _sound(proof: Proof, claim: Claim) -> Claim:
    """A claim, unless it is none: proofs of other packages are not ours to trust with a NaN or a negative figure."""
    if isinstance(claim.epsilon, (int, float)) and claim.epsilon >= 0:
        return claim
    raise InputError(
        f"mechanism {proof.release.mechanism}: the proof {type(proof).__qualname__} claims epsilon = {claim.epsilon} "
        f"({claim.theorem}); allowed: numbers from 0 on, or infinity"
    )


def sampling_of(release: Release) -> str:
    """Return how a step picks its examples, in words."""
    if release.sampling == "balls-in-bins":
        return f"balls-in-bins, {release.slots} steps a pass"
    if release.correlation is not None:
        return f"{release.sampling}, at most every {release.correlation.separation} rounds"
    rated = release.sampling in ("fixed", "poisson")
    return f"{release.sampling}, rate {release.rate:.6g}" if rated else release.sampling
