"""Images in folders: which files there are, of which class, and which of them are held out."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.loading.archives import ARCHIVES, ArchiveIndex, index_archive, refuse_compressed
from datamodules.loading.file_table import FileTable
from datamodules.loading.file_tree import Folder, Listing, State, files_below
from datamodules.loading.heic import HEIC, reads_heic
from datamodules.loading.randomness import permutation

__all__ = [
    "PARTS",
    "ImageTree",
    "describe_left_out",
    "find_parts",
    "images_below",
    "is_archive",
    "is_image",
    "left_out_by_ending",
    "open_place",
    "scan_tree",
    "split_by_class",
]

_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUFFIXES = (*_JPEG, *(".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".tga", ".avif"))
_MOST_NOTES = 3  # Of the same kind.
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
        states: of all folders and archives that were listed, by path, before they were; see `state_of`. Without these
            it is unknown when the tree changes.
    """

    classes: tuple[str, ...]
    parts: dict[str, tuple[FileTable, Tensor]]
    notes: list[str]
    left_out: dict[str, int] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)


class Opened(NamedTuple):
    """A folder, and what tells about the files in it."""

    folder: Folder
    source: Listing | ArchiveIndex


def is_archive(file: str | Path) -> bool:
    """Whether a file is an archive that can be read in place, by its ending."""
    return _ending(file) in ARCHIVES


def _ending(file: str | Path) -> str:
    # A pathlib.Path takes several times longer.
    return os.path.splitext(file)[1].lower()  # noqa: PTH122


def is_image(file: str | Path) -> bool:
    """Whether a file is an image that can be read, by its ending."""
    suffix = _ending(file)
    return suffix in _SUFFIXES or (suffix in HEIC and reads_heic())


def left_out_by_ending(files: Sequence[str]) -> dict[str, int]:
    """Files that are no images, counted by their endings, the most frequent first.

    Example:
        >>> left_out_by_ending(["a/1.xyz", "a/2.XYZ", "notes"])
        {'.xyz': 2, 'no ending': 1}
    """
    return dict(Counter(_ending(file) or "no ending" for file in files).most_common())


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


def _split(folder: Folder) -> tuple[list[int], list[str]]:
    """The files below a folder in the order of their paths: the numbers of images, and the paths of the others."""
    images: list[int] = []
    others: list[str] = []
    for path, number in files_below(folder).items():
        if is_image(path):
            images.append(number)
        else:
            others.append(path)
    return images, others


def images_below(folder: str | Path) -> tuple[list[str], list[str]]:
    """The files in a folder and its subfolders, sorted: those that are images by their suffix, and the others."""
    listing = Listing(Path(folder))
    images, others = _split(listing.top)
    return list(listing.table.select(torch.tensor(images, dtype=torch.int64))), others


def find_parts(folder: Folder) -> dict[str, Folder]:
    """The folders of "train", "val" and "test" by any of their usual names; none where `folder` holds the classes.

    Raises:
        UserError: there are two folders of a part, or none to train on.
    """
    inner = [folder.folders[name] for name in sorted(folder.folders)]
    found = _by_part(folder, [(place.name, place) for place in inner if place.folders])
    if found and "train" not in found:
        held = " and ".join(place.name for place in found.values())
        raise UserError(f"{folder.path} holds {held} with class folders, but no train")
    return found


def _by_part(folder: Folder, named: list[tuple[str, Folder]]) -> dict[str, Folder]:
    """Which of the entries of a folder, with their names, is which part."""
    found: dict[str, Folder] = {}
    for part, names in PARTS.items():
        places = [place for known in names for name, place in named if name.lower() == known]
        if len(places) > 1:
            raise UserError(f"{folder.path} holds both {places[0].name} and {places[1].name}; keep one of them")
        if places:
            found[part] = places[0]
    return found


def _only_folder(folder: Folder) -> Folder | None:
    """The one folder that holds all others, as often in archives."""
    inner = next(iter(folder.folders.values()), None)
    return inner if inner and inner.folders and len(folder.folders) == 1 else None


def open_place(place: Path) -> Opened:
    """A folder on disk, an archive, or a folder in an archive, such as photos.zip/insects.

    Raises:
        UserError: there is none.
    """
    if place.is_dir():
        listing = Listing(place)
        return Opened(listing.top, listing)
    for path in (place, *place.parents):
        refuse_compressed(path)
        if is_archive(path) and path.is_file():
            index = index_archive(path)
            folder: Folder | None = index.top
            for name in place.relative_to(path).parts:
                folder = folder.folders.get(name) if folder else None
            if folder:
                return Opened(folder, index)
    what = "is a file" if place.is_file() else "does not exist"
    raise UserError(
        f"data_dir={str(place)!r} {what}; pass a folder that holds a folder of images for each class, or a .zip or"
        " .tar of it"
    )


def _unused(folder: Folder, parts: dict[str, Folder]) -> list[str]:
    """A note for each folder beside those of the parts that holds images, or folders that may."""
    notes = []
    for name in sorted(folder.folders.keys() - {place.name for place in parts.values()}):
        beside = folder.folders[name]
        images = sum(map(is_image, beside.files))
        if beside.folders:
            notes.append(f"{beside.path} is not used: it is none of train, val and test")
        elif images:
            notes.append(f"{beside.path} is not used: its {images:,} images are in no folder of a class")
    return notes


def _parts_of(opened: Opened) -> tuple[dict[str, Opened], list[str]]:
    """The folder of each part, which holds the classes, and remarks on others."""
    folder, source = opened
    parts = find_parts(folder)
    if isinstance(source, ArchiveIndex):
        while not parts and (inner := _only_folder(folder)):
            folder, parts = inner, find_parts(inner)
    elif not parts:
        files = [Folder(folder.prefix + name) for name in sorted(folder.files) if is_archive(name)]
        # Beside class folders they are other files.
        beside = files and any(_split(inner)[0] for inner in folder.folders.values())
        archives = _by_part(folder, [(Path(file.name).stem, file) for file in files if not beside])
        if "train" in archives:
            opened_parts = {part: open_place(Path(archive.path)) for part, archive in archives.items()}
            for part, (top, index) in opened_parts.items():
                while inner := _only_folder(top):
                    top = inner
                opened_parts[part] = Opened(top, index)
            return opened_parts, []
    notes = _unused(folder, parts) if parts else []
    return {part: Opened(place, source) for part, place in (parts or {"train": folder}).items()}, notes


def _expected(folder: Folder) -> str:
    """What to pass instead of a folder that holds no classes."""
    for name in sorted(folder.folders):
        inner = folder.folders[name]
        # Archives often hold a folder of their own name.
        if sum(bool(part.folders) or bool(_split(part)[0]) for part in inner.folders.values()) > 1:
            return f"did you mean data_dir={inner.path!r}?"
    return "expected a folder of images for each class, such as ants/1.jpg, in it or in its folders train and val"


def scan_tree(folder: str | Path, opened: Opened | None = None) -> ImageTree:
    """The images in FOLDER/train/CLASS, FOLDER/val/CLASS and FOLDER/test/CLASS, or in FOLDER/CLASS.

    Args:
        folder: on disk or in a .zip or .tar archive, or one that holds train.zip and val.zip or .tar.
        opened: what `open_place` made of it.

    Raises:
        UserError: there is no such folder, there are fewer than two classes, or val or test has one that train lacks.
    """
    opened = opened or open_place(Path(folder))
    found: dict[str, dict[str, list[int]]] = {}
    ignored: list[str] = []
    parts, notes = _parts_of(opened)
    for part, (place, _) in parts.items():
        found[part] = {}
        empty: list[str] = []
        ignored += sorted(place.prefix + name for name in place.files)
        for name in sorted(place.folders):
            images, others = _split(place.folders[name])
            ignored += others
            if images:
                found[part][name] = images
            else:
                held = f", but {describe_left_out(others)}" if others else ""
                at = place.folders[name].path
                empty.append(f"class {name} is left out of {part}: {at} holds no image{held}")
        if len(empty) > _MOST_NOTES:
            more = len(empty) - 1
            empty = [f"{empty[0]}; so are {more:,} more folders of {place.path}"]
        notes += empty
    classes = tuple(sorted(found["train"]))
    for name in classes:
        if name.encode("utf-8", "replace").decode() != name:
            raise UserError(f"the name of the class folder {name!r} is no UTF-8 text; rename it")
    if not classes:
        others = [file for file in ignored if not is_image(file)]
        if count := len(ignored) - len(others):
            what = f"{count:,} images that are" if count > 1 else "an image that is"
            raise UserError(f"{folder} holds {what} in no folder of a class; {_expected(opened.folder)}")
        found_instead = f" (found {describe_left_out(others)})" if others else ""
        raise UserError(f"{folder} holds no class with images{found_instead}; {_expected(opened.folder)}")
    if named := [name for name in classes if name.lower() in sum(PARTS.values(), ())]:
        at = parts["train"].folder.prefix + named[0]
        if len(named) == len(classes):
            raise UserError(f"{at} holds images without class folders; {_expected(opened.folder)}")
        notes.append(f"{at} is taken as a class, as it holds images without class folders")
    if len(classes) == 1:
        raise UserError(f"{folder} holds images of one class only, {classes[0]}; {_expected(opened.folder)}")
    for part, by_class in found.items():
        if unknown := sorted(set(by_class) - set(classes)):
            raise UserError(
                f"{part} holds classes that train has no image of: {', '.join(unknown)}; "
                f"expected only {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
            )
        if missing := sorted(set(classes) - set(by_class)):
            notes.append(f"{part} has no image of {', '.join(missing)}: scores say nothing about them")
    loose, others = [file for file in ignored if is_image(file)], [file for file in ignored if not is_image(file)]
    if loose:
        notes.append(f"left out {len(loose):,} images that are in no folder of a class, such as {loose[0]}")
    if others:
        notes.append(f"left out {len(others):,} files that are no images by their endings: {describe_left_out(others)}")
    files: dict[str, tuple[FileTable, Tensor]] = {}
    for part, by_class in found.items():
        rows = [torch.tensor(by_class.get(name, []), dtype=torch.int64) for name in classes]
        targets = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(of_class) for of_class in rows]))
        files[part] = (parts[part].source.table.select(torch.cat(rows)), targets)
    sources = {id(source): source for _, source in (opened, *parts.values())}.values()
    return ImageTree(
        classes,
        files,
        [note for source in sources for note in source.notes] + notes,
        left_out_by_ending(ignored),
        {path: state for source in sources for path, state in source.states.items()},
    )


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
