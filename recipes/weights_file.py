"""Reader of a file of weights and the settings in it, which runs no code from the file.

Tested in `tests/recipes/test_weights.py`.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callbacks.checkpointing.plain_loading import load_plain
from datamodules.errors import UserError, spelled

# The metadata that the export command writes into safetensors as JSON; other metadata is text.
_JSON = ("config", "hyper_parameters", "class_names", "source_vocabulary", "target_vocabulary")


def _setting(name: str, value: str) -> Any:
    """Return a metadata text as its value. Other programs may have written any text under this name."""
    if name not in _JSON:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def read_weights_file(path: str | Path) -> Mapping[str, Any]:
    """Read a file of weights with any suffix; a safetensors file becomes a dict of its tensors and settings."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {path}; pass {spelled('weights', 'FILE')} or {spelled('weights', 'none')}")
    try:
        with path.open("rb") as file:
            start = file.read(9)
        # A safetensors file begins with the length of its JSON header in 8 bytes.
        if start[8:] == b"{":
            from safetensors import safe_open

            with safe_open(path, "pt") as opened:
                settings = {name: _setting(name, value) for name, value in (opened.metadata() or {}).items()}
                return {**settings, "state_dict": {name: opened.get_tensor(name) for name in opened.keys()}}  # noqa: SIM118
        content = load_plain(path)
    except UserError:
        raise
    except Exception as error:  # A damaged pickle may raise any exception.
        raise UserError(
            f"{path} is damaged, or neither torch.save() nor safetensors wrote it ({type(error).__name__}); download it"
            " again"
        ) from error
    return content if isinstance(content, Mapping) else {}


def read_class_names(path: str | Path) -> list[str]:
    """Read class names in the order of their numbers: one in each line, or a JSON list of texts.

    Raises:
        UserError: there is no such file, it has no names, or it has a name twice.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file {path} of class names")
    text = path.read_text(encoding="utf-8-sig")
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path} begins as a JSON list, and is none ({error})") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} holds no class names; write one a line, or a JSON list of texts")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(f"{path} has the class {name!r} {count} times")
    return names
