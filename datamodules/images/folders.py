"""Images in folders of classes, on disk or in an archive: which files there are, and what is left out."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from datamodules.errors import UserError
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
"""The usual names of the parts of a set."""
_NO_CLASSES = frozenset(
    (
        *("annotations", "labels", "masks", "segmentation", "depth", "infrared", "nir", "rgb", "thermal"),
        *("batch", "batches", "fold", "folds", "split", "splits", "images", "imgs", "thumbnails"),
        *("augmented", "original", "originals", "processed", "raw"),
    )
)
"""Words in the names of folders that hold something else than the images of a class."""


def _expected(files: Sequence[str] = ()) -> str:
    """What a folder should hold, and the table among its files that is likeliest meant."""

    def unlikely(file: str) -> tuple[bool, bool, str]:
        stem = Path(file).stem  # Kaggle's are train_labels.csv and sample_submission.csv.
        return part_of(stem) != "train", "label" not in stem.lower(), file

    tables = sorted((file for file in files if text_suffix(Path(file)) in TABLE_SUFFIXES), key=unlikely)
    return (
        "expected a folder of images for each class, such as ants/1.jpg, in it or in its folders train and val; or pass"
        f" a table as data_dir='{tables[0] if tables else 'train.csv'}'"
    )


def _words(name: str) -> list[str]:
    """The words of a name: "JPEGImages" has jpeg and images, "batch1" has batch."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def part_of(name: str) -> str:
    """The part that a name is of by one of its words, and "" where it is of none, or of several.

    Example:
        >>> [part_of(name) for name in ("seg_train", "TestSet", "testset", "val-0-of-1", "train_val")]
        ['train', 'test', 'test', 'val', '']
    """
    words = {word.removesuffix("set").removesuffix("data") for word in _words(name)}
    found = [part for part, names in PART_NAMES.items() if words.intersection(names)]
    return found[0] if len(found) == 1 else ""


def _by_ending(files: Sequence[str]) -> dict[str, int]:
    """Files that are no images, counted by their endings, the most frequent first."""
    return dict(Counter(ending(file) or "no ending" for file in files).most_common())


def describe_left_out(files: Sequence[str]) -> str:
    """Files that are no images, as in "2 .xyz, 1 without an ending, such as a/1.xyz"; six endings are named."""
    counts = list(_by_ending(files).items())
    named = []
    for suffix, count in counts[:6]:
        what = "without an ending" if suffix == "no ending" else suffix
        named.append(f"{count:,} {what}")
    if len(counts) > 6:
        named.append(f"{sum(count for _, count in counts[6:]):,} with other endings")
    return f"{', '.join(named)}, such as {files[0]}"


def _images_and_others(folder: Folder) -> tuple[list[int], list[str]]:
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
    images, others = _images_and_others(top)
    return list(table.select(torch.tensor(images, dtype=torch.int64))), others


def find_parts(folder: Folder) -> dict[str, Folder]:
    """The folders of "train", "val" and "test" by their names; none where `folder` holds the classes.

    Of names such as training_set and seg_test, which a class may have too, there must be two parts.

    Raises:
        UserError: there are two folders of a part, or none to train on.
    """
    by_word: dict[str, list[Folder]] = {part: [] for part in PARTS}
    for inner in folder.folders.values():
        if part := part_of(inner.name):
            by_word[part].append(inner)
    found: dict[str, Folder] = {}
    for part, names in PART_NAMES.items():
        places = [inner for name in names for inner in by_word[part] if inner.name.lower() == name and inner.folders]
        if not places and by_word["train"] and (by_word["val"] or by_word["test"]):
            places = [inner for inner in by_word[part] if inner.folders]
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
    unpacked_place = unpacked(place, cache_folder("archives"))
    if unpacked_place:
        inform(f"{place} is compressed as a whole, so it is unpacked in {unpacked_place}")
        folder, table = list_folder(unpacked_place)
    else:
        folder, table = open_archive(place)
    while len(folder.folders) == 1 and not find_parts(folder):
        inner = next(iter(folder.folders.values()))
        if not inner.folders:
            break
        folder = inner
    return folder, table


@dataclass
class _ClassFolders:
    """What the class folders of a part hold.

    Attributes:
        images: the numbers of the files of each class.
        others: paths of files that are not used.
        notes: remarks on classes without images.
    """

    images: dict[str, list[int]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _read_classes(part: str, place: Folder) -> _ClassFolders:
    found = _ClassFolders()
    # As in seg_train/seg_train/CLASS.
    while [part_of(name) for name in place.folders] == [part] and next(iter(place.folders.values())).folders:
        place = next(iter(place.folders.values()))
    _check_level(place)
    found.others += sorted(place.prefix + name for name in place.files)
    for name in sorted(place.folders):
        _check_masks(place.folders[name])
        images, others = _images_and_others(place.folders[name])
        found.others += others
        if images:
            # Of a name that is written in two ways, both folders are the class.
            found.images.setdefault(same_name(name), []).extend(images)
        else:
            held = f", but {describe_left_out(others)}" if others else ""
            path = place.folders[name].path
            found.notes.append(f"class {name} is left out of {part}: {path} holds no image{held}")
    return found


def _check_masks(folder: Folder) -> None:
    """Refuse masks beside the images that they belong to, as in ultrasound sets."""
    masks = sorted(name for name in folder.files if "_mask" in name.lower())
    if not masks:
        return
    images = {os.path.splitext(name)[0].lower() for name in folder.files}  # noqa: PTH122
    beside = [name for name in masks if name.lower().split("_mask")[0] in images]
    if beside:
        raise UserError(f"{folder.path} holds {len(beside):,} masks beside images, such as {beside[0]}; remove them")


def _check_level(place: Folder) -> None:
    """Refuse folders of domains, cameras, folds or parts, with the same classes in several, in place of classes."""
    above: Counter[str] = Counter()
    several = False
    for folder in place.folders.values():
        if any(map(is_image, folder.files)):
            continue
        above.update(name.lower() for name in folder.folders)
        several = several or len(folder.folders) > 1
    shared = sorted(name for name, count in above.items() if count > 1)
    # A class may hold its images in one folder, as in ants/images and bees/images.
    if shared and several:
        raise UserError(
            f"{place.path} holds folders such as {min(place.folders)} that each hold {' and '.join(shared[:2])}, and"
            " which of them are classes is not clear; pass the data_dir of one of them, or a table of path,label,split"
        )


def _refuse_other_folders(place: Path, classes: Sequence[str], others: Sequence[str]) -> None:
    """Refuse folders of parts, of masks and of other things beside images in place of folders of classes.

    Args:
        others: the files beside them.
    """
    kinds = {}
    for name in classes:
        kind = part_of(name)
        if not _NO_CLASSES.isdisjoint(_words(name)):
            kind = "other"
        if kind:
            kinds[name] = kind
    # Not test_positive and test_negative.
    if len(kinds) > len(classes) / 2 and set(kinds.values()) not in ({"train"}, {"val"}, {"test"}):
        named = " and ".join(list(kinds)[:4])
        raise UserError(f"{place} holds images in {named} without class folders; {_expected(others)}")


def _samples(by_class: Mapping[str, list[int]], classes: Sequence[str], table: FileTable) -> Samples:
    """The files of a part, class after class."""
    rows: list[int] = []
    targets: list[int] = []
    for number, name in enumerate(classes):
        of_class = by_class.get(name, [])
        rows += of_class
        targets += [number] * len(of_class)
    return Samples(table.select(torch.tensor(rows, dtype=torch.int64)), torch.tensor(targets, dtype=torch.int64))


def from_folder(place: str | Path, opened: tuple[Folder, FileTable] | None = None) -> Source:
    """The images in FOLDER/train/CLASS, FOLDER/val/CLASS and FOLDER/test/CLASS, or in FOLDER/CLASS.

    Args:
        place: a folder on disk, or an archive of one.
        opened: what `open_place` made of it, if it was called before.

    Raises:
        UserError: there is no such folder, there are fewer than two classes, or val or test has one that train lacks.
    """
    place = Path(place)
    folder, table = opened or open_place(place)
    of_parts = find_parts(folder)
    notes: list[str] = []
    for beside in folder.folders.values():
        if of_parts and beside not in of_parts.values():
            notes.append(f"{beside.path} is not used: it is no folder train, val or test with class folders")
    found: dict[str, dict[str, list[int]]] = {}
    ignored: list[str] = []
    for part, inner in (of_parts or {"train": folder}).items():
        read = _read_classes(part, inner)
        ignored += read.others
        notes += read.notes
        found[part] = read.images
    if not found["train"]:
        instead = f" (found {describe_left_out(ignored)})" if ignored else ""
        raise UserError(f"{place} holds no class with images{instead}; {_expected(ignored)}")
    classes = tuple(sorted(found["train"]))
    if len(classes) > 1:
        _refuse_other_folders(place, classes, ignored)
    notes += check_classes({"train": classes, **found}, f"{place} holds", _expected(ignored))
    loose = [file for file in ignored if is_image(file)]
    others = [file for file in ignored if not is_image(file)]
    if loose:
        notes.append(f"left out {len(loose):,} images that are in no folder of a class, such as {loose[0]}")
    if others:
        notes.append(f"left out {len(others):,} files that are no images by their endings: {describe_left_out(others)}")
    parts = {part: _samples(by_class, classes, table) for part, by_class in found.items() if by_class}
    notes += note_shared_images(parts)
    return Source(classes, parts, place.resolve().name, notes, _by_ending(ignored))
