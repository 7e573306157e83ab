"""Record a hash of a run's weights at each save in ``weights.jsonl``, with the settings and environment.

The file has a line for each start of a training, and one for each save after it. Later checkpoints replace earlier
ones, but the hashes stay. So the training from a checkpoint to the next save can be repeated and compared: see
`interval_to_repeat`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.verified_io import CheckpointGuard
from callbacks.lib.writing import best_effort
from datamodules.errors import UserError
from datamodules.lightning import pl
from recipes.runner.loggers import run_ids
from recipes.runner.printing import rank_zero_print
from recipes.runner.results import differences, environment, write_text
from recipes.runner.saved_run import SavedRun

_FILE = "weights.jsonl"


@dataclass(frozen=True)
class Start:
    """The start of a training.

    Args:
        recipe: the title of the recipe.
        resumed_from: the updates in the checkpoint that was resumed; None where the training began with new weights.
        environment: see `recipes.runner.results.environment`.
        config: the settings of the run.
    """

    recipe: str
    resumed_from: int | None
    environment: dict[str, Any]
    config: dict[str, Any]


@dataclass(frozen=True)
class Save:
    """A save after `step` updates, in the epoch `epoch`, from 1, with the hash of the weights."""

    step: int
    epoch: int
    sha256: str


def weights_hash(state_dict: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the names, types, shapes and bytes of a state dict."""
    sha256 = hashlib.sha256()
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            content: Any = plain.reshape(-1).view(torch.uint8).numpy()
            sha256.update(content)
        else:  # The extra state of a module, from `get_extra_state`.
            sha256.update(f"{name} {value!r}\n".encode())
    return sha256.hexdigest()


class WeightsRecorder(CheckpointGuard):
    """Callback that saves a run's settings in its checkpoints, and appends to ``weights.jsonl``.

    Call `saved` with each checkpoint that was written.

    Runs on: `setup`, where it records the environment, and prints how it differs from before a resume; each save; and
    the hooks of `CheckpointGuard`.

    Args:
        folder: the run's folder.
        recipe: the title of the recipe.
        resumed: the run in the checkpoint to resume from; None where the run begins with new weights.
        config: the settings of the run.
        checkpoint: the path of that checkpoint on this rank.
        auto_settings: the settings that the first command of the run has left to the run.
    """

    def __init__(
        self,
        folder: Path,
        recipe: str,
        resumed: SavedRun | None,
        config: Mapping[str, Any],
        checkpoint: str | None = None,
        auto_settings: Sequence[str] = (),
    ) -> None:
        super().__init__(checkpoint)
        self._path = folder / _FILE
        self._resumed = resumed
        self._start = Start(recipe, resumed.updates if resumed else None, {}, dict(config))
        self._auto_settings = list(auto_settings)
        self._last: Save | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._start = replace(self._start, environment=environment(trainer))
            before = dict(self._resumed.environment) if self._resumed else {}
            before.pop("threads", None)  # `UpdateLoop` reports other threads.
            changed = differences(before, self._start.environment) if before else ""
            if changed:
                rank_zero_print(f"bits may differ from here on: {changed}")

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self._start.config
        checkpoint["auto_settings"] = self._auto_settings
        checkpoint["environment"] = self._start.environment
        checkpoint["run_ids"] = run_ids(trainer.loggers)

    def saved(self, checkpoint: Mapping[str, Any]) -> None:
        """Append the hash of the weights in a checkpoint, unless another file has just been saved with the same."""
        with best_effort("the hash of the weights"):
            sha256 = weights_hash(checkpoint["state_dict"])
            save = Save(checkpoint["global_step"], checkpoint["epoch"] + 1, sha256)
            if save == self._last:
                return
            lines: list[dict[str, Any]] = [{"save": asdict(save)}]
            if self._last is None:
                lines.insert(0, {"start": asdict(self._start)})
            before = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            write_text(self._path, before + "".join(json.dumps(line, default=str) + "\n" for line in lines))
            self._last = save


def read_record(folder: Path) -> list[tuple[Start, list[Save]]]:
    """Read the starts of a run, each with its saves.

    Raises:
        UserError: the record is missing or damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        raise UserError(
            f"there is no {path}: expected the folder of a run, which records a hash of its weights at each save"
        )
    trainings: list[tuple[Start, list[Save]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            value = json.loads(line)
            if "start" in value:
                trainings.append((Start(**value["start"]), []))
            else:
                trainings[-1][1].append(Save(**value["save"]))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise UserError(f"line {number} of {path} cannot be read: {error}") from error
    return trainings


@dataclass(frozen=True)
class Interval:
    """A part of a run that can be trained again: from a checkpoint to the next save.

    Args:
        start: the start of the training that has made the save.
        step: the updates made before the save.
        epoch: the epoch of the save, counted from 1.
        hashes: hashes of the saved weights; several where a callback has replaced the weights between two saves.
        checkpoint: the checkpoint at the beginning of the interval; None for the beginning of the run.
        from_step: the updates in that checkpoint.
        from_hashes: hashes of the weights in that checkpoint.
    """

    start: Start
    step: int
    epoch: int
    hashes: frozenset[str]
    checkpoint: Path | None = None
    from_step: int = 0
    from_hashes: frozenset[str] = frozenset()


def _updates_in(interval: Interval) -> int:
    return interval.step - interval.from_step


def interval_to_repeat(folder: Path, checkpoints: Mapping[int, Path]) -> Interval | None:
    """Return the shortest interval between a checkpoint and its next save, else the one from the start.

    Training that was abandoned by a resume from an earlier checkpoint is left out.

    Args:
        folder: the run's folder.
        checkpoints: the existing checkpoints by their updates.

    Raises:
        UserError: see `read_record`.
    """
    saved: dict[int, Interval] = {}
    for start, saves in read_record(folder):
        begin = -1 if start.resumed_from is None else start.resumed_from
        saved = {step: interval for step, interval in saved.items() if step <= begin}
        for save in saves:
            earlier_hashes = saved[save.step].hashes if save.step in saved else frozenset()
            if save.step > begin:
                saved[save.step] = Interval(start, save.step, save.epoch, earlier_hashes | {save.sha256})
    steps = sorted(saved)
    repeatable = [
        replace(saved[step], checkpoint=checkpoints[before], from_step=before, from_hashes=saved[before].hashes)
        for before, step in pairwise(steps)
        if before in checkpoints and (saved[step].start.resumed_from or 0) <= before
    ]
    if repeatable:
        return min(repeatable, key=_updates_in)
    # Step 0 is no interval: a run without training saves its initial weights.
    first_saved = next((saved[step] for step in steps if step), None)
    return first_saved if first_saved and first_saved.start.resumed_from is None else None
