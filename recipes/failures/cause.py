"""Why a run of several processes ends: what the ranks report, and which of it is the cause.

One failure brings many: the others lose their connection to the rank that failed and fail in their turn. The cause is
what explains the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from datamodules.errors import UserError

__all__ = ["Report", "first_line", "is_consequence", "judge", "report_of"]

# Seconds in which a better explanation may arrive, by what is reported.
_PATIENCE = {"user": 2.0, "raised": 0.3, "raising": 10.0, "lost": 0.0, "cut off": 0.0, "left": 5.0, "followed": 4.0}
# What explains most comes first. A rank that left on purpose makes others fail, and they are no news then.
_ORDER = ("user", "raised", "raising", "left", "lost", "cut off", "followed")
_CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "connection was likely closed",
    "remote process exited or there was a network error",
    "failed to recv",
    "failed to send",
    "recvvalue failed",
    "sendbytes failed",
    "application timeout caused pair closure",
)


@dataclass(frozen=True)
class Report:
    """What became of one rank.

    Args:
        kind: user (a mistake of the user's), raised (an exception), raising (the same, still being handled), left (on
            purpose, as on a signal), lost (its process ended without a word), cut off (its node does not answer) or
            followed (an exception that another rank's end explains).
        line: the first line of the error.
        status: the exit status that belongs to it.
        at: when it arrived, in seconds.
    """

    rank: int
    node: int
    host: str
    kind: str
    line: str = ""
    status: int = 1
    at: float = 0.0

    @property
    def due(self) -> float:
        """When to stop waiting for a better explanation."""
        if self.rank == 0:
            # A user's mistake is mostly everybody's, and then it is rank 0 that says so. Leaving, it may have to save.
            return self.at + {"user": 0.3, "left": 25.0}.get(self.kind, _PATIENCE[self.kind])
        return self.at + _PATIENCE[self.kind]

    def describe(self) -> str:
        """The line that the user reads."""
        where = f"rank {self.rank} (node {self.node}, {self.host})"
        if self.kind == "user":
            return f"error on {where}: {self.line}"
        if self.kind == "lost":
            return f"error: {where} ended without a word: it was killed, ran out of memory, or crashed in native code"
        if self.kind == "cut off":
            return f"error: {where} does not answer any more: its node or the network is down"
        return f"error: {where} failed: {self.line}"


def first_line(error: BaseException) -> str:
    """An exception in a line: its kind and the first line of its message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def is_consequence(error: BaseException) -> bool:
    """Whether another rank's end may be all that an exception says.

    Example:
        >>> is_consequence(RuntimeError("[gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"))
        True
        >>> is_consequence(ValueError("Connection closed by peer"))
        False
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _CONSEQUENCES)


def report_of(error: BaseException) -> tuple[str, str, int]:
    """The kind, the line and the exit status of an exception that ends a rank."""
    if isinstance(error, UserError):
        return "user", str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "left", "", 130
    if isinstance(error, SystemExit):
        return "left", "", error.code if isinstance(error.code, int) else int(error.code is not None)
    return ("followed" if is_consequence(error) else "raised"), first_line(error), 1


def judge(reports: Sequence[Report], now: float) -> Report | None:
    """The report that explains the end of the run, as soon as there is nothing more to wait for.

    Example:
        >>> followed = Report(0, 0, "a", "followed", "Connection closed by peer", at=1.0)
        >>> lost = Report(3, 1, "b", "lost", at=1.1)
        >>> judge([followed], now=2.0) is None, judge([followed, lost], now=2.0).rank
        (True, 3)
    """
    # A rank that leaves takes its time, and what becomes of the others meanwhile is no news.
    leaving = [report.due for report in reports if report.kind == "left"]
    if not reports or now < (max(leaving) if leaving else min(report.due for report in reports)):
        return None
    return min(reports, key=lambda report: (_ORDER.index(report.kind), report.rank, report.at))
