"""Define the settings of a run, as opposed to those of its network and data.

Special rules for a setting are marks of its type: `Free`, `OneCall`, `Rare`, `OfMachine` and `NullEnds`. The command
line, the help, files, checkpoints and resumes follow these marks.
"""

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeVar

from jsonargparse import ArgumentParser

from callbacks.lib.durations import read_time
from datamodules.contract import Free, OneCall, Rare
from datamodules.errors import UserError, spelled
from datamodules.lightning import MisconfigurationException, Timer, pl
from datamodules.ranges import COUNT, NOT_NEGATIVE, Range, check_ranges
from recipes.runner.flag_types import type_name
from recipes.runner.hints import nearest, other_places
from recipes.runner.loggers import logger_names
from recipes.runner.machine import Precision

_T = TypeVar("_T")

OfMachine = Annotated[_T, "of the machine"]
"""A parameter that chooses where a run trains; a resume does not take it from the checkpoint."""

NullEnds = Annotated[_T, "null ends it"]
"""A parameter that a null on the command line of a resume switches off; another null means the run's value."""


def _check_further(trainer: Mapping[str, Any], settings_with_flag: set[str]) -> None:
    """Refuse a parameter that the Trainer does not have, that is a setting here, or that has another type.

    Args:
        settings_with_flag: the parameters that are settings of their own.
    """
    elsewhere = other_places()
    trainer_parameters = inspect.signature(pl.Trainer).parameters.keys() - settings_with_flag - elsewhere.keys()
    for name in map(str, trainer):
        if name in elsewhere:
            raise UserError(f"trainer.{name}: {elsewhere[name]}")
        if name in settings_with_flag:
            raise UserError(f"trainer.{name}: {spelled(name)} is a setting of its own; pass it without trainer")
        if name not in trainer_parameters:
            raise UserError(f"trainer.{name}: the Trainer has no such parameter{nearest(name, trainer_parameters)}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(pl.Trainer, skip=settings_with_flag | elsewhere.keys())
    for name, value in trainer.items():
        try:
            parser.parse_object({name: value}, defaults=False)
        except Exception as error:
            kind = type_name(inspect.signature(pl.Trainer).parameters[name].annotation)
            raise UserError(f"trainer.{name} is {value!r}: expected {kind}") from error


def _check_time(name: str, value: Any) -> None:
    """Reject a setting that is neither a number nor a time."""
    if isinstance(value, str) and read_time(value):
        return
    if isinstance(value, (str, dict)):
        try:
            Timer(value)
        except (MisconfigurationException, TypeError) as error:
            problem = 'expected a time, as in "90 minutes", 1h or 00:01:30:00 (days, hours, minutes, seconds)'
            raise UserError(problem, setting=name, value=value) from error


@dataclass(frozen=True)
class TrainerSettings:
    """The parameters of Lightning's Trainer that have a flag.

    Args:
        accelerator: cpu, gpu, mps or another; auto is the GPU, where there is one.
        strategy: ddp, or auto, which is one device or ddp.
        devices: processes on this node: a number, auto for all GPUs, or indices such as 0,1.
        max_epochs: epochs of the run; -1 is no bound.
        max_steps: updates of the run; -1 is no bound. Alone it is the only bound.
        max_time: time of the run, as in "90 minutes", 12h or 00:12:00:00 (days, hours, minutes, seconds).
        fast_dev_run: try a batch of each part, or so many, and save nothing.
        gradient_clip_val: clip the gradients of an update to this norm.
        gradient_clip_algorithm: clip by norm or by value.
        limit_train_batches: train on a number of updates in each epoch, or on a share of it, as in 0.1.
        limit_val_batches: validate on a number of batches, counted over all devices; on one device also on a share.
        limit_test_batches: test on a number of batches, counted over all devices; on one device also on a share.
        limit_predict_batches: predict a number of batches, or a share.
        overfit_batches: train and validate on the same number of updates, or the same share of an epoch, not shuffled.
        val_check_interval: validate after a number of updates, a share of an epoch or a time, as in "30 minutes".
        check_val_every_n_epoch: epochs between two validations.
        num_sanity_val_steps: batches to validate before training.
        log_every_n_steps: updates between two entries of the log.
        enable_checkpointing: save checkpoints.
        enable_progress_bar: show the progress.
        profiler: simple, advanced or pytorch.
        trainer: further parameters of the Trainer by their names, as in --trainer.benchmark true.
    """

    accelerator: OfMachine[Free[str]] = "auto"
    strategy: OfMachine[Free[str]] = "auto"
    devices: OfMachine[Free[list[int] | str | int]] = "auto"
    max_epochs: Free[int | None] = None
    max_steps: Free[int] = -1
    max_time: Rare[Free[str | dict[str, int] | None]] = None
    fast_dev_run: int | bool = False
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: Rare[Literal["norm", "value"] | None] = None
    limit_train_batches: int | float | None = None
    limit_val_batches: Rare[Free[int | float | None]] = None
    limit_test_batches: Rare[Free[int | float | None]] = None
    limit_predict_batches: Rare[Free[int | float | None]] = None
    overfit_batches: Rare[int | float] = 0.0
    val_check_interval: Rare[Free[int | float | str | dict[str, int] | None]] = None
    check_val_every_n_epoch: Rare[Free[int | None]] = 1
    num_sanity_val_steps: Rare[Free[int | None]] = None
    log_every_n_steps: Free[int | None] = None
    enable_checkpointing: Rare[Free[bool | None]] = None
    enable_progress_bar: Rare[Free[bool | None]] = None
    profiler: Rare[OneCall[str | None]] = None
    trainer: Rare[Free[dict[str, Any] | None]] = None

    def __post_init__(self) -> None:
        check_ranges(
            check_val_every_n_epoch=(self.check_val_every_n_epoch, COUNT),
            gradient_clip_val=(self.gradient_clip_val, NOT_NEGATIVE),
        )
        for name in ("max_time", "val_check_interval"):
            _check_time(name, getattr(self, name))
        if self.val_check_interval == 0:
            no_validation = spelled("limit_val_batches", 0)
            raise UserError(
                f"{spelled('val_check_interval', 0)} is no interval; {no_validation} leaves the validation out"
            )
        if self.trainer:
            _check_further(self.trainer, set(vars(self)))

    def options(self) -> dict[str, Any]:
        """Return the arguments of the Trainer."""
        options = asdict(self)
        for name in ("max_time", "val_check_interval"):
            if isinstance(options[name], str):
                options[name] = read_time(options[name]) or options[name]
        return options | (options.pop("trainer") or {})


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that belong neither to the recipe nor to the data, nor to the Trainer.

    Args:
        name: the run's folder in RUN_DIR/RECIPE/, with a number if it exists; by default the time.
        run_dir: folder of all runs.
        resume: checkpoint to resume from, in its run's folder and with its settings; auto finds the newest valid
            checkpoint of the run, or starts fresh; the default is auto in jobs that are restarted, else none.
        save_every: how often last.ckpt is saved, as in "500 steps", "2 epochs" or "10 minutes"; a
            number is one of steps.
        save_top_k: how many of the best checkpoints are kept; -1 keeps all.
        ckpt: checkpoint to validate, test, predict with or export; its settings are the defaults.
        output: JSON or CSV file for scores and predictions, or the file that export writes.
        format: format of the file that export writes.
        seed: seed of all random numbers.
        deterministic: stop at operations without a deterministic implementation.
        threads: of PyTorch in each process; on a processor the bits of a run depend on them, so a resume keeps them
            unless it is given others. By default OMP_NUM_THREADS, else the cores shared by the processes of a node.
        precision: floating-point precision; auto is bf16-mixed where the hardware has fast bf16, else 32-true.
        global_batch_size: samples per update on all devices; the number of micro-batches follows from it.
        accumulate: micro-batches per update on each device.
        warmup: duration of the learning rate warm-up, as in "500 steps", "2 epochs" or "5%".
        lr_scale: how the learning rate follows the global batch; auto is linear for SGD, sqrt for adaptive ones.
        ema: average the weights exponentially with this decay, as in 0.999; the average is validated, saved and tested.
        sync_bn: synchronise BatchNorm over all devices; the bits of the run then depend on their number.
        patience: end the run after so many validations without a better score of those that choose the best checkpoint.
        progress_interval: seconds between two lines of progress, where the output is no terminal.
        logger: any of tensorboard,csv,wandb,mlflow, or none.
    """

    name: OneCall[str | None] = None
    run_dir: OneCall[str] = "runs"
    resume: OneCall[str | None] = None
    save_every: Free[int | str] = "1 epochs"
    save_top_k: Rare[Free[int]] = 1
    ckpt: OneCall[str | None] = None
    output: OneCall[str | None] = None
    format: OneCall[Literal["safetensors", "state-dict", "onnx"] | None] = None
    seed: int = 1
    deterministic: Rare[Free[bool]] = False
    threads: int | None = None
    precision: Free[Precision] = "auto"
    global_batch_size: int | None = None
    accumulate: int = 1
    warmup: int | str = 0
    lr_scale: Rare[Literal["auto", "linear", "sqrt", "none"]] = "auto"
    ema: NullEnds[float | None] = None
    sync_bn: bool = False
    patience: Free[int | None] = None
    progress_interval: Rare[Free[float]] = 60.0
    logger: Free[str] = "tensorboard,csv"

    def __post_init__(self) -> None:
        check_ranges(
            seed=(self.seed, Range(0, 2**63 - 1, whole=True)),
            save_top_k=(self.save_top_k, Range(-1, 2**31 - 1, whole=True)),
            threads=(self.threads, Range(1, 4096, whole=True)),
            global_batch_size=(self.global_batch_size, COUNT),
            patience=(self.patience, COUNT),
            progress_interval=(self.progress_interval, NOT_NEGATIVE),
        )
        logger_names(self.logger)
