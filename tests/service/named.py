"""Answer policies by their names, as the section ``[service]`` makes them."""

from collections.abc import Mapping
from typing import Any

from fedpriv.core.config import validated
from fedpriv.service.settings import ServiceConfig


def named_policy(text: str, settings: Mapping[str, Any] | None = None) -> Any:
    return validated(ServiceConfig, {"method": text, **(settings or {})}, "service").policy
