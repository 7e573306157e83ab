"""One real Slurm for all tests of this folder."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import PROGRAMS, Slurm

_INSTALL = "LIGHTNING_RECIPES_INSTALL_SLURM"
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def _install() -> None:
    """Install Debian's packages; only where `.ci/run` says that this machine is there for the tests."""
    if os.geteuid() or shutil.which("apt-get") is None:
        return
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in ("update -qq", "install -qq --no-install-recommends slurm-wlm munge"):
        with contextlib.suppress(subprocess.TimeoutExpired):  # As without a network.
            subprocess.run(["apt-get", *command.split()], env=env, check=False, capture_output=True, timeout=600)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm of two nodes; the test is skipped where its programs are missing."""
    if os.environ.get(_INSTALL) == "1" and _missing():
        _install()
    if missing := _missing():
        pytest.skip(f"no Slurm here, {', '.join(missing)} missing: apt-get install slurm-wlm munge")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        daemons = Slurm(Path(folder))
        try:
            daemons.start()
            yield daemons
        finally:
            daemons.stop()
