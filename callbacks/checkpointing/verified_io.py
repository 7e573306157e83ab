"""Verified checkpoint files: written to a temporary file, flushed, read back and renamed, so they are valid or absent.

Lightning writes to the system's folder for temporary files. From another disk the last step is a copy, which a kill
cuts short (#21253). A full disk ends the run, and a flipped bit is loaded without an error.
"""

import dataclasses
import enum
import errno
import fcntl
import logging
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.checkpointing.exact_checkpoint import warn_of_other_checkpoints
from callbacks.checkpointing.plain_loading import describe_excess, reject_code
from callbacks.checkpointing.writing import atomic_write
from callbacks.lib.lightning_internals import OneLightningCallback
from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.lightning import TorchCheckpointIO, pl
from datamodules.ranges import check_types

log = logging.getLogger("lightning_recipes.checkpoints")

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter),
    *(torch.dtype, torch.device, torch.layout, torch.Size),
)


def as_loadable(value: Any, lost: list[str] | None = None, name: str = "") -> Any:
    """Convert a value to what a checkpoint can hold, tensors and plain Python; returns a value that is plain as it is.

    Enum members become their values, paths text, dataclasses dicts, NumPy's arrays tensors and its
    scalars numbers. Any other object becomes a text that names it.

    Args:
        lost: list to which the names of replaced objects are added, such as ``"hyper_parameters.act"``.
        name: the name of `value` itself.

    Example:
        >>> as_loadable({"folder": PurePath("data"), "sizes": np.arange(2), "act": max}, lost := [])
        {'folder': 'data', 'sizes': tensor([0, 1]), 'act': 'builtins.max'}
        >>> lost
        ['act']
    """
    lost = [] if lost is None else lost
    if type(value) in _ATOMS:
        return value
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        pairs = [
            (as_loadable(key, lost, f"{prefix}key"), as_loadable(item, lost, f"{prefix}{key}"))
            for key, item in value.items()
        ]
        is_plain = all(k is key and v is item for (k, v), (key, item) in zip(pairs, value.items(), strict=True))
        # Kept rather than copied: a state dict is an OrderedDict whose attribute `_metadata` a copy would lose.
        return value if is_plain and type(value) in (dict, OrderedDict, Counter) else dict(pairs)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [as_loadable(item, lost, f"{prefix}{i}") for i, item in enumerate(value)]
        if type(value) in (list, tuple, set) and all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, (set, frozenset)):
            with suppress(TypeError):  # Its items were hashable, and their plain forms may not be.
                return set(items)
        return tuple(items) if isinstance(value, tuple) else items
    return _plain_object(value, lost, name)


def _plain_object(value: Any, lost: list[str], name: str) -> Any:
    """Convert a value that is not a container."""
    if isinstance(value, enum.Enum):
        return as_loadable(value.value, lost, name)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return as_loadable(value.item(), lost, name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return as_loadable(fields, lost, name)
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor)
    base_types: tuple[Any, ...] = (int, float, str, bytes, bytearray)
    for base_type in base_types:
        if isinstance(value, base_type):
            return base_type(value)
    lost.append(name)
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)[:200]


def describe_damage(path: str | Path) -> str | None:
    """Describe the damage in a file of `torch.save`, by its checksums; None if it is valid."""
    path = Path(path)
    if not path.is_file():
        return "it does not exist"
    if not path.stat().st_size:
        return "it is empty"
    try:
        excess = describe_excess(path)
        if excess:
            return excess
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except zipfile.BadZipFile as error:
        if "not a zip file" in str(error):
            return "it was cut off or overwritten, or is another kind of file"
        return f"it is damaged ({error})"
    except Exception as error:  # A damaged header can raise any exception.
        return f"it is damaged ({type(error).__name__}: {error})"
    return f"it is damaged (the checksum of {record} is wrong)" if record else None


class _Sink:
    """File that keeps a write error instead of raising it into torch's writer.

    That writer would lose the exception or end the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: `write_checkpoint` flushes the file."""


def _lock(file: BinaryIO) -> bool:
    """Lock a file exclusively until it is closed or its process ends; return whether that succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # Another process holds the lock, or the file system has none.
        return False
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove the half-written files of writers that have died; a living writer holds a lock on its file."""
    for leftover in folder.glob(f".*.ckpt.{'[0-9a-f]' * 8}.part"):
        with suppress(OSError), leftover.open("rb+") as file:
            if _lock(file):
                leftover.unlink()


def write_checkpoint(checkpoint: Any, path: Path) -> None:
    """Write a checkpoint so that the file is always the old or the complete new one, even after a power loss.

    Raises:
        OSError: the file could not be written, or did not read back as written; the old one is unchanged.
    """
    remove_leftovers(path.parent)
    with atomic_write(path) as temporary_path:
        with temporary_path.open("xb") as file:
            _lock(file)
            sink = _Sink(file)
            torch.save(checkpoint, sink)  # type: ignore[arg-type]
            if sink.error is not None:
                raise sink.error
            file.flush()
            os.fsync(file.fileno())
        problem = describe_damage(temporary_path)
        if problem:
            raise OSError(errno.EIO, f"what was written does not read back: {problem}")


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Checkpoint plugin that writes verified files of tensors and plain Python values, and rejects damaged files.

    If a checkpoint cannot be written, such as on a full disk, the old one stays, and training continues with a warning:
    see `failures`, which `CheckpointGuard` turns into an error at the end. Until a save succeeds again no
    checkpoint is removed. Hyper-parameters of any kind are written in their plain form, see `as_loadable`.

    Args:
        on_saved: called with each checkpoint that has been written, in the process that writes.

    Example:
        >>> trainer = pl.Trainer(plugins=[VerifiedCheckpointIO()], logger=False)
    """

    def __init__(self, on_saved: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        super().__init__()
        check_types(on_saved=(on_saved, on_saved is None or callable(on_saved), "a function of the checkpoint"))
        self._on_saved = on_saved
        self.failures: dict[str, str] = {}
        """Reasons of failed writes by path, until the file is written or removed."""
        self._last_failed = False
        self._lost: set[str] = set()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        lost: list[str] = []
        plain = as_loadable(checkpoint, lost)
        newly_lost = [name for name in lost if name not in self._lost]
        if newly_lost:
            self._lost.update(newly_lost)
            log.warning(
                "warning: checkpoints hold only the names of %s, which are no plain values", ", ".join(newly_lost)
            )
        try:
            write_checkpoint(plain, Path(path))
        except OSError as error:
            # Training continues: another save may succeed, and `CheckpointGuard` fails the run at its end otherwise.
            self.failures[str(path)] = error.strerror or str(error)
            self._last_failed = True
            kept = "the old one stays" if Path(path).exists() else "there is none yet"
            log.warning(
                "warning: %s was not saved (%s); %s, and training continues", path, error.strerror or error, kept
            )
        else:
            self.failures.pop(str(path), None)
            self._last_failed = False
            if self._on_saved is not None:
                self._on_saved(plain)

    @override
    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            UserError: the file is damaged or holds code.
        """
        problem = describe_damage(path) if Path(path).is_file() else None
        if problem:
            resume = spelled("resume", "auto")
            raise UserError(f"{path} cannot be read: {problem}; pass another checkpoint, or {resume}")
        try:
            return super().load_checkpoint(path, *args, **kwargs)
        except pickle.UnpicklingError as error:
            reject_code(path, error)
            raise

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        # A `ModelCheckpoint` removes any path in its folder that its state names, and a received checkpoint sets it.
        if Path(path).suffix != ".ckpt" or ".." in Path(path).parts:
            log.warning("warning: %s is not removed, since it is no checkpoint of this run", path)
        elif not self._last_failed:
            self.failures.pop(str(path), None)
            super().remove_checkpoint(path)


def raise_failures(trainer: pl.Trainer) -> None:
    """Fail a run, after its training, whose last save failed; called on all ranks.

    Raises:
        RunFailedError: a checkpoint could not be written.
    """
    io = trainer.strategy.checkpoint_io
    problem = None
    if isinstance(io, VerifiedCheckpointIO) and io.failures:
        files = "; ".join(f"{path}: {reason}" for path, reason in io.failures.items())
        problem = (
            f"the training is done, and its checkpoints could not be saved ({files}); make room, and repeat from"
            f" the last one that was saved with {spelled('resume')}"
        )
    # All ranks raise the error of rank 0: a rank that ends alone leaves the others waiting.
    problem = trainer.strategy.broadcast(problem)
    if problem:
        raise RunFailedError(problem)


class CheckpointGuard(OneLightningCallback):
    """Callback that rejects ranks that resume from different checkpoints, and fails a run whose last save failed.

    It warns if the run is saved, and not by an `ExactCheckpoint`, which another callback may have taken out.

    Runs on: `setup`, where it compares the checkpoint of all ranks; `on_train_start`; `on_train_end`.

    Args:
        resumed: the checkpoint that this rank resumes from.

    Raises:
        UserError: the ranks differ.
        RunFailedError: the last checkpoint could not be written.
    """

    def __init__(self, resumed: str | None = None) -> None:
        is_path = resumed is None or isinstance(resumed, (str, os.PathLike))
        check_types(resumed=(resumed, is_path, "the path of a checkpoint"))
        self.resumed = resumed

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or trainer.world_size == 1:
            return
        expected = trainer.strategy.broadcast(self.resumed)
        if not trainer.strategy.reduce_boolean_decision(expected == self.resumed):
            raise UserError(
                f"rank 0 resumes from {expected or 'nothing'}, rank {trainer.global_rank} found"
                f" {self.resumed or 'nothing'}: pass a {spelled('run_dir')} that all nodes share, or a file to"
                f" {spelled('resume')}"
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        warn_of_other_checkpoints(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise_failures(trainer)
