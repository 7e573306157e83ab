"""Reads the sentences to translate from arguments, files or standard input."""

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from datamodules.errors import UserError
from datamodules.loading.text_files import decoded_lines, iter_lines
from datamodules.notes import warn
from datamodules.translation.parallel_corpus import is_markup

LONGEST_INPUT = 100_000
"""Greatest length of a sentence to validate, test or predict on, in bytes of UTF-8."""


class GivenSentence(NamedTuple):
    """Sentence to translate, or the problem of an input without one.

    Args:
        where: name of the input for messages: the sentence, or its line and file.
        text: the sentence, or "".
        problem: why there is no sentence.
    """

    where: str
    text: str
    problem: str = ""


def given_sentence(where: str, text: str) -> GivenSentence:
    """Check a sentence and return it, or the problem if it cannot be translated."""
    if "\0" in text:
        return GivenSentence(where, "", f"{where} holds a NUL character; correct it")
    size = len(text.encode(errors="replace"))
    if size > LONGEST_INPUT:
        return GivenSentence(where, "", f"{where[:60]} has {size:,} bytes, more than {LONGEST_INPUT:,}; split it")
    return GivenSentence(where, text)


def _sentences_of_lines(where: str, lines: Iterable[str | None]) -> Iterator[GivenSentence]:
    """Yield a sentence, or its problem, for each line."""
    for number, line in enumerate(lines, 1):
        line_name = f"line {number} of {where}"
        if line is None:
            yield GivenSentence(line_name, "", f"{line_name} is not in UTF-8; save the file as UTF-8")
        elif is_markup(line.strip()):
            yield GivenSentence(line_name, "", f"{line_name} is markup; write what is between the tags")
        else:
            yield given_sentence(line_name, line.strip())


def _sentences_of_file(path: Path) -> list[GivenSentence]:
    """Return the sentences of a file, or the file as one input with a problem if it cannot be read."""
    try:
        return list(_sentences_of_lines(str(path), iter_lines(path)))
    except UserError as error:
        return [GivenSentence(str(path), "", str(error))]


def read_inputs(inputs: Sequence[str]) -> list[GivenSentence]:
    """Read the sentences to translate. Blank lines of files are kept, so that outputs match the lines of the input.

    Args:
        inputs: sentences; "-" for standard input; "@FILE"; names of .txt files, or of any existing file.

    Raises:
        UserError: there is no sentence.
    """
    sentences: list[GivenSentence] = []
    for text in inputs:
        is_listed = text.startswith("@") or (text.endswith(".txt") and " " not in text)
        # Path.exists raises an error for texts that are longer than a file name may be.
        exists = os.path.exists(text)  # noqa: PTH110
        if text == "-":
            # Read as bytes, since text mode decodes by the locale, which may turn another encoding into wrong letters.
            stream = io.BytesIO(sys.stdin.buffer.read())
            sentences += _sentences_of_lines("standard input", decoded_lines(stream, "standard input"))
        elif is_listed or exists:
            file_sentences = _sentences_of_file(Path(text.removeprefix("@")).expanduser())
            # A word to translate may be the name of a file by chance.
            if not is_listed and os.path.isfile(text):  # noqa: PTH113
                warn(f"note: {text} is a file: its {len(file_sentences):,} lines are translated")
            sentences += file_sentences
        else:
            sentences.append(given_sentence(text, text))
    if not sentences:
        raise UserError('no sentence to translate; type some behind the options, as "je suis fatigué .", @FILE, or -')
    return sentences
