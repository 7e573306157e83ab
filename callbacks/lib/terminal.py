"""Lines that fit a terminal: they break between words, and commands so that they can still be copied.

What goes into a file or a pipe is not broken.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["fit_pairs", "fit_rows", "fitted", "terminal_width", "wrap", "wrap_pieces"]

_INDENT = "  "
# From the name of a program to what cannot be a part of its arguments.
_COMMAND = re.compile(
    r"(?<!\S)(?:python|torchrun|srun|sbatch|scontrol|tensorboard|lightning-recipes|pip install)(?= )"
    r"(?:'[^']*'|\"[^\"]*\"|[^'\"\n])*?(?= or |[;,:)](?:\s|$)|\n|$)"
)


def terminal_width(stream: Any) -> int | None:
    """The columns of the terminal that a stream writes to; None where it writes to something else."""
    try:
        if not stream.isatty():
            return None
        columns = os.environ.get("COLUMNS", "")
        given = int(columns) if columns.isdigit() else 0
        # Some terminals have no size, as those of containers.
        return given or os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return None


def wrap_pieces(pieces: Sequence[str], width: int, separator: str = "  ", indent: str = _INDENT) -> list[str]:
    """Lines of as many pieces as fit; a piece that is longer than a line has one of its own.

    Example:
        >>> wrap_pieces(["epoch 1/3", "train/loss 1.5270", "0.3 s"], width=30)
        ['epoch 1/3  train/loss 1.5270', '  0.3 s']
    """
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(separator) + len(piece) <= width:
            lines[-1] += separator + piece
        else:
            lines.append(indent + piece if lines else piece)
    return lines


def _command_lines(command: str, width: int, indent: str) -> list[str]:
    """The lines of a command that is longer than the terminal, each with a backslash but the last."""
    room = width - len(indent) - len(" \\")
    pieces: list[str] = []
    for word in re.findall(r"python -m \S+|(?:'[^']*'|\"[^\"]*\"|\S)+", command):
        is_value = pieces and re.fullmatch(r"--?[\w-]+", pieces[-1]) and not word.startswith("-")
        # A flag stays with its value, unless that has room in a line without it only.
        if is_value and not len(word) <= room - len(_INDENT) < len(f"{pieces[-1]} {word}"):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    *lines, last = wrap_pieces(pieces, room, " ")
    return [f"{indent}{line} \\" for line in lines] + [indent + last]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    before = text[: len(text) - len(text.lstrip())]
    lines, indent = [before], before + indent

    def add(word: str, separator: str) -> None:
        if not lines[-1].strip():
            lines[-1] += word
        elif not separator or len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += separator + word
        else:
            lines.append(indent + word)

    def add_words(words: str) -> None:
        for i, word in enumerate(words.split()):
            # What follows a command without a space, such as a semicolon, stays with it.
            add(word, "" if i == 0 and not words[0].isspace() else " ")

    end = 0
    for found in _COMMAND.finditer(text):
        add_words(text[end : found.start()])
        end = found.end()
        if len(indent) + len(found[0]) <= width:
            add(found[0], " ")
            continue
        broken = _command_lines(found[0], width, indent if lines[-1].strip() else before)
        lines = [*filter(str.strip, lines), *broken, *([indent] if text[end : end + 1].isspace() else [])]
    add_words(text[end:])
    return lines


def wrap(text: str, width: int, indent: str = _INDENT) -> list[str]:
    """Lines of at most `width` characters, broken between words, and a longer command with backslashes.

    A longer word, such as a path, stays whole: the terminal continues it in the next line, and it can be copied.

    Args:
        indent: before all lines but the first of each paragraph.

    Example:
        >>> print(*wrap("there is no such device; type python -m recipes.mnist --devices 2", 40), sep="\\n")
        there is no such device; type
          python -m recipes.mnist --devices 2
    """
    parts = [_wrapped(part, width, indent) if len(part) > width else [part] for part in text.split("\n")]
    return [line for part in parts for line in part]


def fitted(text: str, stream: Any) -> str:
    """A text as lines that fit the stream, where that is a terminal."""
    width = terminal_width(stream)
    return text if width is None else "\n".join(wrap(text, width))


def fit_rows(rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """The lines of a table with a column per key; where the terminal is too narrow, each row with the names in it.

    Args:
        rows: at least one; all have the same keys.
        width: of the terminal; None for no limit.

    Example:
        >>> print(*fit_rows([{"file": "a.png", "class": "7", "probability": "0.99"}], 26), sep="\\n")
        file   class  probability
        a.png  7      0.99
        >>> print(*fit_rows([{"file": "a.png", "class": "7", "probability": "0.99"}], 24), sep="\\n")
        a.png  class 7
          probability 0.99
    """
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths)).rstrip() for row in cells]
    if width is None or max(map(len, lines)) <= width:
        return lines
    lines = []
    for row in rows:
        first, *others = row.items()
        pieces = wrap_pieces([first[1], *(f"{name} {value}" for name, value in others if value)], width)
        lines += [line for piece in pieces for line in wrap(piece, width)]
    return lines


def fit_pairs(rows: dict[str, str], width: int | None) -> Iterator[tuple[str, list[str]]]:
    """Each name, padded to a column where there is room for one, and the lines that follow it.

    Args:
        width: of the terminal; None for no limit.

    Example:
        >>> for name, lines in fit_pairs({"data": "MNIST: 55,200 train, 4,800 val", "speed": "1 s"}, 30):
        ...     print(name + "\\n".join(lines))
        data: MNIST: 55,200 train, 4,800
          val
        speed: 1 s
    """
    column = max(map(len, rows)) + 2
    for name, value in rows.items():
        if width is None:
            yield f"{name:<{column}}", [value]
        elif width < column + 32:
            first, *rest = wrap(f"{name}: {value}", width)
            yield name, [first.removeprefix(name), *rest]
        else:
            room = width - column
            lines = wrap(value, room, "")
            if max(map(len, lines)) > room:  # A path: it gets a line of its own.
                yield name, ["", *(_INDENT + line for line in wrap(value, width - len(_INDENT)))]
            else:
                yield f"{name:<{column}}", [lines[0], *(" " * column + line for line in lines[1:])]


def print_error(line: str) -> None:
    """Print a line on standard error, or several on a narrow terminal."""
    print(fitted(line, sys.stderr), file=sys.stderr, flush=True)  # noqa: T201
