"""Images in folders: which files there are, of which class, and which of them are held out."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.decoding import ending, is_image
from datamodules.images.file_table import FileTable, Folder, files_below, list_folder, open_archive
from datamodules.loading.randomness import permutation

PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""The usual names of the parts of a set."""
_NO_CLASSES = {"annotations", "fold", "folds", "images", "imgs", "labels", "masks", "split", "splits"}
"""Words in the names of folders that hold something else than the images of a class."""


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def part_of(name: str) -> str:
    """The part that a name is of by one of its words, and "" where it is of none, or of several.

    Example:
        >>> [part_of(name) for name in ("seg_train", "TestSet", "testset", "val-0-of-1", "train_val")]
        ['train', 'test', 'test', 'val', '']
    """
    words = {word.removesuffix("set").removesuffix("data") for word in _words(name)}
    found = [part for part, names in PARTS.items() if words.intersection(names)]
    return found[0] if len(found) == 1 else ""


@dataclass(frozen=True)
class ImageTree:
    """Images and their classes.

    Attributes:
        classes: names of the classes that have images to train on, sorted.
        parts: the files, sorted, or bytes of shape (n, height, width, ...), and their classes' numbers, int64 of shape
            (n,): of "train", and of "val" and "test" where they exist.
        notes: remarks for the user, a line each.
        left_out: how many files or rows are not used, by reason.
        title: what the set is called, where it is not the name of its place.
        source: " of" and the file that images in memory are from, for messages.
    """

    classes: tuple[str, ...]
    parts: dict[str, tuple[Any, Tensor]]
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    title: str = ""
    source: str = ""


def is_archive(file: str | Path) -> bool:
    """Whether a file is an archive that can be read in place, by its ending."""
    return ending(file) == ".zip"


def _by_ending(files: Sequence[str]) -> dict[str, int]:
    """Files that are no images, counted by their endings, the most frequent first."""
    return dict(Counter(ending(file) or "no ending" for file in files).most_common())


def describe_left_out(files: Sequence[str]) -> str:
    """Files that are no images, as in "2 .xyz, 1 without an ending, such as a/1.xyz"; six endings are named."""
    counts = list(_by_ending(files).items())
    named = [f"{n:,} {'without an ending' if suffix == 'no ending' else suffix}" for suffix, n in counts[:6]]
    if len(counts) > 6:
        named.append(f"{sum(n for _, n in counts[6:]):,} with other endings")
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
    top, table = list_folder(Path(folder))
    images, others = _split(top)
    return list(table.select(torch.tensor(images, dtype=torch.int64))), others


def find_parts(folder: Folder) -> dict[str, Folder]:
    """The folders of "train", "val" and "test" by their names; none where `folder` holds the classes.

    Of names such as training_set and seg_test, which a class may have too, there must be two parts.

    Raises:
        UserError: there are two folders of a part, or none to train on.
    """
    inner = folder.folders.values()
    by_word = {part: [here for here in inner if part_of(here.name) == part] for part in PARTS}
    found: dict[str, Folder] = {}
    for part, names in PARTS.items():
        places = [here for name in names for here in inner if here.name.lower() == name and here.folders]
        if not places and by_word["train"] and (by_word["val"] or by_word["test"]):
            places = [here for here in by_word[part] if here.folders]
        if len(places) > 1:
            raise UserError(f"{folder.path} holds both {places[0].name} and {places[1].name}; keep one of them")
        if places:
            found[part] = places[0]
    if found and "train" not in found:
        held = " and ".join(place.name for place in found.values())
        raise UserError(f"{folder.path} holds {held} with class folders, but no train")
    return found


def open_place(place: Path) -> tuple[Folder, FileTable]:
    """A folder on disk, or an archive, of which a folder that holds all others is left out; and the files by number.

    Raises:
        UserError: there is none.
    """
    if place.is_dir():
        return list_folder(place)
    if not is_archive(place) or not place.is_file():
        what = "is neither a folder nor a .zip archive" if place.is_file() else "does not exist"
        raise UserError(
            f"data_dir={str(place)!r} {what}; pass a folder that holds a folder of images for each class, or a .zip of"
            " it"
        )
    folder, table = open_archive(place)
    while len(folder.folders) == 1 and not find_parts(folder):
        inner = next(iter(folder.folders.values()))
        if not inner.folders:
            break
        folder = inner
    return folder, table


def _class_images(part: str, place: Folder) -> tuple[dict[str, list[int]], list[str], list[str]]:
    """The numbers of the images of each class, the files that are not used, and remarks on empty classes."""
    found: dict[str, list[int]] = {}
    # As in seg_train/seg_train/CLASS.
    while [part_of(name) for name in place.folders] == [part] and next(iter(place.folders.values())).folders:
        place = next(iter(place.folders.values()))
    _check_level(place)
    ignored = sorted(place.prefix + name for name in place.files)
    empty: list[str] = []
    for name in sorted(place.folders):
        _check_masks(place.folders[name])
        images, others = _split(place.folders[name])
        ignored += others
        if images:
            found[name] = images
        else:
            held = f", but {describe_left_out(others)}" if others else ""
            empty.append(f"class {name} is left out of {part}: {place.folders[name].path} holds no image{held}")
    return found, ignored, empty


def _check_masks(folder: Folder) -> None:
    """Refuse masks beside the images that they belong to, as in ultrasound sets."""
    masks = sorted(name for name in folder.files if "_mask" in name.lower())
    images = {os.path.splitext(name)[0].lower() for name in folder.files} if masks else set()  # noqa: PTH122
    if found := [name for name in masks if name.lower().split("_mask")[0] in images]:
        raise UserError(f"{folder.path} holds {len(found):,} masks beside images, such as {found[0]}; remove them")


def _check_level(place: Folder) -> None:
    """Refuse folders of domains, folds or parts, each with the same classes, in place of folders of classes."""
    above: Counter[str] = Counter()
    for folder in place.folders.values():
        while len(folder.folders) == 1 and not any(map(is_image, folder.files)):
            folder = next(iter(folder.folders.values()))
        if not any(map(is_image, folder.files)):
            above.update(name.lower() for name in folder.folders)
    shared = sorted(name for name, count in above.items() if count > 1)
    if len(shared) > 1:
        raise UserError(
            f"{place.path} holds folders such as {min(place.folders)} that each hold {shared[0]} and {shared[1]}, and"
            " which of them are classes is not clear; pass the data_dir of one of them, or a table of path,label,split"
        )


def _check_classes(place: Path, found: dict[str, dict[str, list[int]]], ignored: list[str]) -> list[str]:
    """Refuse what cannot be trained on, and remark on classes that a part lacks."""
    classes, notes = sorted(found["train"]), []
    expected = (
        "expected a folder of images for each class, such as ants/1.jpg, in it or in its folders train and val; or pass"
        " a table as data_dir='train.csv'"
    )
    if not classes:
        instead = f" (found {describe_left_out(ignored)})" if ignored else ""
        raise UserError(f"{place} holds no class with images{instead}; {expected}")
    if len(classes) == 1:
        raise UserError(f"{place} holds images of one class only, {classes[0]}; {expected}")
    kinds = {name: part_of(name) if _NO_CLASSES.isdisjoint(_words(name)) else "other" for name in classes}
    of_none = {name: kind for name, kind in kinds.items() if kind}
    # Not test_positive and test_negative.
    if len(of_none) > len(classes) / 2 and set(of_none.values()) not in ({"train"}, {"val"}, {"test"}):
        raise UserError(f"{place} holds images in {' and '.join(list(of_none)[:4])} without class folders; {expected}")
    for part, by_class in found.items():
        if unknown := sorted(set(by_class) - set(classes)):
            raise UserError(
                f"{part} holds classes that train has no image of: {', '.join(unknown)}; "
                f"expected only {', '.join(classes[:10])}{', ...' * (len(classes) > 10)}"
            )
        if missing := sorted(set(classes) - set(by_class)):
            notes.append(f"{part} has no image of {', '.join(missing)}: scores say nothing about them")
    return notes


def scan_tree(place: Path, folder: Folder, table: FileTable) -> ImageTree:
    """The images in FOLDER/train/CLASS, FOLDER/val/CLASS and FOLDER/test/CLASS, or in FOLDER/CLASS.

    Args:
        place: a folder on disk, or a .zip archive.
        folder, table: what `open_place` made of it.

    Raises:
        UserError: there is no such folder, there are fewer than two classes, or val or test has one that train lacks.
    """
    found: dict[str, dict[str, list[int]]] = {}
    ignored: list[str] = []
    notes: list[str] = []
    of_parts = find_parts(folder)
    for beside in folder.folders.values():
        if of_parts and beside not in of_parts.values():
            notes.append(f"{beside.path} is not used: it is no folder train, val or test with class folders")
    for part, inner in (of_parts or {"train": folder}).items():
        found[part], others, empty = _class_images(part, inner)
        ignored += others
        notes += empty
    notes += _check_classes(place, found, ignored)
    loose, others = [file for file in ignored if is_image(file)], [file for file in ignored if not is_image(file)]
    if loose:
        notes.append(f"left out {len(loose):,} images that are in no folder of a class, such as {loose[0]}")
    if others:
        notes.append(f"left out {len(others):,} files that are no images by their endings: {describe_left_out(others)}")
    classes = tuple(sorted(found["train"]))
    parts: dict[str, tuple[FileTable, Tensor]] = {}
    for part, by_class in found.items():
        if not by_class:
            continue
        rows = [torch.tensor(by_class.get(name, []), dtype=torch.int64) for name in classes]
        targets = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(of_class) for of_class in rows]))
        parts[part] = (table.select(torch.cat(rows)), targets)
    return ImageTree(classes, parts, notes, _by_ending(ignored))


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
