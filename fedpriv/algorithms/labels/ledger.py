"""The guarantee of labels that clients changed."""

from fedpriv.accounting.response import label_guarantee
from fedpriv.algorithms.labels.client import response_of
from fedpriv.core.records import Guarantee
from fedpriv.core.world import World


def label_claim(world: World) -> Guarantee:
    """Return the ledger's line about labels."""
    notes = [
        "About labels alone. An image often shows its class: anyone who has the image, from its owner or from an "
        "upload that nothing else protects, needs no label.",
        "It is separate from the mechanism's claim and is never added to it: changing labels before training keeps "
        "neighbouring data sets neighbours.",
    ]
    if world.experiment.noise == "reproducible":
        notes.append("noise = 'reproducible': anyone who guesses the seed knows which labels were changed.")
    return label_guarantee(response_of(world), notes)
