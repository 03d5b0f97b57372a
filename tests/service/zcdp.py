"""The simple conversion of concentrated differential privacy, which exact figures must not exceed."""

import math


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return rho + 2 sqrt(rho log(1/delta)), an epsilon of rho-zCDP (Bun and Steinke 2016, Prop. 1.3)."""
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))
