"""Folders of runs as the command line leaves them."""

import json
from pathlib import Path
from typing import Any

__all__ = ["save_run"]


def save_run(folder: Path, metrics: str = "", **more: Any) -> Path:
    """A run's folder with results and metrics."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"scores": {}, **more}))
    if metrics:
        (folder / "metrics.csv").write_text(metrics)
    return folder
