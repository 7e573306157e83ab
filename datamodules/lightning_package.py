"""Selects whether this package imports `lightning` or `pytorch_lightning`, which hold the same code twice.

The two have different classes: a Trainer of one rejects callbacks of the other. The sources of this package import
`lightning`. If the program uses `pytorch_lightning`, an import hook replaces the name in our modules, and in no others.
"""

import ast
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, FrameType, ModuleType
from typing import Any

from typing_extensions import override

_OUR_MODULES = ("callbacks.", "datamodules.", "recipes.")
_REPLACEMENTS = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
_PACKAGES = ("lightning", "pytorch_lightning")


def _packages_of_importing_file() -> set[str]:
    """Return the Lightning packages that the nearest importing file names, even in imports that have not run yet.

    Sorted imports put ours first: ``from callbacks import WarmupLR``, then ``import pytorch_lightning as pl``.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__"))
        if code.co_name == "<module>" and not module.startswith(_OUR_MODULES):
            packages = {name.partition(".")[0] for name in code.co_names}.intersection(_PACKAGES)
            if packages:
                return packages
        frame = frame.f_back
    return set()


@cache
def uses_pytorch_lightning() -> bool:
    """Return whether to import `pytorch_lightning`; decided once per process.

    The importing file decides, else the modules that are already imported, else the installed packages. If both
    packages remain, the answer is `lightning`.
    """
    packages = _packages_of_importing_file() or sys.modules.keys() & set(_PACKAGES)
    if not packages:
        packages = {name for name in _PACKAGES if find_spec(name)}
    return packages == {"pytorch_lightning"}


def _renamed(name: str) -> str:
    for prefix, replacement in _REPLACEMENTS.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return replacement + name.removeprefix(prefix)
    return name


class _Renaming(ast.NodeTransformer):
    """Transformer that replaces Lightning's module names in imports and in strings, such as names of loggers."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        node.module = node.module and _renamed(node.module)
        return node

    def visit_alias(self, node: ast.alias) -> ast.AST:
        node.name = _renamed(node.name)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            node.value = _renamed(node.value)
        return node


class _Loader(SourceFileLoader):
    @override
    def get_code(self, fullname: str) -> CodeType:
        # Neither reads nor writes bytecode: the .pyc file beside the source is the one for `lightning`.
        path = self.get_filename(fullname)
        code: CodeType = compile(_Renaming().visit(ast.parse(self.get_data(path))), path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_OUR_MODULES) or not uses_pytorch_lightning():
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec and spec.loader
        if spec is not None and isinstance(loader, SourceFileLoader):
            spec.loader = _Loader(loader.name, loader.path)
        return spec


sys.meta_path.insert(0, _Finder())
