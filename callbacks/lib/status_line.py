"""Status line at the bottom of a terminal, rewritten in place; other output appears above it."""

import shutil
import sys
from typing import Any


def columns() -> int:
    """Return the width of the terminal; the variable COLUMNS overrides it."""
    return shutil.get_terminal_size().columns


class _ClearingStream:
    """Stream that clears the status line before each write."""

    def __init__(self, stream: Any, line: "StatusLine") -> None:
        self.stream = stream
        self._line = line

    def write(self, text: str) -> int:
        self._line.clear()
        written: int = self.stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class StatusLine:
    """Status line on standard error, if that is a terminal.

    From the first `show` to `close`, each write to ``sys.stdout`` and ``sys.stderr`` clears the line first, so that no
    message is appended to it. The next `show` draws it again.
    """

    def __init__(self) -> None:
        self._shown = False
        self._replaced_streams: dict[str, _ClearingStream] = {}

    def is_possible(self) -> bool:
        """Whether standard error is a terminal."""
        return sys.stderr is not None and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Draw the line with a new text, cut at the terminal's width; do nothing without a terminal."""
        if not self.is_possible():
            return
        self._replace_streams()
        stream = self._terminal()
        stream.write(f"\r\x1b[K{text[: columns() - 1]}")
        stream.flush()
        self._shown = True

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            self._shown = False
            stream = self._terminal()
            stream.write("\r\x1b[K")
            stream.flush()

    def close(self) -> None:
        """Remove the line, and restore ``sys.stdout`` and ``sys.stderr``."""
        self.clear()
        for name, replacement in self._replaced_streams.items():
            # Another program may have replaced the stream since: then it stays.
            if getattr(sys, name) is replacement:
                setattr(sys, name, replacement.stream)
        self._replaced_streams = {}

    def _terminal(self) -> Any:
        return self._replaced_streams["stderr"].stream if "stderr" in self._replaced_streams else sys.stderr

    def _replace_streams(self) -> None:
        if self._replaced_streams:
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._replaced_streams[name] = _ClearingStream(stream, self)
                setattr(sys, name, self._replaced_streams[name])
