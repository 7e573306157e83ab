"""Makes a data set of image files by a layout: train/CLASS/IMAGE and CLASS/IMAGE are recognized, others declared."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from datamodules.errors import UserError, spelled
from datamodules.images import proposals
from datamodules.images.decoding import ending, is_image
from datamodules.images.labels import class_order, same_name
from datamodules.images.named_source import named_source
from datamodules.images.source import PART_FOLDERS, PART_WORDS, PARTS, Source
from datamodules.loading.archives import is_archive, unpacked
from datamodules.loading.caches import cache_folder
from datamodules.loading.file_table import FileTable, Folder, files_below, list_folder, open_archive
from datamodules.notes import inform

_PLACEHOLDER = re.compile(r"(\{split\}|\{class\}|\*|\[[^\]/]+\])")


def _count_suffixes(files: Sequence[str]) -> dict[str, int]:
    """Count files by suffix, the most frequent suffix first."""
    return dict(Counter(ending(file) or "no ending" for file in files).most_common())


def describe_left_out(files: Sequence[str]) -> str:
    """Describe files that are not images, as in "2 .xyz, 1 without an ending, such as a/1.xyz", up to six suffixes."""
    counts = Counter(ending(file) or "without an ending" for file in files)
    phrases = [f"{count:,} {suffix}" for suffix, count in counts.most_common(6)]
    if len(counts) > 6:
        phrases.append(f"{len(counts) - 6:,} other endings")
    return f"{', '.join(phrases)}, such as {files[0]}"


def images_below(folder: str | Path) -> tuple[list[str], list[str]]:
    """Return the sorted paths of the images in a folder and its subfolders, by their suffix, and of the other files."""
    files = files_below(list_folder(Path(folder))[0])
    return [file for file in files if is_image(file)], [file for file in files if not is_image(file)]


def open_place(place: Path) -> tuple[Folder, FileTable]:
    """List a folder on disk or an archive, and return its folder tree and the table of its files.

    The top folder of an archive is left out if there is no other folder.

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
    while len(folder.folders) == 1:
        inner = next(iter(folder.folders.values()))
        if not inner.folders or inner.name.lower() in PART_FOLDERS:
            break
        folder = inner
    return folder, table


def part_folders(folder: Folder) -> list[Folder]:
    """Return the folders of parts that hold folders, or an empty list if `folder` holds the classes."""
    return [inner for inner in folder.folders.values() if inner.name.lower() in PART_FOLDERS and inner.folders]


def _expression(layout: str, parts: Iterable[str], greedy: bool) -> re.Pattern[str]:
    """Return the regular expression of a layout for paths that are relative to the data set."""
    pattern = ""
    groups = {"{class}": "[^/]+" if greedy else "[^/]+?"}
    groups["{split}"] = f"(?i:{'|'.join(sorted(parts, key=len, reverse=True))})"
    for piece in _PLACEHOLDER.split(layout):
        name = piece.strip("{}")
        if piece in groups:
            # Where a placeholder stands twice, it stands for the same text.
            pattern += f"(?P={name})" if f"<{name}>" in pattern else f"(?P<{name}>{groups[piece]})"
        elif piece == "*":
            pattern += "[^/]*"
        else:
            pattern += piece if _PLACEHOLDER.fullmatch(piece) else re.escape(piece)
    return re.compile(pattern)


class _Matches:
    """Images of a layout.

    Attributes:
        images: indices of the images of each class, in the order of their paths, by part.
        unmatched: relative paths of the other files.
    """

    def __init__(self, top: Folder, layout: str, parts: Mapping[str, str]) -> None:
        self.images: dict[str, dict[str, list[int]]] = {}
        self.unmatched: list[str] = []
        names: dict[str, str] = {}
        shortest, longest = (_expression(layout, parts, greedy) for greedy in (False, True))
        for path, number in files_below(top).items():
            relative = path[len(top.prefix) :]
            match = shortest.fullmatch(relative)
            if match is None or not is_image(relative):
                self.unmatched.append(relative)
                continue
            other = match if "{class}/" in layout else longest.fullmatch(relative)
            if other and other["class"] != match["class"]:
                problem = f"the class of {relative} may be {match['class']} or {other['class']}"
                advice = "write digits that follow it as [0-9], as in '{class}_[0-9]*.jpg'"
                raise UserError(problem, setting="layout", value=layout, to_type=advice)
            name = match.groupdict().get("split", "train")
            part = parts[name.lower()]
            if names.setdefault(part, name) != name:
                raise UserError(f"{top.path} holds both {names[part]} and {name}; keep one of them")
            # Two names that differ in their Unicode form only are the same class.
            self.images.setdefault(part, {}).setdefault(same_name(match["class"]), []).append(number)


def from_layout(top: Folder, table: FileTable, layout: str, title: str) -> Source:
    """Make a data set of the images whose paths have a declared layout, such as "{split}/images/{class}_*.jpg".

    A star matches any text without a slash, and [0-9] a digit. ``{split}`` stands for one of `PART_WORDS`.

    Raises:
        UserError: the layout has no class, no image has the layout, or there are fewer than two classes.
    """
    if "{class}" not in layout:
        raise UserError("expected {class} in it", setting="layout", value=layout, to_type="pass '{class}/*'")
    return _source(top, table, _Matches(top, layout, PART_WORDS), layout, title, [])


def _source(top: Folder, table: FileTable, matches: _Matches, layout: str, title: str, notes: list[str]) -> Source:
    """Return the data set of the images of a layout, ordered by class and within a class by path."""
    if "train" not in matches.images:
        raise UserError(proposals.other_structure(top, layout))
    left_out = [top.prefix + path for path in matches.unmatched]
    loose_images = [file for file in left_out if is_image(file)]
    other_files = [file for file in left_out if not is_image(file)]
    if loose_images:
        notes.append(f"left out {len(loose_images):,} images that are not in {layout}, such as {loose_images[0]}")
    if other_files:
        notes.append(
            f"left out {len(other_files):,} files that are no images by their endings: {describe_left_out(other_files)}"
        )
    parts = {}
    for part in filter(matches.images.__contains__, PARTS):
        images = matches.images[part]
        rows = [row for name in class_order(images) for row in images[name]]
        names = [name for name in class_order(images) for _ in images[name]]
        parts[part] = table.select(torch.tensor(rows, dtype=torch.int64)), names
    has_classes = len(matches.images["train"]) > 1
    expected = proposals.EXPECTED if has_classes else proposals.what_to_pass(top, layout)
    return named_source(parts, title, f"{top.path} holds", expected, notes, _count_suffixes(left_out))


def from_folder(place: str | Path, opened: tuple[Folder, FileTable] | None = None) -> Source:
    """Make a data set of the images in FOLDER/train/CLASS, FOLDER/val/CLASS and FOLDER/test/CLASS, or in FOLDER/CLASS.

    Args:
        place: a folder on disk, or an archive of one.
        opened: result of `open_place` for this path, if it was called before.

    Raises:
        UserError: there is no such folder, it has another structure, there are fewer than two classes, or val or test
            has a class that train lacks.
    """
    place = Path(place)
    top, table = opened or open_place(place)
    parts = part_folders(top)
    layout = proposals.RECOGNIZED[0 if parts else 1]
    matches = _Matches(top, layout, PART_FOLDERS)
    notes: list[str] = []
    if parts:
        others = [folder for folder in top.folders.values() if folder not in parts]
        notes += [f"{folder.path} is not used: it is no folder train, val or test of classes" for folder in others]
    class_folders = [folder for part in parts or [top] for folder in part.folders.values()]
    deeper = [path for path in matches.unmatched if is_image(path) and path.count("/") > layout.count("/")]
    # Beside folders of parts, other folders may hold anything.
    prefixes = tuple(f"{folder.name}/" for folder in parts) if parts else ("",)
    below_classes = [path for path in deeper if path.startswith(prefixes)]
    with_images = [folder for folder in class_folders if any(map(is_image, folder.files))]
    if below_classes or proposals.are_no_classes(with_images):
        raise UserError(proposals.other_structure(top, layout, below_classes))
    for folder in class_folders:
        if folder not in with_images:
            files = [folder.prefix + name for name in folder.files]
            held = f", but {describe_left_out(files)}" if files else ""
            notes.append(f"class {folder.name} is left out: {folder.path} holds no image{held}")
    return _source(top, table, matches, layout, place.resolve().name, notes)
