"""The log messages and warnings that it prints or suppresses."""

import logging
import sys
import warnings
from collections.abc import Callable

from typing_extensions import override

from callbacks.lib.terminal import fitted
from recipes.launch.rank_zero import is_rank_zero

__all__ = ["configure_logging"]


class _OneLine(logging.Handler):
    """Prints each of our log messages as a plain line."""

    def __init__(self, translate: Callable[[str], str]) -> None:
        super().__init__()
        self._translate = translate

    @override
    def emit(self, record: logging.LogRecord) -> None:
        # A message about one rank, such as a damaged file, is logged by no other.
        if is_rank_zero() or getattr(record, "any_rank", False):
            print(fitted(self._translate(record.getMessage()), sys.stderr), file=sys.stderr)  # noqa: T201


def configure_logging(translate: Callable[[str], str] = str) -> None:
    """Print our own messages as plain lines, and suppress tips and deprecation warnings of Lightning and others.

    Args:
        translate: turns parameters in our messages into flags.
    """
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, change in (("lightning.pytorch.profilers", str), ("lightning_recipes", translate)):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers, logger.propagate = [_OneLine(change)], False
    for module in ("joblib", "lightning", "torch", "tensorboard", "torchmetrics"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    # Pillow's, of large images; ours are refused by their size.
    warnings.filterwarnings("ignore", message=r"Image size \(\d+ pixels\) exceeds limit")
    warnings.filterwarnings("ignore", message=r".*(isinstance\(treespec, LeafSpec\)|trace might not generalize).*")
