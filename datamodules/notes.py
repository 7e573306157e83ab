"""Logger ``lightning_recipes`` for the messages of a run, and functions that log on rank 0 only."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from datamodules.lightning import rank_zero_only

log = logging.getLogger("lightning_recipes")


def _escape_names(record: logging.LogRecord) -> bool:
    """Escape characters that UTF-8 cannot encode: file names may contain any bytes, and a log must be readable."""
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
def inform_if_slow(text: str, seconds: float = 2.0, log: Callable[[str], None] = inform) -> Iterator[None]:
    """Log a text if the ``with`` block takes longer than `seconds`, for example on a slow disk."""
    timer = threading.Timer(seconds, log, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


PATIENCE = 15.0
"""Seconds that a process waits for a lock before it logs a line."""


def waiting_for(lock: Path) -> AbstractContextManager[None]:
    """Log a line if the ``with`` block waits longer than `PATIENCE` for a lock that another process holds."""
    # On any rank, because only this one may be waiting, and as a warning, which all programs show.
    text = f"waiting for another process, which holds {lock}; end it if it hangs or is stopped"
    return inform_if_slow(text, PATIENCE, lambda line: log.warning(line, extra={"any_rank": True}))
