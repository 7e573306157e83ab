"""Makes a data set of images in class folders, on disk or in an archive, and reports files that are left out."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from datamodules.errors import UserError, spelled
from datamodules.images.decoding import ending, is_image
from datamodules.images.labels import check_classes, same_name
from datamodules.images.leaks import note_shared_images
from datamodules.images.source import PARTS, Samples, Source
from datamodules.loading.archives import is_archive, unpacked
from datamodules.loading.caches import cache_folder
from datamodules.loading.file_table import FileTable, Folder, files_below, list_folder, open_archive
from datamodules.loading.tables import TABLE_SUFFIXES
from datamodules.loading.text_files import text_suffix
from datamodules.notes import inform

PART_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""Usual folder names of the parts of a data set."""
_NO_CLASSES = frozenset(
    (
        *("annotations", "labels", "masks", "segmentation", "depth", "infrared", "nir", "rgb", "thermal"),
        *("batch", "batches", "fold", "folds", "split", "splits", "images", "imgs", "thumbnails"),
        *("augmented", "original", "originals", "processed", "raw"),
    )
)
"""Words in the names of folders that hold something other than the images of a class."""


def _expected(files: Sequence[str] = ()) -> str:
    """Return the end of an error: the expected contents of a folder, and the most likely table among its files."""

    def sort_key(file: str) -> tuple[bool, bool, str]:
        # Kaggle's tables are called train_labels.csv and sample_submission.csv.
        stem = Path(file).stem
        return part_of(stem) != "train", "label" not in stem.lower(), file

    tables = sorted((file for file in files if text_suffix(Path(file)) in TABLE_SUFFIXES), key=sort_key)
    table = tables[0] if tables else "train.csv"
    return (
        "expected a folder of images for each class, such as ants/1.jpg, in it or in its folders train and val; or pass"
        f" a table as {spelled('data_dir', table)}"
    )


def _words(name: str) -> list[str]:
    """Split a name into lower-case words: "JPEGImages" into jpeg and images, "batch1" into batch."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def part_of(name: str) -> str:
    """Return the part that one of the words of a name stands for, or "" if there is none or more than one.

    Example:
        >>> [part_of(name) for name in ("seg_train", "TestSet", "testset", "val-0-of-1", "train_val")]
        ['train', 'test', 'test', 'val', '']
    """
    words = {word.removesuffix("set").removesuffix("data") for word in _words(name)}
    parts = [part for part, names in PART_NAMES.items() if words.intersection(names)]
    return parts[0] if len(parts) == 1 else ""


def _count_suffixes(files: Sequence[str]) -> dict[str, int]:
    """Count files by suffix, the most frequent suffix first."""
    return dict(Counter(ending(file) or "no ending" for file in files).most_common())


def describe_left_out(files: Sequence[str]) -> str:
    """Describe files that are not images, as in "2 .xyz, 1 without an ending, such as a/1.xyz", up to six suffixes."""
    counts = list(_count_suffixes(files).items())
    phrases = []
    for suffix, count in counts[:6]:
        description = "without an ending" if suffix == "no ending" else suffix
        phrases.append(f"{count:,} {description}")
    if len(counts) > 6:
        remaining = sum(count for _, count in counts[6:])
        phrases.append(f"{remaining:,} with other endings")
    return f"{', '.join(phrases)}, such as {files[0]}"


def _images_and_others(folder: Folder) -> tuple[list[int], list[str]]:
    """Return the indices of the images below a folder, and the paths of the other files, both sorted by path."""
    images: list[int] = []
    other_files: list[str] = []
    for path, number in files_below(folder).items():
        if is_image(path):
            images.append(number)
        else:
            other_files.append(path)
    return images, other_files


def images_below(folder: str | Path) -> tuple[list[str], list[str]]:
    """Return the sorted paths of the images in a folder and its subfolders, by their suffix, and of the other files."""
    top, table = list_folder(Path(folder))
    images, other_files = _images_and_others(top)
    return list(table.select(torch.tensor(images, dtype=torch.int64))), other_files


def find_parts(folder: Folder) -> dict[str, Folder]:
    """Return the folders of "train", "val" and "test", or an empty dict if `folder` holds the classes.

    Names such as training_set and seg_test may be those of classes. They count only if there are two parts.

    Raises:
        UserError: a part has two folders, or there is no training part.
    """
    candidates: dict[str, list[Folder]] = {part: [] for part in PARTS}
    for subfolder in folder.folders.values():
        part = part_of(subfolder.name)
        if part:
            candidates[part].append(subfolder)
    has_two_parts = bool(candidates["train"] and (candidates["val"] or candidates["test"]))
    parts: dict[str, Folder] = {}
    for part, names in PART_NAMES.items():
        # A folder of a part holds class folders. A folder "test" that holds images only may be a class.
        matches = [
            subfolder
            for name in names
            for subfolder in candidates[part]
            if subfolder.name.lower() == name and subfolder.folders
        ]
        if not matches and has_two_parts:
            matches = [subfolder for subfolder in candidates[part] if subfolder.folders]
        if len(matches) > 1:
            raise UserError(f"{folder.path} holds both {matches[0].name} and {matches[1].name}; keep one of them")
        if matches:
            parts[part] = matches[0]
    if parts and "train" not in parts:
        listed = " and ".join(part_folder.name for part_folder in parts.values())
        raise UserError(f"{folder.path} holds {listed} with class folders, but no train")
    return parts


def open_place(place: Path) -> tuple[Folder, FileTable]:
    """List a folder on disk or an archive, and return its folder tree and the table of its files.

    The top folder of an archive is left out if it holds everything else.

    Raises:
        UserError: there is no such folder or archive.
    """
    if place.is_dir():
        return list_folder(place)
    if not is_archive(place) or not place.is_file():
        problem = "is neither a folder nor a .zip archive" if place.is_file() else "does not exist"
        raise UserError(
            f"{spelled('data_dir', str(place))} {problem}; pass a folder that holds a folder of images for each class,"
            " or a .zip of it"
        )
    unpacked_folder = unpacked(place, cache_folder("archives"))
    if unpacked_folder:
        inform(f"{place} is compressed as a whole, so it is unpacked in {unpacked_folder}")
        folder, table = list_folder(unpacked_folder)
    else:
        folder, table = open_archive(place)
    # Archives usually hold one folder, with the name of the data set.
    while len(folder.folders) == 1 and not find_parts(folder):
        inner = next(iter(folder.folders.values()))
        if not inner.folders:
            break
        folder = inner
    return folder, table


@dataclass
class _ClassFolders:
    """Contents of the class folders of a part.

    Attributes:
        images: indices of the images of each class.
        unused_files: paths of the files that are not used.
        notes: remarks on classes without images.
    """

    images: dict[str, list[int]] = field(default_factory=dict)
    unused_files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _read_classes(part: str, folder: Folder) -> _ClassFolders:
    """Read the class folders of a part."""
    contents = _ClassFolders()
    # Some archives repeat the folder, as in seg_train/seg_train/CLASS.
    while [part_of(name) for name in folder.folders] == [part] and next(iter(folder.folders.values())).folders:
        folder = next(iter(folder.folders.values()))
    _check_level(folder)
    contents.unused_files += sorted(folder.prefix + name for name in folder.files)
    for name in sorted(folder.folders):
        class_folder = folder.folders[name]
        _check_masks(class_folder)
        images, other_files = _images_and_others(class_folder)
        contents.unused_files += other_files
        if images:
            # Two folders whose names differ in their Unicode form only are the same class.
            contents.images.setdefault(same_name(name), []).extend(images)
        else:
            held = f", but {describe_left_out(other_files)}" if other_files else ""
            contents.notes.append(f"class {name} is left out of {part}: {class_folder.path} holds no image{held}")
    return contents


def _check_masks(folder: Folder) -> None:
    """Raise an error for masks beside their images, as in ultrasound data sets: they would become training images."""
    masks = sorted(name for name in folder.files if "_mask" in name.lower())
    if not masks:
        return
    images = {os.path.splitext(name)[0].lower() for name in folder.files}  # noqa: PTH122
    with_image = [name for name in masks if name.lower().split("_mask")[0] in images]
    if with_image:
        raise UserError(
            f"{folder.path} holds {len(with_image):,} masks beside images, such as {with_image[0]}; remove them"
        )


def _check_level(folder: Folder) -> None:
    """Raise an error for folders of domains, cameras or folds, which contain the same class folders."""
    counts: Counter[str] = Counter()
    has_several = False
    for subfolder in folder.folders.values():
        if any(map(is_image, subfolder.files)):
            continue
        counts.update(name.lower() for name in subfolder.folders)
        has_several = has_several or len(subfolder.folders) > 1
    shared = sorted(name for name, count in counts.items() if count > 1)
    # A class may hold its images in one folder, as in ants/images and bees/images.
    if shared and has_several:
        raise UserError(
            f"{folder.path} holds folders such as {min(folder.folders)} that each hold {' and '.join(shared[:2])}, and"
            " which of them are classes is not clear; pass the data_dir of one of them, or a table of path,label,split"
        )


def _refuse_other_folders(place: Path, classes: Sequence[str], unused_files: Sequence[str]) -> None:
    """Raise an error if most folders are named after parts, masks and the like, and not after classes.

    Args:
        place: path of the data set, for the message.
        classes: names of the folders that hold images.
        unused_files: files of the data set that are not used.
    """
    kinds = {}
    for name in classes:
        kind = part_of(name)
        if not _NO_CLASSES.isdisjoint(_words(name)):
            kind = "other"
        if kind:
            kinds[name] = kind
    # Folders that all stand for one part are classes, as in test_positive and test_negative.
    if len(kinds) > len(classes) / 2 and set(kinds.values()) not in ({"train"}, {"val"}, {"test"}):
        listed = " and ".join(list(kinds)[:4])
        raise UserError(f"{place} holds images in {listed} without class folders; {_expected(unused_files)}")


def _samples(by_class: Mapping[str, list[int]], classes: Sequence[str], table: FileTable) -> Samples:
    """Return the samples of a part, ordered by class and within a class by path."""
    rows: list[int] = []
    targets: list[int] = []
    for number, name in enumerate(classes):
        class_rows = by_class.get(name, [])
        rows += class_rows
        targets += [number] * len(class_rows)
    return Samples(table.select(torch.tensor(rows, dtype=torch.int64)), torch.tensor(targets, dtype=torch.int64))


def from_folder(place: str | Path, opened: tuple[Folder, FileTable] | None = None) -> Source:
    """Make a data set of the images in FOLDER/train/CLASS, FOLDER/val/CLASS and FOLDER/test/CLASS, or in FOLDER/CLASS.

    Args:
        place: a folder on disk, or an archive of one.
        opened: result of `open_place` for this path, if it was called before.

    Raises:
        UserError: there is no such folder, there are fewer than two classes, or val or test has a class that train
            lacks.
    """
    place = Path(place)
    folder, table = opened or open_place(place)
    part_folders = find_parts(folder)
    notes: list[str] = []
    for subfolder in folder.folders.values():
        if part_folders and subfolder not in part_folders.values():
            notes.append(f"{subfolder.path} is not used: it is no folder train, val or test with class folders")
    images: dict[str, dict[str, list[int]]] = {}
    unused_files: list[str] = []
    for part, part_folder in (part_folders or {"train": folder}).items():
        contents = _read_classes(part, part_folder)
        unused_files += contents.unused_files
        notes += contents.notes
        images[part] = contents.images
    if not images["train"]:
        instead = f" (found {describe_left_out(unused_files)})" if unused_files else ""
        raise UserError(f"{place} holds no class with images{instead}; {_expected(unused_files)}")
    # Sorted, so that a class has the same number on every machine.
    classes = tuple(sorted(images["train"]))
    # With one class, the error of `check_classes` names what is missing.
    if len(classes) > 1:
        _refuse_other_folders(place, classes, unused_files)
    notes += check_classes({"train": classes, **images}, f"{place} holds", _expected(unused_files))
    loose_images = [file for file in unused_files if is_image(file)]
    other_files = [file for file in unused_files if not is_image(file)]
    if loose_images:
        notes.append(
            f"left out {len(loose_images):,} images that are in no folder of a class, such as {loose_images[0]}"
        )
    if other_files:
        notes.append(
            f"left out {len(other_files):,} files that are no images by their endings: {describe_left_out(other_files)}"
        )
    parts = {part: _samples(by_class, classes, table) for part, by_class in images.items() if by_class}
    notes += note_shared_images(parts)
    return Source(classes, parts, place.resolve().name, notes, _count_suffixes(unused_files))
