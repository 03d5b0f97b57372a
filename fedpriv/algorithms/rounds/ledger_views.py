"""Against whom the ledger's figures protect where noise is on the sum of a round's uploads."""

import math
from dataclasses import replace

from fedpriv.accounting import guarantee
from fedpriv.core.records import Guarantee, LedgerLine, LedgerView
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.world import World

LISTS_PARTICIPANTS = (
    "asked.jsonl",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "observations",
    "reconstructions",
    "referee",
)
"""What a run writes that lists who was asked, or follows from it: these files and folders of its folder."""

_SERVER = "the server, and anyone who reads what it reads: uploads there have no noise"


def views(world: World, worst: LedgerLine) -> tuple[LedgerView, ...]:
    """Return the lines of a run; none where every upload is private by itself."""
    where = world.experiment.mechanism.noise_at
    if where == "clients":
        return ()
    plain = Guarantee(**{name: getattr(worst, name) for name in Guarantee.__dataclass_fields__})
    if where == "sum":
        return (_of_sums(plain),)
    model = LedgerView(
        sees="the models of all rounds, and which clients were queried in each",
        protects_against="clients, anyone who gets a model, and anyone who sees, on the network or in the run's "
        "folder, which clients were queried, but no upload",
        not_against=_SERVER,
        guarantee=plain,
    )
    return (model, *_amplified(world, plain))


def _of_sums(plain: Guarantee) -> LedgerView:
    return LedgerView(
        sees="the sum of each round's uploads, and so the models",
        protects_against="a server that passes on the clients' own keys, clients, and anyone who gets a model, as long "
        "as the clients that a sum needs add their shares",
        not_against="a server that makes up clients or their keys, which nothing here prevents: it reads single "
        "uploads, and each has only a share of the noise; clients who work together with the server, because their "
        "shares are then missing in the noise; and anyone who breaks the masks (key agreement and AES are assumed to "
        "hold)",
        guarantee=plain,
    )


def _amplified(world: World, plain: Guarantee) -> tuple[LedgerView, ...]:
    """The line with amplification, where not all clients are asked in every round.

    Anyone who sees less is covered by the plain figure as well, so it is never above that one.
    """
    federation, plan = world.experiment.federation, world.plans[0]
    rate = federation.asked / federation.clients
    if rate == 1 or not plain.participations:
        return ()
    sampling = federation.client_sampling
    if sampling == "turns" or sampling not in MECHANISMS[plan.config.name].proof().amplifying:
        return ()
    release = replace(
        plan.accounted(()),
        sampling=sampling,
        rate=rate,
        participations=plain.participations,
        adjacency=plan.config.adjacent if sampling == "poisson" else "replace-one",
    )
    known = "the run's secret" if world.experiment.keeps_secret else "the seed (noise = 'reproducible')"
    return (
        LedgerView(
            sees="the models of all rounds, but not which clients were queried",
            protects_against="anyone who gets models and never learns who took part",
            not_against=f"anyone who sees which clients were queried: the network, clients about themselves and others "
            f"they know of, holders of {known}, and readers of the files in the run's folder that list them or follow "
            f"from them: {', '.join(LISTS_PARTICIPANTS)}, and what audits and probes add there (ledger.json counts "
            f"every round for every client, queried or not); and {_SERVER}",
            guarantee=min(
                guarantee(release), plain, key=lambda each: math.inf if each.epsilon is None else each.epsilon
            ),
        ),
    )
