"""For mkdocstrings: what the API pages show of the source."""

import re
from typing import Any

import griffe

__all__ = ["Examples", "Types"]

_MARKS = ("Changeable", "Transient", "Advanced")
"""Marks of settings in `datamodules.contract`, which say how the command line treats a parameter."""
_SHOWN_AS = {"OneLightningCallback": "Callback", "OneLightning": None}


class Examples(griffe.Extension):
    """``Example:`` of a docstring becomes the section that Google's style calls ``Examples:``."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """Called with each object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)


class Types(griffe.Extension):
    """Types without the marks of settings, and bases without those that are not public."""

    def on_function_instance(self, *, func: griffe.Function, **others: Any) -> None:
        """Called with each function that has been read."""
        for parameter in func.parameters:
            while isinstance(parameter.annotation, griffe.ExprSubscript) and str(parameter.annotation.left) in _MARKS:
                parameter.annotation = parameter.annotation.slice

    def on_class_instance(self, *, cls: griffe.Class, **others: Any) -> None:
        """Called with each class that has been read."""
        bases = [_SHOWN_AS.get(str(base), base) for base in cls.bases]
        cls.bases = [base for base in bases if base is not None and not str(base).startswith("_")]
