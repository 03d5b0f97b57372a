"""Docstrings name objects as Sphinx does (:class:`~a.b`), and fields have comments; the site shows both."""

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Replace roles by code in every docstring, and list a class's fields with their comments."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once an object and its members are loaded."""
        fields = "".join(_fields(obj)) if obj.is_class else ""
        if obj.docstring:
            text = ROLE.sub(r"`\1`", obj.docstring.value).replace("::\n\n    ", ":\n\n    ")
            obj.docstring.value = f"{text}\n\nAttributes:\n{fields}" if fields else text


def _fields(kind: griffe.Object) -> Iterator[str]:
    """Each public field with its comment, which stands behind it or on the lines above."""
    source = kind.lines_collection[kind.filepath]
    for name, field in kind.members.items():
        if field.is_attribute and not name.startswith("_") and field.lineno:
            *above, line = source[: field.lineno]
            said = [line.partition("  # ")[2]] if "  # " in line else []
            said = said or [*takewhile(lambda each: each.startswith("#"), map(str.strip, reversed(above)))][::-1]
            if said:
                yield f"    {name}: {' '.join(each.removeprefix('# ') for each in said)}\n"
