"""The code blocks of a page of the documentation, and a run of them in a folder, from the first to the last.

- ```` ```python title="mine.py" ````, or any language with a title: a file, written into the folder; a further block
  with its title goes on where it ended.
- ```` ```python ````: run in one namespace for the page, as the cells of a notebook are.
- ```` ```bash ````: run line by line. Lines of this project get flags that make a run of a few batches; a line before
  the block ``<!-- as it is -->`` leaves these out, and ``<!-- parsed: REASON -->`` only checks the flags of trainings.
- others: not run.
"""

import contextlib
import io
import itertools
import os
import posixpath
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Block", "blocks_of", "move_link", "page_text", "run_page", "shell_lines"]

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(
    r"^(?: *<!-- *(?P<how>[^\n]*?) *-->\n+)?"
    r"(?P<indent> *)```(?P<language>[\w-]+)(?: +title=\"(?P<title>[^\"]+)\")?[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
# Neither an image nor an address, nor a place on the same page.
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?!https?:|#)(?P<target>[^)]+)\)")
# A few batches of everything, quietly.
_LIMITS = {
    "fit": ["--limit-train-batches", "2", "--limit-val-batches", "2", "--limit-test-batches", "2"],
    "validate": ["--limit-val-batches", "1"],
    "test": ["--limit-test-batches", "1"],
    "predict": [],
}
_QUIET = ["--accelerator", "cpu", "--enable-progress-bar", "false"]
_OTHERS = [["validate"], ["test"], ["predict"], ["export"], ["verify"]]
# They change nothing that a page shows, or need what a test machine has not.
_NOT_RUN = ("pip", "git", "cd", "mkdir", "export", "tensorboard", "source", "nvidia-smi", "jupyter")


class Block(NamedTuple):
    """One code block: the word after the fence, the file that it is, the comment before it, and where it begins."""

    language: str
    title: str | None
    text: str
    how: str
    line: int


def page_text(markdown: str, page: str = "index.md") -> str:
    """A page, by its path in docs/, with the files that it includes: ``<!-- include: CHANGELOG.md -->``."""
    return re.sub(r"<!-- include: (.+?) -->", lambda match: _included(match[1], page), markdown)


def _included(path: str, page: str) -> str:
    """A file of the repository without its title, with the links of the page that includes it."""
    text = re.sub(r"\A# .*\n", "", (ROOT / path).read_text(encoding="utf-8"))
    return _LINK.sub(lambda match: move_link(match["text"], match["target"], path, page), text)


def move_link(text: str, target: str, source: str, page: str) -> str:
    """A link of the file `source` on a page of the site: to another page, or only its text if the site lacks the file.

    Example:
        >>> move_link("data formats", "../../docs/start.md#files", "recipes/mnist/README.md", "recipes/mnist.md")
        '[data formats](../start.md#files)'
        >>> move_link("the figures", "../../benchmarks/README.md", "recipes/mnist/README.md", "recipes/mnist.md")
        'the figures'
    """
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not path.startswith("docs/") or not path.endswith(".md"):
        return text
    path = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(page) or ".")
    return f"[{text}]({path}#{anchor})" if anchor else f"[{text}]({path})"


def blocks_of(page: str) -> list[Block]:
    """The code blocks of a page's text."""
    found = []
    for match in _BLOCK.finditer(page):
        indent = len(match["indent"])
        text = "".join(line[indent:] if line.strip() else line for line in match["text"].splitlines(keepends=True))
        line = page[: match.start("language")].count("\n") + 1
        found.append(Block(match["language"], match["title"], text, match["how"] or "", line))
    return found


def _write_samples(folder: Path) -> None:
    """The files that pages name and users have: photographs in class folders, pairs of sentences."""
    from PIL import Image

    for name, number in itertools.product(("cats", "dogs"), range(8)):
        path = folder / "PHOTOGRAPHS" / name / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((80, 96), 60 + 8 * number).convert("RGB").save(path)
    shutil.copy(folder / "PHOTOGRAPHS/cats/0.jpg", folder / "photo.jpg")
    words = ["a dog runs", "two men sit", "a girl reads", "the cat sleeps", "a man cooks", "children play"]
    rows = [f"{text} {number}\t{text[::-1]} {number}" for number in range(20) for text in words]
    parts = {"pairs.tsv": rows, "train.tsv": rows[:100], "val.tsv": rows[100:110], "test.tsv": rows[110:]}
    for name, part in parts.items():
        (folder / name).write_text("\n".join(part) + "\n")


def shell_lines(text: str) -> list[list[str]]:
    """The words of each command of a block; comments are left out.

    A line that ends with a backslash, or within quotes, goes on in the next one.
    """
    commands = []
    begun = ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        begun += line
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # A quotation is open.
            begun += "\n"
            continue
        begun = ""
        if words:
            commands.append(words)
    if begun:
        raise ValueError(f"no closing quotation: {begun}")
    return commands


def _recipe_of(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe that a line starts by whatever launcher, or the module `recipes`, or None; and its arguments."""
    at = next((i for i, word in enumerate(words) if re.fullmatch(r"recipes(\.\w+)?|lightning-recipes", word)), None)
    if at is None:
        return None, []
    args = list(itertools.takewhile(lambda word: word != "&", words[at + 1 :]))
    module = words[at].replace("lightning-recipes", "recipes")
    if module == "recipes" and args and (ROOT / "recipes" / args[0] / "__main__.py").is_file():
        return f"recipes.{args[0]}", args[1:]
    return module, args


def _as_trial(args: list[str]) -> list[str]:
    """The arguments with those that make a run short."""
    command = args[0] if args and not args[0].startswith("-") else "fit"
    if command not in _LIMITS or {"--help", "--help-all", "--print-config"} & set(args):
        return args
    limits = list(_LIMITS[command])
    if command == "fit" and not {"--max-epochs", "--max-steps", "--resume"} & set(args):
        limits += ["--max-epochs", "1"]
    return [*args, *limits, *_QUIET]


@contextlib.contextmanager
def _called(args: Sequence[str], folder: Path) -> Iterator[None]:
    """In a folder, with arguments, as a program is called."""
    before, path, where = sys.argv, list(sys.path), Path.cwd()
    sys.argv = list(args)
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"it ended with status {end.code}") from end
    finally:
        sys.argv = before
        sys.path[:] = path
        os.chdir(where)


def _run_line(words: list[str], folder: Path, how: str) -> None:
    recipe, args = _recipe_of(words)
    if words[0] in _NOT_RUN:
        return
    if how.startswith("parsed:"):
        if recipe in (None, "recipes") or args[:1] in _OTHERS:
            return
        args = [*args, "--print-config"]
    elif recipe not in (None, "recipes") and how != "as it is":
        args = _as_trial(args)
    devices = 1 if "--print-config" in args else int((re.findall(r"--devices[= ](\d+)", " ".join(words)) or [1])[0])
    if devices > 1:
        from tests.support.ranks import run_ranks

        # Processes that have imported torch already; each is told its rank, as by a launcher.
        run_ranks(_run_program, devices, words, recipe, args, folder)
    else:
        _run_program(words, recipe, args, folder)


def _run_program(words: list[str], recipe: str | None, args: list[str], folder: Path) -> None:
    if recipe:
        with _called([recipe, *args], folder):
            runpy.run_module(recipe, run_name="__main__", alter_sys=True)
    elif words[0] == "python":
        with _called(words[1:], folder):
            runpy.run_path(words[1], run_name="__main__")
    else:
        subprocess.run(words, cwd=folder, check=True)


def run_page(page: str, folder: str) -> None:
    """Write the files of a page into a folder, and run its code there, in this process.

    Raises:
        RuntimeError: a block failed, with the page and the line where it begins.
    """
    here, names, files = Path(folder).resolve(), {"__name__": "__main__"}, dict[str, str]()
    _write_samples(here)
    for block in blocks_of(page_text(Path(page).read_text(encoding="utf-8"))):
        output = io.StringIO()
        try:
            if block.title:
                files[block.title] = files.get(block.title, "") + block.text
                (here / block.title).parent.mkdir(parents=True, exist_ok=True)
                (here / block.title).write_text(files[block.title], encoding="utf-8")
            elif block.language == "python":
                with _called([""], here), contextlib.redirect_stdout(output):
                    exec(compile(block.text, f"{page}:{block.line}", "exec"), names)
            elif block.language == "bash":
                for words in shell_lines(block.text):
                    _run_line(words, here, block.how)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}\n{output.getvalue()[-2000:]}"
            raise RuntimeError(f"{page}:{block.line}: {said}") from error
