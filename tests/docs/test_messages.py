"""The page of messages holds each error that the source makes, once, and what failing command lines print."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from docs.messages import ERRORS, PACKAGES, ROOT, Message, find_messages, messages_page
from recipes.cli.messages import ALIASES, as_flags
from tests.support.command_lines import typed

MESSAGES = find_messages()


def test_anchors_are_unique_and_each_message_has_one() -> None:
    anchors = re.findall(r'<a id="([^"]+)">', messages_page(MESSAGES))
    assert anchors == [message.anchor for message in MESSAGES]
    assert [anchor for anchor, number in Counter(anchors).items() if number > 1] == []
    texts = Counter((message.text, message.status) for message in MESSAGES)
    assert [text for text, number in texts.items() if number > 1] == []


def test_every_class_of_errors_is_searched() -> None:
    trees = [ast.parse(path.read_text()) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    classes = {node.name: node.bases for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = [name for name, bases in classes.items() if any(isinstance(b, ast.Name) and b.id in ERRORS for b in bases)]
    assert sorted(["UserError", *found]) == sorted(ERRORS)


def _passes_on(call: ast.Call) -> bool:
    """Whether an error's message is no text of its own: it is that of another, or comes from a function."""
    literal = (ast.Constant, ast.JoinedStr)
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return not isinstance(call.args[0], literal) or not any(re.search(r"\w", text) for text in texts)


def test_every_error_of_the_source_is_on_the_page() -> None:
    listed = Counter(place for message in MESSAGES for place in message.places)
    missing, twice = [], []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            made: Counter[str] = Counter()
            place = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                    made[f"{place}:{node.lineno}"] += not _passes_on(node)
            missing += [name for name, number in made.items() if listed[name] < number]
            twice += [name for name in listed if name.startswith(f"{place}:") and name not in made]
    assert missing == twice == []


def _pattern(message: Message) -> re.Pattern[str]:
    """What the command line prints for a message: parameters are flags there, and dots are any text."""
    text = message.text.replace("...", "ANY")
    text = as_flags(text, {*re.findall(r"(?<![\w.-])[a-z]\w*", text)} - ALIASES.keys(), ALIASES)
    return re.compile(re.escape(text).replace("ANY", ".*"))


def entry_of(line: str) -> Message:
    """The message on the page that says most of a line."""
    found = [message for message in MESSAGES if _pattern(message).fullmatch(line.removeprefix("error: "))]
    return max(found, key=lambda message: len(message.text.replace("...", "")))


LINES = {
    "--no-such-flag 1": "there is no flag --",
    "test": "needs a checkpoint; pass --ckpt",
    "--devices 0": "requests none; pass 1 or more",
    "--num-nodes 2": "does not tell how the nodes find each other",
    "--precision 16-mixed": "16-mixed needs a GPU",
    "--save-every soon": "is no interval",
    "--early-stopping nothing --max-epochs 1": "",
    "--resume missing.ckpt": "",
}


def test_what_failing_command_lines_print_is_on_the_page(tmp_path: Path) -> None:
    for command, ended in zip(LINES, typed(tmp_path, *LINES), strict=True):
        (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        entry = entry_of(line)
        print(f"{line}\n    {entry.text}")
        assert LINES[command] in entry.text, command
        assert entry.status == ended.status, command
        assert len(entry.text.replace("...", "")) > 12, command


# They come from functions that other tests call: no text of an error is in the source.
NO_ENTRY = ("shadows the package", "rank 3 (node 1, host7) failed")


def test_the_messages_of_troubleshooting_are_those_of_the_source() -> None:
    page = (ROOT / "docs/help/troubleshooting.md").read_text()
    lines = [line for line in re.findall(r"^error: .*", page, re.M) if not any(text in line for text in NO_ENTRY)]
    assert len(lines) > 12
    assert all(len(entry_of(line).text.replace("...", "")) > 12 for line in lines)


@pytest.mark.parametrize("status", [1, 2])
def test_the_page_shows_the_exit_status(status: int) -> None:
    messages = [message for message in MESSAGES if message.status == status]
    assert messages_page(messages).count("*(status 1)*") == (len(messages) if status == 1 else 0)
