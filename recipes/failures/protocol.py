"""A connection between rank 0 and another rank: after a greeting, every line is a JSON object.

The processes of a run trust each other and their network, as torch's own engines do. What another program sends, which
reached the port by mistake, is told by the greeting.
"""

import contextlib
import errno
import json
import socket
import threading
import time
from typing import Any

__all__ = ["Channel", "ProtocolError", "connection_failure", "keep_alive", "listen"]

# The kernel notices an unreachable node after 5 + 4 * 3 seconds; a busy interpreter does not delay the answers.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 17_000}
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_GREETING = b"lightning-recipes 1"
_MAX_LINE = 1 << 24  # Bytes.


class ProtocolError(OSError):
    """The bytes that arrived are not a message of this protocol."""


def keep_alive(connection: socket.socket) -> socket.socket:
    """Have the kernel notice that the node at the other end is unreachable."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def listen(port: int, *, loopback: bool) -> socket.socket:
    """A listener at a port, or at a free one for 0: on 127.0.0.1, or on all IPv4 and IPv6 addresses of this machine.

    Raises:
        OSError: the port is in use.
    """
    backlog = socket.SOMAXCONN
    if loopback:
        return socket.create_server(("127.0.0.1", port), backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=backlog)


class Channel:
    """One end of a connection, which is closed by `close`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._greeted = False
        self._rest = b""
        self._lock = threading.Lock()
        connection.sendall(_GREETING + b"\n")

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; a connection that is closed already is ignored."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived; none where the last one is not complete yet.

        Raises:
            EOFError: the connection was closed.
            ProtocolError: a line is not a message, or is too long.
        """
        if not (data := self.connection.recv(1 << 16)):
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > (_MAX_LINE if self._greeted else len(_GREETING)):
            raise ProtocolError("a line is too long")
        return [message for line in lines if (message := self._read(line)) is not None]

    def greet(self, timeout: float = 10.0) -> None:
        """Wait for the greeting of the other end.

        Raises:
            OSError, EOFError: as `receive`, or a `TimeoutError` after these seconds.
        """
        before, deadline = self.connection.gettimeout(), time.monotonic() + timeout
        while not self._greeted:
            # For all of it: it may come byte by byte.
            if (rest := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self.connection.settimeout(rest)
            self.receive()
        self.connection.settimeout(before)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _read(self, line: bytes) -> dict[str, Any] | None:
        """The message of a line; None for the greeting."""
        if not self._greeted:
            self._greeted = line == _GREETING
            if not self._greeted:
                raise ProtocolError("it does not speak this protocol")
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError("a line is no JSON") from error
        if not isinstance(message, dict):
            raise ProtocolError("a line is no JSON object")
        return message


def connection_failure(connection_error: OSError | EOFError) -> str:
    """How the rank at the other end of a connection ended: lost, or unreachable."""
    cut = isinstance(connection_error, TimeoutError) or getattr(connection_error, "errno", None) in _UNREACHABLE
    return "unreachable" if cut else "lost"
