"""One line at the bottom of a terminal that is rewritten; whatever else is printed stands above it."""

import shutil
import sys
from typing import Any


def columns() -> int:
    """The width of the terminal, by COLUMNS where it is set."""
    return shutil.get_terminal_size().columns


class _Above:
    """A stream that clears the line before anything is written to it."""

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
    """A line on standard error, where that is a terminal.

    From the first `show` to `close`, what goes to ``sys.stdout`` and ``sys.stderr`` clears the line first, so that no
    message lands behind it; the next `show` draws it again.
    """

    def __init__(self) -> None:
        self._shown = False
        self._replaced: dict[str, _Above] = {}

    def is_possible(self) -> bool:
        """Whether standard error is a terminal."""
        return sys.stderr is not None and sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line by another one, which is cut at the terminal's width; nothing where there is no terminal."""
        if not self.is_possible():
            return
        self._guard()
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
        """Remove the line, and leave the streams as they were."""
        self.clear()
        for name, stream in self._replaced.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
        self._replaced = {}

    def _terminal(self) -> Any:
        return self._replaced["stderr"].stream if "stderr" in self._replaced else sys.stderr

    def _guard(self) -> None:
        if self._replaced:
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._replaced[name] = _Above(stream, self)
                setattr(sys, name, self._replaced[name])
