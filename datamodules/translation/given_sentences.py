"""Sentences to translate, as users give them: typed, in files, or on standard input."""

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from datamodules.errors import UserError
from datamodules.loading.text_files import decoded_lines
from datamodules.notes import warn
from datamodules.translation.parallel_corpus import sentence_lines

LONGEST_INPUT = 100_000
"""Bytes in UTF-8 of a sentence to validate, test or predict on, at most."""


class GivenSentence(NamedTuple):
    """A sentence to translate, or what was given in place of one.

    Args:
        where: the sentence itself, or its line and file.
        problem: why there is no sentence.
    """

    where: str
    text: str
    problem: str = ""


def given_sentence(where: str, text: str) -> GivenSentence:
    """A sentence to translate, or why it cannot be one."""
    if "\0" in text:
        return GivenSentence(where, "", f"{where} holds a NUL character; correct it")
    if (size := len(text.encode(errors="replace"))) > LONGEST_INPUT:
        return GivenSentence(where, "", f"{where[:60]} has {size:,} bytes, more than {LONGEST_INPUT:,}; split it")
    return GivenSentence(where, text)


def _sentences_of(where: str, lines: Iterable[str | None]) -> Iterator[GivenSentence]:
    for number, line in enumerate(lines, 1):
        place = f"line {number} of {where}"
        if line is None:
            yield GivenSentence(place, "", f"{place} is not in UTF-8; save the file as UTF-8")
        else:
            yield given_sentence(place, line.strip())


def _sentences_in(path: Path) -> list[GivenSentence]:
    """The sentences of a file; one that cannot be read is one sentence with a problem."""
    try:
        return list(_sentences_of(str(path), sentence_lines(path)))
    except UserError as error:
        return [GivenSentence(str(path), "", str(error))]


def read_inputs(inputs: Sequence[str]) -> list[GivenSentence]:
    """Sentences to translate, also the blank lines of files; a file that cannot be read is one with a problem.

    Args:
        inputs: sentences; "-" for standard input; "@FILE", and names of .txt files and of any that exist.

    Raises:
        UserError: there is no sentence.
    """
    found: list[GivenSentence] = []
    for text in inputs:
        is_listed = text.startswith("@") or (text.endswith(".txt") and " " not in text)
        # Path.exists raises for texts that are longer than a name may be.
        exists = os.path.exists(text)  # noqa: PTH110
        if text == "-":
            # Bytes: how Python reads text there depends on the locale, and some let other encodings pass as junk.
            given = io.BytesIO(sys.stdin.buffer.read())
            found += _sentences_of("standard input", decoded_lines(given, "standard input"))
        elif is_listed or exists:
            of_file = _sentences_in(Path(text.removeprefix("@")).expanduser())
            if not is_listed and os.path.isfile(text):  # noqa: PTH113
                warn(f"note: {text} is a file: its {len(of_file):,} lines are translated")
            found += of_file
        else:
            found.append(given_sentence(text, text))
    if not found:
        raise UserError('no sentence to translate; type some behind the options, as "je suis fatigué .", @FILE, or -')
    return found
