"""Random command lines, made from a recipe's own parser, and what each has to end with.

A line is a command and some flags, with values that are right, at a border, or wrong. Each is typed in a fork of one
warm process, in an empty folder beside a few files, and has to end with status 0, 1 or 2 within 30 seconds, with one
line that begins with "error:" unless the status is 0, and without a traceback.
"""

import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import torch

from recipes.launch.settings import flag_of

__all__ = ["Ended", "Grammar", "faults_of", "grammar_of", "prepare_files", "random_line", "type_in_fork"]

LIMIT = 30.0
_MEMORY = 12 << 30

WHOLE = ["0", "1", "2", "3", "7", "-1", "-2", str(2**31), str(2**63), str(-(2**63) - 1), "1_000"]
NUMBERS = [*WHOLE, "0.5", "1.0", "1e-30", "1e30", "-0.0", "nan", "inf", "-inf"]
NO_NUMBERS = ["1e400", "0x10", "1,5", "١٢", "+", "1 2"]
FILES = ["", ".", "..", "folder", "text.txt", "good.ckpt", "cut.ckpt", "empty.ckpt", "settings.yaml", "broken.yaml"]
FILES += ["missing", "missing/file.json", "text.txt/x.json", "scores.json", "scores.csv", "folder.json", "/proc/x.json"]
TEXTS = ["", " ", "x", "none", "null", "auto", "-", "--", "~", "a/b", "é", "日本語", "\udc80", "\n", "a\nb", "\x1b[31m"]
TEXTS += ["%s", "x" * 300, "y" * 70_000, "true", "00:00:00:05", "csv,tensorboard", "csv,csv", ",", "sgd", "lbfgs"]
TEXTS += ["{", "[", "[1, 2]", "{a: 1}", '{"a": {"b": []}}', "&a [*a]", "!!python/object:os.x {}", "val/loss", "x/y"]
TEXTS += ["1 epochs", "2 steps", "5%", "-1 steps", "nan%", "1e400 epochs", "1 minutes", "2 parsecs", "SparseAdam"]
CLASSES = ["LearningRateMonitor", "EarlyStopping", "Timer", "Callback", "ModelCheckpoint", "os.system", "[Timer]"]
CLASSES += ["{class_path: Timer}", "{class_path: Timer, init_args: {x: 1}}", "{class_path: 3}", "no.such.Module"]
CLASSES += ["torch.nn.Linear", "SimpleProfiler", "simple", "advanced", "ddp", "fsdp", "cpu", "gpu", "tpu", "7"]
NONSENSE = [*NUMBERS, *NO_NUMBERS, *FILES, *TEXTS, *CLASSES]

# Right values of these flags start processes or take hours.
COSTLY = {
    "devices": ["1", "0", "-1", "auto", "[0]", "[]", "x", "1.5", "nan"],
    "num_nodes": ["1", "0", "-1", "x", "1.5"],
    "num_workers": ["0", "1", "-1", "x", "1.5"],
    "max_epochs": ["0", "1", "-2", "x", "1.5", "nan"],
    "min_epochs": ["0", "1", "-2", "x"],
    "max_steps": ["0", "1", "-2", "x", "nan"],
    "min_steps": ["0", "1", "-2", "x"],
    "rendezvous_timeout": ["0", "1", "-1", "nan", "x"],
    "download": ["false", "x"],
    "compile": ["false", "x"],
}
"""Values in place of those of the type, by flag."""


class Ended(NamedTuple):
    """What a line ended with and printed; the status is -1 where it was killed after `LIMIT` seconds."""

    status: int
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Grammar:
    """What lines of a recipe are made of.

    Args:
        recipe: ``module:name`` of its class, as `data` is of the data module's.
        always: flags that keep a run small, at the beginning of each line.
        commands: what a line may begin with.
        types: the type of each flag, by name.
    """

    recipe: str
    data: str
    always: tuple[str, ...]
    commands: tuple[str, ...]
    types: dict[str, Any]


def grammar_of(recipe: str, data: str, always: Sequence[str]) -> Grammar:
    """Ask a recipe's command line for its commands and flags, as completion does."""
    from recipes import run

    main, taken = sys.modules["__main__"], []
    main.TAKE_PARSER = lambda parser, commands: taken.append((parser.types(), tuple(commands)))  # type: ignore[attr-defined]
    try:
        run(resolve_name(recipe), resolve_name(data), args=[])
    finally:
        del main.TAKE_PARSER  # type: ignore[attr-defined]
    types_of_flags, commands = taken[0]
    return Grammar(recipe, data, tuple(always), commands, types_of_flags)


def _values(name: str, annotation: Any) -> list[str]:
    """Values of a flag that are right, or nearly."""
    if name in COSTLY:
        return COSTLY[name]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [*map(str, arguments), str(arguments[0]).upper()]
    if origin in (Union, types.UnionType):
        return [value for part in arguments for value in _values(name, part)]
    if annotation is int:
        return WHOLE
    if annotation is float:
        return NUMBERS
    if annotation is bool:
        return ["true", "false", "false", "yes"]
    if annotation is str:
        return [*FILES, *TEXTS]
    if annotation is type(None):
        return ["null"]
    if origin in (list, tuple, dict) or origin is not None:
        return ["[]", "{}", "[1]", "[x, y]", "{0: 2}", '{"1 epochs": 2}', "{layer4: 1 epochs}", "{seconds: 3}", "[[]]"]
    return FILES if name == "config" else CLASSES


def _misspelt(random: Random, flag: str) -> str:
    at = random.randrange(2, len(flag))
    return random.choice([flag[:at] + flag[at + 1 :], flag[:at] + "q" + flag[at:], flag[1:], flag.upper(), flag + "+"])


def _flag(random: Random, grammar: Grammar) -> list[str]:
    """A flag with its value, in one of the ways to write it."""
    name = random.choice(list(grammar.types))
    flag = flag_of(name) if random.random() < 0.8 else f"--{name}"
    wrong = random.random() < 0.1 and name not in COSTLY
    value = random.choice(NONSENSE if wrong else _values(name, grammar.types[name]))
    how = random.random()
    if how < 0.03:
        return [_misspelt(random, flag), value]
    if how < 0.05:
        return [f"{flag}.{random.choice(['help', 'x', 'patience', ''])}={value}"]
    if how < 0.07:
        return [f"{flag}+={value}"]
    if how < 0.09:
        return [f"--no-{flag[2:]}"]
    if how < 0.11:
        return [flag]
    if how < 0.13:
        return [flag, value, flag, value]
    if how < 0.14:
        return [value]
    return [f"{flag}={value}"] if random.random() < 0.5 else [flag, value]


def random_line(random: Random, grammar: Grammar) -> list[str]:
    """A command line; those of commands that need a checkpoint mostly have one."""
    command = random.choice([[], ["fit"], *([name] for name in grammar.commands)])
    if random.random() < 0.02:
        command = ["Test"]
    line = [*command, *grammar.always]
    if command and command[0] in grammar.commands[1:] and random.random() < 0.95:
        line += ["--ckpt", "good.ckpt"]
    if command == ["export"] and random.random() < 0.8:
        line += ["--format", random.choice(["safetensors", "state-dict", "onnx"])]
    for _ in range(random.choice([1, 1, 2, 2, 3, 5])):
        line += _flag(random, grammar)
    if command == ["predict"]:
        line += [random.choice(FILES + TEXTS) for _ in range(random.randrange(3))]
    return line


def type_in_fork(grammar: Grammar, line: Sequence[str], folder: Path) -> Ended:
    """Type a line in a fork of this process, in a folder; the fork ends as a program does."""
    out, err, began = folder / "stdout", folder / "stderr", time.monotonic()
    process = os.fork()
    if process == 0:
        _child(grammar, line, folder, out, err)
    status = _wait(process)
    return Ended(status, out.read_text(errors="replace"), err.read_text(errors="replace"), time.monotonic() - began)


def _wait(process: int) -> int:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.003)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -1


def _child(grammar: Grammar, line: Sequence[str], folder: Path, out: Path, err: Path) -> None:
    status = 70
    try:
        os.setsid()
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, errors=errors, closefd=False)  # noqa: SIM115
            for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
        )
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # No line reaches a server.
        os.environ |= dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
        torch.set_num_threads(1)
        from recipes import run

        try:
            run(resolve_name(grammar.recipe), resolve_name(grammar.data), args=list(line))
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def faults_of(ended: Ended) -> list[str]:
    """What differs from how every line has to end.

    Example:
        >>> faults_of(Ended(2, "", "error: there is no flag --x; did you mean --lr?\\n", 0.1))
        []
        >>> faults_of(Ended(1, "", "Traceback (most recent call last):\\n  ...\\nKeyError: 3\\n", 0.1))
        ['a traceback', 'status 1 with 0 lines of error']
        >>> faults_of(Ended(-1, "", "", 30.0))
        ['it took more than 30 s']
    """
    if ended.status == -1:
        return [f"it took more than {LIMIT:.0f} s"]
    faults = []
    if ended.status not in (0, 1, 2):
        faults.append(f"status {ended.status}")
    if "Traceback (most recent call last)" in ended.out + ended.err:
        faults.append("a traceback")
    errors = len(re.findall(r"^error\b.*: ", ended.err, re.MULTILINE))
    if errors != (ended.status != 0):
        faults.append(f"status {ended.status} with {errors} lines of error")
    if errors and not ended.err.strip().splitlines()[-1].startswith("error"):
        faults.append("more lines after the error")
    if max(map(len, ended.err.splitlines() or [""])) > 2000:
        faults.append("a line of more than 2,000 characters")
    return faults


def prepare_files(grammar: Grammar, folder: Path) -> None:
    """The files that lines name: a checkpoint of a trained run, damaged ones, settings, and what is none of these.

    The run that makes the checkpoint is one of this process, which has then imported what the forks need.
    """
    from recipes import run

    folder.mkdir(parents=True)
    flags = [*grammar.always, "--run-dir", str(folder / "runs"), "--name", "good"]
    run(resolve_name(grammar.recipe), resolve_name(grammar.data), args=flags)
    good = next(folder.glob("runs/*/good/checkpoints/last.ckpt")).read_bytes()
    config = next(folder.glob("runs/*/good/config.yaml")).read_text()
    shutil.rmtree(folder / "runs")
    (folder / "good.ckpt").write_bytes(good)
    (folder / "cut.ckpt").write_bytes(good[: len(good) // 2])
    (folder / "empty.ckpt").touch()
    (folder / "settings.yaml").write_text(config)
    (folder / "broken.yaml").write_text("lr: [1\nseed: {")
    (folder / "text.txt").write_text("words\nand\tmore words\n")
    (folder / "folder").mkdir()
    (folder / "folder.json").mkdir()
