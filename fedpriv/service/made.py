"""The endpoint of a run as its folder tells it: what it is, for whom, and how much is used. Read without torch."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter

from fedpriv.core.errors import InputError
from fedpriv.core.records import Service, UserFacts, read_file
from fedpriv.service.ledger import Opening, QueryLedger

_SERVICE, _USERS = TypeAdapter(Service), TypeAdapter(tuple[UserFacts, ...])


def made_service(run: Path) -> Service:
    """Return what a run's endpoint is."""
    if not (run / "config.toml").is_file():
        raise InputError(f"{run} is not the folder of a run: it has no config.toml")
    service = read_file(run / "service" / "service.json", _SERVICE)
    if service is None:
        make = f"fedpriv serve {run} --status --set service.method=METHOD"
        raise InputError(f"{run} has no endpoint yet: make it with {make}")
    return service


def users(run: Path) -> tuple[UserFacts, ...]:
    """Return the users of an endpoint; without any, whoever reaches it asks as the folder's owner."""
    return read_file(run / "service" / "users.json", _USERS) or ()


def query_ledger(run: Path, service: Service) -> QueryLedger:
    """Open the ledger of an endpoint."""
    content = (run / "service" / "service.json").read_bytes()
    limits: Mapping[str, int] = {user.name: user.answers for user in users(run)}
    return QueryLedger(run / "service" / "charges.jsonl", Opening(sha256(content).hexdigest(), service.answers), limits)
