"""Files that a stranger may have made, for the rows of `benchmarks.faults.cases`."""

import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "name_a_victim",
    "write_aliases",
    "write_bomb",
    "write_code",
    "write_digit_bomb",
    "write_image_bomb",
    "write_import",
    "write_victim",
]


def name_a_victim(path: Path) -> None:
    """Have a checkpoint remember a file of the user's as its best one, which the next better score would remove."""
    checkpoint = torch.load(path, weights_only=True)
    victim = f"/run/{'../' * 30}{path.parents[4]}/files/victim.ckpt"  # Within the run's folder, for who reads no "..".
    for name, state in checkpoint["callbacks"].items():
        if name.startswith("ExactCheckpoint") and state.get("best_model_path"):
            worst = torch.tensor(-1e9 if "'max'" in name else 1e9)
            state |= {"best_k_models": {victim: worst}, "kth_best_model_path": victim, "best_model_path": victim}
            state |= {"kth_value": worst, "best_model_score": worst, "dirpath": "/run"}
    torch.save(checkpoint, path)


def write_victim(folder: Path) -> None:
    """A file of the user's."""
    (folder / "victim.ckpt").write_text("precious")


def write_bomb(folder: Path) -> None:
    """Eight gibibytes of sentence pairs: the members of a gzip file may repeat."""
    member = gzip.compress(b"a\tb\n" * (1 << 25), 6)
    (folder / "bomb.tsv.gz").write_bytes(member * 64)


def write_digit_bomb(folder: Path) -> None:
    header = {
        "images": struct.pack(">4B3I", 0, 0, 8, 3, 60_000, 28, 28),
        "labels": struct.pack(">4BI", 0, 0, 8, 1, 60_000),
    }
    member = gzip.compress(bytes(1 << 27), 6)
    for part in ("train", "t10k"):
        for kind, content in header.items():
            name = f"{part}-{kind}-idx{3 if kind == 'images' else 1}-ubyte.gz"
            (folder / name).write_bytes(gzip.compress(content) + member * 64)


def write_image_bomb(folder: Path) -> None:
    """A PNG of 60,000 x 60,000 pixels in each of two classes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    image = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(4):
            (folder / name / f"{number}.png").write_bytes(image)


def write_aliases(folder: Path) -> None:
    """YAML whose nine lines stand for a billion values."""
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi")]
    (folder / "settings.yaml").write_text("\n".join([*lines, "lr: *i"]))


def write_import(folder: Path) -> None:
    """Settings with a class of a module that nobody has imported."""
    (folder / "settings.yaml").write_text("strategy:\n  class_path: this.s\n")


class _Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("code-from-a-file-was-run",)


def write_code(folder: Path) -> None:
    """Weights whose pickle makes a folder when it is loaded."""
    torch.save({"state_dict": _Code()}, folder / "weights.pth")
