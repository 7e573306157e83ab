"""Safe loading of `torch.save` files: no code from them is run, and files that hold code are rejected.

torch's own error advises to load such a file with `weights_only=False`, which is unsafe for files of other people.

Tested in `tests/recipes/test_weights.py`.
"""

import argparse
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.errors import UserError


def describe_excess(path: str | Path) -> str | None:
    """Describe a zip archive that unpacks to more than its size, unlike any file of `torch.save`; None otherwise."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        claimed = sum(record.file_size for record in archive.infolist())
    size = Path(path).stat().st_size
    return f"its {size:,} bytes unpack to {claimed:,}, and torch.save() packs nothing" if claimed > size else None


def _is_torchscript(path: str | Path) -> bool:
    """Whether `torch.jit.save` wrote a file: its archive holds source code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name and name.endswith(".py") for name in archive.namelist())


def reject_code(path: str | Path, error: Exception) -> None:
    """Raise an error that names the code in a file, if it holds any.

    Args:
        error: the exception of `torch.load(weights_only=True)`.

    Raises:
        UserError: the file would import or call something when it is unpickled.
    """
    match = re.search(r"GLOBAL (\S+?) (?:was not|whose)", str(error)) or re.search("TorchScript", str(error))
    if match:
        # A pickle names `os.system` by the module that defines it: posix or nt.
        name = re.sub(r"^(posix|nt)\.", "os.", match[match.lastindex or 0])
        raise UserError(
            f"{path} holds code ({name}) and not only weights, and reading it would run that code; it is not read:"
            " pass a file of weights alone, such as .safetensors or what torch.save(model.state_dict(), FILE) writes"
        ) from error


def _numpy_numbers() -> list[Any]:
    """Return the globals that unpickle a NumPy number, and nothing else, under the names of NumPy 1 and 2."""
    kinds = [type(np.dtype(code)) for code in "?bhilqBHILQefd"]
    scalar = np.float64(0).__reduce__()[0]
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    return [np.dtype, *kinds, *((scalar, name) for name in names)]


def load_plain(path: str | Path) -> Any:
    """Load a file of `torch.save` on the CPU without running code; large files are mapped into memory.

    NumPy numbers are allowed, and `argparse.Namespace`: many published files hold the arguments of a command line.

    Raises:
        UserError: the file holds code, or unpacks to more than its size.
        Exception: the file is damaged.
    """
    if _is_torchscript(path):
        raise UserError(
            f"{path} is a TorchScript file, which holds code; pass its weights alone, as"
            " torch.save(torch.jit.load(FILE).state_dict(), OTHER) writes them"
        )
    problem = describe_excess(path)
    if problem:
        raise UserError(f"{path} is rejected: {problem}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace, *_numpy_numbers()]):
            if Path(path).suffix == ".safetensors":  # torch chooses the format by this suffix, so it gets a stream.
                with Path(path).open("rb") as stream:
                    return torch.load(stream, map_location="cpu", weights_only=True)
            # Files of torch before 1.6 are no zip archives, and cannot be mapped into memory.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        reject_code(path, error)
        raise
