"""Lines of JSON over a connection, for the failure monitor. Any process may connect and send anything."""

import contextlib
import errno
import json
import socket
from typing import Any

__all__ = ["ProtocolError", "connection_failure", "keep_alive", "listen", "receive", "send"]

# The kernel notices an unreachable node after 5 + 4 * 3 seconds; a busy interpreter does not delay the answers.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 17_000}
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_MAX_MESSAGE = 1 << 16  # Bytes.
_MAX_TEXT = 10_000


class ProtocolError(OSError):
    """The bytes that arrived are not a message of this protocol."""


def keep_alive(connection: socket.socket) -> socket.socket:
    """Have the kernel notice that the node at the other end is unreachable."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def listen(backlog: int) -> socket.socket:
    """A listener at a free port, on all IPv4 and IPv6 addresses of this machine."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def receive(connection: socket.socket, rest: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The messages that have arrived, and the start of the next one.

    Args:
        rest: the start of a message that the last call returned.

    Raises:
        EOFError: the connection was closed.
        ProtocolError: a line is not a message, or is too long.
    """
    if not (data := connection.recv(1 << 16)):
        raise EOFError
    *whole, rest = (rest + data).split(b"\n")
    try:
        messages = [json.loads(line) for line in whole]
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a line is not JSON") from error
    if len(rest) > _MAX_MESSAGE or not all(isinstance(message, dict) for message in messages):
        raise ProtocolError("a line is not a message")
    return messages, rest


def connection_failure(connection_error: OSError | EOFError) -> str:
    """How the rank at the other end of a connection ended: lost, or unreachable."""
    cut = isinstance(connection_error, TimeoutError) or getattr(connection_error, "errno", None) in _UNREACHABLE
    return "unreachable" if cut else "lost"


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, with texts cut to the accepted length; a connection that is closed already is ignored."""
    short = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in message.items()}
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(short).encode() + b"\n")
