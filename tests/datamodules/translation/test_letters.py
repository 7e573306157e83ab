"""A file of pairs whose sides have other letters than the first file gets a note."""

import random
from pathlib import Path

import pytest

from datamodules.translation.data_module import TranslationDataModule


def _write_sides(folder: Path, name: str, sides: tuple[str, str], seed: int, extra: str = "") -> None:
    """Write 100 lines of words of two syllables from the letters of each side."""
    draws = random.Random(seed)
    for ending, letters in zip(("a", "b"), sides, strict=True):
        lines = []
        for _ in range(100):
            words = ["".join(draws.choices(letters, k=4)) for _ in range(5)]
            lines.append(" ".join(words))
        (folder / f"{name}.{ending}").write_text("\n".join([*lines, extra]) if extra else "\n".join(lines))


LATIN, CYRILLIC = "abcdefghij", "абвгдежзик"


@pytest.mark.parametrize(
    ("other", "extra", "is_noted"),
    [
        ((LATIN, CYRILLIC), "", False),
        ((CYRILLIC, LATIN), "", True),
        ((CYRILLIC, LATIN), "a jig", True),
        (("klmnopqrst", CYRILLIC), "", True),
    ],
)
@pytest.mark.parametrize("part", ["train", "val"])
def test_sides_in_other_letters_are_noted(part, other, extra, is_noted, tmp_path, caplog):
    # A foreign name in the first file makes none of its letters usual.
    _write_sides(tmp_path, "one", (LATIN, CYRILLIC), 1, extra="и" if extra else "")
    _write_sides(tmp_path, "two", other, 2, extra)
    names = ["one", "two"] if part == "train" else ["one"]
    files = {
        "source_file": [str(tmp_path / f"{n}.a") for n in names],
        "target_file": [str(tmp_path / f"{n}.b") for n in names],
    }
    if part == "val":
        files |= {"val_source_file": str(tmp_path / "two.a"), "val_target_file": str(tmp_path / "two.b")}
    data = TranslationDataModule(**files, test_fraction=0.1, vocab_size=400)
    with caplog.at_level("WARNING", "lightning_recipes"):
        data.setup("fit")
    lines = [message for message in caplog.messages if "shares no usual letter" in message]
    assert len(lines) == is_noted
    assert all("two.a and" in line and "one.a and" in line for line in lines)
