"""A release of Lightning that runs malicious code at its import is refused before that, by its metadata."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _with_lightning(folder: Path, name: str, version: str) -> dict[str, str]:
    """An environment with a release of Lightning that leaves a file when it is imported."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "lightning").mkdir()
    (folder / "lightning" / "__init__.py").write_text(f"open({str(folder / 'imported')!r}, 'w')")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("lightning", "import recipes"),
        ("lightning", "from callbacks import Preemption"),
        ("pytorch-lightning", "from datamodules.mnist.data_module import MNISTDataModule"),
    ],
)
def test_a_compromised_release_is_refused_and_not_imported(name: str, code: str, tmp_path: Path) -> None:
    environment = _with_lightning(tmp_path, name, "2.6.3")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert f"ImportError: {name} 2.6.3 is a compromised release" in done.stderr
    assert not (tmp_path / "imported").exists()


def test_the_command_line_says_so_in_one_line(tmp_path: Path) -> None:
    environment = _with_lightning(tmp_path, "lightning", "2.6.2")
    command = [sys.executable, "-m", "recipes.mnist", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: lightning 2.6.2 is a compromised release")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "imported").exists()
