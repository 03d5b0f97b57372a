"""Shadow models (Shokri, Stronati, Song and Shmatikov 2017): an attack that learns what members' predictions look like.

The references are the shadows: of each it is known with which candidates it was trained, so their predictions are
labelled examples of "in" and "out". A classifier is trained on those and applied to the target's predictions.
"""

import numpy as np
from numpy.typing import NDArray

from fedpriv.attacks.membership.signals import Signals, need_references

__all__ = ["judged", "predictions", "shadow_models"]

Floats = NDArray[np.float64]

# As in the paper: one hidden layer of 64 units.
HIDDEN = 64
# More predictions teach one small network next to nothing; these are drawn at random where there are more.
MOST_RECORDS = 50_000
# The attack is a function of the signals: the seed of the network and of the draw is no setting.
SEED = 0


def shadow_models(signals: Signals) -> Floats:
    """Learn on the references' final predictions which were trained with an example, and judge the target's.

    The paper trains one classifier a class on whole prediction vectors. Here one serves all classes, since a class may
    have few candidates: it sees the right label's logit and the other classes' log-probabilities in order of size
    (as Salem et al. 2019, ML-Leaks, Section III).

    Args:
        signals: the final round is used.

    Returns:
        (N,), the log-odds of "in".

    Raises:
        InputError: a candidate lacks references of one kind.
    """
    need_references(signals.inside, 1, "trained with it")
    need_references(~signals.inside, 1, "trained without it")
    records = predictions(signals.references[:, -1], signals.reference_others)
    return judged(records, signals.inside, predictions(signals.target[-1], signals.others))


def judged(records: Floats, inside: NDArray[np.bool_], asked: Floats) -> Floats:
    """Learn what predictions on members look like, and judge others.

    Args:
        records: (R, N, F), predictions of each shadow on each of its examples.
        inside: (R, N), whether the shadow was trained with it.
        asked: (M, F), predictions of the target.

    Returns:
        (M,), the log-odds of "in".
    """
    from sklearn.neural_network import MLPClassifier  # a second to import, and only an audit needs it
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    flat, answers = records.reshape(-1, records.shape[-1]), inside.ravel()
    chosen = np.random.default_rng(SEED).permutation(len(flat))[:MOST_RECORDS]
    network = MLPClassifier((HIDDEN,), early_stopping=True, max_iter=200, random_state=SEED)
    classifier = make_pipeline(StandardScaler(), network).fit(flat[chosen], answers[chosen])
    with np.errstate(divide="ignore"):  # where it is certain the odds are infinite, and rank as such
        logs = classifier.predict_log_proba(asked)
    odds: Floats = logs[:, 1] - logs[:, 0]
    return odds


def predictions(labels: Floats, others: Floats) -> Floats:
    """Return right labels' logits (..., N) and other classes' log-probabilities (..., N, K) as (..., N, 1 + K)."""
    return np.concatenate([labels[..., None], others], axis=-1)
