"""Threat models as data: the adversary's position, what it sees and knows, and what attacks may require.

A threat model is a row of :data:`LISTENERS` (who listens, and where) together with the settings ``adversary.knows_*``
(what they know besides). An attack states what it needs as a tuple of :class:`Access`; where the threat model
withholds one of these, the attack is refused with the reason, rather than helped along.
"""

import textwrap
from collections.abc import Iterable
from dataclasses import replace

from fedpriv.attacks.settings import Access
from fedpriv.core import records
from fedpriv.core.algorithm import algorithm_of
from fedpriv.core.columns import worded
from fedpriv.core.config import AdversaryConfig, Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.registry import suggestion

WIDTH = 79


# What one may know without listening, each with the setting that grants or withholds it.
_KNOWLEDGE = {
    Access.MECHANISM: "knows_mechanism",
    Access.BATCH_SIZE: "knows_batch_size",
    Access.LABELS: "knows_labels",
    Access.PUBLIC_DATA: "knows_public_data",
    Access.CANDIDATES: "knows_candidates",
}


class ThreatModel(records.ThreatRecord):
    """What one adversary has to work with, and what it refuses."""

    @property
    def grants_uploads(self) -> bool:
        """Whether uploads reach the adversary at all, be it their sum."""
        return Access.SUM in self.grants

    def describe(self) -> str:
        """Return the threat model as a few lines of at most 79 characters for a person."""
        rows = (
            ("listens", self.listener),
            ("sees", "; ".join(self.sees)),
            ("knows", "; ".join(self.knows)),
            ("does not know", "; ".join(self.withheld)),
            ("conduct", self.conduct),
        )
        lines = [
            textwrap.fill(f"{key + ':':<15}{text}", WIDTH, initial_indent="  ", subsequent_indent=" " * 17)
            for key, text in rows
        ]
        return "\n".join([f"threat model: {self.name}", *lines])

    def refusal(self, attack: str, needs: Iterable[Access]) -> str | None:
        """Say why an attack with these needs cannot be made, or return ``None``."""
        missing = [need for need in needs if need not in self.grants]
        if not missing:
            return None
        first = missing[0]
        switch = f" (adversary.{_KNOWLEDGE[first]} = false)" if first in _KNOWLEDGE else ""
        known = [
            words for kind in ("signal", "row", "sentence") if (words := worded(first.words, kind)) in self.withheld
        ]
        words = known[0] if known else first.words
        return f"{attack} needs {words}, which the threat model {self.name} withholds{switch}"


_EACH = (
    "the parameters sent to the clients before the round",
    "each client's upload and which client sent it",
)
_SUM = (
    "the parameters sent to the clients before the round",
    "which clients take part",
    "the sum of their uploads, weighted as the server averages them (secure aggregation is carried out with "
    "federation.secure_aggregation, and assumed without it: the adversary is handed the sum only)",
)
_PASSIVE = "passive: it follows the protocol and only listens"
_ACTIVE = (
    "active: it may send the clients that it attacks parameters of its own making, and leaves their uploads out of the "
    "model; otherwise it follows the protocol"
)
_ALL_UPLOADS = (Access.PARAMETERS, Access.UPLOADS, Access.SUM)
_SUM_ONLY = (Access.PARAMETERS, Access.SUM)

_BEHIND_SUMS = "the server, behind secure aggregation"
_SINGLE = ("the upload of a single client",)
OUTSIDER = "outsider"
_ON_THE_WIRE = "anyone who can read the connections between clients and server"

LISTENERS = {
    model.name: model
    for model in (
        ThreatModel("honest-but-curious-server", "the server", _EACH, (), (), _PASSIVE, _ALL_UPLOADS),
        ThreatModel("malicious-server", "the server", _EACH, (), (), _ACTIVE, (*_ALL_UPLOADS, Access.ACTIVE)),
        ThreatModel("secure-aggregation", _BEHIND_SUMS, _SUM, (), _SINGLE, _PASSIVE, _SUM_ONLY),
        ThreatModel(
            "malicious-secure-aggregation", _BEHIND_SUMS, _SUM, (), _SINGLE, _ACTIVE, (*_SUM_ONLY, Access.ACTIVE)
        ),
        ThreatModel("network-plaintext", f"{_ON_THE_WIRE}, which carry no TLS", _EACH, (), (), _PASSIVE, _ALL_UPLOADS),
        ThreatModel(
            OUTSIDER,
            "anyone who gets the model of every round and no upload, as every client does",
            (
                "the parameters sent to the clients before the round",
                "how the server changed them: the mean of the round's uploads, with all noise that is on it",
            ),
            (),
            (*_SINGLE, "which clients took part, where a secret draws them"),
            _PASSIVE,
            _SUM_ONLY,
        ),
        ThreatModel(
            "network-tls",
            f"{_ON_THE_WIRE}, which carry TLS",
            ("when messages pass, between whom, and how many bytes they have",),
            (),
            ("what the messages say: parameters and uploads",),
            _PASSIVE,
            (),
        ),
    )
}
"""Who listens, and where; what they know without listening depends on the settings."""

_ANY_PICTURE = "asks about pictures of its own making, as many as the endpoint answers"

PARTICIPANT = ThreatModel(
    "participant",
    "any client, or anyone who gets the model",
    ("the finished model's parameters",),
    (),
    ("the uploads of others",),
    _ANY_PICTURE,
    (Access.MODEL, Access.ANSWERS),
)
_AT_THE_ENDPOINT = (
    ThreatModel(
        "user",
        "anyone who may ask the endpoint",
        ("its answers under its policy",),
        (),
        ("the model's parameters", "uploads"),
        _ANY_PICTURE,
        (Access.ANSWERS,),
    ),
    ThreatModel(
        "curious-endpoint",
        "anyone who runs the endpoint",
        ("the finished model's parameters", "every image that people ask about, as they send it"),
        (),
        ("what the images were before people changed them",),
        "passive: it answers as it should, and reads what it is asked",
        (Access.MODEL, Access.ANSWERS, Access.QUESTIONS),
    ),
)
_PUBLIC = (
    "the network's architecture and loss",
    "the algorithm, number of local steps, learning rate and local optimiser",
    "the number of the client's examples",
    "shape, classes and public normalisation constants of the data",
)
_SECRET = (
    "the images",
    "which examples are in a batch",
    "every random seed (in a simulation the messages hold the experiment's seed; the adversary does not look at it)",
    "the random numbers of the mechanism",
)


def threat_model(config: AdversaryConfig, kind: str = "image") -> ThreatModel:
    """Return the threat model that the settings describe; ``kind``: image, signal, row or sentence."""
    model = _with_knowledge(LISTENERS[config.threat_model], config)
    knows, withheld = (tuple(worded(text, kind) for text in texts) for texts in (model.knows, model.withheld))
    return replace(model, knows=knows, withheld=withheld)


def _with_knowledge(listener: ThreatModel, config: AdversaryConfig) -> ThreatModel:
    known = [access for access, switch in _KNOWLEDGE.items() if getattr(config, switch)]
    hidden = [access for access in _KNOWLEDGE if access not in known]
    return replace(
        listener,
        knows=(*_PUBLIC, *(access.words for access in known)),
        withheld=(*listener.withheld, *(access.words for access in hidden), *_SECRET),
        grants=(*listener.grants, *known),
    )


def probers(experiment: Experiment) -> dict[str, ThreatModel]:
    """Return who attacks a run's finished model, by name: whoever gets it, first, and who asks or answers for it."""
    holder = algorithm_of(experiment).holder() or PARTICIPANT
    return {model.name: _with_knowledge(model, experiment.adversary) for model in (holder, *_AT_THE_ENDPOINT)}


def prober(name: str | None, experiment: Experiment) -> ThreatModel:
    """Return an adversary of the finished model, by default whoever gets it; raise ``InputError`` for another name."""
    known = probers(experiment)
    if name is None:
        return next(iter(known.values()))
    if name not in known:
        raise InputError(f"there is no adversary {name!r} of this run's model{suggestion(name, tuple(known))}")
    return known[name]
