"""An authenticated connection between rank 0 and another rank. Any process may connect and send anything.

Both ends send a random nonce and compute a key from the nonces and the run's secret. After that every line is a JSON
object behind a message authentication code (HMAC-SHA256, RFC 2104) of the key, the sender, the number of the line and
its text. So a process that does not know the secret can read messages, and cannot send, change, reorder or repeat one.
"""

import contextlib
import errno
import hmac
import json
import secrets
import socket
import threading
import time
from typing import Any, Literal

__all__ = ["Channel", "ProtocolError", "WrongSecret", "connection_failure", "keep_alive", "listen"]

# The kernel notices an unreachable node after 5 + 4 * 3 seconds; a busy interpreter does not delay the answers.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 17_000}
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_GREETING = b"lightning-recipes 1 "
_MAX_UNKNOWN = 1 << 12  # Bytes of a line from a process that has not shown that it knows the secret.
_MAX_MESSAGE = 1 << 24


class ProtocolError(OSError):
    """The bytes that arrived are not a message of this protocol."""


class WrongSecret(ProtocolError):
    """The process at the other end speaks this protocol and does not know the secret.

    Args:
        claim: the message that was not authenticated.
    """

    def __init__(self, claim: bytes) -> None:
        super().__init__("it does not know the run's secret")
        self.claim = claim


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
    """One end of a connection.

    Args:
        connection: to the other end; closed by `close`.
        secret: of the run.
        end: which end this is.
    """

    def __init__(self, connection: socket.socket, secret: bytes, end: Literal["rank 0", "rank"]) -> None:
        self.connection = connection
        self.authenticated = False
        """Whether a message has arrived that shows that the other end knows the secret."""
        self._secret, self._end = secret, end
        self._nonce, self._key = secrets.token_hex(16).encode(), b""
        self._rest = b""
        self._sent = self._received = 0
        self._lock = threading.Lock()
        connection.sendall(_GREETING + self._nonce + b"\n")

    def _code(self, end: str, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, f"{end} {number} ".encode() + text, "sha256").hex().encode()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; a connection that is closed already is ignored."""
        text = json.dumps(message).encode()
        with self._lock, contextlib.suppress(OSError):
            code = self._code(self._end, self._sent, text)
            self._sent += 1
            self.connection.sendall(code + b" " + text + b"\n")

    def refuse(self) -> None:
        """Answer a process that does not know the secret, so that it need not wait."""
        with contextlib.suppress(OSError):
            self.connection.sendall(b"refused\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived; none where the last one is not complete yet.

        Raises:
            EOFError: the connection was closed.
            WrongSecret: the other end does not know the secret.
            ProtocolError: a line is not a message, or is too long.
        """
        if not (data := self.connection.recv(1 << 16)):
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [message for line in lines if (message := self._open(line)) is not None]
        self._check_length(self._rest)
        return messages

    def greet(self, timeout: float = 10.0) -> None:
        """Wait for the nonce of the other end, without which nothing can be sent.

        Raises:
            OSError, EOFError: as `receive`, or a `TimeoutError` after these seconds.
        """
        before, deadline = self.connection.gettimeout(), time.monotonic() + timeout
        while not self._key:
            # For all of it: a stranger may send it byte by byte.
            if (rest := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self.connection.settimeout(rest)
            self.receive()
        self.connection.settimeout(before)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _check_length(self, line: bytes) -> None:
        if len(line) > (_MAX_MESSAGE if self.authenticated else _MAX_UNKNOWN):
            raise ProtocolError("a line is too long")

    def _open(self, line: bytes) -> dict[str, Any] | None:
        """The message of a line; None for the greeting."""
        self._check_length(line)
        if not self._key:
            nonce = line.removeprefix(_GREETING)
            if len(nonce) != len(self._nonce) or nonce == line:
                raise ProtocolError("it does not speak this protocol")
            zero, other = (self._nonce, nonce) if self._end == "rank 0" else (nonce, self._nonce)
            self._key = hmac.digest(self._secret, zero + b" " + other, "sha256")
            return None
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(_OTHER[self._end], self._received, text)):
            if self.authenticated:
                raise ProtocolError("a message was changed on its way")
            raise WrongSecret(text)
        self.authenticated = True
        self._received += 1
        message: dict[str, Any] = json.loads(text)
        return message


_OTHER = {"rank 0": "rank", "rank": "rank 0"}


def connection_failure(connection_error: OSError | EOFError) -> str:
    """How the rank at the other end of a connection ended: lost, or unreachable."""
    cut = isinstance(connection_error, TimeoutError) or getattr(connection_error, "errno", None) in _UNREACHABLE
    return "unreachable" if cut else "lost"
