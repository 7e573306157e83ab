"""What zip and tar archives hold, and where each file begins, so that any of them is read in place."""

import os
import stat
import struct
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from datamodules.errors import UserError
from datamodules.loading.archive_files import AGAIN, DEFLATED, IN_TAR, STORED, Archive, Member
from datamodules.loading.file_table import FileTable
from datamodules.loading.file_tree import Folder, State, is_hidden, state_of

__all__ = ["ARCHIVES", "ArchiveIndex", "index_archive", "refuse_compressed"]

ARCHIVES = (".zip", ".tar")
"""The endings of archives that can be read in place."""

_COMPRESSED = (".tgz", ".txz", ".tbz", ".tbz2", ".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst", ".7z", ".rar")
_LINK = -2  # In place of how a file is kept.
_METHODS = {1: "shrink", 6: "implode", 9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "zstd", 95: "xz", 99: "AES"}
_CENTRAL = struct.Struct("<4s4xHH4xLLLHHH4xLL")
_BLOCK = 512
_MOST_FIELDS = 1 << 20


def refuse_compressed(path: Path) -> None:
    """Refuse archives whose files cannot be read at random.

    Raises:
        UserError: with the command that makes another file of it.
    """
    name = path.name.lower()
    if ending := next((ending for ending in _COMPRESSED if name.endswith(ending)), ""):
        how = f"; run gunzip -k {path}, and pass the .tar" if ending == ".tar.gz" else ""
        how += f"{', or' if how else ';'} unpack it, and pass its folder"
        raise UserError(f"{path} is compressed as a whole, so that no file in it can be read by itself{how}")


class ArchiveIndex(NamedTuple):
    """What an archive holds.

    Attributes:
        top: the folder with all of it.
        table: the files, by the numbers in their folders.
        states: of the archive before it was listed, by path; see `state_of`.
        notes: remarks for the user, a line each.
    """

    top: Folder
    table: FileTable
    states: dict[str, State]
    notes: list[str]


class _Damaged(UserError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}; {AGAIN}")


def _zip_directory(path: Path, file: int, size: int) -> tuple[bytes, int, int]:
    """The list of files at the end of a zip archive, the byte where it begins, and what is added to all places."""
    margin = min(size, 22 + 0xFFFF + 76)
    tail = os.pread(file, margin, size - margin)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + 22 > len(tail):
        is_zip = os.pread(file, 4, 0) == b"PK\3\4"
        what = "is truncated: the list of files at its end is missing" if is_zip else "is no zip archive"
        raise _Damaged(path, f"{what} (it has {size:,} bytes)")
    disk, first_disk, _, _, length, offset = struct.unpack_from("<HHHHLL", tail, at + 4)
    end = size - margin + at
    if tail[max(0, at - 20) : at][:4] == b"PK\6\7":
        end -= 76
        if tail[at - 76 :][:4] != b"PK\6\6":
            raise _Damaged(path, "is damaged: the record of large archives is not before its end")
        disk, first_disk, _, _, length, offset = struct.unpack_from("<LLQQQQ", tail, at - 76 + 16)
    if disk or first_disk:
        raise UserError(
            f"{path} is one of several parts; join them with zip -s 0 {path} --out WHOLE.zip, and pass that"
        )
    start = end - length
    if start < offset:
        raise _Damaged(path, f"is truncated: its list of files should begin at byte {offset:,}, and is at {start:,}")
    return os.pread(file, length, start), start, start - offset


def _zip_members(path: Path, file: int, size: int) -> Iterator[tuple[str, Member]]:
    """The files of a zip archive; names of folders end with a slash."""
    directory, limit, shift = _zip_directory(path, file, size)
    at = 0
    while at < len(directory):
        if directory[at : at + 4] != b"PK\1\2" or at + 46 > len(directory):
            raise _Damaged(path, f"is damaged: its list of files is no list at byte {limit + at:,}")
        fields = _CENTRAL.unpack_from(directory, at)
        _, flags, method, check, packed, unpacked, name_length, extra_length, comment_length, mode, start = fields
        at += 46
        raw = directory[at : at + name_length]
        extra = directory[at + name_length : at + name_length + extra_length]
        name = _zip_name(raw, extra, is_unicode=bool(flags & 0x800))
        if 0xFFFFFFFF in (packed, unpacked, start):
            unpacked, packed, start = _large(extra, unpacked, packed, start)
        at += name_length + extra_length + comment_length
        if "\\" in name and "/" not in name:
            name = name.replace("\\", "/")  # As some programs for Windows write it.
        if stat.S_ISLNK(mode >> 16):
            method = _LINK
        elif not name.endswith("/"):
            if flags & 1:
                raise UserError(f"{path}: {name} is encrypted; unpack it with its password, and pass the folder")
            if method not in (STORED, DEFLATED):
                raise UserError(
                    f"{path}: {name} is compressed by {_METHODS.get(method, f'method {method}')}, expected deflate or"
                    " nothing; unpack it, and pass the folder, or pack that with zip -0 -r"
                )
            if start + shift + 30 + packed > limit:
                raise _Damaged(
                    path,
                    f"is damaged: {name} should take {packed:,} bytes from byte {start + shift:,} on, and the"
                    f" files end at {limit:,}",
                )
        yield name, Member(start + shift, packed, unpacked, check, method)


def _extra_field(extra: bytes, wanted: int) -> bytes:
    """One of the further fields of a file; empty where there is none."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == wanted:
            return extra[4 : 4 + length]
        extra = extra[4 + length :]
    return b""


def _zip_name(raw: bytes, extra: bytes, is_unicode: bool) -> str:
    """A file's name. Info-ZIP on Linux writes UTF-8 without saying so, or beside a name in another encoding."""
    unicode = _extra_field(extra, 0x7075)
    if unicode[:1] == b"\1" and unicode[1:5] == zlib.crc32(raw).to_bytes(4, "little"):
        raw, is_unicode = unicode[5:], True
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("utf-8" if is_unicode else "cp437", "surrogateescape")


def _large(extra: bytes, *fields: int) -> Iterator[int]:
    """The sizes and the place of a file beyond 4 GiB, which stand in a further field."""
    extra = _extra_field(extra, 1)
    for value in fields:
        if value == 0xFFFFFFFF and len(extra) >= 8:
            value, extra = struct.unpack_from("<Q", extra)[0], extra[8:]
        yield value


def _number(field: bytes) -> int:
    """A number in a tar archive: octal digits, or bytes where it is too large for them."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.split(b"\0")[0].strip() or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    """The records of an extended header (POSIX.1-2001), such as ``30 path=...``, each with a line feed at its end."""
    found = {}
    while data:
        if (length := int(data.split(b" ", 1)[0])) <= 0:
            raise ValueError(length)
        key, _, value = data[:length].split(b" ", 1)[1].partition(b"=")
        found[key.decode()] = value[:-1].decode("utf-8", "surrogateescape")
        data = data[length:]
    return found


def _padded(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


def _tar_members(path: Path, file: int, size: int) -> Iterator[tuple[str, Member | str]]:
    """The files of a tar archive, or for a hard link the file that it is another name of; folders end with a slash."""
    at, name = 0, ""
    extended: dict[str, str] = {}
    while True:
        header = os.pread(file, _BLOCK, at)
        if len(header) < _BLOCK:
            raise _Damaged(path, f"is truncated: it has {size:,} bytes and no end mark{f', after {name}' * bool(name)}")
        if not any(header):
            return
        try:
            intact = _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * ord(" ")
            length, kind, start = _number(header[124:136]), header[156:157], at + _BLOCK
            intact = intact and length >= 0
            if intact and kind in b"LKxg":
                data = os.pread(file, min(length, _MOST_FIELDS), start)
                if kind != b"g":
                    extended |= _pax(data) if kind == b"x" else {"path" if kind == b"L" else "linkpath": _text(data)}
                at = start + _padded(length)
                continue
            length = int(extended.get("size", length))
            intact = intact and 0 <= length < 2**63
        except (ValueError, IndexError, OverflowError):
            intact = False
        if not intact:
            raise _Damaged(
                path, f"is damaged: no file begins at byte {at:,}, after {name}" if at else "is no tar archive"
            )
        prefix = f"{_text(header[345:500])}/" if header[257:263] == b"ustar\0" and header[345] else ""
        name = extended.get("path") or prefix + _text(header[:100])
        if kind == b"5":
            yield f"{name}/", Member(0, 0, 0, 0, IN_TAR)
        elif kind == b"1":
            yield name, extended.get("linkpath") or _text(header[157:257])
        elif kind in b"0\0007" and not any(key.startswith("GNU.sparse") for key in extended):
            if start + length > size:
                raise _Damaged(
                    path, f"is truncated: {name} takes {length:,} bytes from byte {start:,} on, and it has {size:,}"
                )
            yield name, Member(start, length, length, 0, IN_TAR)
        else:
            yield name, Member(0, 0, 0, 0, _LINK)
        # Links, devices and folders have no content, whatever their size says.
        at = start + (0 if kind in b"123456" else _padded(length))
        extended = {}


class _Tree:
    """The folders of an archive, from the names in it."""

    def __init__(self, path: Path) -> None:
        self.top = Folder(str(path))
        self._found: dict[str, tuple[Folder, str] | None] = {}

    def folder(self, name: str) -> tuple[Folder, str] | None:
        """A folder, made if need be, and what the names in it begin with; None where it is hidden."""
        if name not in self._found:
            parts = [part for part in name.split("/") if part not in ("", ".")]
            here = self.top
            if hidden := any(map(is_hidden, parts)):
                parts = []
            for part in parts:
                here = here.folders.setdefault(part, Folder(f"{here.path}/{part}"))
            self._found[name] = None if hidden else (here, "".join(f"{part}/" for part in parts))
        return self._found[name]

    def file(self, name: str) -> int | None:
        """The number of a file."""
        folder, _, name = name.rpartition("/")
        place = self.folder(folder)
        return place[0].files.get(name) if place else None


def index_archive(path: Path) -> ArchiveIndex:
    """List what an archive holds. The last of several files with the same name counts, as when it is unpacked.

    Raises:
        UserError: it is missing, damaged or truncated, or it holds files that are encrypted or of an unknown kind.
    """
    tree, names, members = _Tree(path), bytearray(), array("q")
    left_out: list[str] = []
    try:
        states = {str(path): state_of(str(path))}
        with path.open("rb", buffering=0) as opened:
            file, status = opened.fileno(), os.fstat(opened.fileno())
            read = _zip_members if path.suffix.lower() == ".zip" else _tar_members
            for name, found in read(path, file, status.st_size):
                folder, _, base = name.rpartition("/")
                if "\0" in name:
                    raise _Damaged(path, f"is damaged: a name in it has a zero byte, {name!r}")
                if ".." in folder.split("/") and base:
                    left_out.append(name)
                    continue
                if (place := tree.folder(folder)) is None or is_hidden(base) or not base:
                    continue
                member: Member | tuple[int, ...] = Member(0, 0, 0, 0, _LINK)
                if isinstance(found, Member):
                    member = found
                elif (row := tree.file(found)) is not None:
                    member = tuple(members[5 * row : 5 * row + 5])
                if member[-1] == _LINK:
                    left_out.append(name)
                    continue
                place[0].files[base] = len(members) // 5
                names += f"{place[1]}{base}\0".encode("utf-8", "surrogateescape")
                members.extend(member)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    notes = []
    if left_out:
        notes.append(
            f"{path}: left out {len(left_out):,} links, special files and paths with .., such as {left_out[0]}"
        )
    columns = torch.frombuffer(members, dtype=torch.int64).view(-1, 5) if members else torch.empty(0, 5)
    archive = Archive(str(path), columns, (status.st_size, status.st_mtime_ns))
    return ArchiveIndex(tree.top, FileTable(names, f"{path}/", archive), states, notes)
