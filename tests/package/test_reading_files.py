"""No file can run code: everything is read with ``weights_only=True``."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("recipes", "callbacks", "datamodules") for path in (ROOT / package).rglob("*.py"))
LOADS = {"load_from_checkpoint", "load_checkpoint"}


def reads(call: ast.Call) -> bool:
    """Whether a call reads a checkpoint: `torch.load`, or a Trainer that is given one."""
    if not isinstance(call.func, ast.Attribute):
        return False
    of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch" and call.func.attr == "load"
    return of_torch or call.func.attr in LOADS or any(word.arg == "ckpt_path" for word in call.keywords)


@cache
def calls(path: Path) -> list[ast.Call]:
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and reads(node)]
    # What overrides a method may pass its argument on.
    return [call for call in found if not isinstance(getattr(call.func, "value", None), ast.Call)]


def test_whatever_reads_a_checkpoint_says_weights_only():
    for path in FILES:
        for call in calls(path):
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert given.get("weights_only") == "True", f"{path.relative_to(ROOT)}:{call.lineno}"


def test_the_known_places_are_found():
    found = {path.name: len(calls(path)) for path in FILES if calls(path)}
    assert found["training.py"] >= 4
    assert "plain_loading.py" in found
