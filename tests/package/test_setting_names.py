"""Messages name settings with `spelled` only, which spells them as flags or as parameters in Python."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.runner.hints import read_help

ROOT = Path(__file__).parents[2]
FLAGS = "|".join({name for recipe in ("mnist", "resnet", "seq2seq") for name in read_help(f"recipes.{recipe}").names()})
FILLED = "\0"
"""What a string fills in."""
NAMED = re.compile(rf"`(?:{FLAGS}|{FILLED})`|(?<![\w(.,/'-])(?:{FLAGS}|{FILLED})=(?![=.{{])")

ALLOWED = {
    ("callbacks/lib/threads.py", f"{FILLED}="),  # An environment variable.
    ("datamodules/lightning_package.py", f"{FILLED}="),
    ("callbacks/lib/loaded_updates.py", "`batch_size`"),  # An attribute of any loader.
    ("callbacks/warmup_lr.py", "scale="),  # An argument of WarmupLR, which is no flag.
    ("datamodules/images/file_pipeline.py", "augment="),  # What a run says of itself, whoever asks.
    ("datamodules/images/tensor_pipeline.py", f"{FILLED}="),
    ("datamodules/images/builtin_datasets.py", f"{FILLED}="),  # USE=COLUMN, of the value of `columns`.
    ("datamodules/images/proposals.py", f"{FILLED}="),
    ("datamodules/translation/parallel_corpus.py", f"{FILLED}="),
    ("recipes/resnet/feature_cache.py", "cache_gb="),
    ("recipes/runner/run.py", f"{FILLED}="),  # A call of fit().
    ("recipes/runner/flags.py", f"{FILLED}="),
    ("recipes/runner/variables.py", f"{FILLED}="),  # An environment variable.
    ("recipes/seq2seq/attention.py", "name="),  # HTML.
    ("datamodules/errors.py", f"{FILLED}="),  # `spelled` itself.
    ("datamodules/errors.py", f"`{FILLED}`"),
}


def texts_of(tree: ast.AST) -> Iterator[str]:
    """The strings of code that are no docstrings."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped.update(part for part in ast.walk(node) if part is not node)
            yield "".join(part.value if isinstance(part, ast.Constant) else FILLED for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield re.sub(r"%[sdr]", FILLED, node.value)


def settings_named_literally() -> Iterator[tuple[str, str]]:
    for package in ("recipes", "callbacks", "datamodules"):
        for path in (ROOT / package).rglob("*.py"):
            for text in texts_of(ast.parse(path.read_text(encoding="utf-8"))):
                for match in NAMED.finditer(text):
                    yield path.relative_to(ROOT).as_posix(), match[0]


def test_no_message_names_a_setting_literally():
    named = {(path, name) for path, name in settings_named_literally()}
    assert named == ALLOWED
