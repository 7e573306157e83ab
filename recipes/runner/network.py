"""Addresses, listeners and interfaces of this machine."""

import contextlib
import errno
import ipaddress
import os
import socket

from datamodules.errors import UserError
from recipes.runner.command import Command

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "198.51.100.1"  # An address for documentation (RFC 5737), behind the default route.


def listen(port: int, *, loopback: bool) -> socket.socket:
    """A listener at a port, or at a free one for 0: on 127.0.0.1, or on all IPv4 and IPv6 addresses of this machine.

    Raises:
        OSError: the port is in use.
    """
    backlog = socket.SOMAXCONN
    if not loopback and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server((LOOPBACK if loopback else "", port), backlog=backlog)


def listen_at(address: str, port: int, command: Command) -> socket.socket:
    """A listener for the other processes of a run, at the address that they know.

    Raises:
        UserError: the port is in use.
    """
    try:
        return listen(port, loopback=is_loopback(address))
    except OSError as error:
        where = "on every node: " if command.launcher == "manual" else ""
        raise UserError(
            f"port {port} of this machine is in use ({error.strerror}), perhaps by another run;"
            f" {where}{command.using(master_port=port + 1)}"
        ) from error


def is_loopback(address: str) -> bool:
    """Whether an address or a name leads every machine to itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address.split(".")[0] == "localhost"


def choose_interface(nodes: int, address: str) -> None:
    """Have gloo and NCCL use the interface that leads to the other ranks, unless the user has chosen one.

    Gloo listens at the address of the host's name, which on many systems is 127.0.0.1 and unreachable for other nodes.
    """
    if nodes > 1:
        interface, names = interface_towards(address), ["GLOO_SOCKET_IFNAME"]
    else:
        interface, names = loopback_interface(), ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    if interface:
        for name in names:
            os.environ.setdefault(name, interface)


def loopback_interface() -> str | None:
    """The name of the loopback interface; None where it has another one than on Linux and macOS."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    return next((name for name in ("lo", "lo0") if name in names), None)


def interface_towards(address: str) -> str | None:
    """The interface on the route to another machine; None where it cannot be determined.

    For an address of this machine, the interface that has it. Where this machine's own name resolves to the loopback
    interface, the interface of the default route.
    """
    if os.name == "nt":  # gloo takes no interface there.
        return None
    import psutil  # Here, since only runs on several nodes need it.

    try:
        own = _own_address(address)
        if is_loopback(own) and not is_loopback(address):
            own = _own_address(_ELSEWHERE)
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    # An IPv6 address may be followed by % and its interface.
    return next((name for name, found in interfaces if any(a.address.split("%")[0] == own for a in found)), None)


def _own_address(address: str) -> str:
    """The address of this machine on the route to `address`; nothing is sent."""
    # IPv4 first: not every network with IPv6 addresses routes them.
    found = sorted(socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM), key=lambda info: info[0])
    family, place = found[0][0], found[0][4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
