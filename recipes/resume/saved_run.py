"""Runs that were saved: what a checkpoint says of its run, which one is good, and whether it is the same experiment."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from callbacks.checkpointing.verified_io import describe_damage
from datamodules.errors import UserError

__all__ = ["SavedRun", "describe_differences", "find_last_good", "read_run"]

log = logging.getLogger("lightning_recipes.saved")

# Of how a run is split, watched and bounded, or of the machine: what it learns does not depend on them.
_FREE = {
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "num_workers", "cache_gb", "download", "fused"),
    *("channels_last", "cache_features", "deterministic", "benchmark", "tune_allocator", "use_distributed_sampler"),
    *("batch_size", "eval_batch_size", "max_tokens", "global_batch_size", "accumulate", "inference_mode", "barebones"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "save_every", "save_top_k", "model_registry"),
    *("limit_val_batches", "limit_test_batches", "limit_predict_batches", "val_check_interval"),
    *("check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing"),
    *("enable_progress_bar", "profiler", "detect_anomaly", "lean_loop"),
    # The data set has a name of its own, see `SettledData`, and its folder may move.
    *("data_dir", "top_k", "beam", "length_penalty", "nbest", "attention", "val_sentences"),
}


@dataclass(frozen=True)
class SavedRun:
    """What has to be known of a checkpoint before the Trainer reads it.

    Args:
        config: the settings of the run.
        updates: optimiser steps done.
        epochs: whole epochs done.
        devices: on how many it was trained; None in checkpoints of a plain Trainer.
        global_batch_size: samples per update on all devices; None where that is not known.
    """

    config: dict[str, Any]
    updates: int
    epochs: int
    devices: int | None = None
    global_batch_size: int | None = None

    def is_finished(self, max_epochs: int | None, max_steps: int = -1) -> bool:
        """Whether nothing is left to train up to these bounds; -1 and None are no bound."""
        by_epochs = max_epochs is not None and 0 < max_epochs <= self.epochs
        return by_epochs or 0 < max_steps <= self.updates


def read_run(path: str | Path) -> SavedRun:
    """The settings and the progress in a checkpoint, without running code from it; weights are not read.

    Raises:
        UserError: there is none, it is cut off, or it is no checkpoint of a run.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path}")
    stat = Path(path).stat()
    return _read(str(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _read(path: str, changed: int, size: int) -> SavedRun:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if problem := describe_damage(path):
            raise UserError(f"{path} is no checkpoint: {problem}") from error
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a readable checkpoint: {reason}") from error
    if (
        not isinstance(checkpoint, dict)
        or not {"state_dict", "loops", "pytorch-lightning_version"} <= checkpoint.keys()
    ):
        raise UserError(f"{path} is no checkpoint of a run, which holds its settings beside the weights")
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    # A plain Trainer saves the constructors' arguments only.
    saved = checkpoint.get("datamodule_hyper_parameters", {}) | checkpoint.get("hyper_parameters", {})
    split = checkpoint.get("split", {})
    return SavedRun(
        checkpoint.get("config") or saved,
        checkpoint["global_step"],
        epochs,
        split.get("devices"),
        split.get("global_batch_size"),
    )


def find_last_good(folder: str | Path) -> Path | None:
    """The checkpoint of a run that is farthest on and whole, or None; damaged ones on the way are named.

    Progress decides and not the clock, which may have been set back.

    Args:
        folder: the run's ``checkpoints``.
    """
    readable: list[tuple[int, int, bool, Path]] = []
    damaged: dict[Path, str] = {}
    for path in sorted(Path(folder).glob("*.ckpt")):
        try:
            run = read_run(path)
        except UserError as error:
            damaged[path] = describe_damage(path) or str(error).removeprefix(f"{path} ")
        else:
            readable.append((run.updates, run.epochs, path.name == "last.ckpt", path))
    good = None
    for *_, path in sorted(readable, reverse=True):
        if problem := describe_damage(path):
            damaged[path] = problem
        else:
            good = path
            break
    for path, problem in damaged.items():
        log.warning("warning: %s is passed over: %s", path, problem)
    return good


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {str(k): v for k, v in old.items()} == {str(k): v for k, v in new.items()}
    if isinstance(old, str) and isinstance(new, str) and old != new:
        return Path(old).expanduser().resolve() == Path(new).expanduser().resolve()
    return old == new


def describe_differences(saved: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Where settings ask for another experiment than the saved one: a line each, none where they are the same.

    What a setting leaves open (None or "auto") the saved run has settled. Splits, devices, logging and bounds may
    differ freely, see README.md; the global batch is compared by `fit_batch`, which knows the number of devices.

    Example:
        >>> describe_differences({"seed": 1, "devices": 1, "lr": 0.1}, {"seed": 2, "devices": 4, "lr": None})
        ['--seed is 2, and 1 in the checkpoint']
    """
    lines = []
    for name, new in config.items():
        if name in _FREE or name not in saved or new in (None, "auto") or _same(saved[name], new):
            continue
        lines.append(f"--{name.replace('_', '-')} is {new}, and {saved[name]} in the checkpoint")
    return lines
