"""The names of the packages: each stands once, in a stub, is imported when it is used, and exists."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("callbacks", "datamodules", "recipes", "recipes.mnist", "recipes.resnet", "recipes.seq2seq")


def test_importing_a_package_imports_neither_torch_nor_lightning() -> None:
    script = f"import sys, {', '.join(PACKAGES)}; print(*(m for m in sys.modules if m.split('.')[0] in "
    script += "('torch', 'lightning', 'callbacks', 'datamodules', 'recipes')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert sorted(done.stdout.split()) == sorted([*PACKAGES, "recipes.shadowing"])


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_listed_by_dir_can_be_imported(package: str) -> None:
    module = import_module(package)
    assert dir(module) == sorted(module.__all__) != []
    assert [name for name in dir(module) if not hasattr(module, name)] == []


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchCallback"):
        import_module("callbacks").NoSuchCallback  # noqa: B018


def test_folders_of_a_program_stand_beside_ours(tmp_path: Path) -> None:
    """As docs/help/troubleshooting.md says for a project with folders of the same names."""
    for name in ("callbacks", "datamodules"):
        (tmp_path / name).mkdir()
        lines = "from pkgutil import extend_path\n\n__path__ = extend_path(__path__, __name__)\n"
        (tmp_path / name / "__init__.py").write_text(lines)
        (tmp_path / name / "mine.py").write_text("value = 'mine'")
    script = "import callbacks.mine, datamodules.mine\nfrom callbacks.lib.signals import name_of\n"
    script += "print(callbacks.mine.value, datamodules.mine.value, name_of(15))"
    (tmp_path / "program.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["mine", "mine", "SIGTERM"], done.stderr
