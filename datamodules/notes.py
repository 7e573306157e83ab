"""Log messages of a run: the logger ``lightning_recipes``, and functions that log on rank 0 only."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from datamodules.lightning import rank_zero_only

log = logging.getLogger("lightning_recipes")


def _escape_names(record: logging.LogRecord) -> bool:
    """Escape characters that UTF-8 cannot encode. File names may hold any bytes, which readers of a log reject."""
    text = record.getMessage()
    escaped = text.encode("utf-8", "backslashreplace").decode()
    if escaped != text:
        record.msg = escaped
        record.args = ()
    return True


log.addFilter(_escape_names)
inform = rank_zero_only(log.info)
warn = rank_zero_only(log.warning)


@contextmanager
def inform_if_slow(text: str, seconds: float = 2.0) -> Iterator[None]:
    """Log a text if the ``with`` block takes longer than `seconds`, as reading from a slow disk does."""
    timer = threading.Timer(seconds, inform, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
