"""For mkdocstrings: ``Example:`` of a docstring is the section that Google's style calls ``Examples:``."""

import re
from typing import Any

import griffe

__all__ = ["Examples"]


class Examples(griffe.Extension):
    """Renames the section in every docstring."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """Called with each object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
