"""Image data sets at a path: two layouts of folders, tables, and named arrays.

Folders are train/CLASS/IMAGE or CLASS/IMAGE; the user declares other layouts. `DataSet` is the data set of an image
data module, which is read on first use.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from datamodules.errors import UserError, spelled
from datamodules.images import proposals
from datamodules.images.arrays import from_samples, read_npz
from datamodules.images.builtin_datasets import ImageSet, digits_source, download_cifar, from_cifar
from datamodules.images.decoding import ending, is_image
from datamodules.images.image_tables import find_tables, from_tables, other_parts
from datamodules.images.labels import check_same_classes, class_order, same_name
from datamodules.images.source import PART_FOLDERS, PART_WORDS, PARTS, Source, named_source, part_folders
from datamodules.loading.file_table import (
    FileTable,
    Folder,
    cache_folder,
    files_below,
    is_archive,
    list_folder,
    open_archive,
    unpacked,
)
from datamodules.loading.table_files import TABLE_SUFFIXES, text_suffix
from datamodules.notes import inform, inform_if_slow, warn
from datamodules.ranges import check_choice

_PLACEHOLDER = re.compile(r"(\{split\}|\{class\}|\*|\[[^\]/]+\])")


def _count_suffixes(files: Sequence[str]) -> dict[str, int]:
    """Count files by suffix, the most frequent suffix first."""
    return dict(Counter(ending(file) or "no ending" for file in files).most_common())


def open_path(path: Path) -> tuple[Folder, FileTable]:
    """List a folder or an archive, and return its folder tree and the table of its files.

    If an archive holds one folder only, that folder is the root of the tree.

    Raises:
        UserError: there is no such folder or archive.
    """
    if path.is_dir():
        return list_folder(path)
    if not is_archive(path) or not path.is_file():
        problem = "is neither a folder nor a .zip archive" if path.is_file() else "does not exist"
        raise UserError(
            f"{spelled('data_dir', str(path))} {problem}; pass a folder that holds a folder of images for each class,"
            " or a .zip of it"
        )
    unpacked_folder = unpacked(path, cache_folder("archives"))
    if unpacked_folder:
        inform(f"{path} is compressed as a whole, so it is unpacked in {unpacked_folder}")
        folder, table = list_folder(unpacked_folder)
    else:
        folder, table = open_archive(path)
    # Most archives hold one folder, named after the data set.
    while len(folder.folders) == 1:
        inner = next(iter(folder.folders.values()))
        if not inner.folders or inner.name.lower() in PART_FOLDERS:
            break
        folder = inner
    return folder, table


def _expression(layout: str, parts: Iterable[str], greedy: bool) -> re.Pattern[str]:
    """Return the regular expression of a layout, for paths relative to the data set."""
    pattern = ""
    groups = {"{class}": "[^/]+" if greedy else "[^/]+?"}
    groups["{split}"] = f"(?i:{'|'.join(sorted(parts, key=len, reverse=True))})"
    for piece in _PLACEHOLDER.split(layout):
        name = piece.strip("{}")
        if piece in groups:
            # A repeated placeholder matches the same text.
            pattern += f"(?P={name})" if f"<{name}>" in pattern else f"(?P<{name}>{groups[piece]})"
        elif piece == "*":
            pattern += "[^/]*"
        else:
            pattern += piece if _PLACEHOLDER.fullmatch(piece) else re.escape(piece)
    return re.compile(pattern)


class _Matches:
    """Images that match a layout.

    Attributes:
        images: indices of the images by part and class, in the order of their paths.
        unmatched: relative paths of all other files.
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
            # Names that differ in their Unicode form only are one class.
            self.images.setdefault(part, {}).setdefault(same_name(match["class"]), []).append(number)


def from_layout(top: Folder, table: FileTable, layout: str, title: str) -> Source:
    """Make a data set from the images whose paths match a layout, such as "{split}/images/{class}_*.jpg".

    A star matches any text without a slash, [0-9] matches a digit, and ``{split}`` matches one of `PART_WORDS`.

    Raises:
        UserError: the layout has no {class}, no image matches it, or there are fewer than two classes.
    """
    if "{class}" not in layout:
        raise UserError("expected {class} in it", setting="layout", value=layout, to_type="pass '{class}/*'")
    return _source(top, table, _Matches(top, layout, PART_WORDS), layout, title, [])


def _source(top: Folder, table: FileTable, matches: _Matches, layout: str, title: str, notes: list[str]) -> Source:
    """Return the data set of the images that match a layout, ordered by class and then by path."""
    if "train" not in matches.images:
        raise UserError(proposals.other_structure(top, layout))
    left_out = [top.prefix + path for path in matches.unmatched]
    loose_images = [file for file in left_out if is_image(file)]
    other_files = [file for file in left_out if not is_image(file)]
    if loose_images:
        notes.append(f"left out {len(loose_images):,} images that are not in {layout}, such as {loose_images[0]}")
    if other_files:
        listed = proposals.describe_left_out(other_files)
        notes.append(f"left out {len(other_files):,} files that are no images by their endings: {listed}")
    parts = {}
    for part in filter(matches.images.__contains__, PARTS):
        images = matches.images[part]
        rows = [row for name in class_order(images) for row in images[name]]
        names = [name for name in class_order(images) for _ in images[name]]
        parts[part] = table.select(torch.tensor(rows, dtype=torch.int64)), names
    has_classes = len(matches.images["train"]) > 1
    expected = proposals.EXPECTED if has_classes else proposals.what_to_pass(top, layout)
    return named_source(parts, title, f"{top.path} holds", expected, notes, _count_suffixes(left_out))


def from_folder(path: str | Path, opened: tuple[Folder, FileTable] | None = None) -> Source:
    """Make a data set from the images in FOLDER/train/CLASS, FOLDER/val/CLASS, FOLDER/test/CLASS, or FOLDER/CLASS.

    Args:
        path: a folder, or an archive of a folder.
        opened: result of `open_path`, if it was called before.

    Raises:
        UserError: there is no such folder, it has another structure, there are fewer than two classes, or train lacks a
            class of val or test.
    """
    path = Path(path)
    top, table = opened or open_path(path)
    parts = part_folders(top)
    layout = proposals.RECOGNIZED[0 if parts else 1]
    matches = _Matches(top, layout, PART_FOLDERS)
    notes: list[str] = []
    if parts:
        others = [folder for folder in top.folders.values() if folder not in parts]
        notes += [f"{folder.path} is not used: it is no folder train, val or test of classes" for folder in others]
    class_folders = [folder for part in parts or [top] for folder in part.folders.values()]
    deeper = [path for path in matches.unmatched if is_image(path) and path.count("/") > layout.count("/")]
    # Folders beside train, val and test may hold anything.
    prefixes = tuple(f"{folder.name}/" for folder in parts) if parts else ("",)
    below_classes = [path for path in deeper if path.startswith(prefixes)]
    with_images = [folder for folder in class_folders if any(map(is_image, folder.files))]
    if below_classes or proposals.are_no_classes(with_images):
        raise UserError(proposals.other_structure(top, layout, below_classes))
    for folder in class_folders:
        if folder not in with_images:
            files = [folder.prefix + name for name in folder.files]
            held = f", but {proposals.describe_left_out(files)}" if files else ""
            notes.append(f"class {folder.name} is left out: {folder.path} holds no image{held}")
    return _source(top, table, matches, layout, path.resolve().name, notes)


def find_images(
    path: str | Path,
    layout: str | None = None,
    columns: str | None = None,
    on_faults: Literal["error", "skip"] | None = None,
) -> Source:
    """Find images in an .npz file, a table, tables of the parts of a folder or archive, or folders of classes.

    Args:
        path: a file, a folder or an archive.
        layout: positions of class and part in the path of an image, see `from_layout`; None: see `from_folder`.
        columns: other names of columns or arrays, see `parse_columns`.
        on_faults: "error" or "skip" for unusable rows of a table, see `from_tables`.

    Raises:
        UserError: there is nothing to train on, or rows are unusable.
    """
    path = Path(path)
    is_table = path.is_file() and (columns is not None or text_suffix(path) in (*TABLE_SUFFIXES, ".txt"))
    if layout is not None and (columns is not None or is_table):
        raise UserError("a table or an array has no layout", setting="layout", value=layout)
    if path.suffix.lower() == ".npz":
        return read_npz(path, columns)
    if is_table and not is_archive(path):
        return from_tables(path, {"train": [str(path)]}, columns, on_faults, others=other_parts(path))
    opened = open_path(path)
    if layout is not None:
        return from_layout(*opened, layout, path.resolve().name)
    tables, others = find_tables(opened[0])
    if tables:
        return from_tables(path, tables, columns, on_faults, opened, others)
    if columns is not None:
        problem = f"{path} holds no table train.csv, or folders of classes beside it"
        raise UserError(problem, setting="columns", value=columns, to_type="pass the table itself")
    source = from_folder(path, opened)
    source.notes.extend(f"{path} is not used: the class folders are" for path in others)
    return source


def check_path(dataset: str, data_dir: str | Path | None, sets: Collection[str]) -> str | None:
    """Check the name of a data set, and return its path with ~ expanded.

    Raises:
        UserError: there is no such data set, or it is bundled and has no path.
    """
    check_choice("dataset", dataset, ("auto", *sets))
    if data_dir is None:
        return None
    # A string: with a Path among its hyperparameters, a checkpoint does not load with weights_only=True.
    path = str(Path(data_dir).expanduser())
    if dataset == "digits":
        raise UserError(
            f"{spelled('dataset', dataset)} comes with this package, so {spelled('data_dir', path)} would not be read"
        )
    return path


class DataSet:
    """Data set of an image data module, read on first use: a data set known by name, or the user's images.

    Args:
        sets: facts about each data set by name; "auto" has the facts of the first one.
        own: name of the user's images in `sets`.
        name: name of the data set; may be "auto" until `decide` is called.
        source: the user's images, if they have been read already.
    """

    declared_num_classes: int | None = None
    """Number of classes that the user has declared; None takes the number from the data."""
    _download_error: Exception | None = None

    def __init__(self, sets: Mapping[str, ImageSet], own: str, name: str, source: Source | None = None) -> None:
        self.sets = sets
        self.own = own
        self.name = name
        self.settings: Mapping[str, Any] = {}
        """Settings of the data module, such as ``data_dir``. Some are set after its constructor."""
        self._source = source
        self._saved_classes: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether the data set is the user's images."""
        return self.name == self.own

    @property
    def is_read(self) -> bool:
        """Whether `source` has been read."""
        return self._source is not None

    @property
    def folder(self) -> Path:
        """Path of the data."""
        return Path(self.settings.get("data_dir") or "data")

    @property
    def info(self) -> ImageSet:
        """Name, statistics and, once known, classes of the data set."""
        known = self.sets[self.name if self.name in self.sets else next(iter(self.sets))]
        if self.name == self.own and self._source is not None:
            return replace(known, title=self._source.title, classes=self._source.classes)
        return replace(known, classes=self._saved_classes or known.classes)

    @property
    def num_classes(self) -> int:
        """Number of classes. Lists the user's images, unless a checkpoint has named the classes."""
        has_names = self._saved_classes or not self.is_own
        return self.declared_num_classes or len(self.info.classes if has_names else self.source.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes. Empty before the data set is read, and if another number of classes is declared."""
        names = self.info.classes
        return names if self.declared_num_classes in (None, len(names)) else ()

    @property
    def parts(self) -> Collection[str]:
        """Parts of the data set as it is published. Lists the user's images."""
        return self.source.parts if self.is_own else self.info.parts

    @property
    def source(self) -> Source:
        """Source of the data set. The first access lists the user's images, and logs notes about them.

        Raises:
            UserError: there is no data to train on.
        """
        if self._source is None:
            if self.is_own and self.settings.get("data_dir") is None:
                raise UserError(
                    f"{spelled('dataset', self.own)} needs {spelled('data_dir')}, a folder with a folder of images for"
                    " each class, a .zip of it, a table or a NumPy file"
                )
            with inform_if_slow(f"listing the images in {self.folder} ..."):
                self._source = self._read()
            for note in self._source.notes:
                warn(f"note: {note}")
        return self._source

    def _read(self) -> Source:
        options = self.settings
        if self.is_own:
            return find_images(self.folder, options["layout"], options["columns"], options.get("on_corrupt"))
        if self.info.torchvision_name:
            return from_cifar(self.info, self.folder, self._download_error)
        return digits_source(color=len(self.info.mean) == 3)

    def set_source(self, samples: Any) -> None:
        """Set a `Source`, or images and labels in memory, see `from_samples`."""
        self._source = samples if isinstance(samples, Source) else from_samples(samples)
        self.name = self.own

    def prepare(self) -> None:
        """Download missing files, in one process per node.

        An error is kept and raised by `source`, which every process reads. If it were raised here, the other processes
        would wait forever.
        """
        try:
            self._download()
        except (UserError, OSError) as error:
            self._download_error = error

    def _download(self) -> None:
        """Download missing files.

        Raises:
            UserError: the download failed.
            OSError: a file cannot be written.
        """
        if self.info.torchvision_name:
            download_cifar(self.info, self.folder)

    def decide(self, note: Callable[..., None], from_rank_zero: Callable[[int], int]) -> None:
        """Resolve the name "auto" to a data set, and log a note if the bundled digits are used.

        Args:
            note: function that logs a text once.
            from_rank_zero: function that broadcasts a number from rank 0.
        """
        if self.name == "digits" and self.settings.get("dataset") == "auto":
            note(
                f"no {spelled('data_dir')}: using the 1,797 bundled digits as small color images; pass"
                f" {spelled('data_dir', 'FOLDER')} for your own",
                warn,
            )

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore the data set and the classes from a checkpoint, and return whether the data set has changed.

        Raises:
            UserError: the user has declared another data set, or the user's images have other classes.
        """
        saved = state["dataset"]
        check_choice("dataset", saved, tuple(self.sets))
        declared = self.settings.get("dataset", saved)
        if declared == "auto" and self.name == self.own:
            declared = self.own
        lacks_folder = saved == self.own and self.is_read and self.settings.get("data_dir") is None
        if saved != self.name and (declared not in ("auto", saved) or lacks_folder):
            parameter = spelled("data_dir", "FOLDER") if saved == self.own else spelled("dataset", saved)
            raise UserError(f"the checkpoint was trained on {saved}, found {self.name}; pass {parameter}")
        changed = self.name not in ("auto", saved)
        if changed:
            self._source = None
        self.name = saved
        self._saved_classes = tuple(state.get("classes", ()))
        if self.is_own and self.is_read:
            check_same_classes(self._saved_classes, self.info.classes)
        return changed
