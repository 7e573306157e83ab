"""Record of a hash of a run's weights at each save, and the comparison with a part of the run that is trained again.

``weights.jsonl`` has a line for each start of a training, with the settings and the environment, and a line for each
save after it. Later checkpoints replace earlier checkpoints, but the hashes remain. So the training from a checkpoint
to the next save can be repeated and compared.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.checkpointing.writing import best_effort
from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.lightning import pl
from recipes.runner.errors import rank_zero_print, relative_path
from recipes.runner.loggers import run_ids
from recipes.runner.saved_run import SavedRun, differences, environment, write_text

_FILE = "weights.jsonl"


def weights_hash(state_dict: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the names, types, shapes and bytes of a state dict."""
    sha256 = hashlib.sha256()
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            # torch cannot view lazy conjugates as bytes.
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            content: Any = plain.reshape(-1).view(torch.uint8).numpy()
            sha256.update(content)
        else:  # The extra state of a module, from `get_extra_state`.
            sha256.update(f"{name} {value!r}\n".encode())
    return sha256.hexdigest()


class RecordedCheckpointIO(VerifiedCheckpointIO):
    """Writer of a run's checkpoints with its settings, and of a line with each hash into ``weights.jsonl``.

    Call `begin` with the Trainer before it trains.

    Args:
        folder: the run's folder.
        recipe: the title of the recipe.
        resumed: the checkpoint to resume from; None if the run begins with new weights.
        config: the settings of the run.
        auto_settings: the settings that the first command of the run has left to the run.
    """

    def __init__(
        self,
        folder: Path,
        recipe: str,
        resumed: SavedRun | None,
        config: Mapping[str, Any],
        auto_settings: Sequence[str] = (),
    ) -> None:
        super().__init__(on_saved=self._record)
        self._path = folder / _FILE
        self._before = dict(resumed.environment) if resumed else {}
        self._start: dict[str, Any] = {
            "recipe": recipe,
            "resumed_from": resumed.updates if resumed else None,
            "environment": {},
            "config": dict(config),
        }
        self._auto_settings = list(auto_settings)
        self._last: dict[str, Any] | None = None
        self._trainer: pl.Trainer | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Record the environment of a training, and print its differences to the environment before a resume."""
        self._trainer = trainer
        self._start["environment"] = environment(trainer)
        self._before.pop("threads", None)  # `UpdateLoop` reports a different number of threads.
        changed = differences(self._before, self._start["environment"])
        if changed:
            rank_zero_print(f"bits may differ from here on: {changed}")

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "callbacks" in checkpoint and self._trainer is not None:  # A file of weights only has no settings.
            checkpoint = {
                **checkpoint,
                "config": self._start["config"],
                "auto_settings": self._auto_settings,
                "environment": self._start["environment"],
                "run_ids": run_ids(self._trainer.loggers),
            }
        super().save_checkpoint(checkpoint, path, storage_options)

    def _record(self, checkpoint: Mapping[str, Any]) -> None:
        """Append the hash of the weights in a checkpoint, unless it was just recorded for another file."""
        with best_effort("the hash of the weights"):
            sha256 = weights_hash(checkpoint["state_dict"])
            save = {"step": checkpoint["global_step"], "epoch": checkpoint["epoch"] + 1, "sha256": sha256}
            if save == self._last:
                return
            entries = [{"save": save}]
            if self._last is None:
                entries.insert(0, {"start": self._start})
            before = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            write_text(self._path, before + "".join(json.dumps(entry, default=str) + "\n" for entry in entries))
            self._last = save


@dataclass(frozen=True)
class Interval:
    """Part of a run that can be trained again: from a checkpoint, or the beginning of the run, to a save.

    Args:
        recipe: the title of the recipe.
        resumed_from: the number of updates in the checkpoint from which the training of this save was resumed; None if
            the training began with new weights.
        environment: the environment of this training, see `recipes.runner.saved_run.environment`.
        config: the settings of this training.
        step: the number of completed updates at the save.
        epoch: the epoch of the save, counted from 1.
        hashes: hashes of the saved weights; several if a callback has replaced the weights between two saves.
        begin: the checkpoint at the beginning of the interval; None for the beginning of the run.
        begin_hashes: the recorded hashes of the weights in the checkpoint `begin`.
    """

    recipe: str
    resumed_from: int | None
    environment: dict[str, Any]
    config: dict[str, Any]
    step: int
    epoch: int
    hashes: frozenset[str]
    begin: SavedRun | None = None
    begin_hashes: frozenset[str] = frozenset()


def read_saves(folder: Path) -> dict[int, Interval]:
    """Read the saves of a run by their updates, each as the interval from the beginning of the run.

    Training that was abandoned by a resume from an earlier checkpoint is left out.

    Raises:
        UserError: the record is missing or damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        raise UserError(
            f"there is no {path}: expected the folder of a run, which records a hash of its weights at each save"
        )
    saves: dict[int, Interval] = {}
    start: dict[str, Any] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            entry = json.loads(line)
            if "start" in entry:
                start = entry["start"]
                resumed_from = -1 if start["resumed_from"] is None else start["resumed_from"]
                saves = {step: save for step, save in saves.items() if step <= resumed_from}
                continue
            sha256 = entry["save"].pop("sha256")
            save = Interval(**start, **entry["save"], hashes=frozenset({sha256}))
            if save.step > resumed_from:
                hashes = saves[save.step].hashes if save.step in saves else frozenset()
                saves[save.step] = replace(save, hashes=save.hashes | hashes)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"line {number} of {path} cannot be read: {error}") from error
    return saves


def find_interval(folder: Path, checkpoints: Sequence[SavedRun]) -> Interval | None:
    """Return the shortest interval between a checkpoint and its next save, else the interval from the beginning.

    Args:
        folder: the run's folder.
        checkpoints: the existing checkpoints.

    Raises:
        UserError: see `read_saves`.
    """
    by_updates = {saved.updates: saved for saved in checkpoints}
    saves = read_saves(folder)
    steps = sorted(saves)
    lengths = {}
    for before, step in pairwise(steps):
        if before in by_updates and (saves[step].resumed_from or 0) <= before:
            lengths[before, step] = step - before
    if lengths:
        before, step = min(lengths, key=lengths.__getitem__)
        return replace(saves[step], begin=by_updates[before], begin_hashes=saves[before].hashes)
    # Step 0 is not an interval: a run without training saves its initial weights.
    first_save = next((saves[step] for step in steps if step), None)
    return first_save if first_save and first_save.resumed_from is None else None


class IntervalEnd(pl.Callback):
    """Callback that saves after the last update of an interval, and ends the training before the next update.

    The run may have saved right after the update, after a validation, or at the end of the epoch. The weights of these
    saves may differ, for example with callbacks that average weights, so each save is compared.

    Runs on: the end of an update; `on_train_batch_start`.

    Args:
        step: the number of the last update.
        path: the checkpoint to write.
    """

    class Reached(Exception):
        """Exception that ends the training on all ranks at the same update."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_update_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Save, if the update is the interval's last."""
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.step:
            raise self.Reached


def check_beginning(interval: Interval, world_size: int, global_batch_size: int | None) -> None:
    """Compare the weights at the beginning of an interval with the record.

    Raises:
        RunFailedError: the checkpoint has other weights.
        UserError: the run starts without a checkpoint, and the number of devices changes the update's micro-batches.
    """
    if interval.begin is None:
        devices = int(interval.environment.get("devices", 1)) * int(interval.environment.get("num_nodes", 1))
        if global_batch_size is None and world_size != devices:
            raise UserError(
                f"the run began on {devices} devices, and is repeated from its beginning; no checkpoint holds the"
                f" number of samples of an update: pass {spelled('devices', devices)}"
            )
        return
    sha256 = weights_hash(load_plain(interval.begin.path)["state_dict"])
    if sha256 not in interval.begin_hashes:
        raise RunFailedError(
            f"NOT EQUAL: the weights in {relative_path(interval.begin.path)} are not those that the run has saved after"
            f" {interval.begin.updates:,} updates: their SHA-256 is {sha256}, and {_text(interval.begin_hashes)} in the"
            " record"
        )


def compare(interval: Interval, repeated: Interval | None, *, repeats_bits: bool) -> dict[str, str]:
    """Compare an interval with its repetition, and return the rows to print if the weights are equal.

    Args:
        repeated: the last save of the repetition; None if it ended before the save.
        repeats_bits: whether training on this device repeats its bits.

    Raises:
        RunFailedError: the weights differ.
        UserError: there are no weights to compare.
    """
    begin = "the beginning"
    if interval.begin:
        begin = f"update {interval.begin.updates:,} ({relative_path(interval.begin.path)})"
    trained = f"from {begin} to update {interval.step:,} (epoch {interval.epoch})"
    if repeated is None:
        raise UserError(f"training again {trained} did not come to that update: no weights to compare")
    changed = differences(interval.environment, repeated.environment)
    equal = interval.hashes & repeated.hashes
    if equal:
        rows = {"trained again": trained, "weights": f"equal to the bit, SHA-256 {_text(equal)}"}
        return rows | ({"although": changed} if changed else {})
    cause = (
        f"here it has {changed}" if changed else "processor, versions, threads and precision are the same as in the run"
    )
    if not repeats_bits:
        cause += f"; on a GPU only a run with {spelled('deterministic')} repeats its bits for sure"
    raise RunFailedError(
        f"NOT EQUAL: trained again {trained}, the weights have SHA-256 {_text(repeated.hashes)}, and"
        f" {_text(interval.hashes)} in the run; {cause}"
    )


def _text(hashes: frozenset[str]) -> str:
    return " or ".join(sorted(hashes))
