"""The messages that the page of troubleshooting quotes are those that the code prints."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from datamodules.errors import spelled, spelling_as_flags
from recipes.runner.hints import read_help

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "help" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^```\{\.text \.wrap\}\n(.+?)\n```$", PAGE, re.MULTILINE)
FILLED = "\0"
SHORTEST = 9
"""Characters that a string of the code has to share with a message to count."""

VALUES = [
    r"rank 0 \(process .*?\), rank 1 \(process .*?\)|(?<=end on )SIGTERM|\b1200\b|(?<=order of )this DataLoader",
    r"(?<=note: )a DataLoader|(?<=are no )MNIST",
    r"python -m recipes\.\w+( --[a-z-]+ \w+)*",  # The user's command.
    r"srun --nodes=\d --ntasks-per-node=\d",
    r"runs/[\w/.]+|PHOTOGRAPHS/[\w/.]+|network\.[\w.]+",
    r"(?<=the folder )data|train-images-idx3-ubyte\.gz|--data-dir nowhere|--batch-size 512|--seed is 5, and 1|2 nodes",
    r"/home/me/project/callbacks|(?<=package )callbacks",
    r"ConnectionRefusedError: \[Errno 111\] Connection refused|Address already in use|node0(?=:)|\b29500\b|\bcuda\b",
    r"OutOfMemoryError: CUDA out of memory\. Tried to allocate 2\.00 GiB \.\.\.",
    r"\bpytorch_lightning\b|\bWarmupLR\b|\blightning\b(?!-)|teacher\.weight",
    r"^ModuleNotFoundError: No module named 'callbacks\.[\w.]+'.*",
    r"rank 3 \(node 1, host7\)|ValueError: a bad pixel",
    r"(?<=note: )train_loss|ReduceLROnPlateau(?= decides)|^own(?= is 0 on)|(?<=own is )0|(?<= and )1(?= on)|1(?=, and)",
]
"""What the code fills in, in the messages of the page: commands, files, figures, and errors of others."""


FLAGS = {name for recipe in ("mnist", "resnet", "seq2seq") for name in read_help(f"recipes.{recipe}").names()}


def part_of_string(part: ast.expr) -> str:
    """A part of an f-string, where it is literal or a setting."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    if not (isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Call)):
        return FILLED
    arguments = [argument.value for argument in part.value.args if isinstance(argument, ast.Constant)]
    if ast.unparse(part.value.func) != "spelled" or not arguments:
        return FILLED
    is_filled_in = len(arguments) < len(part.value.args)
    return f"{spelled(*arguments)} {FILLED}" if is_filled_in else spelled(*arguments)


def strings_of(tree: ast.AST) -> Iterator[list[str]]:
    """The literal parts of each string in code, in order, as they are for who calls from Python and for who types."""
    for flags in ((), FLAGS):
        with spelling_as_flags(flags):
            for node in ast.walk(tree):
                text = ""
                if isinstance(node, ast.JoinedStr):
                    text = "".join(map(part_of_string, node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = re.sub(r"%[sd]|\{\w*\}", FILLED, node.value)
                yield text.split(FILLED)


@cache
def strings_of_code() -> list[list[str]]:
    """The strings of our packages that are long enough to count."""
    return [
        parts
        for package in ("recipes", "callbacks", "datamodules")
        for path in (ROOT / package).rglob("*.py")
        for parts in strings_of(ast.parse(path.read_text(encoding="utf-8")))
        if max(map(len, parts), default=0) >= SHORTEST
    ]


def without_strings_of_code(message: str) -> str:
    """A message without what strings of the code say of it."""
    rest = message
    for parts in strings_of_code():
        place = 0
        spans = []
        for part in parts:
            at = message.find(part, place)
            if at < 0:
                break
            place = at + len(part)
            spans.append((at, place))
        else:
            for start, end in spans:
                rest = rest[:start] + " " * (end - start) + rest[end:]
    return rest


def test_the_page_quotes_messages() -> None:
    assert len(MESSAGES) >= 10


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_a_quoted_message_is_printed_by_the_code(message: str) -> None:
    filled = re.sub("|".join(VALUES), FILLED, message)
    rest = re.sub(r"^(error|warning|note):?", "", without_strings_of_code(filled))
    assert re.findall(r"[\w-]{3,}", rest) == []
