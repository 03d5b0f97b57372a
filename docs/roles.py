"""Docstrings name objects as Sphinx does (:class:`~a.b`); the site shows them as code."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Replace roles by code in every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once an object and its members are loaded."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value).replace("::\n\n    ", ":\n\n    ")
