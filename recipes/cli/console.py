"""What the command line prints, and what it keeps from being printed."""

import logging
import sys
import warnings

from typing_extensions import override

from recipes.launch.host import is_rank_zero

__all__ = ["program_name", "quiet", "say"]


def program_name() -> str:
    """What the user typed to start us: ``python -m recipes.mnist``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if program := getattr(sys.modules["__main__"], "PROGRAM", None):
        return str(program)
    if spec is not None:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return f"python {sys.argv[0]}"


class _OneLine(logging.Handler):
    """Our own notes, as a plain line each."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        # What one rank alone has met, such as a damaged file, no other says.
        if is_rank_zero() or getattr(record, "any_rank", False):
            print(record.getMessage(), file=sys.stderr)  # noqa: T201


def quiet() -> None:
    """Keep Lightning's tips, deprecations and notes about our own choices from the user."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    profiles = logging.getLogger("lightning.pytorch.profilers")
    profiles.setLevel(logging.INFO)
    profiles.handlers, profiles.propagate = [_OneLine()], False
    for module in ("lightning", "torch", "tensorboard", "torchmetrics"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    warnings.filterwarnings("ignore", message=r".*(isinstance\(treespec, LeafSpec\)|trace might not generalize).*")
    ours = logging.getLogger("lightning_recipes")
    ours.setLevel(logging.INFO)
    ours.handlers, ours.propagate = [_OneLine()], False


def say(message: str) -> None:
    if is_rank_zero():
        print(message, flush=True)  # noqa: T201
