"""The messages of the errors that users can correct, read from the source: what each says, and its anchor on a page.

A text that stands in several places is one entry. Errors that pass on the message of another have none of their own.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Message", "find_messages", "messages_page"]

ROOT = Path(__file__).parents[1]
ERRORS = ("UserError", "RunFailedError", "DownloadError", "UnreadableImage")
PACKAGES = ("recipes", "callbacks", "datamodules")
_TOPICS = {
    "recipes/cli": "The command line",
    "recipes/launch": "Devices, nodes and launchers",
    "recipes/failures": "Several processes",
    "recipes/resume": "Resuming",
    "recipes/results": "Results and runs",
    "recipes/export": "Export",
    "recipes/mnist": "The MNIST recipe",
    "recipes/resnet": "The image recipe",
    "recipes/seq2seq": "The translation recipe",
    "recipes": "Recipes",
    "callbacks/checkpointing": "Checkpoints",
    "callbacks": "Callbacks",
    "datamodules/images": "Images",
    "datamodules/mnist": "MNIST's data",
    "datamodules/translation": "Pairs of sentences",
    "datamodules": "Data",
}


@dataclass(frozen=True)
class Message:
    """One error in the source.

    Args:
        text: what it says; ``...`` stands for what depends on the case.
        anchor: on the page of messages.
        topic: the section of that page.
        places: the files and the lines.
        status: the exit status of a run that ends with it.
    """

    text: str
    anchor: str
    topic: str
    places: tuple[str, ...]
    status: int


def _text(node: ast.expr, names: dict[str, ast.expr]) -> str:
    """The text of an expression, with dots where it depends on the case."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value, names) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, names) + _text(right, names)
        case ast.IfExp(body=body):
            return _text(body, names)
        case ast.Name(id=name) if name in names:
            return _text(names[name], {other: value for other, value in names.items() if other != name})
    return "..."


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, dict[str, ast.expr]]]:
    """The errors that are made, and the texts that the functions around them have assigned to names."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        names: dict[str, ast.expr] = {}
        pending: list[ast.AST] = list(ast.iter_child_nodes(function))
        while pending:
            node = pending.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.ClassDef) and isinstance(function, ast.Module):
                continue
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                yield node, names
            pending += ast.iter_child_nodes(node)


def _slug(text: str) -> str:
    words = re.findall(r"[a-z0-9]+", text.replace("...", " ").lower())
    return "-".join(words)[:64].strip("-") or "message"


def _topic(place: str) -> str:
    return next(topic for folder, topic in _TOPICS.items() if place.startswith(f"{folder}/"))


def _errors(root: Path) -> Iterator[tuple[str, str, int]]:
    """The text, the place and the exit status of each error that is made."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            # All names are known when the last call has been found.
            for call, names in list(_calls(ast.parse(path.read_text(encoding="utf-8")))):
                text = " ".join(" ".join(_text(argument, names) for argument in call.args).split())
                status = 1 if isinstance(call.func, ast.Name) and call.func.id == "RunFailedError" else 2
                yield text, f"{place}:{call.lineno}", status


def find_messages(root: Path = ROOT) -> list[Message]:
    """All messages, in the order of the topics."""
    places: dict[tuple[str, int], list[str]] = {}
    for text, place, status in _errors(root):
        if re.search(r"\w", text.replace("...", "")):
            places.setdefault((text, status), []).append(place)
    found, seen = [], Counter[str]()
    for (text, status), where in sorted(places.items()):
        anchor = _slug(text)
        seen[anchor] += 1
        anchor += f"-{seen[anchor]}" if seen[anchor] > 1 else ""
        found.append(Message(text, anchor, _topic(min(where)), tuple(where), status))
    order = list(dict.fromkeys(_TOPICS.values()))
    return sorted(found, key=lambda message: (order.index(message.topic), message.text.lstrip(". ").lower()))


def messages_page(messages: list[Message]) -> str:
    """The messages in Markdown, with a heading for each topic."""
    lines: list[str] = []
    for number, message in enumerate(messages):
        if number == 0 or messages[number - 1].topic != message.topic:
            lines += ["", f"## {message.topic}", ""]
        text = message.text.replace("\\", "\\\\").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
        text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
        status = " *(status 1)*" if message.status == 1 else ""
        lines.append(f'- <a id="{message.anchor}"></a>{text}{status} [¶](#{message.anchor}){{ .headerlink }}')
    return "\n".join(lines)
