"""Proposals in error messages: what to type for images and tables of another form.

Words in names may reject a folder or a column here, but they never decide how a data set is read.

Tested in `tests/datamodules/images/test_layouts.py`.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from datamodules.errors import UserError, spelled
from datamodules.images.decoding import ending, is_image
from datamodules.images.source import PART_WORDS
from datamodules.loading.file_table import Folder, files_below, list_folder
from datamodules.loading.table_files import FORM, SEPARATOR_NAMES, TABLE_SUFFIXES, Table, iter_lines, text_suffix

RECOGNIZED = ("{split}/{class}/*", "{class}/*")
EXPECTED = "expected CLASS/IMAGE or train/CLASS/IMAGE, and val and test so"
_PARTS = frozenset((*PART_WORDS, "eval", "holdout", "unlabeled"))
_NO_CLASSES = _PARTS | frozenset(
    (
        *("annotations", "labels", "masks", "mask", "segmentation", "depth", "infrared", "nir", "rgb", "thermal"),
        *("batch", "batches", "fold", "folds", "split", "splits", "images", "imgs", "thumbnails", "originals"),
    )
)
_SPLITS = _PARTS | {"split", "subset", "partition", "usage", "phase"}
_PATHS = ("path", "filepath", "filename", "file", "image", "img", "id")
_LABELS = ("label", "labels", "class", "target", "category", "breed", "species")
# Longest first, so that "training" does not match as "train".
_PART = re.compile("|".join(sorted(PART_WORDS, key=len, reverse=True)), re.IGNORECASE)


def _words(name: str) -> list[str]:
    """Split a name into lower-case words: "JPEGImages" into jpeg and images, "batch1" into batch."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return [word.removesuffix("set").removesuffix("data") or word for word in words]


def are_no_classes(folders: Sequence[Folder]) -> bool:
    """Return whether folders are probably not classes, by a word in a name, or because they hold masks of images."""
    for folder in folders:
        if not _NO_CLASSES.isdisjoint(_words(folder.name)):
            return True
        stems = {os.path.splitext(name)[0].lower() for name in folder.files if is_image(name)}  # noqa: PTH122
        if any("_mask" in stem and stem.partition("_mask")[0] in stems for stem in stems):
            return True
    return False


def describe_left_out(files: Sequence[str]) -> str:
    """Describe files that are not images, as in "2 .xyz, 1 without an ending, such as a/1.xyz", up to six suffixes."""
    counts = Counter(ending(file) or "without an ending" for file in files)
    phrases = [f"{count:,} {suffix}" for suffix, count in counts.most_common(6)]
    if len(counts) > 6:
        phrases.append(f"{len(counts) - 6:,} other endings")
    return f"{', '.join(phrases)}, such as {files[0]}"


def _first_levels(top: Folder) -> str:
    """Describe the first levels of a folder, as in "train_images/ (12 .png), train.csv"."""
    phrases = []
    for folder in list(top.folders.values())[:4]:
        held = [f"{name}/" for name in list(folder.folders)[:3]]
        held += [f"{count:,} {suffix}" for suffix, count in Counter(map(ending, folder.files)).most_common(2)]
        phrases.append(f"{folder.name}/ ({', '.join(held) or 'empty'})")
    if len(top.folders) > 4:
        phrases.append(f"{len(top.folders) - 4:,} more folders")
    if len(top.files) > 3:
        phrases.append(f"{len(top.files):,} files such as {next(iter(top.files))}")
    else:
        phrases += top.files
    return ", ".join(phrases) or "nothing"


def _layouts(top: Folder) -> Iterator[str]:
    """Yield a layout that matches the images of a folder, if there is one."""
    paths = [path[len(top.prefix) :].split("/") for path in files_below(top) if is_image(path)]
    if not paths:
        return
    depth = Counter(map(len, paths)).most_common(1)[0][0]
    paths = [path for path in paths if len(path) == depth]
    suffixes = {Path(path[-1]).suffix for path in paths}
    file = f"*{suffixes.pop()}" if len(suffixes) == 1 else "*"
    pieces: list[str] = []
    class_level = None
    for level in range(depth - 1):
        names = sorted({path[level] for path in paths})
        # For example, "training_set" and "test_set" become "{split}_set".
        templates = {_PART.sub("{split}", name, count=1) for name in names}
        images = [name for name in names if "images" in _words(name)]
        if len(templates) == 1:
            pieces.append(templates.pop())
        elif images:
            # Images beside masks.
            pieces.append(images[0])
        else:
            pieces.append("*")
            class_level = level
    if class_level is not None:
        pieces[class_level] = "{class}"
        yield "/".join([*pieces, file])
        return
    # The class in names, such as cat.1.jpg and cat_001.jpg.
    starts = [re.match(r"([A-Za-z]+)([._-])(?=[0-9])", path[-1]) for path in paths]
    found = {match[0] for match in starts if match}
    if all(starts) and 1 < len(found) < len(paths) and len({start[-1] for start in found}) == 1:
        yield "/".join([*pieces, f"{{class}}{found.pop()[-1]}[0-9]{file}"])


def what_to_pass(top: Folder, layout: str) -> str:
    """Return the end of an error for a folder: the recognized layouts, and what to pass for another layout."""
    advice = [spelled("layout", proposal) for proposal in _layouts(top) if proposal != layout]
    files = [top.prefix + name for name in top.files]
    tables = [path for path in files if text_suffix(Path(path)) in TABLE_SUFFIXES]
    # Kaggle's tables are called train_labels.csv and sample_submission.csv.
    tables.sort(key=lambda path: ("train" not in _words(Path(path).stem), "label" not in Path(path).name, path))
    advice += [spelled("data_dir", path) for path in [*tables[:1], *(path for path in files if path.endswith(".npz"))]]
    folders = list(top.folders.values())
    if len(folders) > 1 and all(any(map(is_image, folder.files)) for folder in folders):
        names = " and ".join(sorted(top.folders)[:3])
        advice.append(f"{spelled('layout', '{class}/*')} if {names} are classes")
    if not advice:
        advice = [f"{spelled('layout')} with {{class}} where the class is in the path, or a table of path,label"]
    return f"{EXPECTED}; pass {', or '.join(advice)}"


def other_structure(top: Folder, layout: str, deeper: Sequence[str] = ()) -> str:
    """Return the error for a folder without images in a layout: its content, and what to pass.

    Args:
        top: the folder.
        layout: the layout.
        deeper: images in folders below the class folders.
    """
    found = f"{top.path} holds {_first_levels(top)}"
    if deeper:
        found += f", and {len(deeper):,} images such as {deeper[0]}"
    if layout not in RECOGNIZED:
        found += f", and no image to train on is in {spelled('layout', layout)}"
    return f"{found}; {what_to_pass(top, layout)}"


def _columns(names: Mapping[str, str]) -> str:
    return spelled("columns", ",".join(f"{use}={name}" for use, name in names.items()))


def headless(path: str) -> str:
    """Return the error for a file without a header and without declared columns, such as train.txt."""
    line = next((line.strip() for line in iter_lines(Path(path)) if line), "")
    separator = next((mark for mark in "\t;, " if mark in line), "\t")
    cells = line.split(separator)
    image = next((index for index, cell in enumerate(cells) if is_image(cell)), 0)
    declared = {"path": str(image + 1), "label": "1" if image else "2"}
    declared["separator"] = SEPARATOR_NAMES.get(separator, separator)
    return f"{path} has no header, and its first line is {line[:100]!r}; pass {_columns(declared)}"


def _likeliest(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the columns whose names contain a known word, in the order of the words."""
    by_word = [[name for name in names if word in _words(name)] for word in known]
    return [name for found in by_word for name in found]


def _path_template(table: Table, column: str, files: Sequence[str]) -> str:
    """Return a path template for cells that are not paths, such as "train/{id}.jpg"; else the column itself."""
    folder = os.path.dirname(table.where)  # noqa: PTH120
    if not files and Path(folder).is_dir():
        files = list(files_below(list_folder(Path(folder))[0]))
    paths = [os.path.relpath(path, folder or ".") for path in files if is_image(path)]
    cell = str(table.rows[0][1][table.index(column)]) if table.rows else ""
    if cell and cell not in paths:
        for path in sorted(paths, key=lambda path: "train" not in _words(path)):
            base = os.path.basename(path)  # noqa: PTH119
            if cell in (base, os.path.splitext(base)[0]):  # noqa: PTH122
                return f"{{{column}}}".join(path.rsplit(cell, 1))
    return column


def other_columns(table: Table, names: Mapping[str, str], missing: Sequence[str], files: Sequence[str] = ()) -> str:
    """Return the error for a table without the expected columns: its columns, and what to pass.

    Args:
        table: the table.
        names: name of the expected column of each use.
        missing: declared names that the table lacks.
        files: files of the data set; by default the files in the folder of the table.
    """
    listed = ", ".join(map(repr, table.names[:10])) + ", ..." * (len(table.names) > 10)
    lacks = f" and not {', '.join(map(repr, missing))}" if missing else f"; expected {names['path']},{names['label']}"
    problem = f"{table.where} has the columns {listed[:300]}{lacks}"
    form = {use: name for use, name in names.items() if use in FORM}
    other = next((mark for mark in ";\t|," if len(table.names) == 1 and mark in table.names[0]), "")
    if other:
        return f"{problem}; pass {_columns({'separator': SEPARATOR_NAMES.get(other, other)})}"
    if len(table.names) > 100:
        return f"{problem}; save rows of pixels as arrays, images of shape (n, height, width) and labels, by np.savez"
    first = [index for index, name in enumerate(table.names) if is_image(name)]
    if first:
        declared = {"path": str(first[0] + 1), "label": "1" if first[0] else "2", **form}
        return f"{problem}, so its first line is a row; pass {_columns(declared)}"
    cells = table.rows[0][1] if table.rows else []
    of_images = [name for name, cell in zip(table.names, cells) if is_image(str(cell))]
    known_path = [names["path"]] if table.index(names["path"]) >= 0 else []
    path = (known_path + of_images + _likeliest(table.names, _PATHS) + table.names)[0]
    others = [name for name in table.names if name != path]
    label = ([*_likeliest(others, _LABELS), *reversed(others), "NAME"])[0]
    return f"{problem}; pass {_columns({'path': _path_template(table, path, files), 'label': label, **form})}"


def other_arrays(path: str, keys: Sequence[str], uses: Sequence[str]) -> str:
    """Return the error for a NumPy file whose arrays have other names: its arrays, and what to pass."""
    kinds = {"images": {"images", "x", "data"}, "labels": {"labels", "y", "targets"}}
    parts = {"": {"train", "training"}, "val": {"val", "valid", "validation"}, "test": {"test"}}
    declared: dict[str, str] = {}
    for use in uses:
        part, _, kind = use.rpartition("_")
        for key in sorted(keys):
            words = set(re.split("[^a-z]+", key.lower()))
            if kinds[kind] & words and (parts[part] & words or (not part and len(words) == 1)):
                declared.setdefault(use, key)
    to_type = 'np.savez("digits.npz", images=..., labels=...)'
    if {"images", "labels"} <= declared.keys():
        to_type = f"pass {_columns(declared)}"
    listed = ", ".join(sorted(keys)[:10]) or "nothing"
    return f"{path} holds {listed}; expected images and labels, and perhaps test_images and test_labels: {to_type}"


def check_parts(table: Table, unused: Sequence[int], columns: Mapping[str, str]) -> None:
    """Raise a UserError if an unused column may hold the parts, by its name or by all of its cells."""
    for index in unused:
        name = table.names[index]
        cells = {str(cells[index]).strip().lower() for _, cells in table.rows}
        if _SPLITS.isdisjoint(_words(name)) and not (cells and cells <= _PARTS):
            continue
        use = "split"
        if cells <= {"true", "false", "yes", "no", "0", "1"}:
            word = next(iter(_PART.findall(name)), "test").lower()
            use = "train" if word.startswith("train") else "val" if word.startswith("val") else "test"
        unknown = sorted(cells - _PARTS) if use == "split" else []
        first = f", with train, val or test in place of {unknown[0]!r}" if unknown else " to use it"
        declared = _columns({**columns, use: name}) + first
        ignored = _columns({**columns, "split": ""})
        raise UserError(f"{table.where}: the column {name!r} may hold the parts; pass {declared}, or {ignored} if not")
