"""What is said while a run goes on: lines of the logger ``lightning_recipes``, by rank 0."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger("lightning_recipes")


def _escape_names(record: logging.LogRecord) -> bool:
    """Escape what UTF-8 lacks: a file's name may hold any bytes, and what reads a log may not."""
    text = record.getMessage()
    escaped = text.encode("utf-8", "backslashreplace").decode()
    if escaped != text:
        record.msg = escaped
        record.args = ()
    return True


log.addFilter(_escape_names)
inform, warn = rank_zero_only(log.info), rank_zero_only(log.warning)


@contextmanager
def inform_if_slow(text: str, seconds: float = 2.0) -> Iterator[None]:
    """Log a text once the block has taken so long, such as what is read from a slow disk."""
    timer = threading.Timer(seconds, inform, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
