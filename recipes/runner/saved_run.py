"""Read the settings and the progress in a checkpoint, and the settings in a file."""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.checkpointing.verified_io import describe_damage
from datamodules.errors import UserError, spelled
from datamodules.notes import warn

log = logging.getLogger("lightning_recipes.resume")


@dataclass(frozen=True)
class SavedRun:
    """The settings and the progress in a checkpoint, read before the Trainer restores it.

    Args:
        path: the file.
        config: the settings of the run.
        updates: optimizer steps made.
        epochs: epochs completed.
        devices: number of devices of the run; None in checkpoints of a plain Trainer.
        update_items: samples of an update on all devices, or batches limited by tokens; None where their number is
            not known.
        epoch: the epoch of the save, counted from 1.
        recipes: titles of the recipe and of its base classes; empty where they are not known.
        environment: what may have changed the bits, see `recipes.runner.results.environment`.
        auto_settings: the settings that the run has resolved; None where they are not known.
        run_ids: the ids of its runs of W&B and MLflow by the logger's name.
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
        """Return whether the run has reached these bounds; -1 and None are no bound."""
        by_epochs = max_epochs is not None and 0 <= max_epochs <= self.epochs
        return by_epochs or 0 <= max_steps <= self.updates


def read_run(path: str | Path) -> SavedRun:
    """Read the settings and the progress in a checkpoint; no code in it runs, and weights are not read.

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
    """Log the settings of a checkpoint that are not known, and so are left out."""
    config = saved.config
    unknown = ", ".join(spelled(name, config[name]) for name in sorted(config) if name not in known)
    if unknown:
        warn(f"warning: {saved.path} has settings that this recipe leaves out: {unknown:.300}")


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{name} is {str(value)[:40]!r}, expected a number of 0 or more")
    return value


def _checkpoints(folder: Path) -> tuple[list[SavedRun], dict[Path, str]]:
    """Return the checkpoints in a folder that a run may resume from, and the errors of the others."""
    readable = []
    problems = {}
    for path in sorted(folder.glob("*.ckpt")):
        try:
            readable.append(_read(path))
        except UserError as error:
            problems[path] = str(error).removeprefix(f"{path} ").removeprefix("is not a checkpoint: ")
    return readable, problems


def readable_checkpoints(folder: Path) -> list[SavedRun]:
    """Return the checkpoints in a folder that can be read."""
    return _checkpoints(folder)[0]


def newest_valid_run(folder: Path, logs: bool = True) -> SavedRun | None:
    """Return the valid checkpoint with the most updates, or None; damaged ones with more updates are logged.

    The number of updates decides, not the time of the file, because clocks may be set back.

    Args:
        folder: the run's ``checkpoints``.
        logs: whether to log the damaged checkpoints.
    """
    readable, damaged = _checkpoints(folder)
    valid = None
    # Newest first, and only until one is valid: a check reads the whole file.
    for saved in sorted(readable, key=_progress, reverse=True):
        problem = describe_damage(saved.path)
        if problem is None:
            valid = saved
            break
        damaged[saved.path] = problem
    for path, problem in damaged.items() if logs else ():
        log.warning("warning: %s is skipped: %s", path, problem)
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
        _refuse_repeated(yaml.compose(text, yaml.SafeLoader), path)
        return yaml.safe_load(text)
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: cannot be read as a file of settings: {error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as a file of settings: {' '.join(str(error).split())}") from error


def _refuse_repeated(root: yaml.Node | None, path: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if lines.setdefault(str(key.value), line) != line:
            raise UserError(
                f"{path}, line {line}: {key.value} is also in line {lines[str(key.value)]}; remove one of them"
            )
