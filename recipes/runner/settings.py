"""Settings of a run without the parameters of its network and data: marks, merging, limits, strategies.

Special rules for a setting are marks of its type: `Changeable`, `Transient`, `Advanced`, `MachineOnly` and
`NullDisables`. The command line, the help, files, checkpoints and resumes follow these marks.
"""

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from callbacks.lib.batch_norm import broadcast_tensors, exempt_from_broadcast, running_buffers
from callbacks.lib.updates import read_time
from datamodules.contract import Advanced, Changeable, Transient
from datamodules.errors import UserError, spelled
from datamodules.lightning import DDPStrategy, MisconfigurationException, Timer, pl
from datamodules.ranges import COUNT, COUNT_OR_NO_LIMIT, NATURAL, NOT_NEGATIVE, Range, check_ranges
from recipes.runner.command import type_name
from recipes.runner.hints import TRAINER_FLAG, managed_parameters, nearest
from recipes.runner.loggers import logger_names
from recipes.runner.machine import Precision

_EVALUATION_LIMITS = ("limit_val_batches", "limit_test_batches")
_TIMES = ("max_time", "val_check_interval")
_PARTS = (
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("overfit_batches", "val_check_interval"),
)
"""Settings that are a number or a share of batches."""
_STRATEGY = re.compile(r"auto|ddp(?:_find_unused_parameters_(true|false))?")
_T = TypeVar("_T")
MachineOnly = Annotated[_T, "machine only"]
"""Mark of a parameter that chooses the machine or devices of a run; a resume does not restore its value."""
NullDisables = Annotated[_T, "null disables"]
"""Mark of a parameter that ``--NAME null`` disables in a resume; null from a file keeps the saved value."""


@dataclass(frozen=True)
class SettingMarks:
    """Sets of settings with special rules, from the marks of their types.

    Args:
        changeable: settings that do not define the experiment: they change at most the length of the training.
        transient: settings of one call, which are not saved with a run.
        machine_only: settings that choose the machine or devices, and are not restored from a checkpoint.
        null_disables: settings that a typed null disables in a resume.
    """

    changeable: frozenset[str]
    transient: frozenset[str]
    machine_only: frozenset[str]
    null_disables: frozenset[str]


def is_auto(value: Any) -> bool:
    """Return whether a value is None, "auto" or, for a seed, "random", so that the run resolves it."""
    return value is None or value in ("auto", "random")


def merge_layers(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `below`, replaced by `above`; in ``trainer``, parameters are replaced one by one."""
    settings = {**below, **above}
    extra = below.get(TRAINER_FLAG)
    if isinstance(extra, Mapping) and isinstance(above.get(TRAINER_FLAG), Mapping):
        settings[TRAINER_FLAG] = {**extra, **above[TRAINER_FLAG]}
    return settings


def drop_epoch_limit(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, without a limit of epochs if the user limits only the steps."""
    steps = given.get("max_steps", defaults["max_steps"])
    ends_by_steps = steps not in (-1, None) and given.get("max_epochs") is None
    return {**defaults, "max_epochs": -1} if ends_by_steps else dict(defaults)


def merge(
    marks: SettingMarks,
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    saved: Mapping[str, Any] | None = None,
    auto_settings: Collection[str] | None = None,
    keeps: Collection[str] = (),
    typed: Collection[str] = (),
) -> dict[str, Any]:
    """Return all settings of a command; each layer replaces the one before it.

    A given null or "auto" keeps the value that the saved run has resolved.

    Args:
        defaults: the defaults of all settings; saved settings without a default are left out.
        given: the settings in files and on the command line.
        saved: the settings of a checkpoint.
        auto_settings: the saved settings that the run has resolved; by default any setting.
        keeps: settings of the machine or of one call that are nevertheless restored.
        typed: the typed settings, in which a null can disable a setting of the run.
    """
    excluded = (marks.transient | marks.machine_only) - set(keeps)
    saved_settings = {}
    for name, value in (saved or {}).items():
        if name in defaults and name not in excluded:
            saved_settings[name] = value
    # Changeable settings are resolved again if they are null or "auto" in a resume. A null in a file does not
    # disable a setting of the run: --print-config writes a null for each setting without a value.
    resolved_by_run = saved_settings.keys() - marks.changeable - (marks.null_disables & set(typed))
    if auto_settings is not None:
        resolved_by_run &= set(auto_settings)
    replacing = {name: value for name, value in given.items() if not (is_auto(value) and name in resolved_by_run)}
    return merge_layers({**defaults, **saved_settings}, replacing)


def resolve_auto(settings: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose None and "auto" are replaced by resolved values."""
    filled = dict(settings)
    for name, value in found.items():
        if value is not None and name in settings and is_auto(settings[name]):
            filled[name] = value
    return filled


def as_plain(value: Any) -> Any:
    """Convert a value to the types of YAML, JSON and checkpoints: numbers, text, lists and dicts.

    Raises:
        TypeError: the value cannot be converted.

    Example:
        >>> as_plain({"file": Path("a.csv"), "sizes": (1, 2)})
        {'file': 'a.csv', 'sizes': [1, 2]}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, timedelta):
        minutes, seconds = divmod(int(value.total_seconds()), 60)
        return f"{minutes // 1440:02}:{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}"
    if isinstance(value, Mapping):
        return {name: as_plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)  # The order of a set differs between processes, and ranks compare their settings.
    if isinstance(value, (list, tuple, range)):
        return [as_plain(item) for item in value]
    raise TypeError(f"expected numbers, text, lists and dicts, found a {type(value).__name__}")


def same_setting(name: str, old: Any, new: Any) -> bool:
    """Return whether two values of a setting are equivalent.

    For settings that end in ``_file``, the file may be in another folder.
    """
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(same_setting(name, *pair) for pair in zip(old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {str(k): v for k, v in old.items()} == {str(k): v for k, v in new.items()}
    if isinstance(old, str) and isinstance(new, str) and old != new:
        a = Path(old).expanduser()
        b = Path(new).expanduser()
        return a.name == b.name if name.endswith("_file") else a.resolve() == b.resolve()
    return bool(old == new)


def describe_differences(
    saved: Mapping[str, Any],
    settings: Mapping[str, Any],
    changeable: Collection[str],
    auto_settings: Collection[str] | None = None,
) -> list[str]:
    """Return a line for each setting that contradicts the saved experiment.

    The saved run has resolved settings that are left open (None, "auto").

    Args:
        changeable: the settings that may differ.
        auto_settings: the settings that the saved run has resolved; None: any setting.
    """
    lines = []
    for name, new in settings.items():
        resolved = is_auto(new) and (auto_settings is None or name in auto_settings)
        if name in changeable or name not in saved or resolved or same_setting(name, saved[name], new):
            continue
        lines.append(f"{spelled(name)} is {new}, and {saved[name]} in the checkpoint")
    return lines


def micro_batches_of_update(accumulate: int, items: int | None, batch_size: Any, world_size: int) -> int | None:
    """Return the number of micro-batches of an update on all devices; None if the settings do not determine it.

    Args:
        accumulate: micro-batches of each device; used if `items` is None.
        items: samples of an update on all devices, or batches if tokens limit a batch.
        batch_size: the size of a micro-batch, in the unit of `items`.
    """
    if items is None:
        return accumulate * world_size
    return -(-items // batch_size) if isinstance(batch_size, int) else None


def _counts(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Return the limits that are numbers of batches, not shares, times, 0 or None."""
    values = {name: options.get(name) for name in names}
    return {name: n for name, n in values.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}


def limits_per_device(options: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the Trainer's limits of an evaluation on one device, from numbers of batches of all devices.

    Args:
        options: arguments of the Trainer.

    Raises:
        UserError: a device would get no batch, or the limit is a share for each device.

    Example:
        >>> limits_per_device({"limit_train_batches": 40, "limit_val_batches": 5}, rank=1, world_size=2)
        {'limit_val_batches': 2}
    """
    limits = {}
    for name, count in _counts(options, _EVALUATION_LIMITS).items():
        if count < world_size:
            raise UserError(
                f"{spelled(name, count)} leaves {world_size - count} of {world_size} devices without a batch; pass"
                f" {spelled(name, world_size)} or more"
            )
        # This rank evaluates the batches rank, rank + world_size, rank + 2 * world_size and so on.
        limits[name] = -((rank - count) // world_size)
    for name in _EVALUATION_LIMITS:
        share = options.get(name)
        if world_size > 1 and isinstance(share, float) and 0 < share < 1:
            raise UserError(
                f"{spelled(name, share)} is a share of each device's batches, not of one device's; pass a"
                f" number of batches of all devices, such as {spelled(name, world_size)}"
            )
    return limits


class LeanDDPStrategy(DDPStrategy):
    """DDP with the same results and less communication.

    Gradients are views of the reduced buckets, which saves a copy, in memory and time. The running statistics of
    BatchNorm are broadcast from rank 0 before each validation and at the end of training, not before each forward pass:
    training does not read them, so evaluated and saved values are the same. Other buffers are broadcast as in stock
    DDP.

    Args:
        settings: arguments of `DDPStrategy` and `torch.nn.parallel.DistributedDataParallel`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"gradient_as_bucket_view": True, **settings})

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        exempt_from_broadcast(model)

    @override
    def on_validation_start(self) -> None:
        self._broadcast_statistics()

    @override
    def on_train_end(self) -> None:
        self._broadcast_statistics()

    @torch.no_grad()
    def _broadcast_statistics(self) -> None:
        assert self.model is not None
        if dist.is_initialized():
            broadcast_tensors(running_buffers(self.model))


def check_strategy(name: Any) -> None:
    """Reject a strategy other than one device and DDP.

    Raises:
        UserError: runs cannot train with the strategy.
    """
    if not _STRATEGY.fullmatch(str(name)):
        raise UserError(
            "runs train on one device or with DDP",
            setting="strategy",
            value=name,
            to_type=f"pass {spelled('strategy', 'ddp')}, or leave it out",
        )


def build_strategy(name: str, world_size: int) -> Any:
    """Return the strategy for ``--strategy``.

    Args:
        world_size: processes of the run.
    """
    match = _STRATEGY.fullmatch(name)
    if match is None or world_size == 1:
        return name
    if match[1] is None:
        return LeanDDPStrategy()
    return LeanDDPStrategy(find_unused_parameters=match[1] == "true")


def _check_trainer_parameters(trainer: Mapping[str, Any], settings_with_flag: set[str]) -> None:
    """Reject a parameter that the Trainer does not have, that has a flag here, or that has a wrong type.

    Args:
        settings_with_flag: the names of the parameters with a flag.
    """
    elsewhere = managed_parameters()
    trainer_parameters = inspect.signature(pl.Trainer).parameters.keys() - settings_with_flag - elsewhere.keys()
    for name in map(str, trainer):
        if name in elsewhere:
            raise UserError(f"trainer.{name}: {elsewhere[name]}")
        if name in settings_with_flag:
            raise UserError(f"trainer.{name}: {spelled(name)} has its own flag; pass it without trainer")
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


def _check_part(name: str, value: Any) -> None:
    """Check a number or a share of batches.

    Raises:
        UserError: the value is neither.
    """
    if not isinstance(value, (int, float)):
        return
    if value < 0 or (value > 1 and not float(value).is_integer()):
        raise UserError("expected a whole number, or a share from 0 to 1", setting=name, value=value)


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
        accelerator: cpu, gpu, mps or another accelerator; auto: the GPU, if there is one.
        strategy: ddp; or auto for one device or ddp.
        devices: processes on this node: a number, auto for all GPUs, or indices such as 0,1.
        max_epochs: epochs of the run; -1: no limit.
        max_steps: updates of the run; -1: no limit. Without max_epochs, the number of epochs is not limited.
        max_time: time of the run, as in "90 minutes", 12h or 00:12:00:00 (days, hours, minutes, seconds).
        fast_dev_run: try one batch of each part, or this number of batches, and save nothing.
        gradient_clip_val: maximum norm of an update's gradients, to which they are clipped.
        gradient_clip_algorithm: clipping by norm or by value.
        limit_train_batches: number of updates in each epoch, or a share of the epoch, as in 0.1.
        limit_val_batches: number of batches in a validation, counted over all devices; on one device also a share.
        limit_test_batches: number of batches in a test, counted over all devices; on one device also a share.
        limit_predict_batches: number of batches to predict, or a share.
        overfit_batches: number of updates, or share of an epoch, for training and validation, not shuffled.
        val_check_interval: interval of validations in updates, or a share of an epoch, or a time, as in "30 minutes".
        check_val_every_n_epoch: epochs between two validations.
        num_sanity_val_steps: batches to validate before training.
        log_every_n_steps: updates between two entries of the log.
        enable_checkpointing: save checkpoints.
        enable_progress_bar: show the progress.
        profiler: simple, advanced or pytorch.
        trainer: other parameters of the Trainer by name, as in --trainer.benchmark true.
    """

    accelerator: MachineOnly[Changeable[str]] = "auto"
    strategy: MachineOnly[Changeable[str]] = "auto"
    devices: MachineOnly[Changeable[list[int] | str | int]] = "auto"
    max_epochs: Changeable[int | None] = None
    max_steps: Changeable[int] = -1
    max_time: Advanced[Changeable[str | dict[str, int] | None]] = None
    fast_dev_run: int | bool = False
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: Advanced[Literal["norm", "value"] | None] = None
    limit_train_batches: int | float | None = None
    limit_val_batches: Advanced[Changeable[int | float | None]] = None
    limit_test_batches: Advanced[Changeable[int | float | None]] = None
    limit_predict_batches: Advanced[Changeable[int | float | None]] = None
    overfit_batches: Advanced[int | float] = 0.0
    val_check_interval: Advanced[Changeable[int | float | str | dict[str, int] | None]] = None
    check_val_every_n_epoch: Advanced[Changeable[int | None]] = 1
    num_sanity_val_steps: Advanced[Changeable[int | None]] = None
    log_every_n_steps: Changeable[int | None] = None
    enable_checkpointing: Advanced[Changeable[bool | None]] = None
    enable_progress_bar: Advanced[Changeable[bool | None]] = None
    profiler: Advanced[Transient[str | None]] = None
    trainer: Advanced[Changeable[dict[str, Any] | None]] = None

    def __post_init__(self) -> None:
        check_ranges(
            max_epochs=(self.max_epochs, COUNT_OR_NO_LIMIT),
            max_steps=(self.max_steps, COUNT_OR_NO_LIMIT),
            fast_dev_run=(int(self.fast_dev_run), NATURAL),
            check_val_every_n_epoch=(self.check_val_every_n_epoch, COUNT),
            num_sanity_val_steps=(self.num_sanity_val_steps, COUNT_OR_NO_LIMIT),
            log_every_n_steps=(self.log_every_n_steps, NATURAL),
            gradient_clip_val=(self.gradient_clip_val, NOT_NEGATIVE),
        )
        for name in _TIMES:
            _check_time(name, getattr(self, name))
        for name in _PARTS:
            _check_part(name, getattr(self, name))
        if self.val_check_interval == 0:
            no_validation = spelled("limit_val_batches", 0)
            raise UserError(
                f"{spelled('val_check_interval', 0)} is no interval; {no_validation} leaves the validation out"
            )
        if self.trainer:
            _check_trainer_parameters(self.trainer, set(vars(self)))

    def options(self) -> dict[str, Any]:
        """Return the arguments of the Trainer."""
        options = asdict(self)
        for name in _TIMES:
            if isinstance(options[name], str):
                options[name] = read_time(options[name]) or options[name]
        return options | (options.pop("trainer") or {})


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that do not belong to the recipe, the data or the Trainer.

    Args:
        name: the run's folder in RUN_DIR/RECIPE/, with a number if it exists; by default the time.
        run_dir: folder of all runs.
        resume: checkpoint to resume from, in its run's folder and with its settings; auto finds the newest valid
            checkpoint of the run, or starts fresh; the default is auto in jobs that are restarted, else none.
        save_every: interval between saves of last.ckpt, as in "500 steps", "2 epochs" or "10 minutes"; a number means
            steps.
        save_top_k: number of best checkpoints to keep; -1 keeps all.
        ckpt: checkpoint to validate, test, predict with or export; its settings are the defaults.
        output: JSON or CSV file for scores and predictions, or the file that export writes.
        format: format of the file that export writes.
        graph: input of an onnx file: one RGB image of any size, which the graph crops and resizes, or a batch of images
            of the network's size; by default an image, if the recipe has photographs.
        seed: seed of all random numbers; random draws a seed, which is printed in the first line and saved with the
            run.
        deterministic: stop at operations without a deterministic implementation.
        threads: number of PyTorch's threads in each process. On a CPU, the bits of a run depend on it, so a resume
            keeps it by default. By default OMP_NUM_THREADS, else the node's cores divided by its processes.
        precision: floating-point precision; auto is bf16-mixed if the hardware has fast bf16, else 32-true.
        global_batch_size: samples per update on all devices, from which the number of micro-batches is computed.
        accumulate: micro-batches per update on each device.
        warmup: duration of the learning rate warm-up, as in "500 steps", "2 epochs" or "5%".
        lr_scale: scaling of the learning rate with the global batch; auto is linear for SGD, sqrt for adaptive
            optimizers.
        ema: decay of an exponential average of the weights, as in 0.999; the average is validated, saved and tested.
        sync_bn: synchronize BatchNorm over all devices; the bits of the run then depend on their number.
        patience: early stopping: number of validations without an improvement of the monitored score.
        progress_interval: seconds between two lines of progress, if the output is not a terminal.
        logger: any of tensorboard,csv,wandb,mlflow, or none.
        summary: print parameters, output shapes and FLOPs of each layer; results.json has the FLOPs of one input.
        log_graph: write the graph of the network into the TensorBoard log.
    """

    name: Transient[str | None] = None
    run_dir: Transient[str] = "runs"
    resume: Transient[str | None] = None
    save_every: Changeable[int | str] = "1 epochs"
    save_top_k: Advanced[Changeable[int]] = 1
    ckpt: Transient[str | None] = None
    output: Transient[str | None] = None
    format: Transient[Literal["safetensors", "state-dict", "onnx", "pt2"] | None] = None
    graph: Transient[Literal["image", "batch"] | None] = None
    seed: int | Literal["random"] = 1
    deterministic: Advanced[Changeable[bool]] = False
    threads: int | None = None
    precision: Changeable[Precision] = "auto"
    global_batch_size: int | None = None
    accumulate: int = 1
    warmup: int | str = 0
    lr_scale: Advanced[Literal["auto", "linear", "sqrt", "none"]] = "auto"
    ema: NullDisables[float | None] = None
    sync_bn: bool = False
    patience: Changeable[int | None] = None
    progress_interval: Advanced[Changeable[float]] = 60.0
    logger: Changeable[str] = "tensorboard,csv"
    summary: Advanced[Transient[bool]] = False
    log_graph: Advanced[Transient[bool]] = False

    def __post_init__(self) -> None:
        check_ranges(
            seed=(0 if self.seed == "random" else self.seed, Range(0, 2**63 - 1, whole=True)),
            save_top_k=(self.save_top_k, COUNT_OR_NO_LIMIT),
            threads=(self.threads, Range(1, 4096, whole=True)),
            global_batch_size=(self.global_batch_size, COUNT),
            patience=(self.patience, COUNT),
            progress_interval=(self.progress_interval, NOT_NEGATIVE),
        )
        names = logger_names(self.logger)
        if self.log_graph and "tensorboard" not in names:
            needed = spelled("logger", ",".join(["tensorboard", *names]))
            raise UserError("the graph is for TensorBoard", setting="log_graph", value=True, to_type=f"pass {needed}")
