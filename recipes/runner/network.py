"""Open listeners, and find addresses and interfaces of this machine."""

import contextlib
import errno
import ipaddress
import os
import socket
from operator import itemgetter

from datamodules.errors import UserError
from recipes.runner.command import Command

LOOPBACK = "127.0.0.1"
_DEFAULT_ROUTE_ADDRESS = "198.51.100.1"  # Reserved for documentation (RFC 5737), so it is behind the default route.


def listen(port: int, *, loopback: bool) -> socket.socket:
    """Open a listener at a port, or at a free one for 0.

    It is bound to 127.0.0.1, or to all IPv4 and IPv6 addresses of this machine.

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
    """Open a listener for the other processes of a run, at the address that they know.

    Raises:
        UserError: the port is in use.
    """
    try:
        return listen(port, loopback=is_loopback(address))
    except OSError as error:
        scope = "on every node: " if command.launcher == "manual" else ""
        raise UserError(
            f"port {port} of this machine is in use ({error.strerror}), perhaps by another run;"
            f" {scope}{command.using(master_port=port + 1)}"
        ) from error


def is_loopback(address: str) -> bool:
    """Return whether an address or a host name means the machine itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address.split(".")[0] == "localhost"


def choose_interface(nodes: int, address: str) -> None:
    """Select the network interface that leads to the other ranks for gloo and NCCL, unless the user did.

    Gloo listens at the address of the host's name, which on many systems is 127.0.0.1 and unreachable for other nodes.
    """
    if nodes > 1:
        interface = interface_towards(address)
        names = ["GLOO_SOCKET_IFNAME"]
    else:
        interface = loopback_interface()
        names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    if interface:
        for name in names:
            os.environ.setdefault(name, interface)


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None where it is neither Linux's nor macOS's."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    return next((name for name in ("lo", "lo0") if name in names), None)


def interface_towards(address: str) -> str | None:
    """Return the interface on the route to another machine; None where it cannot be determined.

    For an address of this machine, the interface that has it. Where this machine's own name resolves to the loopback
    interface, the interface of the default route.
    """
    if os.name == "nt":  # Gloo takes no interface on Windows.
        return None
    import psutil  # Imported here, since only runs on several nodes need it.

    try:
        local_address = _own_address(address)
        if is_loopback(local_address) and not is_loopback(address):
            local_address = _own_address(_DEFAULT_ROUTE_ADDRESS)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # An IPv6 address may be followed by % and its interface.
        if any(entry.address.split("%")[0] == local_address for entry in addresses):
            return str(name)
    return None


def _own_address(address: str) -> str:
    """Return the address of this machine on the route to `address`; nothing is sent."""
    # AF_INET sorts before AF_INET6: not every network with IPv6 addresses routes them.
    candidates = sorted(socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM), key=itemgetter(0))
    family, _, _, _, socket_address = candidates[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(socket_address)
        return str(probe.getsockname()[0])
