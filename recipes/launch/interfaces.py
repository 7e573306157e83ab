"""The network interface and address by which other nodes reach this machine."""

import contextlib
import ipaddress
import os
import socket

__all__ = ["LOOPBACK", "address_for_others", "interface_towards", "loopback_interface", "own_address"]

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "198.51.100.1"  # An address for documentation (RFC 5737), behind the default route.


def own_address(address: str, port: int = 1) -> str:
    """The address of this machine on the route to `address`; nothing is sent."""
    # IPv4 first: not every network with IPv6 addresses routes them.
    found = sorted(socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM), key=lambda info: info[0])
    family, place = found[0][0], found[0][4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address.split(".")[0] == "localhost"


def address_for_others(address: str, port: int = 1) -> str:
    """The address to publish to other nodes, given the address of one of them, or of this machine.

    Debian resolves a machine's own name to 127.0.1.1, a loopback address: then the name is published.
    """
    own = own_address(address, port)
    return address if _is_loopback(own) else own


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
        own = own_address(address)
        if _is_loopback(own) and not _is_loopback(address):
            own = own_address(_ELSEWHERE)
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    # An IPv6 address may be followed by % and its interface.
    return next((name for name, found in interfaces if any(a.address.split("%")[0] == own for a in found)), None)
