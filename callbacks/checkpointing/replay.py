"""Steps of a resume that Lightning leaves out, and checks for runs that cannot be resumed exactly.

Lightning resumes within an epoch with the first batches of a loader that saves no position (#19764), which is rejected
here. It starts the epoch after a resume in the order of epoch 0 (#18780). A `DataLoader` with a sampler of torch has a
position, since `UpdateLoop` distributes its samples by their numbers.

A checkpoint may come from somebody else. `ModelCheckpoint` deletes the worst of its best checkpoints by the path in its
state, which could be any file of the user.

Tested in `tests/callbacks/checkpointing/test_resume_table.py`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from callbacks.checkpointing.stopping_points import SAVE_POINTS
from callbacks.lib.first_update import unsaved_state
from callbacks.lib.lightning_internals import callbacks_of, torchmetrics_of_epoch, unused_loader_states
from callbacks.lib.loaded_updates import update_loaders
from callbacks.lib.optimizers import optimizer_layers
from callbacks.update_loop import install_update_loop
from datamodules.errors import UserError
from datamodules.lightning import (
    BaseFinetuning,
    EarlyStopping,
    EarlyStoppingReason,
    StochasticWeightAveraging,
    WeightAveraging,
    pl,
)
from datamodules.loading.updates import UpdateLoader
from datamodules.notes import warn

_END_OF_EPOCH = "resume from an epoch's end"

RAW_WEIGHTS = "current_model_state"
"""Checkpoint entry of the weights that are not averaged; Lightning's `WeightAveraging` uses the same name."""

UNSAVED = "unsaved_state"
"""Checkpoint entry of the `unsaved_state` of the module."""

ORDERS = "orders_of_loaders"
"""Checkpoint entry of what loaders without a position need to repeat their order in the next epoch."""

_STOPS_OF_PATIENCE = (EarlyStoppingReason.NOT_STOPPED, EarlyStoppingReason.PATIENCE_EXHAUSTED)


def loaded_raw_weights(pl_module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the weights that are not averaged, after the module's `on_load_checkpoint`; None if there are none."""
    if RAW_WEIGHTS not in checkpoint:
        return None
    raw_checkpoint = {**checkpoint, "state_dict": checkpoint[RAW_WEIGHTS]}
    # Lightning calls this hook for the averaged weights only.
    pl_module.on_load_checkpoint(raw_checkpoint)
    weights: dict[str, Any] = raw_checkpoint["state_dict"]
    return weights


def _without_position(trainer: pl.Trainer) -> list[UpdateLoader]:
    return [loader for loader in update_loaders(trainer.train_dataloader) if not loader.has_position]


def order_states(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the states of the orders of loaders without a position, for a checkpoint of an epoch's end."""
    return [loader.order_state() for loader in _without_position(trainer)]


def _reload_problem(trainer: pl.Trainer) -> str | None:
    """Return why the loaders of the present epoch cannot be made again; None if they can."""
    untyped: Any = trainer
    every = untyped.reload_dataloaders_every_n_epochs
    epoch = trainer.current_epoch
    if not every or not epoch % every:
        return None
    # Lightning would make the loaders of this epoch instead of the last multiple (#21492).
    return (
        f"with reload_dataloaders_every_n_epochs={every} the loaders of epoch {epoch + 1} are those that were made"
        f" for epoch {epoch - epoch % every + 1}"
    )


def _order_problem(trainer: pl.Trainer) -> str | None:
    """Return why the training loaders cannot go on within the present epoch; None if they can."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    if batches.is_last_batch:
        return None  # Only a validation or the epoch's end is left.
    unpositioned = _without_position(trainer)
    if len(update_loaders(trainer.train_dataloader)) > 1:
        name = "several loaders"
    elif unpositioned:
        name = f"this {type(unpositioned[0].source).__name__}"
    else:
        return None
    return (
        f"the order of {name} cannot be repeated, only that of one stock DataLoader over a data set with a length, with"
        " a sampler of torch, or of a loader with `state_dict` and `load_state_dict`"
    )


def _torchmetrics_problem(trainer: pl.Trainer, names: Iterable[str]) -> str | None:
    """Return which monitored mean of a torchmetrics object no checkpoint holds; None if none is monitored."""
    monitors = {getattr(callback, "monitor", None) for callback in callbacks_of(trainer)}
    monitors |= {config.monitor for config in trainer.lr_scheduler_configs}
    monitored = [name for name in sorted(names) if monitors & {name, f"{name}_epoch"}]
    return f"no checkpoint holds the torchmetrics object {monitored[0]}, which is monitored" if monitored else None


def resumes_within_epoch(trainer: pl.Trainer) -> str | None:
    """Return why a run that is saved now cannot resume; None if it can. A collective call: rank 0 decides.

    The one place that decides this: a save within an epoch asks it, and so does a resume. What cannot be resumed is not
    saved over what can.
    """
    problem = (
        _order_problem(trainer)
        or _reload_problem(trainer)
        or _torchmetrics_problem(trainer, torchmetrics_of_epoch(trainer))
    )
    # A rank that has computed nothing in the epoch's first update has logged nothing.
    answer: str | None = trainer.strategy.broadcast(problem)
    return answer


def _check_position(trainer: pl.Trainer) -> None:
    """Check that the loaders resume within the epoch at the position of the checkpoint.

    Raises:
        UserError: a loader saves no position, or the checkpoint was saved within a batch.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    done = batches.current.processed
    rule = SAVE_POINTS["update" if batches.current.ready == done else "within batch"]
    if not rule.saves:
        raise UserError(f"the checkpoint was saved {rule.reason}, as by OnExceptionCheckpoint: pass another one")
    problem = resumes_within_epoch(trainer) if done else None
    if problem:
        raise UserError(f"the run was saved within an epoch, and {problem}: {_END_OF_EPOCH}")


def reject_torchmetrics(trainer: pl.Trainer, sums: list[dict[str, Any]]) -> None:
    """Reject a resume within an epoch if a monitored mean is a torchmetrics object; warn of others.

    Args:
        sums: sums of the epoch by rank; None for torchmetrics objects, which no checkpoint holds.
    """
    names = {key.partition(".")[2] for rank_sums in sums for key, value in rank_sums.items() if value is None}
    problem = _torchmetrics_problem(trainer, names)
    if problem:
        raise UserError(f"the run was saved within an epoch, and {problem}: {_END_OF_EPOCH}, or log a number")
    for name in sorted(names):
        warn(
            "warning: %s of this epoch will be that of its rest, since no checkpoint holds torchmetrics of training",
            name,
        )


def reject_states(trainer: pl.Trainer, optimizer: Optimizer) -> None:
    """Reject an optimizer whose state checkpoints do not restore; for the first update's end, when it has a state.

    Raises:
        UserError: the state holds tensors of a subclass, or leaves out the state of an optimizer that it wraps.
    """
    states: Any = trainer.strategy.optimizer_state(optimizer).get("state", {}).values()
    saved_names = {name for state in states for name in state}
    for value in (value for state in states for value in state.values() if isinstance(value, Tensor)):
        if type(value) not in (Tensor, Parameter):
            raise UserError(
                f"the state of {type(optimizer).__name__} is of {type(value).__name__}, and Lightning reads no such"
                " tensors from checkpoints: pass an optimizer with ordinary tensors"
            )
    for inner in optimizer_layers(optimizer)[1:]:
        unsaved = {name for state in inner.state.values() for name in state} - saved_names
        if unsaved:
            raise UserError(
                f"{type(optimizer).__name__}.state_dict() leaves out {min(unsaved)} of the {type(inner).__name__} that"
                " it wraps, so that a resumed run goes on without: have it save the state of both"
            )


def _restore_dtypes(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Load optimizer state again in its saved dtype, where torch has cast it to the dtype of a parameter.

    An example is the float32 product of NAdam beside bfloat16 weights.
    """
    weights = trainer.lightning_module.state_dict()
    saved_weights = checkpoint.get("state_dict", {})
    for name, weight in weights.items():
        if isinstance(weight, Tensor) and weight.dtype != getattr(saved_weights.get(name, weight), "dtype", None):
            return  # The resumed run has another precision.
    for optimizer, state in zip(trainer.optimizers, checkpoint.get("optimizer_states", ())):
        for group, saved_group in zip(optimizer.param_groups, state.get("param_groups", ())):
            for parameter, number in zip(group["params"], saved_group["params"]):
                for name, value in state["state"].get(number, {}).items():
                    # By `get`: indexing a defaultdict would create an entry, which the next checkpoint would hold.
                    loaded_states = [layer.state.get(parameter, {}) for layer in optimizer_layers(optimizer)]
                    for loaded in loaded_states:
                        if isinstance(value, Tensor) and name in loaded and value.dtype != loaded[name].dtype:
                            loaded[name] = value.to(loaded[name].device)


def warn_of_unsaved_state(module: nn.Module, saved: Mapping[str, float]) -> None:
    """Note what had another value when the run was saved, since no checkpoint holds it.

    Args:
        saved: result of `unsaved_state` then.
    """
    current = unsaved_state(module)
    # NaN differs from itself, but is not a change.
    lost = [name for name, value in saved.items() if repr(current.get(name)) != repr(value)]
    if lost:
        first = f"{lost[0]} (the first of {len(lost)})" if len(lost) > 1 else lost[0]
        warn(
            "note: %s of %s had another value when the run was saved, and is in no checkpoint: if the training depends"
            " on it, the run goes on otherwise; make it a persistent buffer, or save it in the module's"
            " on_save_checkpoint",
            first,
            type(module).__name__,
        )


def replay_epoch(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Complete a resume by the steps that Lightning leaves out; for `on_train_start` of a resumed run.

    Args:
        checkpoint: the loaded checkpoint.

    Raises:
        UserError: the order of the epoch or the state of a loader cannot be repeated, the data differ, or a callback
            of Lightning unfreezes layers.
    """
    within_epoch = trainer.fit_loop.restarted_mid_epoch
    module = trainer.lightning_module
    loads = [isinstance(c, WeightAveraging) or getattr(c, "loads_raw_weights", False) for c in callbacks_of(trainer)]
    if not any(loads):
        # The run no longer averages: it continues from the weights that were trained, not from their average.
        raw_weights = loaded_raw_weights(module, checkpoint)
        if raw_weights is not None:
            module.load_state_dict(raw_weights, strict=module.strict_loading)
    _restore_dtypes(trainer, checkpoint)
    warn_of_unsaved_state(module, checkpoint.get(UNSAVED, {}))
    # At an epoch's end Lightning does not load the states of loaders, so their data are checked here.
    with_position = [loader for loader in update_loaders(trainer.train_dataloader) if loader.has_position]
    for loader, state in zip(with_position, unused_loader_states(trainer)):
        loader.check_data(state)
    for callback in callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            raise UserError(
                f"{type(callback).__name__} freezes its layers again where a run resumes, for good (Lightning #21901):"
                " use FreezeLayers"
            )
        if isinstance(callback, StochasticWeightAveraging) and within_epoch:
            callback.on_train_epoch_start(trainer, module)  # Lightning calls no such hook when it resumes mid-epoch.
    unpositioned = _without_position(trainer)
    if trainer.current_epoch > 0:
        states = checkpoint.get(ORDERS) or [{} for _ in unpositioned]
        for loader, order in zip(unpositioned, states):
            loader.load_order_state(order)
    untyped: Any = trainer
    if untyped.reload_dataloaders_every_n_epochs and trainer.current_epoch > 0:
        warn(
            "note: train_dataloader makes a loader anew for epoch %d: the resumed run has the samples of the other one"
            " only if they follow from the epoch, and not from random numbers that were drawn before",
            trainer.current_epoch + 1,
        )
    reload_problem = _reload_problem(trainer)
    if reload_problem:
        raise UserError(f"{reload_problem}: resume from that epoch or from the end of the one before")
    if within_epoch:
        _check_position(trainer)
    elif unpositioned:
        install_update_loop(trainer).loaded.restarts_iterators = True


def end_finished_run(trainer: pl.Trainer) -> None:
    """Put the mean of `StochasticWeightAveraging` into the module of a run that was saved after its last update.

    Lightning calls no training hook if nothing is left to train.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            callback.on_train_end(trainer, trainer.lightning_module)


def was_stopped_early(trainer: pl.Trainer) -> bool:
    """Whether `EarlyStopping` had requested a stop when the run was saved; Lightning would train another epoch."""
    epoch = trainer.current_epoch - (not trainer.fit_loop.restarted_mid_epoch)
    # A patience that was exhausted may be longer now.
    return any(
        stop.stopped_epoch >= epoch
        and (stop.wait_count >= max(1, stop.patience) or stop.stopping_reason not in _STOPS_OF_PATIENCE)
        for stop in callbacks_of(trainer)
        if isinstance(stop, EarlyStopping)
    )


def _path_in_folder(path: Any, old_folder: Any, folder: Path, levels: int) -> str:
    """Return the present path of a checkpoint in a folder that may have moved; empty if the folder does not hold it.

    Example:
        >>> _path_in_folder("old/../thesis.tex", "old", Path("checkpoints"), levels=1)
        ''
    """
    try:
        name = Path(path).relative_to(old_folder)
        real_path = (folder / name).resolve(strict=True)
    except (TypeError, ValueError, OSError, RuntimeError):  # Not a path in the folder, or the file is missing.
        return ""
    # Links are followed: one in the folder could lead to any file, which ModelCheckpoint would then delete.
    is_in_folder = real_path.is_relative_to(folder.resolve()) and ".." not in name.parts and len(name.parts) <= levels
    is_checkpoint = real_path.is_file() and real_path.suffix == name.suffix == ".ckpt"
    return str(folder / name) if is_in_folder and is_checkpoint else ""


def _score(value: Any) -> Tensor | None:
    """Return a score as a scalar tensor; None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    if isinstance(value, Tensor) and (value.dim() or value.is_complex() or value.is_meta):
        return None
    score = torch.as_tensor(value)
    return None if score.isnan() else score


def files_in(folder: str | Path, state: Mapping[str, Any], mode: str, levels: int = 1) -> dict[str, Any]:
    """Return the state of a `ModelCheckpoint` with only its checkpoints in a folder, under their present paths.

    The best checkpoint and the worst kept one, which Lightning derives from the scores, are derived again.

    Args:
        folder: the folder where the callback saves now; a run may have been moved.
        state: the callback's ``state_dict`` in a checkpoint.
        mode: "min" or "max", which score is the best.
        levels: maximum depth of the files in the folder; 1 is directly in it.
    """
    old_folder = state.get("dirpath") or "."
    saved_scores = state.get("best_k_models")
    if not isinstance(saved_scores, Mapping):
        saved_scores = {}
    scores: dict[str, Tensor] = {}
    for saved_path, value in saved_scores.items():
        path = _path_in_folder(saved_path, old_folder, Path(folder), levels)
        score = _score(value)
        if path and score is not None:
            scores[path] = score
    files: dict[str, Any] = {"dirpath": folder, "best_k_models": scores, "best_model_score": None}
    for name in ("best_model_path", "last_model_path"):
        files[name] = _path_in_folder(state.get(name), old_folder, Path(folder), levels)
    if scores:
        select_best = min if mode == "min" else max
        select_worst = max if mode == "min" else min
        best_path = select_best(scores, key=lambda path: scores[path])
        worst_path = select_worst(scores, key=lambda path: scores[path])
        files |= {"best_model_path": best_path, "best_model_score": scores[best_path]}
        files |= {"kth_best_model_path": worst_path, "kth_value": scores[worst_path]}
    return files
