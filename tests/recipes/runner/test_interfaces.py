"""The interface by which other nodes reach this one."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.runner.machine import address_for_others, interface_towards, own_address

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are asked for as Linux does")


@linux
def test_towards_the_loopback_address_it_is_the_loopback_interface():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"


def test_where_an_address_cannot_be_reached_there_is_none():
    assert interface_towards("no-such-host.invalid") is None


@linux
def test_it_is_one_of_this_machines_interfaces_wherever_the_address_lies():
    names = {name for _, name in socket.if_nameindex()}
    assert interface_towards("192.0.2.1") in names | {None}


def test_the_address_for_others_is_never_one_of_which_they_would_find_themselves():
    assert address_for_others("127.0.1.1") == "127.0.1.1"
    assert address_for_others("localhost") == "localhost"
    if socket.has_dualstack_ipv6():
        assert own_address("::1") == address_for_others("::1") == "::1"


@linux
def test_where_the_hosts_own_name_is_a_loopback_address_others_get_the_name_and_gloo_the_way_out(tmp_path):
    """Debian's /etc/hosts, in a mount namespace."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no program unshare")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node0\n")
    code = "import json, recipes.runner.machine as i\n"
    code += "print(json.dumps([i.own_address('node0'), i.address_for_others('node0'), i.interface_towards('node0')]))"
    script = 'mount --bind "$1" /etc/hosts && exec "$2" -c "$3"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(hosts), sys.executable, code]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mount namespaces: {done.stderr.strip()}")
    own, told, interface = json.loads(done.stdout)
    assert own.startswith("127.")
    assert told == "node0"
    assert interface == interface_towards("198.51.100.1") != "lo"
