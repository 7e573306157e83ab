"""The cause of a run's failure, from what its ranks report.

One failure causes others: the remaining ranks lose their connection to the rank that failed, and fail too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from datamodules.errors import UserError, first_line

MISSED_AFTER_LOSS = 5
"""Heartbeats, of one a second, after which a rank is lost where another one has lost the connection to some rank."""

# The kind that explains most comes first, as a rank that exits on purpose makes others fail; and the seconds to wait
# for a report that explains more.
_WAIT = {
    "user_error": 2.0,
    "exception": 0.3,
    "exception_pending": 10.0,
    "exit": 5.0,
    "lost": 0.0,
    "unreachable": 0.0,
    "consequence": MISSED_AFTER_LOSS + 3.0,
}
_CONSEQUENCES = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed"),
    *("connection was likely closed", "remote process exited or there was a network error", "failed to recv"),
    *("failed to send", "recvvalue failed", "sendbytes failed", "application timeout caused pair closure"),
)


@dataclass(frozen=True)
class RankReport:
    """How one rank ended.

    Args:
        kind: user_error (the user can correct it), exception, exception_pending (an exception that is still being
            handled), exit (on purpose, as on a signal), lost (the process ended without a report), unreachable (its
            node does not answer) or consequence (an exception that the end of another rank explains).
        line: the first line of the error, or the signal that has killed a process.
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
        """When to stop waiting for a report that explains more."""
        # A user error mostly occurs on all ranks, and rank 0 prints it. Before it exits, rank 0 may have to save.
        of_rank_0 = {"user_error": 0.3, "exit": 25.0} if self.rank == 0 else {}
        return self.at + of_rank_0.get(self.kind, _WAIT[self.kind])

    def describe(self) -> str:
        """The line that is printed."""
        where = f"rank {self.rank} (node {self.node}, {self.host})"
        if self.kind == "user_error":
            return f"error on {where}: {self.line}"
        if self.kind == "lost":
            why = self.line or "it was killed, ran out of memory, or crashed in native code"
            return f"error: {where} ended without a report: {why}"
        if self.kind == "unreachable":
            return f"error: {where} does not answer: its node or the network is down"
        return f"error: {where} failed: {self.line}"


def is_consequence(error: BaseException) -> bool:
    """Whether an exception may only reflect the end of another rank.

    Example:
        >>> is_consequence(RuntimeError("[gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"))
        True
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _CONSEQUENCES)


def classify_exception(error: BaseException) -> tuple[str, str, int]:
    """The kind, the line and the exit status of an exception that ends a rank."""
    if isinstance(error, UserError):
        return "user_error", str(error), error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return "exit", "", 130
    if isinstance(error, SystemExit):
        return "exit", "", error.code if isinstance(error.code, int) else int(error.code is not None)
    line = first_line(error)
    if "Application timeout caused pair closure" in line:  # As gloo says where another call found the time over.
        line = f"Timed out: another rank did not answer within the collective timeout ({line})"
    return ("consequence" if is_consequence(error) else "exception"), line, 1


def failure_cause(reports: Sequence[RankReport], now: float) -> RankReport | None:
    """The report that explains the end of the run; None while a better one may still arrive.

    Example:
        >>> consequence = RankReport(0, 0, "a", "consequence", "Connection closed by peer", at=1.0)
        >>> lost = RankReport(3, 1, "b", "lost", at=1.1)
        >>> failure_cause([consequence], now=2.0) is None, failure_cause([consequence, lost], now=2.0).rank
        (True, 3)
    """
    # A rank that exits on purpose may take a while; reports that arrive meanwhile are its consequences.
    exiting = [report.due for report in reports if report.kind == "exit"]
    if not reports or now < (max(exiting) if exiting else min(report.due for report in reports)):
        return None
    return min(reports, key=lambda report: (list(_WAIT).index(report.kind), report.rank, report.at))
