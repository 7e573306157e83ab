"""What Lightning leaves out where a run resumes, done before its first batch, or refused.

Lightning goes on in an epoch with the first batches of a loader that saves no position (#19764), which is refused here,
and begins the epoch after a resume in the order of epoch 0 (#18780). A `DataLoader` whose sampler is torch's has a
position: `UpdateLoop` deals its samples by their numbers.

A checkpoint may come from somebody else: `ModelCheckpoint` deletes the worst of its best checkpoints by the path that
stands in its state, and that can be any file of the user's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
)

from callbacks.checkpointing.stopping_points import RULES
from callbacks.lib.hooks import callbacks_of
from callbacks.lib.lightning_internals import unused_loader_states
from callbacks.lib.optimizers import optimizer_layers
from callbacks.update_loop import install_update_loop
from datamodules.errors import UserError
from datamodules.loading.resumable import ResumableLoader
from datamodules.notes import warn

RAW_WEIGHTS = "current_model_state"
"""The entry of a checkpoint with the weights that are not averaged, as Lightning's `WeightAveraging` calls it."""

_STOPS_OF_PATIENCE = (EarlyStoppingReason.NOT_STOPPED, EarlyStoppingReason.PATIENCE_EXHAUSTED)


def loaded_raw_weights(pl_module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The weights that are not averaged as the module's `on_load_checkpoint` makes them; None where there are none."""
    if RAW_WEIGHTS not in checkpoint:
        return None
    second = {**checkpoint, "state_dict": checkpoint[RAW_WEIGHTS]}
    pl_module.on_load_checkpoint(second)
    weights: dict[str, Any] = second["state_dict"]
    return weights


def _without_position(trainer: pl.Trainer) -> list[Any]:
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return [loader for loader in loaders if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"))]


def _sampler(loader: DataLoader[Any]) -> Any:
    """What lists the samples of an epoch."""
    batches: Any = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", None)


def _moves_on(loader: Any) -> str:
    """The state of a `DataLoader` that persists between epochs, not in checkpoints, and the fix, or an empty text."""
    if not isinstance(loader, DataLoader):
        return ""
    if getattr(_sampler(loader), "generator", None) or (loader.num_workers and loader.generator):
        return "a generator of its own: leave it out and train with SeedControl"
    if loader.persistent_workers:
        return "persistent workers, whose generators go on: pass persistent_workers=False"
    return ""


def _check_position(trainer: pl.Trainer) -> None:
    """Refuse to resume within an epoch where the loaders do not go on from where the run was saved.

    Raises:
        UserError: a loader saves no position.
    """
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    done = progress.processed
    rule = RULES["update" if progress.ready == done else "within batch"]
    if not rule.saves:
        raise UserError(f"the checkpoint was saved {rule.reason}, as by OnExceptionCheckpoint: pass another one")
    if not done:
        return
    advice = "resume from an epoch's end, or use a loader with `state_dict` and `load_state_dict`"
    without = _without_position(trainer)
    if len(loaders) > 1 or without:
        name = (
            "several loaders"
            if len(loaders) > 1
            else f"this {type(getattr(without[0], 'loader', without[0])).__name__}"
        )
        raise UserError(
            f"the run was saved within an epoch, and the order of {name} cannot be repeated, only that of one stock"
            f" DataLoader over a data set with a length, with a sampler of torch: {advice}"
        )


def refuse_torchmetrics(trainer: pl.Trainer, sums: list[dict[str, Any]]) -> None:
    """Refuse a resume within an epoch whose mean a torchmetrics object holds, if it is monitored; else warn.

    Args:
        sums: those of the epoch by rank, and None for the objects, which no checkpoint holds.
    """
    names = {key.partition(".")[2] for by_key in sums for key, value in by_key.items() if value is None}
    monitors = {getattr(callback, "monitor", None) for callback in callbacks_of(trainer)}
    monitors |= {config.monitor for config in trainer.lr_scheduler_configs}
    for name in sorted(names):
        problem = f"{name} of this epoch will be that of its rest, since no checkpoint holds torchmetrics of training"
        if monitors & {name, f"{name}_epoch"}:
            raise UserError(f"{problem}: resume from an epoch's end, or log a number")
        warn("warning: %s", problem)


def refuse_states(trainer: pl.Trainer, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state no checkpoint brings back; for the first update's end.

    Raises:
        UserError: it holds tensors of a class of their own, or leaves out what an optimizer that it wraps holds.
    """
    states: Any = trainer.strategy.optimizer_state(optimizer).get("state", {}).values()
    saved = {name for state in states for name in state}
    for value in (value for state in states for value in state.values() if isinstance(value, Tensor)):
        if type(value) not in (Tensor, Parameter):
            raise UserError(
                f"the state of {type(optimizer).__name__} is of {type(value).__name__}, and Lightning reads no such"
                " tensors from checkpoints: pass an optimizer with ordinary tensors"
            )
    for inner in optimizer_layers(optimizer)[1:]:
        held = {name for state in inner.state.values() for name in state}
        if left_out := held - saved:
            raise UserError(
                f"{type(optimizer).__name__}.state_dict() leaves out {min(left_out)} of the {type(inner).__name__} that"
                " it wraps, so that a resumed run goes on without: have it save the state of both"
            )


def _restore_dtypes(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Load again what torch casts to a parameter's dtype as an optimiser is loaded, such as NAdam's float32 product."""
    weights, saved = trainer.lightning_module.state_dict(), checkpoint.get("state_dict", {})
    if any(isinstance(v, Tensor) and v.dtype != getattr(saved.get(n, v), "dtype", None) for n, v in weights.items()):
        return  # Another precision is asked for.
    for optimizer, state in zip(trainer.optimizers, checkpoint.get("optimizer_states", ())):
        for group, saved_group in zip(optimizer.param_groups, state["param_groups"]):
            for parameter, number in zip(group["params"], saved_group["params"]):
                for name, value in state["state"].get(number, {}).items():
                    # To ask without `get` creates an entry.
                    holders = [each.state.get(parameter, {}) for each in optimizer_layers(optimizer)]
                    for loaded in holders:
                        if isinstance(value, Tensor) and name in loaded and value.dtype != loaded[name].dtype:
                            loaded[name] = value.to(loaded[name].device)


def replay_epoch(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Do what Lightning leaves out; for `on_train_start` of a resumed run.

    Args:
        checkpoint: the one that was loaded.

    Raises:
        UserError: the order of the epoch or the state of a loader cannot be repeated, the data are others, or a
            callback of Lightning unfreezes layers.
    """
    within_epoch, module = trainer.fit_loop.restarted_mid_epoch, trainer.lightning_module
    loads = [isinstance(c, WeightAveraging) or getattr(c, "loads_raw_weights", False) for c in callbacks_of(trainer)]
    if not any(loads) and (raw := loaded_raw_weights(module, checkpoint)) is not None:
        module.load_state_dict(raw, strict=module.strict_loading)
    _restore_dtypes(trainer, checkpoint)
    # Lightning does not load the states of loaders at an epoch's end, where other data are to be refused, too.
    with_state = [each for each in CombinedLoader(trainer.train_dataloader).flattened if hasattr(each, "state_dict")]
    for loader, state in zip(with_state, unused_loader_states(trainer)):
        if isinstance(loader, ResumableLoader):
            loader.check_data(state)
    for callback in callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            raise UserError(
                f"{type(callback).__name__} freezes its layers again where a run resumes, for good (Lightning #21901):"
                " use FreezeLayers"
            )
        if isinstance(callback, StochasticWeightAveraging) and within_epoch:
            callback.on_train_epoch_start(trainer, module)
    without = _without_position(trainer)
    for loader in without:
        if trainer.current_epoch > 0 and (found := _moves_on(loader)):
            raise UserError(f"the state of the DataLoader is in no checkpoint, since it has {found}")
    untyped: Any = trainer
    every, epoch = untyped.reload_dataloaders_every_n_epochs, trainer.current_epoch
    if every and epoch % every:
        raise UserError(
            f"with reload_dataloaders_every_n_epochs={every} the loaders of epoch {epoch + 1} are those that were made"
            f" for epoch {epoch - epoch % every + 1}: resume from that epoch or from the end of the one before"
        )
    if within_epoch:
        _check_position(trainer)
    elif without:
        install_update_loop(trainer).loaded.restarts_iterators = True


def end_finished_run(trainer: pl.Trainer) -> None:
    """Put the mean of `StochasticWeightAveraging` into the module of a run that was saved after its last update.

    Lightning calls no hook of training where nothing is left to train.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            callback.on_train_end(trainer, trainer.lightning_module)


def was_stopped_early(trainer: pl.Trainer) -> bool:
    """Whether `EarlyStopping` had asked for the end when the run was saved; Lightning would train another epoch."""
    epoch = trainer.current_epoch - (not trainer.fit_loop.restarted_mid_epoch)
    # A patience that was exhausted may be longer now.
    return any(
        stop.stopped_epoch >= epoch
        and (stop.wait_count >= max(1, stop.patience) or stop.stopping_reason not in _STOPS_OF_PATIENCE)
        for stop in callbacks_of(trainer)
        if isinstance(stop, EarlyStopping)
    )


def _found(path: Any, old: Any, folder: Path, levels: int) -> str:
    """The path in the folder as it is now; empty where that is no checkpoint in it, also after links are followed.

    Example:
        >>> _found("old/../thesis.tex", "old", Path("checkpoints"), levels=1)
        ''
    """
    try:
        name = Path(path).relative_to(old)
        real = (folder / name).resolve(strict=True)
    except (TypeError, ValueError, OSError, RuntimeError):  # No path in that folder, or no file is there.
        return ""
    is_in_folder = real.is_relative_to(folder.resolve()) and ".." not in name.parts and len(name.parts) <= levels
    return str(folder / name) if is_in_folder and real.is_file() and real.suffix == name.suffix == ".ckpt" else ""


def _score(value: Any) -> Tensor | None:
    """A score as a tensor of one number; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    if isinstance(value, Tensor) and (value.dim() or value.is_complex() or value.is_meta):
        return None
    score = torch.as_tensor(value)
    return None if score.isnan() else score


def files_in(folder: str | Path, state: Mapping[str, Any], mode: str, levels: int = 1) -> dict[str, Any]:
    """The state of a `ModelCheckpoint` with those of its checkpoints that lie in a folder, under their paths there.

    What Lightning derives from the scores, the best checkpoint and the worst of those that are kept, is derived again.

    Args:
        folder: where the callback saves now; a run may have been moved.
        state: its ``state_dict`` in a checkpoint.
        mode: "min" or "max", which of its scores is the best.
        levels: how deep its files lie in the folder at most; 1 is directly in it.
    """
    home, old = Path(folder), state.get("dirpath") or "."
    here = {name: _found(state.get(name), old, home, levels) for name in ("best_model_path", "last_model_path")}
    saved = state.get("best_k_models")
    scores: dict[str, Tensor] = {}
    for path, value in saved.items() if isinstance(saved, Mapping) else ():
        if (found := _found(path, old, home, levels)) and (score := _score(value)) is not None:
            scores[found] = score
    files: dict[str, Any] = {"dirpath": folder, **here, "best_k_models": scores, "best_model_score": None}
    if scores:
        best, worst = (min, max) if mode == "min" else (max, min)
        first, last = best(scores, key=lambda path: scores[path]), worst(scores, key=lambda path: scores[path])
        files |= {"best_model_path": first, "best_model_score": scores[first]}
        files |= {"kth_best_model_path": last, "kth_value": scores[last]}
    return files
