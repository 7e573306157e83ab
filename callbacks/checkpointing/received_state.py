"""What a checkpoint says of its callback's files, as far as it is true here.

A checkpoint may come from somebody else. `ModelCheckpoint` deletes the worst of its best checkpoints by the path that
stands in its state, and that can be any file of the user's; a score of another kind ends the run at the next save.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["files_in", "is_own_checkpoint"]

_SUFFIX = ".ckpt"


def is_own_checkpoint(path: Path, folder: Path) -> bool:
    """Whether a path is a checkpoint in a folder, also after all links are followed.

    Example:
        >>> is_own_checkpoint(Path("checkpoints/../thesis.tex"), Path("checkpoints"))
        False
    """
    try:
        real = path.resolve(strict=True)
        return real.is_file() and real.suffix == path.suffix == _SUFFIX and real.is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # It does not exist, holds a null byte, or links go round in a circle.
        return False


def _found(path: Any, old: Any, folder: Path, levels: int) -> str:
    """The path in the folder as it is now; empty where there is no such checkpoint."""
    if not isinstance(path, str) or not isinstance(old, str) or not Path(path).is_relative_to(old):
        return ""
    name = Path(path).relative_to(old)
    if ".." in name.parts or not 1 <= len(name.parts) <= levels:
        return ""
    return str(folder / name) if is_own_checkpoint(folder / name, folder) else ""


def _score(value: Any) -> Tensor | None:
    """A score as a tensor of one number; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    if isinstance(value, Tensor) and (value.dim() or value.is_complex() or value.is_meta):
        return None
    score = torch.as_tensor(value)
    return None if score.isnan() else score


def files_in(folder: str | Path, state: Mapping[str, Any], mode: str, levels: int = 1) -> dict[str, Any]:
    """The state of a `ModelCheckpoint` with those of its checkpoints that lie in a folder, under their paths there.

    What Lightning derives from the scores, the best checkpoint and the worst of those that are kept, is derived again.

    Args:
        folder: where the callback saves now; a run may have been moved.
        state: its ``state_dict`` in a checkpoint.
        mode: "min" or "max", which of its scores is the best.
        levels: how deep its files lie in the folder at most; 1 is directly in it.
    """
    home, old = Path(folder), state.get("dirpath") or "."
    here = {name: _found(state.get(name), old, home, levels) for name in ("best_model_path", "last_model_path")}
    saved = state.get("best_k_models")
    scores: dict[str, Tensor] = {}
    for path, value in saved.items() if isinstance(saved, Mapping) else ():
        if (found := _found(path, old, home, levels)) and (score := _score(value)) is not None:
            scores[found] = score
    files: dict[str, Any] = {"dirpath": folder, **here, "best_k_models": scores, "best_model_score": None}
    if scores:
        best, worst = (min, max) if mode == "min" else (max, min)
        first, last = best(scores, key=lambda path: scores[path]), worst(scores, key=lambda path: scores[path])
        files |= {"best_model_path": first, "best_model_score": scores[first]}
        files |= {"kth_best_model_path": last, "kth_value": scores[last]}
    return files
