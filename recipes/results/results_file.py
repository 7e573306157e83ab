"""``results.json``: what a finished run has reached, with what, and how long it took."""

import json
from pathlib import Path
from typing import Any, TypedDict, cast

from datamodules.errors import UserError
from recipes.files import write_rows

__all__ = ["RESULTS", "Best", "Results", "read_results", "set_aside", "write_results"]

RESULTS = "results.json"


class Best(TypedDict):
    """The checkpoint that the scores are of.

    `epoch` is that in which it was saved, from 1 as on the console, and `step` the updates before it. `monitor` is the
    score by which it is the best, and `value` its value; both are None without a validation.
    """

    checkpoint: str
    epoch: int
    step: int
    monitor: str | None
    value: float | None


class Results(TypedDict, total=False):
    """The entries of ``results.json``. Files of earlier versions lack some of them.

    `scores` are of the checkpoint `best`. `seconds` has "start_up" to the beginning of training, "train" without
    validation, and "total" of the program that has written the file, which are those after a resume; `epochs` counts
    all. `devices` are those of one node, and `peak_memory_bytes` that of the process with rank 0.
    """

    recipe: str
    command: str
    started_at: str
    ended_at: str
    host: str
    hardware: str
    devices: int
    num_nodes: int
    versions: dict[str, str]
    scores: dict[str, float]
    headline: dict[str, str]
    best: Best | None
    seconds: dict[str, float]
    epochs: int
    samples_per_second: float
    peak_memory_bytes: dict[str, int | None]
    stopped_early: str | None
    parameters: int
    trainable_parameters: int
    data: dict[str, Any]
    config: dict[str, Any]
    changed: list[str]


def read_results(folder: Path) -> Results:
    """The results of a finished run.

    Raises:
        UserError: the folder has none, since the run has not finished or it is none of a run; or the file is damaged.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise UserError(f"there is no {path}: expected the folder of a run that has finished")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("scores"), dict):
        raise UserError(f"{path} holds no results of a run: expected an object with an entry scores")
    return cast(Results, found)


def write_results(folder: Path, results: Results) -> None:
    """Write the results of a run.

    Raises:
        OSError: the file is as it was before.
    """
    write_rows(folder / RESULTS, results)


def set_aside(folder: Path) -> None:
    """Rename the results of a run that trains on, so that a folder holds results exactly where its run has finished.

    The first ones become ``results-1.json``.
    """
    if (folder / RESULTS).is_file():
        number = 1
        while (target := folder / f"results-{number}.json").exists():
            number += 1
        (folder / RESULTS).rename(target)
