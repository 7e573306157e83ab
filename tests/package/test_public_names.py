"""The names of the packages: each stands once, in a stub, is imported when it is used, and exists."""

import subprocess
import sys
from importlib import import_module

import pytest

PACKAGES = ("callbacks", "datamodules", "recipes", "recipes.mnist", "recipes.resnet", "recipes.seq2seq")


def test_importing_a_package_imports_neither_torch_nor_lightning() -> None:
    script = f"import sys, {', '.join(PACKAGES)}; print(*(m for m in sys.modules if m.split('.')[0] in "
    script += "('torch', 'lightning', 'callbacks', 'datamodules', 'recipes')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert sorted(done.stdout.split()) == sorted([*PACKAGES, "recipes.neighbours"])


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_listed_by_dir_and_can_be_imported(package: str) -> None:
    module = import_module(package)
    assert dir(module) == sorted(module.__all__) != []
    assert [name for name in dir(module) if not hasattr(module, name)] == []


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchCallback"):
        import_module("callbacks").NoSuchCallback  # noqa: B018
