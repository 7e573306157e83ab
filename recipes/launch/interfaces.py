"""By which of this machine's network interfaces the other nodes reach it."""

import contextlib
import ipaddress
import socket
import struct

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["address_for_others", "interface_towards", "own_address"]

_SIOCGIFADDR = 0x8915  # Of Linux: the address of an interface.
_ELSEWHERE = "198.51.100.1"  # An address of documentation, RFC 5737: behind the way out.


def own_address(address: str, port: int = 1) -> str:
    """The address under which this machine is seen by who reaches `address`; nothing is sent."""
    # An address of the older kind first: not every network that has the newer ones carries them.
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
    """What this machine is to tell other nodes to reach it, of whom one is at `address`, be it this machine itself.

    Debian gives a machine's own name the address 127.0.1.1, of which others would find themselves: then the name.
    """
    own = own_address(address, port)
    return address if _is_loopback(own) else own


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # It has no such address.
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_towards(address: str) -> str | None:
    """The interface through which this machine reaches another one, or None where that cannot be told.

    Of an address of this machine itself, the interface that has it. Where only this machine's own name for itself leads
    to the loopback interface, it is the one by which the rest of the world is reached.
    """
    if fcntl is None:
        return None
    try:
        own = own_address(address)
        if _is_loopback(own) and not _is_loopback(address):
            own = own_address(_ELSEWHERE)
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    return next((name for name in names if _address_of(name) == own), None)
