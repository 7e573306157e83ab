"""Lines of JSON over a connection, for the watch over a run: whoever connects may send anything."""

import contextlib
import errno
import json
import socket
from typing import Any

__all__ = ["Strange", "end_of", "keep_alive", "listen", "receive", "send"]

# A node that is cut off is noticed after 5 + 4 * 3 seconds, by the system: a busy interpreter answers all the same.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 17_000}
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_LONGEST = 1 << 16  # Bytes of a message that has not ended.
_LONGEST_TEXT = 10_000


class Strange(OSError):
    """What has arrived is no message of ours."""


def keep_alive(connection: socket.socket) -> socket.socket:
    """Have the system notice that the other end's node is cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def listen(backlog: int) -> socket.socket:
    """A listener at a free port, on all addresses of this machine, of both kinds where it has them."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def receive(connection: socket.socket, rest: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The messages that have arrived, and the beginning of the next.

    Args:
        rest: the beginning that the last call has returned.

    Raises:
        EOFError: the connection has ended.
        Strange: a line is no message, or does not end.
    """
    if not (data := connection.recv(1 << 16)):
        raise EOFError
    *whole, rest = (rest + data).split(b"\n")
    try:
        messages = [json.loads(line) for line in whole]
    except (ValueError, RecursionError) as error:
        raise Strange("a line is no JSON") from error
    if len(rest) > _LONGEST or not all(isinstance(message, dict) for message in messages):
        raise Strange("a line is no message")
    return messages, rest


def end_of(connection_error: OSError | EOFError) -> str:
    """What became of the rank at the other end of a connection: lost, or cut off."""
    cut = isinstance(connection_error, TimeoutError) or getattr(connection_error, "errno", None) in _UNREACHABLE
    return "cut off" if cut else "lost"


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, its texts cut to a length that is taken; who does not listen any more has ended already."""
    short = {name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in message.items()}
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(short).encode() + b"\n")
