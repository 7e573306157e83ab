"""Which room may import which. A room is a folder of a package, or one of the modules beside them.

Imports run one way, from recipes to callbacks to data modules, and inside a package along the arrows below. Imports
inside functions count too.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("recipes", "callbacks", "datamodules")

_DATA = "datamodules.contract datamodules.errors datamodules.ranges"
_SET = f"{_DATA} datamodules.base datamodules.loading"
_CALLBACKS = f"{_DATA} callbacks.lib callbacks.*"
MAY_IMPORT = {
    "datamodules": "",
    "datamodules.errors": "",
    "datamodules.contract": "datamodules.errors",
    "datamodules.ranges": "datamodules.errors",
    "datamodules.base": f"{_DATA} datamodules.loading",
    "datamodules.loading": _DATA,
    "datamodules.mnist": _SET,
    "datamodules.images": f"{_SET} datamodules.mnist",
    "datamodules.translation": _SET,
    "datamodules.NAME": _SET,
    "callbacks": "callbacks.lib datamodules",
    "callbacks.lib": f"{_DATA} datamodules.loading",
    "callbacks.checkpointing": f"{_DATA} datamodules.loading callbacks.lib",
    "callbacks.drawing": f"{_DATA} callbacks.lib",
    "callbacks.*": f"{_DATA} datamodules.loading callbacks.checkpointing callbacks.drawing callbacks.lib",
    "recipes": "datamodules",
    "recipes.__main__": "datamodules.errors recipes.cli recipes.runner recipes.results recipes.version",
    "recipes.version": "",
    "recipes.files": "callbacks.lib",
    "recipes.weights": "datamodules.errors callbacks.checkpointing callbacks.lib",
    "recipes.pretrained": "datamodules.errors datamodules.loading recipes.weights",
    "recipes.labels": f"{_DATA} datamodules.loading",
    "recipes.optim": "datamodules.errors",
    "recipes.parameter_groups": "",
    "recipes.curves": "",
    "recipes.schedules": f"{_CALLBACKS} recipes.curves",
    "recipes.graphs": "",
    "recipes.text_scores": "datamodules.errors",
    "recipes.compilation": "datamodules.errors",
    "recipes.dropout": "datamodules.loading",
    "recipes.recipe": f"{_CALLBACKS} datamodules.loading recipes.compilation recipes.graphs "
    "recipes.optim recipes.parameter_groups recipes.schedules recipes.version recipes.weights",
    "recipes.tta": "datamodules.errors",
    "recipes.classification_scores": "recipes.recipe",
    "recipes.classification": f"{_CALLBACKS} callbacks.drawing datamodules.loading recipes.classification_scores "
    "recipes.labels recipes.recipe recipes.tta",
    "recipes.export": "datamodules.errors callbacks.lib callbacks.checkpointing recipes.graphs recipes.recipe "
    "recipes.version recipes.weights",
    "recipes.runner": "datamodules.errors datamodules.ranges callbacks.lib",
    "recipes.results": f"{_CALLBACKS} callbacks.checkpointing recipes.files recipes.version",
    "recipes.resume": f"{_CALLBACKS} callbacks.checkpointing recipes.results recipes.runner",
    "recipes.cli": f"{_CALLBACKS} callbacks.checkpointing callbacks.drawing recipes.files recipes.export "
    "recipes.graphs recipes.optim recipes.recipe recipes.results recipes.resume recipes.runner recipes.version "
    "recipes.weights",
    "recipes.NAME": f"{_CALLBACKS} callbacks.drawing datamodules.NAME datamodules.images datamodules.loading "
    "datamodules.mnist datamodules.translation recipes.classification recipes.dropout recipes.graphs recipes.optim "
    "recipes.parameter_groups recipes.pretrained recipes.recipe recipes.text_scores recipes.weights",
    "recipes.NAME.__main__": "datamodules recipes recipes.cli",
}
"""``callbacks.*`` are the modules beside the rooms, which may import each other; ``recipes.NAME`` is a recipe, and
``datamodules.NAME`` a data module that is not named here."""

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
    if top == "datamodules" and name and f"{top}.{name}" not in MAY_IMPORT:
        return "datamodules.NAME"
    if top == "callbacks" and name and f"{top}.{name}" not in MAY_IMPORT:
        return "callbacks.*"
    return f"{top}.{name}" if name else top


def _imports(module: str) -> Iterator[tuple[str, int]]:
    """Modules of ours that `module` imports, and the line."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        yield from (
            (name, node.lineno) for name in names if name.partition(".")[0] in (*PACKAGES, "benchmarks", "tests")
        )


def test_every_import_is_allowed() -> None:
    wrong = []
    for module, path in MODULES.items():
        room = _room(module)
        assert room in MAY_IMPORT, f"{path}: a new room, {room}; say in MAY_IMPORT what it may import"
        for target, line in _imports(module):
            if _room(target) not in (room, *MAY_IMPORT[room].split()):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} may not import {target}")
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def test_the_allowed_imports_make_no_circle() -> None:
    arrows = {room: targets.split() for room, targets in MAY_IMPORT.items()}
    assert {target for targets in arrows.values() for target in targets} <= arrows.keys()
    TopologicalSorter(arrows).prepare()


def test_the_imports_of_modules_make_no_circle() -> None:
    graph = {module: {target for target, _ in _imports(module)} for module in MODULES}
    TopologicalSorter(graph).prepare()
