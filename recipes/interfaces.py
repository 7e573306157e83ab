"""By which of this machine's network interfaces the other nodes reach it."""

import socket
import struct

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["interface_towards", "own_address"]

_SIOCGIFADDR = 0x8915  # Of Linux: the address of an interface.


def own_address(address: str, port: int = 1) -> str:
    """The address under which this machine is seen by who reaches `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(address), port))
        return probe.getsockname()[0]


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # It has no such address.
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_towards(address: str) -> str | None:
    """The interface through which this machine reaches another one, or None where that cannot be told.

    Of an address of this machine itself, the interface that has it.
    """
    if fcntl is None:
        return None
    try:
        own = own_address(address)
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    return next((name for name in names if _address_of(name) == own), None)
