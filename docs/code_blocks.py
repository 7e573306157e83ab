"""The code blocks of a page of the documentation, and a run of them in a folder, from the first to the last.

What a block is follows from its first line:

- ```` ```python title="mine.py" ```` (or ``yaml``, any language with a title): a file, written into the folder;
  a further block with its title goes on where it ended.
- ```` ```python ````: run in one namespace for the page, as the cells of a notebook are.
- ```` ```bash ````: run line by line. Lines of this project get flags that make a run of a few batches; a line before
  the block ``<!-- as it is -->`` leaves these out, and ``<!-- parsed: REASON -->`` only checks the flags of its lines.
- ```` ```text ```` right after one of Python: what this printed. Its words have to be there; numbers may differ.
- others: not run.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Block", "blocks_of", "kept_pictures", "page_text", "pictures_of", "run_page"]

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(
    r"^(?: *<!-- *(?P<how>[^\n]*?) *-->\n+)?"
    r"(?P<indent> *)```(?P<language>[\w-]+)(?: +title=\"(?P<title>[^\"]+)\")?[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_PICTURE = re.compile(r"(?:savefig|Path)\(\s*[\"']([\w./-]+\.(?:png|svg))[\"']\)?(?:,|\)|\.write_bytes)")

# A few batches of everything, quietly.
_LIMITS = {
    "fit": ["--limit-train-batches", "2", "--limit-val-batches", "2", "--limit-test-batches", "2", "--report", "false"],
    "validate": ["--limit-val-batches", "1"],
    "test": ["--limit-test-batches", "1"],
}
QUIET = ["--accelerator", "cpu", "--enable-progress-bar", "false"]
_COMMANDS = ("fit", "validate", "test", "predict", "verify", "export")
# They change nothing that a page shows, or need what a test machine has not.
_NOT_RUN = ("pip", "git", "cd", "mkdir", "export", "tensorboard", "source", "nvidia-smi", "jupyter")


@dataclass(frozen=True)
class Block:
    """One code block.

    Args:
        language: the word after the fence.
        title: the file that it is, if any.
        how: the comment before it.
        line: where it begins in the page.
    """

    language: str
    title: str | None
    text: str
    how: str
    line: int

    @property
    def is_parsed_only(self) -> bool:
        """Its lines are checked and not run."""
        return self.how.startswith("parsed:")


def _included(path: str) -> str:
    """A file of the repository without its title; links to files that the site has not become their text."""
    text = (ROOT / path).read_text(encoding="utf-8")
    text = re.sub(r"\A# .*\n", "", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"\1", text)


def page_text(markdown: str) -> str:
    """A page with the files that it includes: ``<!-- include: CHANGELOG.md -->``."""
    return re.sub(r"<!-- include: (.+?) -->", lambda found: _included(found[1]), markdown)


def blocks_of(page: str) -> list[Block]:
    """The code blocks of a page's text."""
    found = []
    for match in _BLOCK.finditer(page):
        indent = len(match["indent"])
        text = "".join(line[indent:] if line.strip() else line for line in match["text"].splitlines(keepends=True))
        line = page[: match.start("language")].count("\n") + 1
        found.append(Block(match["language"], match["title"], text, match["how"] or "", line))
    return found


def pictures_of(page: str) -> list[str]:
    """The pictures that a page's code saves, which the page shows."""
    return [name for block in blocks_of(page) if block.language == "python" for name in _PICTURE.findall(block.text)]


def kept_pictures(page: str) -> Path:
    """The folder where the pictures of this version of a page are kept, for the site."""
    return ROOT / ".cache" / "docs" / hashlib.sha256(page.encode()).hexdigest()[:16]


def _write_samples(folder: Path) -> None:
    """The files that pages name and users have: photographs in class folders, pairs of sentences."""
    from PIL import Image

    for name in ("cats", "dogs"):
        for number in range(8):
            path = folder / "PHOTOGRAPHS" / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((80, 96), 60 + 8 * number).convert("RGB").save(path)
    shutil.copy(folder / "PHOTOGRAPHS/cats/0.jpg", folder / "photo.jpg")
    words = ["a dog runs", "two men sit", "a girl reads", "the cat sleeps", "a man cooks", "children play"]
    rows = [f"{text} {number}\t{text[::-1]} {number}" for number in range(20) for text in words]
    for name, part in (
        ("pairs.tsv", rows),
        ("train.tsv", rows[:100]),
        ("val.tsv", rows[100:110]),
        ("test.tsv", rows[110:]),
    ):
        (folder / name).write_text("\n".join(part) + "\n")


def shell_lines(text: str) -> list[list[str]]:
    """The words of each line of a block; comments are left out, and a line that ends with a backslash goes on."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _module_of(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The module that a line runs, or None, and its arguments."""
    if words[0] == "lightning-recipes":
        return "recipes", list(words[1:])
    if words[:2] == ["python", "-m"]:
        return words[2], list(words[3:])
    return None, list(words)


def _recipe_of(module: str | None, args: list[str]) -> tuple[str | None, list[str]]:
    """The recipe that is called, and its arguments."""
    if module == "recipes" and args and args[0] not in ("list", "compare", "verify", "--version"):
        return f"recipes.{args[0]}", args[1:]
    return (module, args) if module and module.startswith("recipes.") else (None, args)


def _as_trial(args: list[str]) -> list[str]:
    command = args[0] if args and args[0] in _COMMANDS else "fit"
    if {"--help", "--help-all", "--print-config"} & set(args) or command in ("verify", "export"):
        return args
    limits = list(_LIMITS.get(command, []))
    if command == "fit" and not {"--max-epochs", "--max-steps", "--resume"} & set(args):
        limits += ["--max-epochs", "1"]
    return [*args, *limits, *QUIET]


@contextlib.contextmanager
def _called(args: Sequence[str], folder: Path) -> Iterator[None]:
    before, path, where = sys.argv, list(sys.path), Path.cwd()
    sys.argv = list(args)
    sys.path.insert(0, str(folder))  # As for a program, and for a notebook.
    os.chdir(folder)
    try:
        yield
    finally:
        sys.argv = before
        sys.path[:] = path
        os.chdir(where)


def _run_here(words: list[str], folder: Path, module: str | None) -> None:
    """Run a module, or a program of the folder, in this process, as `python` does."""
    with _called(words, folder):
        try:
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"it ended with status {end.code}") from end


def _run_line(words: list[str], folder: Path, block: Block) -> None:
    if words[0] in _NOT_RUN:
        return
    module, args = _module_of(words)
    recipe, args = _recipe_of(module, args)
    if block.is_parsed_only:
        check_flags(words)
        return
    if recipe and block.how != "as it is":
        args = _as_trial(args)
    several = any(arg.startswith("--devices") for arg in args)
    if recipe and not several:
        _run_here([recipe, *args], folder, recipe)
    elif module == "recipes" and not several:
        _run_here(["recipes", *args], folder, module)
    elif words[0] == "python" and not module and not several:
        _run_here(words[1:], folder, None)
    else:
        program = [sys.executable, *words[1:]] if words[0] == "python" else words
        _run_process([sys.executable, "-m", recipe, *args] if recipe else program, folder)


def _run_process(words: list[str], folder: Path) -> None:
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"it ended with status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")


def check_flags(words: Sequence[str]) -> None:
    """Parse the flags of a line that starts a recipe, by whatever launcher.

    Raises:
        UserError: there is no such flag, or it takes no such value.
    """
    at = next((i for i, word in enumerate(words) if re.fullmatch(r"recipes(\.\w+)?|lightning-recipes", word)), None)
    if at is None:
        raise ValueError(f"no recipe is started by {shlex.join(words)}")
    module = "recipes" if words[at] == "lightning-recipes" else words[at]
    recipe, args = _recipe_of(module, list(words[at + 1 :]))
    if recipe is None:
        return
    args = list(itertools.takewhile(lambda word: word != "&", args))
    from recipes.cli.command_line import build_parser
    from recipes.cli.experiment import Classes
    from recipes.cli.fitting import find_recipe

    recipe_class = find_recipe(recipe.removeprefix("recipes."))
    assert recipe_class.data_class is not None
    parser = build_parser(Classes(recipe_class, recipe_class.data_class, tuple), recipe)
    if args[:1] == ["predict"]:
        parser.add_argument("inputs", nargs="*")
    parser.parse(args[1:] if args and args[0] in _COMMANDS else args)


@contextlib.contextmanager
def _messages(output: io.StringIO) -> Iterator[None]:
    """Writes the messages of a Trainer and its callbacks there, too."""
    handler = logging.StreamHandler(output)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_recipes")]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)


def _words(text: str) -> set[str]:
    return {*re.findall(r"[^\W\d_]+", text)}


def run_page(page: str, folder: str) -> None:
    """Write the files of a page into a folder, run its code there, in this process, and keep its pictures.

    Args:
        page: path of the page.

    Raises:
        RuntimeError: a block failed, with the page and the line where it begins.
    """
    import matplotlib

    matplotlib.use("agg")
    here = Path(folder).resolve()
    names: dict[str, Any] = {"__name__": "__main__"}
    files: dict[str, str] = {}
    _write_samples(here)
    text = page_text(Path(page).read_text(encoding="utf-8"))
    printed, end = "", 0  # By the last block of Python, and where it ends.
    for block in blocks_of(text):
        output = io.StringIO()
        try:
            if block.title:
                files[block.title] = files.get(block.title, "") + block.text
                (here / block.title).parent.mkdir(parents=True, exist_ok=True)
                (here / block.title).write_text(files[block.title], encoding="utf-8")
            elif block.language == "python":
                with _called([""], here), contextlib.redirect_stdout(output), _messages(output):
                    exec(compile(block.text, f"{page}:{block.line}", "exec"), names)
                printed, end = output.getvalue(), block.line + block.text.count("\n") + 2
            elif (
                block.language == "text" and block.line <= end + 2 and (missing := _words(block.text) - _words(printed))
            ):
                raise ValueError(f"the code before did not print {', '.join(sorted(missing))}, but:\n{printed}")
            elif block.language == "bash":
                for words in shell_lines(block.text):
                    _run_line(words, here, block)
        except BaseException as error:
            raise RuntimeError(
                f"{page}:{block.line}: {type(error).__name__}: {error}\n{output.getvalue()[-2000:]}"
            ) from error
    for name in pictures_of(text):
        kept_pictures(text).mkdir(parents=True, exist_ok=True)
        shutil.copy(here / name, kept_pictures(text) / name)


def main() -> None:
    """Run a page: ``python docs/code_blocks.py PAGE FOLDER``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("page")
    parser.add_argument("folder")
    options = parser.parse_args()
    run_page(options.page, options.folder)


if __name__ == "__main__":
    main()
