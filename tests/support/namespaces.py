"""Two network namespaces joined by a cable that can be pulled: nodes with addresses of their own on one machine."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

__all__ = ["Cable", "two_nodes"]


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Cable:
    """The names of the two namespaces, of the interface at the end of each, and the addresses."""

    nodes: tuple[str, str]
    ends: tuple[str, str]
    addresses: tuple[str, str] = ("10.213.7.1", "10.213.7.2")

    def inside(self, node: int) -> list[str]:
        """The prefix of a command that runs on a node."""
        return ["ip", "netns", "exec", self.nodes[node]]

    def pull(self) -> None:
        """Cut the nodes off from each other: packets vanish, and nobody is told."""
        _ip("-n", self.nodes[1], "link", "set", self.ends[1], "down")


@contextlib.contextmanager
def two_nodes() -> Iterator[Cable]:
    """Two nodes and the cable between them; the test is skipped where the system does not allow it."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces: there is no program ip (iproute2)")
    mark = f"{os.getpid() % 100000:05d}"
    cable = Cable((f"lr{mark}a", f"lr{mark}b"), (f"lv{mark}a", f"lv{mark}b"))
    (one, two), (left, right) = cable.nodes, cable.ends
    try:
        try:
            _ip("netns", "add", one)
            _ip("netns", "add", two)
            _ip("link", "add", left, "netns", one, "type", "veth", "peer", "name", right, "netns", two)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.strip()}")
        for node, end, address in zip(cable.nodes, cable.ends, cable.addresses, strict=True):
            _ip("-n", node, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", node, "link", "set", "lo", "up")
            _ip("-n", node, "link", "set", end, "up")
        yield cable
    finally:
        for node in cable.nodes:
            subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True, timeout=300)
