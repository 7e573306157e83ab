"""Images in folders: which files there are, of which class, and which of them are held out."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.file_table import FileTable
from datamodules.loading.heic import HEIC, reads_heic
from datamodules.loading.randomness import permutation

__all__ = [
    "PARTS",
    "ImageTree",
    "describe_left_out",
    "images_below",
    "is_image",
    "left_out_by_ending",
    "scan_tree",
    "split_by_class",
]

_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUFFIXES = (*_JPEG, *(".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".tga", ".avif"))
PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""The usual names of the parts of a set."""


@dataclass(frozen=True)
class ImageTree:
    """Image files and their classes.

    Attributes:
        classes: names of the classes that have images to train on, sorted.
        parts: the files, sorted, and their classes' numbers, int64 of shape (n,): of "train", and of "val" and "test"
            where they exist.
        notes: remarks for the user, a line each.
        left_out: how many files or rows are not used, by reason.
    """

    classes: tuple[str, ...]
    parts: dict[str, tuple[FileTable, Tensor]]
    notes: list[str]
    left_out: dict[str, int] = field(default_factory=dict)


def is_image(file: str | Path) -> bool:
    """Whether a file is an image that can be read, by its ending."""
    suffix = Path(file).suffix.lower()
    return suffix in _SUFFIXES or (suffix in HEIC and reads_heic())


def left_out_by_ending(files: Sequence[str]) -> dict[str, int]:
    """Files that are no images, counted by their endings, the most frequent first.

    Example:
        >>> left_out_by_ending(["a/1.xyz", "a/2.XYZ", "notes"])
        {'.xyz': 2, 'no ending': 1}
    """
    return dict(Counter(Path(file).suffix.lower() or "no ending" for file in files).most_common())


def describe_left_out(files: Sequence[str], shown: int = 6) -> str:
    """Files that are no images, as in "2 .heic (pip install pillow-heif to read them), 1 .txt, such as a/1.heic".

    Args:
        shown: how many endings are named.
    """
    counts = left_out_by_ending(files)
    named = []
    for ending, count in list(counts.items())[:shown]:
        named.append(f"{count:,} {'without an ending' if ending == 'no ending' else ending}")
        if ending in HEIC:
            named[-1] += " (pip install pillow-heif to read them)"
    if len(counts) > shown:
        named.append(f"{sum(list(counts.values())[shown:]):,} with other endings")
    return f"{', '.join(named)}, such as {files[0]}"


def _visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted; without hidden entries and the shadow folder in archives made by macOS."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX")))


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _visible(folder) if entry.is_dir()]


def _files_below(folder: Path) -> Iterator[Path]:
    """The visible files in a folder and its subfolders, through links too, each folder once."""
    stack, seen = [folder], set()
    while stack:
        here = stack.pop()
        if (real := os.path.realpath(here)) in seen:
            continue
        seen.add(real)
        for entry in _visible(here):
            if entry.is_dir():
                stack.append(entry)
            else:
                yield entry


def images_below(folder: str | Path) -> tuple[list[str], list[str]]:
    """The files in a folder and its subfolders, sorted: those that are images by their suffix, and the others."""
    files = sorted(str(file) for file in _files_below(Path(folder)))
    return [file for file in files if is_image(file)], [file for file in files if not is_image(file)]


def _find_parts(folder: Path) -> dict[str, Path]:
    """The folders of "train", "val" and "test" by any of their usual names; none where `folder` holds the classes."""
    split = {entry.name.lower(): entry for entry in _folders(folder) if _folders(entry)}
    found: dict[str, Path] = {}
    for part, names in PARTS.items():
        places = [split[name] for name in names if name in split]
        if len(places) > 1:
            raise UserError(f"{folder} holds both {places[0].name} and {places[1].name}; keep one of them")
        if places:
            found[part] = places[0]
    if found and "train" not in found:
        raise UserError(
            f"{folder} holds {' and '.join(path.name for path in found.values())} with class folders, but no train"
        )
    return found


def has_part_folders(folder: Path) -> bool:
    """Whether a folder holds train with class folders."""
    return bool(_find_parts(folder))


def _expected(folder: Path) -> str:
    """What to pass instead of a folder that holds no classes."""
    for inner in _folders(folder):
        # Archives often hold a folder of their own name.
        if sum(bool(_folders(part)) or bool(images_below(part)[0]) for part in _folders(inner)) > 1:
            return f"did you mean data_dir={str(inner)!r}?"
    return "expected a folder of images for each class, such as ants/1.jpg, in it or in its folders train and val"


def scan_tree(folder: str | Path) -> ImageTree:
    """The images in FOLDER/train/CLASS, FOLDER/val/CLASS and FOLDER/test/CLASS, or in FOLDER/CLASS.

    Raises:
        UserError: there is no such folder, there are fewer than two classes, or val or test has one that train lacks.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file; unpack it, and pass its folder" if folder.exists() else "does not exist; pass a folder"
        raise UserError(f"data_dir={str(folder)!r} {what} that holds a folder of images for each class")
    found: dict[str, dict[str, list[str]]] = {}
    ignored: list[str] = []
    notes: list[str] = []
    for part, place in (_find_parts(folder) or {"train": folder}).items():
        found[part] = {}
        ignored += [str(entry) for entry in _visible(place) if not entry.is_dir()]
        for class_folder in _folders(place):
            images, others = images_below(class_folder)
            ignored += others
            if images:
                found[part][class_folder.name] = images
            else:
                held = f", but {describe_left_out(others)}" if others else ""
                notes.append(f"class {class_folder.name} is left out of {part}: {class_folder} holds no image{held}")
    classes = tuple(sorted(found["train"]))
    if not classes:
        others = [file for file in ignored if not is_image(file)]
        found_instead = f" (found {describe_left_out(others)})" if others else ""
        raise UserError(f"{folder} holds no class with images{found_instead}; {_expected(folder)}")
    if all(name.lower() in sum(PARTS.values(), ()) for name in classes):
        raise UserError(f"{folder / classes[0]} holds images without class folders; {_expected(folder)}")
    if len(classes) == 1:
        raise UserError(f"{folder} holds images of one class only, {classes[0]}; {_expected(folder)}")
    for part, by_class in found.items():
        if unknown := sorted(set(by_class) - set(classes)):
            raise UserError(
                f"{part} holds classes that train has no image of: {', '.join(unknown)}; "
                f"expected only {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
            )
        if missing := sorted(set(classes) - set(by_class)):
            notes.append(f"{part} has no image of {', '.join(missing)}: scores say nothing about them")
    if ignored:
        notes.append(
            f"left out {len(ignored):,} files that are no images by their endings: {describe_left_out(ignored)}"
        )
    parts = {}
    for part, by_class in found.items():
        pairs = [(file, number) for number, name in enumerate(classes) for file in by_class.get(name, ())]
        parts[part] = (FileTable(file for file, _ in pairs), torch.tensor([number for _, number in pairs]))
    return ImageTree(classes, parts, notes, left_out_by_ending(ignored))


def split_by_class(
    targets: Tensor, classes: Sequence[str], fractions: dict[str, float], seed: int
) -> dict[str, Tensor]:
    """Sorted sample numbers of "train" and of each part in `fractions`, which takes its share of every class.

    A function of the seed, the classes' names and the order of their samples. A class with two samples or more is in
    each part, as far as they suffice; training keeps one at least.

    Args:
        targets: the classes' numbers, int64 of shape (n,).

    Returns:
        int64 of shape (samples,) by part.
    """
    parts: dict[str, list[Tensor]] = {"train": [], **{part: [] for part in fractions}}
    numbers, counts = targets.unique(return_counts=True)
    for number, rows in zip(numbers.tolist(), targets.argsort(stable=True).split(counts.tolist())):
        order = rows[permutation(len(rows), seed, f"split {classes[number]}")]
        for part, fraction in fractions.items():
            wanted = max(round(len(rows) * fraction), 1) if fraction else 0
            held_out = min(wanted, len(order) - 1)
            parts[part].append(order[:held_out])
            order = order[held_out:]
        parts["train"].append(order)
    return {part: torch.cat(rows).sort().values for part, rows in parts.items()}
