"""What Lightning leaves out where a run resumes, done before its first batch, or refused.

Lightning goes on in an epoch with the first batches of a loader that saves no position, a `DataLoader` for instance,
and leaves out the last ones (#19764); the epoch after a resume begins in the order of epoch 0 (#18780). Where the order
of an epoch can be repeated, the loader starts again, and the batches that were trained are read and passed over.

A checkpoint of a run that averages its weights has the averaged ones for its ``state_dict``: without the callback that
averaged them Lightning would train on from them.

`StochasticWeightAveraging` sets its schedule at an epoch's start only, so that the rest of a resumed epoch had none.
"""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from callbacks.lib.lightning_internals import restart_training_loaders, unused_loader_states
from callbacks.lib.trainer_attributes import callbacks_of
from datamodules.errors import UserError
from datamodules.loading.resumable import ResumableLoader

__all__ = ["RAW_WEIGHTS", "loaded_raw_weights", "raw_weights", "replay_epoch", "resume_order"]

RAW_WEIGHTS = "current_model_state"
"""The entry of a checkpoint with the weights that are not averaged, as Lightning's `WeightAveraging` calls it."""


def loaded_raw_weights(pl_module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The weights that are not averaged as the module's `on_load_checkpoint` makes them; None where there are none."""
    if RAW_WEIGHTS not in checkpoint:
        return None
    second = {**checkpoint, "state_dict": checkpoint[RAW_WEIGHTS]}
    pl_module.on_load_checkpoint(second)
    weights: dict[str, Any] = second["state_dict"]
    return weights


def raw_weights(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """The weights to train on from, where a checkpoint has them besides averages and no callback loads them."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, WeightAveraging) or getattr(callback, "loads_raw_weights", False):
            return None
    return loaded_raw_weights(trainer.lightning_module, checkpoint)


def _without_position(trainer: pl.Trainer) -> list[Any]:
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return [loader for loader in loaders if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"))]


def _seeds(trainer: pl.Trainer) -> Any:
    """The callback that seeds the generators for each epoch; None where there is none."""
    return next((callback for callback in callbacks_of(trainer) if hasattr(callback, "seed_epoch")), None)


def _sampler(loader: Any) -> Any:
    """What decides on the order of a `DataLoader`; None of loaders and iterable data sets of a user."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches: Any = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", batches)


def _repeats_its_order(loader: Any) -> bool:
    """Whether an epoch's order depends on no generator's state; assumed of loaders and iterable data sets of a user."""
    sampler = _sampler(loader)
    return sampler is None or isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch")


def _pass_over_trained_batches(trainer: pl.Trainer, saved_world_size: int) -> None:
    """Put loaders without position to where the run was saved."""
    loaders = _without_position(trainer)
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if not loaders or not done:
        return
    name, seeds = type(loaders[0]).__name__, _seeds(trainer)
    advice = "resume from an epoch's end, or use a loader with `state_dict` and `load_state_dict`"
    if len(loaders) < len(CombinedLoader(trainer.train_dataloader).flattened):
        raise UserError(f"of several training loaders a {name} saves no position within an epoch: {advice}")
    if saved_world_size != trainer.world_size:
        raise UserError(
            f"the run was saved within an epoch, with devices={saved_world_size}, and a {name} saves no position that"
            f" another number of devices can use: pass devices={saved_world_size}, {advice}"
        )
    if seeds is None and not all(_repeats_its_order(loader) for loader in loaders):
        raise UserError(
            f"the run was saved within an epoch, and the {name} shuffles with torch's global generator, so that its"
            f" order cannot be repeated: train with SeedControl, {advice}"
        )
    rank_zero_info(f"epoch {trainer.current_epoch}: passing over the {done:,} batches that were trained")
    restart_training_loaders(trainer, done, seeds and seeds.seed_epoch)
    if seeds is not None:
        seeds.seed_between_steps(trainer)


def _check_data(trainer: pl.Trainer) -> None:
    """Refuse other training data at an epoch's end, too, where Lightning does not load the states of loaders."""
    with_state = [each for each in CombinedLoader(trainer.train_dataloader).flattened if hasattr(each, "state_dict")]
    for loader, state in zip(with_state, unused_loader_states(trainer)):
        if isinstance(loader, ResumableLoader):
            loader.check_data(state)


def replay_epoch(trainer: pl.Trainer, saved_world_size: int) -> None:
    """Do what Lightning leaves out; for `on_train_start` of a resumed run.

    Args:
        saved_world_size: the number of processes that saved it.

    Raises:
        UserError: the order of the epoch cannot be repeated, the data are others, or a callback of Lightning unfreezes
            layers.
    """
    within_epoch = trainer.fit_loop.restarted_mid_epoch
    _check_data(trainer)
    for callback in callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            raise UserError(
                f"{type(callback).__name__} freezes its layers again where a run resumes, for good (Lightning #21901):"
                " use FreezeLayers"
            )
        if isinstance(callback, StochasticWeightAveraging) and within_epoch:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    loaders = _without_position(trainer)
    if trainer.current_epoch > 0 and any(getattr(_sampler(loader), "generator", None) for loader in loaders):
        raise UserError(
            f"the {type(loaders[0]).__name__} shuffles with a generator of its own, whose state is in no checkpoint, so"
            " that its order cannot be repeated: leave the generator out and train with SeedControl, or use a loader"
            " with `state_dict` and `load_state_dict`"
        )
    if within_epoch:
        _pass_over_trained_batches(trainer, saved_world_size)


def resume_order(trainer: pl.Trainer) -> None:
    """Give loaders without position the order of the epoch that begins; for `on_train_epoch_start` after a resume."""
    if trainer.current_epoch > 0 and _without_position(trainer):
        restart_training_loaders(trainer, 0)
