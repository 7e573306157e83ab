"""Folders of runs as the command line leaves them."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

__all__ = ["save_run"]


def save_run(folder: Path, metrics: str = "", figures: dict[str, tuple[int, int]] | None = None, **more: Any) -> Path:
    """A run's folder with results, metrics and black figures of (width, height)."""
    (folder / "figures").mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"scores": {}, **more}))
    if metrics:
        (folder / "metrics.csv").write_text(metrics)
    for name, size in (figures or {}).items():
        Image.new("RGB", size).save(folder / "figures" / name)
    return folder
