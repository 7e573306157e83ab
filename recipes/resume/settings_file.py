"""Files of settings: YAML, or a run's results.json."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from datamodules.errors import UserError

__all__ = ["read_settings"]

_CONFIG = "config"
"""The entry of a run's results.json that holds its settings."""


def _without_results(settings: Any) -> Any:
    """The settings of a run, where these are its results; others as they are."""
    inside = settings.get(_CONFIG) if isinstance(settings, dict) else None
    return inside if isinstance(inside, dict) else settings


def read_settings(path: str | Path) -> Any:
    """What a YAML file of settings, or a run's results.json, holds of settings, as plain Python.

    Raises:
        UserError: it is no file, is no YAML, or has a setting twice.
    """
    if not os.path.isfile(path):  # noqa: PTH113 - Path's raises for long names.
        raise UserError(f"there is no file {path}")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
        _refuse_repeated(root, path)
        # In YAML 1.1 numbers such as 1e-05 are text.
        return _without_results(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{where}: cannot be read as a file of settings: {error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as a file of settings: {' '.join(str(error).split())}") from error


def _refuse_repeated(root: yaml.Node | None, path: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if lines.setdefault(str(key.value), line) != line:
            raise UserError(f"{path}, line {line}: {key.value} is in line {lines[str(key.value)]}, too; leave one out")
