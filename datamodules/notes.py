"""Log messages of a run: the logger ``lightning_recipes``, and functions that log on rank 0 only."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

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
def inform_if_slow(text: str, seconds: float = 2.0, log: Callable[[str], None] = inform) -> Iterator[None]:
    """Log a text if the ``with`` block takes longer than `seconds`, as reading from a slow disk does."""
    timer = threading.Timer(seconds, log, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


PATIENCE = 15.0
"""Seconds that a process waits for a lock before it logs that."""


def waiting_for(lock: Path) -> AbstractContextManager[None]:
    """Log a line if the ``with`` block waits longer than `PATIENCE` for a lock that another process holds."""
    # On any rank, since only this one may be waiting, and in programs that show warnings only.
    text = f"waiting for another process, which holds {lock}; end it if it hangs or is stopped"
    return inform_if_slow(text, PATIENCE, lambda line: log.warning(line, extra={"any_rank": True}))
