"""What keys mean: for editors, as a JSON Schema, and for people."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from fedpriv.core.config.experiment import Experiment
from fedpriv.core.settings import Table


def json_schema(kind: type[BaseModel] = Experiment) -> dict[str, Any]:
    """Return the JSON Schema of a kind of files, what installed packages add to experiments included."""
    schema: dict[str, Any] = _in_terms_of_json(kind.model_json_schema())
    return schema


def _in_terms_of_json(node: Any) -> Any:
    """Rename bounds of numbers, which pydantic leaves under its own names where a field has a validator of ours."""
    if isinstance(node, list):
        return [_in_terms_of_json(each) for each in node]
    if not isinstance(node, dict):
        return node
    bounded = "type" in node and not isinstance(node["type"], dict)
    return {_BOUNDS.get(key, key) if bounded else key: _in_terms_of_json(value) for key, value in node.items()}


_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def describe(settings: BaseModel) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (key, value, default, description) for every key, in the order of the sections."""
    yield from _describe(settings, "")


def _describe(model: BaseModel, prefix: str) -> Iterator[tuple[str, Any, Any, str]]:
    for key, field in type(model).model_fields.items():
        value = getattr(model, key)
        if isinstance(value, Table):
            yield from (
                (f"{prefix}{key}.{name}", each, None, field.description or "") for name, each in value.plain().items()
            )
        elif isinstance(value, BaseModel):
            yield from _describe(value, f"{prefix}{key}.")
        else:
            usual = field.get_default(call_default_factory=True)
            yield f"{prefix}{key}", value, usual, field.description or ""
