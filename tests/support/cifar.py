"""Archives in the format of CIFAR-10 and CIFAR-100: pickles of Python 2 in a .tar.gz."""

import hashlib
import io
import pickle
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Batch = tuple[npt.NDArray[np.uint8], list[int]]
"""Images of shape (n, 32, 32, 3), and their labels."""


class _Python2Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Pickler that writes text and bytes as the strings of Python 2, and NumPy's names of 2009."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_string(self, text: str | bytes) -> None:
        content = text if isinstance(text, bytes) else text.encode()
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_string


def pickled(value: Any) -> bytes:
    """Return the pickle of a value as Python 2 and an old NumPy would write it."""
    file = io.BytesIO()
    _Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def as_batch(images: npt.NDArray[np.uint8], labels: list[int], key: str = "labels") -> bytes:
    """Return the pickle of a batch: a row of 3,072 bytes for each image, all red values first."""
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    fine = {"coarse_labels": [0] * len(labels)} if key == "fine_labels" else {}
    return pickled({"batch_label": "a batch", key: labels, "data": rows, "filenames": [], **fine})


def write_archive(path: Path, members: Mapping[str, bytes]) -> str:
    """Write a .tar.gz of files, and return its MD5."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()
