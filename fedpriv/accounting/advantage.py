"""What differential privacy says about telling members from others: no attack on a private release does better.

Members and others are drawn alike, and one of them is in the training data in place of the other: the two data sets are
neighbours under replace-one. Of a rule that says "member", TPR <= e^epsilon FPR + delta and 1 - FPR <= e^epsilon (1 -
TPR) + delta; added up, TPR - FPR <= (e^epsilon - 1 + 2 delta) / (e^epsilon + 1) (Yeom et al. 2018; tight: Humphries et
al. 2023). Where one release scores both, let A be the probability that the member's score is the larger one. Exchange
the two: the data set becomes a neighbour and the event its opposite, so A <= e^epsilon (1 - A) + delta.
"""

import scipy

from fedpriv.core.errors import InputError


def membership_advantage(epsilon: float, delta: float) -> float:
    """Return what true minus false positive rate is at most: (e^epsilon - 1 + 2 delta) / (e^epsilon + 1)."""
    _check(epsilon, delta)
    return float(1 - 2 * (1 - delta) * scipy.special.expit(-epsilon))


def membership_auc(epsilon: float, delta: float) -> float:
    """Return what the area under the curve is at most: (e^epsilon + delta) / (1 + e^epsilon)."""
    _check(epsilon, delta)
    return float(1 - (1 - delta) * scipy.special.expit(-epsilon))


def _check(epsilon: float, delta: float) -> None:
    if not epsilon >= 0:
        raise InputError(key="epsilon", given=epsilon, allowed="allowed is from 0")
    if not 0 <= delta <= 1:
        raise InputError(key="delta", given=delta, allowed="allowed is from 0 to 1")
