"""Which room may import which. A room is a folder of a package, or one of the modules beside them.

Imports run one way: from recipes to callbacks to data modules, and inside a package from a higher level to a lower one.
Imports inside functions count too. Imports inside a recipe's folder are relative, and no others, so that a copy of the
folder is another recipe.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("datamodules", "callbacks", "recipes")

_NO_CODE = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)}

LEVELS = (
    "datamodules.errors",
    "datamodules.lightning_package",
    "datamodules.lightning",
    "datamodules.notes",
    "datamodules.contract datamodules.ranges",
    "datamodules.loading",
    "callbacks.lib",
    "callbacks.update_loop",
    "callbacks.checkpointing",
    "callbacks.*",
    "datamodules.base",
    "datamodules.NAME",
    "callbacks datamodules",
    "recipes.shadowing recipes.version recipes.dropout recipes.forward recipes.figures recipes.weights_file",
    "recipes.photograph_graph",
    "recipes.labels recipes.optim recipes.schedules recipes.weights recipes.compilation recipes.scores",
    "recipes.mistakes recipes.check_optimization",
    "recipes.evaluation_tables",
    "recipes.base",
    "recipes.registry recipes.inputs",
    "recipes.classifier recipes.prediction recipes.export",
    "recipes.NAME",
    "recipes.runner",
    "recipes recipes.goldens",
    "recipes.__main__ recipes.NAME.__main__",
)
"""Rooms from the lowest to the highest: each may import from those below. ``callbacks.*`` are the modules beside the
folders, which may import each other; ``datamodules.NAME`` is a data module, and ``recipes.NAME`` a recipe."""

LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms.split()}
NOT_FOR_CALLBACKS = ("datamodules", "datamodules.base", "datamodules.NAME")

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def _room(module: str) -> str:
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if f"{top}.{name}.__main__" in MODULES:
        return "recipes.NAME.__main__" if module.endswith(".__main__") else "recipes.NAME"
    others = {"datamodules": "datamodules.NAME", "callbacks": "callbacks.*"}
    room = f"{top}.{name}" if name else top
    return others[top] if name and room not in LEVEL and top in others else room


def _imports(module: str) -> Iterator[tuple[str, int]]:
    """Modules of ours that `module` imports, and the line."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = str(node.module)
            if node.level:
                source = f"{module.rpartition('.')[0]}.{source}".removesuffix(".None")
            names = [f"{source}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else source for name in names]
        else:
            continue
        yield from (
            (name, node.lineno) for name in names if name.partition(".")[0] in (*PACKAGES, "benchmarks", "tests")
        )


def _may_import(module: str, target: str) -> bool:
    here, there = _room(module), _room(target)
    if here == there:
        # A recipe does not import another one, nor a data module another one.
        return not here.endswith(".NAME") or module.split(".")[1] == target.split(".")[1]
    packages = [PACKAGES.index(name.partition(".")[0]) for name in (module, target)]
    if there not in LEVEL or packages[0] < packages[1] or LEVEL[there] >= LEVEL[here]:
        return False
    return not (module.startswith("callbacks") and there in NOT_FOR_CALLBACKS)


def test_every_import_is_allowed() -> None:
    wrong = []
    for module, path in MODULES.items():
        assert _room(module) in LEVEL, f"{path}: a new room, {_room(module)}; say in LEVELS what it may import"
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: {_room(module)} may not import {target}"
            for target, line in _imports(module)
            if not _may_import(module, target)
        ]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


PUBLIC = {
    alias.name: f"recipes.{node.module}"
    for node in ast.walk(ast.parse((ROOT / "recipes" / "__init__.pyi").read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module of each name that ``from recipes import ...`` imports."""


def _modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules in an import that is not relative."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.module == "recipes":
        return [PUBLIC.get(alias.name, f"recipes.{alias.name}") for alias in node.names]
    return [str(node.module)]


def test_imports_are_relative_inside_the_folder_of_a_recipe() -> None:
    wrong = []
    for module, path in MODULES.items():
        folder = ""
        if _room(module).startswith("recipes.NAME"):
            folder = ".".join(module.split(".")[:2])
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            line = f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
            if isinstance(node, ast.ImportFrom) and node.level:
                if not folder or node.level > 1:
                    wrong.append(f"{line}: write the name of the package")
            elif folder and any(f"{name}.".startswith(f"{folder}.") for name in _modules_of(node)):
                wrong.append(f"{line}: write from .MODULE import NAME")
    assert not wrong, "\n".join(wrong)


def test_the_imports_of_modules_make_no_circle() -> None:
    graph = {module: {target for target, _ in _imports(module)} for module in MODULES}
    TopologicalSorter(graph).prepare()


CLOSURES = {
    "recipes.mnist.recipe": 4_600,
    "callbacks.freezing": 800,
    "datamodules.translation.data_module": 2_450,
}
"""How many lines of our code a reader of a module may have to know at most: its own and those of modules it imports.

What it imports from a package, as `from datamodules import MNISTDataModule`, is known by its public name, and what it
imports from `datamodules.lightning` by its name in Lightning. Comments, docstrings and blank lines do not count: they
help to read."""


def _lines_of_code(path: Path) -> int:
    text = path.read_text()
    numbers = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(numbers)


@pytest.mark.parametrize("module", CLOSURES)
def test_a_module_is_read_with_few_others(module: str) -> None:
    seen, open_ = set(), [module]
    while open_:
        seen.add(name := open_.pop())
        targets = {target for target, _ in _imports(name)} & MODULES.keys() - {"datamodules.lightning"}
        open_ += targets - seen
    lines = sum(_lines_of_code(MODULES[name]) for name in seen)
    assert lines <= CLOSURES[module], f"{module} needs {lines:,} lines of {len(seen)} files"
