"""The endpoint of a run as its folder tells it: what it is, for whom, and how much is used. Read without torch."""

import json
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter

from fedpriv.core.errors import InputError
from fedpriv.core.records import read_file, read_text
from fedpriv.service.ledger import Opening, QueryLedger
from fedpriv.service.records import AnswersAudit, Referee, Service, UserFacts

_SERVICE, _USERS = TypeAdapter(Service), TypeAdapter(tuple[UserFacts, ...])
_REFEREE, _AUDIT = TypeAdapter(Referee), TypeAdapter(AnswersAudit)


def made_service(run: Path) -> Service:
    """Return what a run's endpoint is."""
    if not (run / "config.toml").is_file():
        raise InputError(f"{run} is not the folder of a run: it has no config.toml")
    service = known_service(run)
    if service is None:
        make = f"fedpriv serve {run} --status --set service.method=METHOD"
        raise InputError(f"{run} has no endpoint yet: make it with {make}")
    return service


def known_service(run: Path) -> Service | None:
    """Return what a run's endpoint is; ``None``: there is none."""
    return read_file(run / "service" / "service.json", _SERVICE)


def referee_of(run: Path) -> Referee | None:
    """Return the accuracies of an endpoint; ``None``: there is none."""
    return read_file(run / "service" / "referee.json", _REFEREE)


def audit_of(run: Path) -> AnswersAudit | None:
    """Return what an audit of an endpoint's answers found; ``None``: there was none."""
    return read_file(run / "service" / "audit.json", _AUDIT)


def answered(run: Path) -> Mapping[str, int]:
    """Return how many answers were charged to each user; the query ledger itself says whether its chain is whole."""
    lines = (read_text(run / "service" / "charges.jsonl") or "").splitlines()[1:]
    return Counter(user for user in map(_charged_user, lines) if user is not None)


def users(run: Path) -> tuple[UserFacts, ...]:
    """Return the users of an endpoint; without any, whoever reaches it asks as the folder's owner."""
    return read_file(run / "service" / "users.json", _USERS) or ()


def query_ledger(run: Path, service: Service) -> QueryLedger:
    """Open the ledger of an endpoint."""
    content = (run / "service" / "service.json").read_bytes()
    limits: Mapping[str, int] = {user.name: user.answers for user in users(run)}
    return QueryLedger(run / "service" / "charges.jsonl", Opening(sha256(content).hexdigest(), service.answers), limits)


def _charged_user(line: str) -> str | None:
    """Who a line of the query ledger charges; ``None``: it was cut off, and the next one stands for it."""
    try:
        return str(json.loads(line)["user"])
    except (ValueError, TypeError, KeyError):
        return None
