"""``weights.jsonl``: a hash of a run's weights at each save, and with what they were trained.

A line for each start of a training, and one for each save after it. Checkpoints are replaced by later ones; the hashes
stay, so that a training from one checkpoint to the next save can be repeated and compared: see `interval_to_repeat`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from callbacks.checkpointing.verified_io import CheckpointGuard
from callbacks.lib.writing import best_effort
from datamodules.errors import UserError
from recipes.runner.loggers import run_ids
from recipes.runner.printing import rank_zero_print
from recipes.runner.results import differences, environment, write_text
from recipes.runner.saved_run import SavedRun

_FILE = "weights.jsonl"


@dataclass(frozen=True)
class Start:
    """The start of a training.

    Args:
        recipe: its title.
        resumed_from: the updates behind the checkpoint that it was resumed from; None where it began with new weights.
        environment: see `recipes.runner.results.environment`.
        config: the settings.
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
    """The SHA-256 of the names, types, shapes and bytes of a state dict."""
    sha256 = hashlib.sha256()
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            content: Any = plain.reshape(-1).view(torch.uint8).numpy()
            sha256.update(content)
        else:  # What a module keeps by `get_extra_state`.
            sha256.update(f"{name} {value!r}\n".encode())
    return sha256.hexdigest()


class WeightsRecorder(CheckpointGuard):
    """Saves the settings of a run with its checkpoints, and appends to ``weights.jsonl``.

    `saved` is to be called with each checkpoint that was written.

    Runs on: `setup`, where it finds out on what the run trains, and says what differs from before a resume; each save;
    and as `CheckpointGuard`.

    Args:
        folder: of the run.
        recipe: its title.
        resumed: what the checkpoint that is resumed holds; None where the run begins with new weights.
        checkpoint: the path of that checkpoint on this rank.
        config: the settings.
        auto_settings: which of them the first command of the run has left to it.
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
            before = self._resumed.environment if self._resumed else {}
            if before and (changed := differences(before, self._start.environment)):
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
    """The starts of a run, each with its saves.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        raise UserError(
            f"there is no {path}: expected the folder of a run, which records a hash of its weights at each save"
        )
    found: list[tuple[Start, list[Save]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            value = json.loads(line)
            if "start" in value:
                found.append((Start(**value["start"]), []))
            else:
                found[-1][1].append(Save(**value["save"]))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise UserError(f"line {number} of {path} cannot be read: {error}") from error
    return found


@dataclass(frozen=True)
class Interval:
    """A part of a run that can be trained again: from a checkpoint to the next save.

    Args:
        start: of the training that has made the save.
        step: the updates behind the save, which was made in the epoch `epoch`, from 1.
        hashes: of the weights that were saved then; several, where a callback has put others in their place.
        checkpoint: at its beginning; None for the beginning of the run.
        from_step: the updates behind that checkpoint.
        from_hashes: of its weights.
    """

    start: Start
    step: int
    epoch: int
    hashes: frozenset[str]
    checkpoint: Path | None = None
    from_step: int = 0
    from_hashes: frozenset[str] = frozenset()


def interval_to_repeat(folder: Path, checkpoints: Mapping[int, Path]) -> Interval | None:
    """The shortest interval from one of a run's checkpoints to its next save; else that from its start to the first.

    What was trained and then abandoned, by a resume from an earlier checkpoint, is left out.

    Args:
        folder: of the run.
        checkpoints: those that are there, by their updates.

    Raises:
        UserError: see `read_record`.
    """
    saved: dict[int, Interval] = {}
    for start, saves in read_record(folder):
        begin = -1 if start.resumed_from is None else start.resumed_from
        saved = {step: interval for step, interval in saved.items() if step <= begin}
        for save in saves:
            known = saved[save.step].hashes if save.step in saved else frozenset()
            if save.step > begin:
                saved[save.step] = Interval(start, save.step, save.epoch, known | {save.sha256})
    steps = sorted(saved)
    found = [
        replace(saved[step], checkpoint=checkpoints[before], from_step=before, from_hashes=saved[before].hashes)
        for before, step in pairwise(steps)
        if before in checkpoints and (saved[step].start.resumed_from or 0) <= before
    ]
    if found:
        return min(found, key=lambda interval: interval.step - interval.from_step)
    first = next((saved[step] for step in steps if step), None)  # A run without training saves its initial weights.
    return first if first and first.start.resumed_from is None else None
