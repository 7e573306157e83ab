"""Which package our modules take Lightning from: `lightning`, or `pytorch_lightning`, which holds the same code.

A callback of one is no callback for a Trainer of the other. Our sources name `lightning`. Where the program uses
`pytorch_lightning`, an import hook reads that name in them: in our modules only, nobody else's imports change.
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

_OURS = ("callbacks.", "datamodules.", "recipes.")
_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
_PACKAGES = ("lightning", "pytorch_lightning")


def _named_by_importing_file() -> set[str]:
    """The package that the nearest importing file names, which has perhaps not come to that line yet.

    Sorted imports put ours first: ``from callbacks import WarmupLR``, then ``import pytorch_lightning as pl``.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if code.co_name == "<module>" and not module.startswith(_OURS):
            named = {name.partition(".")[0] for name in code.co_names}.intersection(_PACKAGES)
            if named:
                return named
        frame = frame.f_back
    return set()


@cache
def uses_pytorch_lightning() -> bool:
    """Decide once: by the file that imports us, else by what is imported, else by what is installed.

    Where that leaves both, the answer is `lightning`.
    """
    named = _named_by_importing_file() or sys.modules.keys() & set(_PACKAGES)
    named = named or {name for name in _PACKAGES if find_spec(name)}
    return named == {"pytorch_lightning"}


def _renamed(name: str) -> str:
    for prefix, other in _NAMES.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return other + name.removeprefix(prefix)
    return name


class _Renaming(ast.NodeTransformer):
    """Modules of Lightning in imports, and in texts such as the name of a logger."""

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
        # Neither reads nor writes bytecode: the file beside the source is that for `lightning`.
        path = self.get_filename(fullname)
        code: CodeType = compile(_Renaming().visit(ast.parse(self.get_data(path))), path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_OURS) or not uses_pytorch_lightning():
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec and spec.loader
        if spec is not None and isinstance(loader, SourceFileLoader):
            spec.loader = _Loader(loader.name, loader.path)
        return spec


sys.meta_path.insert(0, _Finder())
