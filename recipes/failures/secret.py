"""A run's secret, by which its processes recognise each other.

Whoever can reach the port of rank 0 may claim to be a rank. All ranks take the secret from the same place: the process
that started them, the environment, or a file that the first of them writes into the folder
of all runs, which the nodes share anyway.
"""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from datamodules.errors import UserError

__all__ = ["HANDED_DOWN", "SECRET_VARIABLE", "Secret", "find_secret", "new_secret"]

SECRET_VARIABLE = "LIGHTNING_RECIPES_SECRET"
"""Set by the user."""

HANDED_DOWN = "LIGHTNING_RECIPES_RUN_SECRET"
"""Set by the first process of a node for those that it starts."""

# One for each user: teams share a folder of runs.
_FILE = f".secret-{os.getuid()}" if hasattr(os, "getuid") else ".secret"
_MIN_LENGTH = 16  # Characters: a shorter one could be guessed from a recorded exchange.
_TIMEOUT = 5.0  # Seconds for a network file system.


@dataclass(frozen=True)
class Secret:
    """A secret and where it comes from.

    Args:
        advice: what makes the secrets of all nodes equal.
    """

    key: bytes = field(repr=False)
    source: str
    advice: str = ""


def new_secret() -> str:
    """A random secret."""
    return secrets.token_hex(32)


def find_secret(env: Mapping[str, str], run_dir: Path) -> Secret:
    """The secret of a run that other processes have started, too.

    Args:
        env: the environment variables of this process.
        run_dir: the folder of all runs.

    Raises:
        UserError: it is too short, cannot be read or made, or others could read it.
    """
    if text := env.get(SECRET_VARIABLE):
        return _checked(text, f"the variable {SECRET_VARIABLE}", "set it to the same value on all nodes")
    path = run_dir / _FILE
    try:
        _create(path)
        text = _read(path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"the processes of this run need a secret in common, and {path} cannot be made ({reason}); pass a `run_dir`"
            f" that can be written, or set {SECRET_VARIABLE} to the same random text for all of them"
        ) from error
    advice = f"pass a `run_dir` that all nodes share, or set {SECRET_VARIABLE} to the same value on all of them"
    return _checked(text, f"the file {path}", advice)


def _checked(text: str, source: str, advice: str) -> Secret:
    if len(text := text.strip()) < _MIN_LENGTH:
        raise UserError(
            f"the secret in {source} has {len(text)} characters, and could be guessed; expected {_MIN_LENGTH} or more,"
            " such as those of: openssl rand -hex 32"
        )
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"the secret in {source} is no text; expected one such as that of: openssl rand -hex 32")
    return Secret(text.encode(), source, advice)


def _create(path: Path) -> None:
    """Make the file, complete from its first moment, unless another process, perhaps on another node, was faster."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{_FILE}-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret())
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> str:
    """The text of a secret's file, which only its owner may read and write, as ssh has it for its keys."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            # NFS caches that a file does not exist, until its folder is listed.
            list(path.parent.iterdir())
            with path.open() as file:
                _check_mode(path, os.fstat(file.fileno()))
                return file.read()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        except (PermissionError, UnicodeDecodeError, IsADirectoryError) as error:
            raise UserError(f"the run's secret cannot be read from {path}: {error}") from error


def _check_mode(path: Path, found: os.stat_result) -> None:
    if os.name != "posix":
        return
    if found.st_uid not in (0, os.geteuid()):
        raise UserError(
            f"{path} belongs to another user (uid {found.st_uid}), who knows the secret in it: delete it, or set"
            f" {SECRET_VARIABLE}, also where this disk changes the owners of files"
        )
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(
            f"others may read or write {path}, which holds the run's secret (mode {stat.S_IMODE(found.st_mode):04o},"
            f" {mode:03o} too much): chmod 600 {path}; on a disk without permissions set {SECRET_VARIABLE} instead"
        )
