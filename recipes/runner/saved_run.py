"""Records of a run: settings and progress in checkpoints, results, times, memory and hardware."""

import contextlib
import csv
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.checkpointing.verified_io import describe_damage
from callbacks.checkpointing.writing import atomic_write
from callbacks.lib.threads import counted_threads
from datamodules.errors import UserError, spelled
from datamodules.lightning import CombinedLoader, pl, summarize
from datamodules.notes import warn
from recipes.version import __version__

log = logging.getLogger("lightning_recipes.resume")
RESULTS = "results.json"
# The name of a file may not be UTF-8; its bytes are written unchanged.
_ERRORS = "surrogateescape"


@dataclass(frozen=True)
class SavedRun:
    """Settings and progress in a checkpoint, read before the Trainer restores it.

    Args:
        path: the file.
        config: the settings of the run.
        updates: completed optimizer steps.
        epochs: completed epochs.
        devices: number of devices of the run; None in checkpoints of a plain Trainer.
        update_items: number of samples of an update on all devices, or of batches limited by tokens; None if it is not
            known.
        epoch: the epoch of the save, counted from 1.
        recipes: titles of the recipe and of its base classes; empty if they are not known.
        environment: the factors on which the bits depend, see `recipes.runner.saved_run.environment`.
        auto_settings: the settings that the run has resolved; None if they are not known.
        run_ids: the ids of the runs in W&B and MLflow by the logger's name.
    """

    path: Path
    config: dict[str, Any]
    updates: int
    epochs: int
    devices: int | None = None
    update_items: int | None = None
    epoch: int = 1
    recipes: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    auto_settings: tuple[str, ...] | None = None
    run_ids: dict[str, str] = field(default_factory=dict)

    def is_finished(self, max_epochs: int | None, max_steps: int = -1) -> bool:
        """Return whether the run has reached these limits; -1 and None are no limit."""
        by_epochs = max_epochs is not None and 0 <= max_epochs <= self.epochs
        return by_epochs or 0 <= max_steps <= self.updates


def read_run(path: str | Path) -> SavedRun:
    """Read the settings and the progress in a checkpoint without running its code or reading its weights.

    Raises:
        UserError: the file is missing or damaged, or is not a checkpoint of a run.
    """
    if Path(path).is_dir():
        newest = newest_valid_checkpoint(Path(path) / "checkpoints", logs=False)
        raise UserError(f"{path} is a folder; pass a checkpoint" + (f", such as {newest}" if newest else ""))
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path}")
    return _read(Path(path))


def _read(path: Path) -> SavedRun:
    try:
        checkpoint = load_plain(path)
    except UserError:
        raise
    except Exception as error:
        problem = describe_damage(path)
        if problem:
            raise UserError(f"{path} is not a checkpoint: {problem}") from error
        raise UserError(f"{path} is not a readable checkpoint: {str(error).splitlines()[0]}") from error
    entries = {"state_dict", "loops", "pytorch-lightning_version"}
    if not isinstance(checkpoint, dict) or not entries <= checkpoint.keys():
        raise UserError(f"{path} is not a checkpoint of a run, which holds settings beside the weights")
    try:
        return _saved_run(path, checkpoint)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is not a checkpoint of a run: {error}") from error


def _saved_run(path: Path, checkpoint: Mapping[str, Any]) -> SavedRun:
    # A checkpoint of a plain Trainer has the constructors' arguments only.
    saved = {**checkpoint.get("datamodule_hyper_parameters", {}), **checkpoint.get("hyper_parameters", {})}
    devices = checkpoint.get("devices")
    auto_settings = checkpoint.get("auto_settings")
    items = checkpoint.get("callbacks", {}).get("GradientAccumulation", {}).get("items")
    return SavedRun(
        path=path,
        config=dict(checkpoint.get("config") or saved),
        updates=_count("global_step", checkpoint["global_step"]),
        epochs=_count("processed", checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]),
        devices=None if devices is None else _count("devices", devices),
        update_items=None if items is None else _count("items", items),
        epoch=1 + _count("epoch", checkpoint.get("epoch", 0)),
        recipes=tuple(map(str, checkpoint.get("recipes", ()))),
        environment=dict(checkpoint.get("environment", {})),
        auto_settings=None if auto_settings is None else tuple(map(str, auto_settings)),
        run_ids={str(name): str(run_id) for name, run_id in checkpoint.get("run_ids", {}).items()},
    )


def note_unknown_settings(saved: SavedRun, known: Collection[str]) -> None:
    """Log the unknown settings of a checkpoint, which are left out."""
    config = saved.config
    unknown = ", ".join(spelled(name, config[name]) for name in sorted(config) if name not in known)
    if unknown:
        warn(f"warning: {saved.path} has settings that this recipe leaves out: {unknown:.300}")


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{name} is {str(value)[:40]!r}, expected a number of 0 or more")
    return value


def _checkpoints(folder: Path) -> tuple[list[SavedRun], list[str]]:
    """Return the readable checkpoints in a folder, and the errors of unreadable checkpoints."""
    readable = []
    problems = []
    for path in sorted(folder.glob("*.ckpt")):
        try:
            readable.append(_read(path))
        except UserError as error:
            problems.append(str(error))
    return readable, problems


def readable_checkpoints(folder: Path) -> list[SavedRun]:
    """Return the readable checkpoints in a folder."""
    return _checkpoints(folder)[0]


def newest_valid_run(folder: Path, logs: bool = True) -> SavedRun | None:
    """Return the valid checkpoint with the most updates, or None; log damaged checkpoints with more updates.

    The number of updates decides, not the time of the file, because clocks may be set back.

    Args:
        folder: the run's ``checkpoints``.
        logs: whether to log the damaged checkpoints.
    """
    readable, damaged = _checkpoints(folder)
    valid = None
    # Newest first, up to the first valid checkpoint: a check reads the whole file.
    for saved in sorted(readable, key=_progress, reverse=True):
        problem = describe_damage(saved.path)
        if problem is None:
            valid = saved
            break
        damaged.append(f"{saved.path}: {problem}")
    for problem in damaged if logs else ():
        log.warning("warning: a checkpoint is skipped: %s", problem)
    return valid


def newest_valid_checkpoint(folder: Path, logs: bool = True) -> Path | None:
    """Return the path of the newest valid checkpoint in a folder, see `newest_valid_run`."""
    saved = newest_valid_run(folder, logs)
    return saved.path if saved else None


def _progress(saved: SavedRun) -> tuple[int, int, bool, Path]:
    return saved.updates, saved.epochs, saved.path.name == "last.ckpt", saved.path


def read_settings(path: str | Path) -> Any:
    """Read a YAML file of settings.

    Raises:
        UserError: the file does not exist, is not YAML, or has a setting twice.
    """
    if not os.path.isfile(path):  # noqa: PTH113 - `Path.is_file` raises for long names.
        raise UserError(f"there is no file {path}")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        _reject_repeated(yaml.compose(text, yaml.SafeLoader), path)
        return yaml.safe_load(text)
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: cannot be read as a file of settings: {error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as a file of settings: {' '.join(str(error).split())}") from error


def _reject_repeated(root: yaml.Node | None, path: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if lines.setdefault(str(key.value), line) != line:
            raise UserError(
                f"{path}, line {line}: {key.value} is also in line {lines[str(key.value)]}; remove one of them"
            )


def write_text(path: Path, text: str) -> None:
    """Write a file of text.

    Raises:
        OSError: the write failed, and the file is unchanged.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=_ERRORS)


def write_rows(
    path: Path, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], columns: Sequence[str] | None = None
) -> None:
    """Write rows as JSON, CSV, or the first column as lines of text, by the file's suffix.

    Args:
        columns: the columns of a CSV or text file; by default the keys of the first row.

    Raises:
        OSError: the write failed, and the file is unchanged.
    """
    table = [rows] if isinstance(rows, Mapping) else rows
    if path.suffix == ".txt" and columns:
        # Exactly one line for each row, also for text with line breaks: other programs compare files line by line.
        lines = [str(row[columns[0]]).replace("\n", " ") + "\n" for row in table]
        write_text(path, "".join(lines))
        return
    if path.suffix != ".csv":
        write_text(path, json.dumps(rows, indent=2, ensure_ascii=False, default=str) + "\n")
        return
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8", errors=_ERRORS) as file:
        writer = csv.DictWriter(file, fieldnames=columns or list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results of a finished run.

    Raises:
        UserError: there is no results.json, because the run has not finished or this is not its folder; or the file is
            damaged.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise UserError(f"there is no {path}: expected the folder of a run that has finished")
    try:
        results: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(results, dict) or not isinstance(results.get("scores"), dict):
        raise UserError(f"{path} holds no results of a run: expected an object with an entry scores")
    return results


def _device(trainer: pl.Trainer) -> str:
    """Return the name of the devices."""
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {device.type}"


def hardware(trainer: pl.Trainer) -> str:
    """Return number and name of the devices, and on CPUs the threads of each process."""
    description = f"{trainer.world_size} x {_device(trainer)}"
    if trainer.strategy.root_device.type == "cuda":
        return description
    return f"{description} with {counted_threads(torch.get_num_threads())}"


def processor() -> tuple[str, str]:
    """Return the maker and the model of the CPU, or the platform's names if the system does not report them."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):  # Not on Linux.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        # Reversed, so that the first processor wins.
        fields = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in reversed(lines))}
    model = fields.get("model name") or platform.processor() or platform.machine()
    return fields.get("vendor_id") or platform.machine(), model


def environment(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the factors on which a run's bits depend, and its split, on which they do not; call this in the run."""
    on_cpu = trainer.strategy.root_device.type == "cpu"
    return {
        "device": _device(trainer),
        "processor": f"{processor()[1]} ({torch.backends.cpu.get_cpu_capability()})",
        **({"threads": torch.get_num_threads()} if on_cpu else {}),
        "precision": str(trainer.precision),
        **{name: version for name, version in versions().items() if name != "python"},
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the differences of two values of `environment` that may change the bits; "" without differences."""
    return "; ".join(
        f"{name} {value}, and {before[name]} in the run"
        for name, value in now.items()
        if name not in ("devices", "num_nodes") and before.get(name, value) != value
    )


def versions() -> dict[str, str]:
    """Return the versions of this package, Python, torch and Lightning, and of the GPU's libraries."""
    found_versions: dict[str, Any] = {
        "lightning-recipes": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "lightning": pl.__version__,
    }
    if torch.cuda.is_available():
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        found_versions["cuda"] = torch.version.cuda
        found_versions["rocm"] = torch.version.hip
        found_versions["cudnn"] = torch.backends.cudnn.version()
        found_versions["nccl"] = ".".join(map(str, nccl))
    return {name: str(version) for name, version in found_versions.items() if version}


def loader_sizes(**loaders: Any) -> dict[str, int]:
    """Return the numbers of samples of the loaders by part; parts of unknown size are left out.

    Example:
        >>> loader_sizes(train=torch.utils.data.DataLoader(range(10), batch_size=4), val=None, test=iter("abc"))
        {'train': 10}
    """
    sizes = {}
    for part, loader in loaders.items():
        datasets = [getattr(flat, "dataset", None) for flat in CombinedLoader(loader).flattened]
        sized = [dataset for dataset in datasets if isinstance(dataset, Sized)]
        if sized and len(sized) == len(datasets):
            sizes[part] = sum(map(len, sized))
    return sizes


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Return the number of all parameters, and of those that require a gradient."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)


def forward_flops(recipe: pl.LightningModule) -> int | None:
    """Return torch's count of the FLOPs of a forward pass of ``example_input_array``; None without this array.

    A multiplication and an addition count as two.
    """
    return None if recipe.example_input_array is None else summarize(recipe).total_flops


def process_age() -> float:
    """Return the seconds since the start of this process."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of this process in bytes: of tensors on its GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    # Not from getrusage: its peak starts at the memory of the parent process.
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


class Stopwatch(pl.Callback):
    """Callback that measures the seconds of start-up and training, the trained epochs, and the trained parameters.

    `sizes` has the numbers of samples of the training and validation loaders, if they have a length.

    Args:
        started_at: `time.monotonic` at the start of the program.
    """

    def __init__(self, started_at: float) -> None:
        self.epochs = 0.0
        self.trainable = 0
        self.sizes: dict[str, int] = {}
        self._first_batch = 0
        self._started_at = self._train_start = started_at
        self._train_seconds = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_batch = trainer.fit_loop.total_batch_idx
        self._train_start = time.monotonic()
        self._train_seconds -= self._train_start  # Each stop of the clock adds its time.

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._train_seconds += time.monotonic()
        # Counted here: callbacks unfreeze frozen layers at the end of the run.
        self.trainable = count_parameters(pl_module)[1]
        batches = trainer.fit_loop.total_batch_idx - self._first_batch
        loader: Any = trainer.train_dataloader
        # Saved here: an evaluation after training replaces the loaders.
        self.sizes = loader_sizes(train=loader, val=trainer.val_dataloaders)
        # A full epoch has the length of the loader; with limit_train_batches, an epoch of the Trainer is shorter.
        with contextlib.suppress(TypeError):  # An iterable loader has no length.
            self.epochs = batches / max(1, len(loader))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The clock stops: the seconds of training do not include validation.
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._train_seconds += time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._train_seconds -= time.monotonic()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of start-up, of training without validation, and in total."""
        total = time.monotonic() - self._started_at
        start_up = self._train_start - self._started_at
        return {"start_up": round(start_up, 6), "train": round(self._train_seconds, 6), "total": round(total, 6)}
