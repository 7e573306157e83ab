"""The interface by which other nodes reach this one."""

import socket
import sys

import pytest

from recipes.runner.worker import interface_towards

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are asked for as Linux does")


@linux
def test_the_loopback_address_has_the_loopback_interface():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"


def test_where_an_address_cannot_be_reached_there_is_none():
    assert interface_towards("no-such-host.invalid") is None


@linux
def test_any_address_has_an_interface_of_this_machine():
    names = {name for _, name in socket.if_nameindex()}
    assert interface_towards("192.0.2.1") in names | {None}
