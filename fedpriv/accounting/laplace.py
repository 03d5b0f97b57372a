"""Composition of the Laplace mechanism by privacy-loss distributions (PLD).

One coordinate suffices. Let h_t(b) = sup over events of P - b Q for Laplace laws P, Q of scale 1 at distance t; it is
1 - min(1, b, sqrt(b) exp(-t/2)). Of two coordinates at distances t and u, with r the density ratio of the second,

    h(b) = 1 - E_Q min(r, b, sqrt(b r) exp(-t/2)) <= 1 - min(1, b, sqrt(b) exp(-(t + u)/2)) = h_(t+u)(b),

the expectation written out in the atoms and the density of r. So one coordinate at the full L1 distance dominates any
number of coordinates that share it, and the dominating pair may be composed in place of the mechanism, adaptively (Zhu,
Dong and Wang 2022, Theorem 10).
"""

import math

__all__ = ["laplace_pld_epsilon"]

# As for the Gaussian, the FFT that composes rounds absolutely: small deltas are left to other theorems.
_SMALLEST_DELTA, _DELTA_PER_STEP = 1e-9, 1e-12
_HELD_BACK = 1e-3
_LARGEST_EPSILON = 1e6
# Below, the loss is nearly that of randomised response, which has a closed form; above, exponentials overflow.
_SMALLEST_SHIFT, _LARGEST_SHIFT = 0.02, 500.0
_LARGEST_COUNT = 100_000  # more take seconds


def laplace_pld_epsilon(shift: float, count: int, delta: float, upper: float) -> float | None:
    """Return epsilon of ``count`` adaptive Laplace releases, by dp-accounting's pessimistic discretisation.

    Args:
        shift: L1 sensitivity over the noise scale, above 0.
        count: number of releases, at least 1.
        delta: in (0, 1).
        upper: an epsilon already known to hold, which sets the scale of the grid.

    Returns:
        Epsilon; None where the numbers are out of the range in which the composition is accurate and fast.
    """
    from dp_accounting.pld import privacy_loss_distribution  # here, because the import takes a second

    in_range = _SMALLEST_SHIFT <= shift <= _LARGEST_SHIFT and upper <= _LARGEST_EPSILON and count <= _LARGEST_COUNT
    if not in_range or delta < max(_SMALLEST_DELTA, _DELTA_PER_STEP * count):
        return None
    # Both ends of the loss, where its atoms lie, are on the grid.
    cells = math.ceil(shift / max(min(0.2 * shift, 0.05), upper / 1e5))
    single = privacy_loss_distribution.from_laplace_mechanism(
        1.0, sensitivity=shift, value_discretization_interval=shift / cells
    )
    epsilon = float(single.self_compose(count).get_epsilon_for_delta(delta * (1 - _HELD_BACK)))
    return epsilon if math.isfinite(epsilon) else None
