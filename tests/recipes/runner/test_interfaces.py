"""The interface by which other nodes reach this one."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.runner.network import interface_towards

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="interfaces are asked for as Linux does")


@linux
def test_towards_the_loopback_address_it_is_the_loopback_interface():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"


def test_where_an_address_cannot_be_reached_there_is_none():
    assert interface_towards("no-such-host.invalid") is None


@linux
def test_it_is_one_of_this_machines_interfaces_wherever_the_address_lies():
    names = {name for _, name in socket.if_nameindex()}
    assert interface_towards("192.0.2.1") in names | {None}


@linux
def test_where_the_hosts_own_name_is_a_loopback_address_gloo_takes_the_way_out(tmp_path):
    """Debian's /etc/hosts, in a mount namespace."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no program unshare")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node0\n")
    code = "import json, recipes.runner.network as network\n"
    code += "print(json.dumps(network.interface_towards('node0')))"
    script = 'mount --bind "$1" /etc/hosts && exec "$2" -c "$3"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(hosts), sys.executable, code]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mount namespaces: {done.stderr.strip()}")
    interface = json.loads(done.stdout)
    assert interface == interface_towards("198.51.100.1") != "lo"
