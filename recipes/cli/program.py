"""The program's name. This file imports nothing, so that help that was kept is printed at once."""

import sys

__all__ = ["program_name"]


def program_name() -> str:
    """What the user typed to start the program: ``python -m recipes.mnist``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if program := getattr(sys.modules["__main__"], "PROGRAM", None):
        return str(program)
    if spec is not None:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return f"python {sys.argv[0]}"
