"""``weights.jsonl``: a hash of a run's weights at each save, and with what they were trained.

A line for each start of a training, and one for each save after it. Checkpoints are replaced by later ones; the hashes
stay, so that a training from one checkpoint to the next save can be repeated and compared: see `interval_to_repeat`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from datamodules.errors import UserError

__all__ = ["Interval", "Save", "Start", "WeightsRecord", "interval_to_repeat", "read_record"]

_FILE = "weights.jsonl"


@dataclass(frozen=True)
class Start:
    """The start of a training.

    Args:
        recipe: its title.
        resumed_from: the updates behind the checkpoint that it was resumed from; None where it began anew.
        environment: what may change the bits, and the numbers of devices and nodes: see `recipes.results.origin`.
        config: the settings.
    """

    recipe: str
    resumed_from: int | None
    environment: dict[str, Any]
    config: dict[str, Any]

    def __post_init__(self) -> None:
        self.world_size  # noqa: B018 - A file may hold anything.

    @property
    def world_size(self) -> int:
        """Devices of all nodes."""
        found = dict(self.environment)
        return int(found.get("devices", 1)) * int(found.get("num_nodes", 1))


@dataclass(frozen=True)
class Save:
    """A save after `step` updates, in the epoch `epoch`, from 1, with the hash of the weights."""

    step: int
    epoch: int
    sha256: str


class WeightsRecord:
    """Appends to the record of a run.

    Args:
        folder: of the run.
        start: of this training; written before its first save.
    """

    def __init__(self, folder: Path, start: Start) -> None:
        self._path, self._start = folder / _FILE, start
        self._last: Save | None = None

    def add(self, save: Save) -> None:
        """Append a save, unless another file has just been saved with the same weights.

        Raises:
            OSError: it cannot be written.
        """
        size = self._path.stat().st_size if self._path.exists() else 0
        if save == self._last and size:
            return
        lines: list[dict[str, Any]] = [{"save": asdict(save)}]
        if self._last is None or not size:
            lines.insert(0, {"start": asdict(self._start)})
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
        if self._last is None and size and not self._path.read_bytes().endswith(b"\n"):
            text = "\n" + text  # A process was killed as it wrote its last line.
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            if self._path.exists():
                os.truncate(self._path, size)
            raise
        self._last = save


def read_record(folder: Path) -> list[tuple[Start, list[Save]]]:
    """The starts of a run, each with its saves; a line that was cut off as its process ended is left out.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        raise UserError(
            f"there is no {path}: expected the folder of a run, which records a hash of its weights at each save"
        )
    found: list[tuple[Start, list[Save]]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, (line, following) in enumerate(pairwise(lines), 1):
        try:
            value = json.loads(line)
            if "start" in value:
                found.append((Start(**value["start"]), []))
            else:
                found[-1][1].append(Save(**value["save"]))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            if not following.startswith('{"start"'):  # Else the process was killed as it wrote the line.
                raise UserError(f"line {number} of {path} cannot be read: {error}") from error
    return found


@dataclass(frozen=True)
class Interval:
    """A part of a run that can be trained again: from a checkpoint to the next save.

    Args:
        folder: of the run.
        start: of the training that has made the save.
        step: the updates behind the save, which was made in the epoch `epoch`, from 1.
        hashes: of the weights that were saved then; several, where a callback has put others in their place.
        checkpoint: at its beginning; None for the beginning of the run.
        from_step: the updates behind that checkpoint.
        from_hashes: of its weights.
    """

    folder: Path
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
                saved[save.step] = Interval(folder, start, save.step, save.epoch, known | {save.sha256})
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
