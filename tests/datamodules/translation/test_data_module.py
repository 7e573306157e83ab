import bz2
import csv
import gzip
import hashlib
import io
import logging
import lzma
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.errors import UserError
from datamodules.translation.corpus import hash_sources, split_by_source
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.parallel_corpus import bundled_pairs
from datamodules.translation.text import SPECIAL_TOKENS, UNK, normalize

WORDS = ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit"]
ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def _lines(count: int = 60) -> list[str]:
    """Pairs of 1 to 7 tokens, all different."""
    numbers = [[int(digit) for digit in f"{i:o}" * (1 + i % 3)] for i in range(count)]
    return [
        " ".join(WORDS[n] for n in number) + "\t" + " ".join(ENGLISH[n] for n in number) + "\n" for number in numbers
    ]


def _file(folder: Path, *lines: str, name: str = "pairs.tsv") -> str:
    path = folder / name
    path.write_bytes("".join(lines).encode())
    return str(path)


def _aligned(folder: Path, lines: list[str], part: str = "") -> dict[str, str]:
    """The sides of pairs in two files, as the parameters of a part."""
    sides = zip(("source", "target"), zip(*(line.strip("\n").split("\t") for line in lines)))
    return {
        f"{part}{side}_file": _file(folder, *(f"{text}\n" for text in texts), name=f"{part}{side}.txt")
        for side, texts in sides
    }


_words = partial(TranslationDataModule, subwords="none")


def _data(folder: Path, *lines: str, **options: Any) -> TranslationDataModule:
    data = _words(_file(folder, *(lines or _lines())), **{"batch_size": 4, **options})
    data.setup("fit")
    return data


def _sentences(data: TranslationDataModule, part: str) -> list[tuple[str, str]]:
    numbers = data.rows[part]
    return list(zip(data.source_sentences(numbers), data.target_sentences(numbers)))


def _everything(data: TranslationDataModule) -> list[tuple[str, str]]:
    return sorted(sum((_sentences(data, part) for part in ("train", "val", "test")), []))


# The real file


@pytest.mark.parametrize(
    ("edition", "pairs", "tokens"),
    [("tutorial", 11_445, [4_601, 2_991]), ("tutorial-2017", 10_599, [4_345, 2_803])],
)
def test_the_tutorials_figures_come_out_of_the_real_file(
    shared_data: Path, edition: Any, pairs: int, tokens: list[int]
) -> None:
    path = shared_data / "eng-fra" / "eng-fra.txt.zip"
    data = TranslationDataModule(
        str(path), reverse=True, max_length=10, prefixes="tutorial", normalization=edition, val_fraction=0,
        test_fraction=0, on_bad_lines="error",
    )  # fmt: skip
    data.setup("fit")
    assert (data.info.title, data.info.read, data.info.kept) == ("eng-fra.txt.zip", 135_842, pairs)
    # The tutorial counts SOS and EOS among the tokens, of all pairs, as here without a held-out part.
    counted = [len(v) - len(SPECIAL_TOKENS) + 2 for v in (data.source_vocabulary, data.target_vocabulary)]
    assert counted == tokens
    batches = list(data.train_dataloader())
    assert sum(len(batch.source) for batch in batches) == pairs
    assert max(int(batch.source_lengths.max()) for batch in batches) == 10
    assert max(int(batch.target_lengths.max()) for batch in batches) == 11


# Reading


def _zipped(lines: list[str], *names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "".join(lines) if name.endswith("s.txt") else "about")
    return buffer.getvalue()


TEXT = "".join(_lines())
WRITTEN = {
    "plain": TEXT.encode(),
    "crlf-bom": TEXT.replace("\n", "\r\n").encode("utf-8-sig"),
    "blank-lines": "\n".join(_lines()).encode(),
    "separators": TEXT.replace(" ", "\u2028").replace("\t", "\x85\t\x0b").encode(),
    "carriage-returns": TEXT.replace(" ", "\r").encode(),
    "no-last-newline": TEXT.rstrip("\n").encode(),
    "gz": gzip.compress(TEXT.encode(), mtime=0),
    "xz": lzma.compress(TEXT.encode()),
    "zip": _zipped(_lines(), "pairs.txt", "_about.txt", "__MACOSX/._pairs.txt"),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_a_file_is_read_however_it_is_written(tmp_path: Path, form: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(WRITTEN[form])
    data = _words(str(path))
    data.setup("test")
    assert _everything(data) == _everything(_data(tmp_path))
    assert data.info.read == 60 + sum(data.left_out.values())
    assert set(data.left_out) <= {"blank"}


def test_two_aligned_files_equal_one_of_pairs(tmp_path: Path) -> None:
    whole = _data(tmp_path)
    assert whole.validates
    assert _everything(_words(**_aligned(tmp_path, _lines()))) == _everything(whole)


def test_reverse_swaps_the_sides(tmp_path: Path) -> None:
    whole = _data(tmp_path)
    backwards = _data(tmp_path, reverse=True)
    assert _everything(backwards) == sorted((b, a) for a, b in _everything(whole))
    assert "one" in backwards.source_vocabulary
    assert "one" not in whole.source_vocabulary


def test_without_a_file_the_bundled_sentences_are_used(caplog: Any) -> None:
    data = TranslationDataModule()
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        data.setup("fit")
    assert [r.message for r in caplog.records] == [
        f"note: `data_file` is not given: training on {len(bundled_pairs()):,} bundled artificial French-English "
        "sentences"
    ]
    assert data.info.title == "bundled artificial French-English sentences"
    assert sum(data.sizes.values()) == len(bundled_pairs())
    text = "".join(f"{french}\t{english}\n" for french, english in bundled_pairs())
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "1ef24d5e8b9ea7228d7d4858d7800260da0d9fd4e2db5ed5c355e747683219de", "always the same"


# Faulty input


BAD = [
    ("un deux trois\n", "1 with fewer cells than the first line"),
    ("\tone\n", "1 with an empty side"),
    ("un\t \n", "1 with an empty side"),
    ("\u00ad\tone\n", "1 with an empty side in unicode normalization"),
    ("un\0\tone\n", "1 with a NUL character"),
    ("mot " * 200_000 + "\tword\n", "1 over 10,000 bytes"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_faulty_line_is_rejected_or_skipped_by_its_number(
    tmp_path: Path, line: str, reason: str, caplog: Any
) -> None:
    lines = [*_lines()[:9], line, *_lines()[9:]]
    rejection = rf"pairs.tsv: 1 of 61 lines cannot be used: {reason} \(line 10\).*pass on_bad_lines=.skip."
    with pytest.raises(UserError, match=rejection):
        _data(tmp_path, *lines)
    skipping = _data(tmp_path, *lines, on_bad_lines="skip")
    assert f"pairs.tsv: left out 1 of 61 lines: {reason} (line 10)" in caplog.text
    assert _everything(skipping) == _everything(_data(tmp_path))
    assert (skipping.info.read, skipping.info.kept) == (61, 60)


def test_lines_in_another_encoding_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "latin.tsv"
    path.write_bytes(TEXT.encode() + 7 * "été\tsummer\n".encode("latin-1"))
    reason = r"7 of 67 .*: 7 not in UTF-8 \(lines 61, 62, 63, 64, 65, \.\.\.\); save the file"
    with pytest.raises(UserError, match=reason):
        _words(str(path)).setup("fit")
    assert len(_everything(_words(str(path), on_bad_lines="skip"))) == 60


def test_aligned_files_of_unequal_lengths_are_rejected(tmp_path: Path) -> None:
    source, target = _aligned(tmp_path, _lines())["source_file"], _file(tmp_path, *_lines()[:58])
    with pytest.raises(UserError, match=f"{source} has 60 lines and {target} 58, so their lines do not belong"):
        TranslationDataModule(source_file=source, target_file=target, on_bad_lines="skip").setup("test")


def test_markup_is_rejected(tmp_path: Path) -> None:
    files = _aligned(tmp_path, ["<refset>\t<refset>\n", *["<seg>un</seg>\t<seg>one</seg>\n"] * 9])
    reason = "source.txt and .*: 10 of 10 lines cannot be used: 10 of markup .*; write what is between the tags"
    with pytest.raises(UserError, match=reason):
        TranslationDataModule(**files).setup("fit")


# Files to validate and to test on


def _write_parts(folder: Path, aligned: bool = False) -> dict[str, str]:
    """Training files of 60 pairs, 7 to validate on, one of which has a source of the training file, and 5 to test."""
    parts = {
        "": _lines(60),
        "val_": [*(f"dix {'x ' * i}\tten\n" for i in range(6)), _lines(1)[0]],
        "test_": [f"neuf {'x ' * i}\tnine\n" for i in range(5)],
    }
    if aligned:
        return {name: file for part, lines in parts.items() for name, file in _aligned(folder, lines, part).items()}
    return {f"{part or 'data_'}file": _file(folder, *lines, name=f"{part}pairs.tsv") for part, lines in parts.items()}


@pytest.mark.parametrize("aligned", [False, True])
def test_a_published_split_is_used_as_it_is(tmp_path: Path, aligned: bool, caplog: Any) -> None:
    data = _words(**_write_parts(tmp_path, aligned), max_length=4)
    data.setup("fit")
    assert (data.sizes["val"], data.sizes["test"]) == (7, 5)
    alone = _data(tmp_path, val_fraction=0, test_fraction=0, max_length=4)
    assert _sentences(data, "train") == _sentences(alone, "train")
    assert data.vocabularies() == alone.vocabularies()
    assert "neuf" not in data.source_vocabulary
    assert _sentences(data, "test") == [(f"neuf {'x ' * i}".strip(), "nine") for i in range(5)]
    batches = data.test_dataloader()
    assert sorted(sum((batch.numbers.tolist() for batch in batches), [])) == data.rows["test"].tolist()
    assert (data.validates, alone.validates, alone.val_dataloader()) == (True, False, [])
    assert data.info.read == data.info.kept + sum(data.info.left_out.values())
    assert data.left_out == alone.left_out
    assert "1 of 25 training pairs have a source sentence that is also in the validation files" in caplog.text
    assert "the test files, too" not in caplog.text


def test_a_part_without_files_is_held_out_of_the_training_files(tmp_path: Path) -> None:
    files = _write_parts(tmp_path)
    data = _words(files["data_file"], val_file=files["val_file"])
    assert len(data.rows["test"]) == 6
    assert data.sizes == {"train": 54, "val": 7, "test": 6}
    whole = _words(files["data_file"], val_fraction=0)
    assert whole.rows["test"].tolist() == data.rows["test"].tolist()


def test_the_counts_of_each_part_add_up(tmp_path: Path, caplog: Any) -> None:
    files = _write_parts(tmp_path)
    Path(files["val_file"]).write_text("un\tone\n\nun\n", newline="\n")
    data = _words(**files, on_bad_lines="skip", max_length=3)
    data.setup("fit")
    assert data.sizes["val"] == 1
    over = data.left_out["over a length of 3"]
    assert data.left_out == {
        "over a length of 3": over,
        "blank in val": 1,
        "with fewer cells than the first line in val": 1,
    }
    assert over + data.info.kept == 60
    with caplog.at_level("INFO", "lightning_recipes"):
        data.train_dataloader()
    source, target = data.vocabularies()
    assert f"; vocabularies of {len(source)} and {len(target)} tokens" in caplog.text
    assert (
        "validation: val_pairs.tsv: 3 lines read = 1 pairs kept + 1 blank + 1 with fewer cells than the first line"
        in caplog.text
    )
    with pytest.raises(
        UserError, match=r"val_pairs.tsv: 1 of 3 lines cannot be used: 1 with fewer cells .* \(line 3\)"
    ):
        _words(**files).setup("fit")


def test_several_files_of_a_side_are_read_in_turn_in_any_form(tmp_path: Path) -> None:
    sides = [[line.strip().split("\t")[side] + "\n" for line in _lines(60)] for side in (0, 1)]
    files: list[list[str]] = [[], []]
    for name, start, pack in (("1", 0, bytes), ("2.gz", 20, gzip.compress), ("3.bz2", 40, bz2.compress)):
        for side, names in enumerate(files):
            path = tmp_path / f"{side}.{name}"
            path.write_bytes(pack("".join(sides[side][start : start + 20]).encode()))
            names.append(str(path))
    data = _words(source_file=files[0], target_file=files[1])
    assert _everything(data) == _everything(_data(tmp_path))
    assert data.info.title == "0.1, 0.2.gz, 0.3.bz2, 1.1 and 2 more"
    twice = _words([_file(tmp_path, *_lines())] * 2)
    assert twice.rows["train"].shape[0] == 2 * data.rows["train"].shape[0]
    Path(files[0][2]).write_bytes(Path(files[0][2]).read_bytes()[:-9])
    with pytest.raises(UserError, match="0.3.bz2 is damaged"):
        _words(source_file=files[0], target_file=files[1]).setup("fit")


def test_sentences_over_the_limit_are_skipped_with_a_count(tmp_path: Path, caplog: Any) -> None:
    lines = ["un deux\tone two\n", "un deux trois\tone\n", "un\tone two three\n", *(f"a{i}\tb\n" for i in range(8))]
    data = _data(tmp_path, *lines, max_length=3)
    assert "left out 2 of 11 lines: 2 over a length of 3 (lines 2, 3)" in caplog.text
    assert data.info.kept == 9
    assert max(int(batch.source_lengths.max()) for batch in data.train_dataloader()) <= 3


def test_the_limit_counts_words_not_subwords(tmp_path: Path) -> None:
    words = ["abcdefghij", "klmnopqrst", "uvwxyzabcd", "zyxwvutsrq", "ponmlkjihg"]
    kept = [f"{a} {b} {a[:n]}\t{b} {a}\n" for n in range(1, 9) for a in words for b in words]
    data = _data(tmp_path, *kept, "a b c d\te\n", subwords="bpe", vocab_size=290, max_length=4)
    assert data.left_out["over a length of 4"] == 1
    assert data.info.kept == len(kept)
    assert max(int(batch.source_lengths.max()) for batch in data.train_dataloader()) > 4


@pytest.mark.parametrize(
    ("contents", "options", "reason"),
    [
        (b"", {}, "file is empty"),
        (b"a\tb\n\0\x01\x02", {}, "is no text file"),
        ("a\tb\n".encode("utf-16"), {}, "is no text file: its text is in UTF-16; expected lines of UTF-8"),
        (gzip.compress(b"a\tb\n", mtime=0)[:-6], {}, "is damaged"),
        (b"PK\x03\x04nothing", {}, "is damaged"),
        (_zipped(["a\tb\n"], "as.txt", "bs.txt"), {}, "holds 2 files, expected one text: as.txt, bs.txt; unpack"),
        ("да\tя\n".encode(), {"normalization": "tutorial", "on_bad_lines": "skip"}, "no pair of 1 is left af"),
        (b"a b c\td\n", {"max_length": 3}, "no pair of 1 is left after max_length=3"),
        (b"a\tb\n", {"prefixes": "tutorial"}, "no pair of 1 is left after prefixes='tutorial'"),
        (b"a\tb\n" * 9, {}, "nothing is left for the train part of 9 pairs.* 1 of these sentences are different"),
    ],
)
def test_a_file_that_leaves_nothing_to_train_on_is_rejected(tmp_path, contents, options, reason):
    path = tmp_path / "file"
    path.write_bytes(contents)
    with pytest.raises(UserError, match=reason):
        _words(str(path), **options).setup("fit")
    with pytest.raises(UserError, match=reason):
        TranslationDataModule(str(path), **options).vocabularies()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"data_file": "missing.tsv"}, "there is no file missing.tsv"),
        ({"data_file": "."}, "is a folder"),
        ({"val_fraction": 1.5}, "outside 0 to 1"),
        ({"max_length": 1}, "max_length=1: expected a whole number, 2 or more"),
        ({"normalization": "ascii"}, "no normalization 'ascii'"),
        ({"subwords": "wordpiece"}, "no subwords 'wordpiece'; expected one of bpe, none"),
        (
            {"subwords": "bpe", "normalization": "tutorial"},
            "subwords=.bpe. are learnt from the text as it is: leave `normalization`",
        ),
        ({"prefixes": "i am"}, "prefixes='i am': expected one of tutorial"),
        ({"columns": "a"}, "columns='a': expected USE=COLUMN, separated by commas; the uses are source, target, sep"),
        ({"columns": "source=a,target=b"}, "columns='source=a,target=b': only `data_file` has columns"),
        ({"val_source_file": "a"}, "`val_source_file` needs .*; pass `val_target_file` too"),
        ({"val_file": "a", "val_source_file": "a", "val_target_file": "b"}, "found both `val_file` and `val_source_f"),
        ({"val_file": "a", "val_fraction": 0.1}, "found val_fraction=0.1 beside .*; pass val_fraction=0"),
        ({"source_file": ["a", "b"], "target_file": ["c"]}, "has 2 files and `target_file` 1"),
        ({"val_file": "a"}, "no training files; pass `data_file` too"),
    ],
)
def test_wrong_settings_are_rejected_with_what_to_type(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        TranslationDataModule(**options).setup("fit")


# Filters, split and vocabularies


def test_a_prefix_chooses_pairs_by_either_side(tmp_path: Path) -> None:
    lines = ["Il est là.\tHe’s here.\n", "Elle\tHer\n", "Hé\tHi\n", "I m a\tx\n", "ça va\tyou aren't\n", "a\tI’m\n"]
    held = _file(tmp_path, "un\tone\n", name="val.tsv")  # Used whole.
    data = _words(_file(tmp_path, *lines), val_file=held, prefixes="tutorial")
    data.setup("test")
    assert (data.sizes["val"], data.left_out) == (1, {"without a prefix": 3})
    found = _sentences(data, "train") + _sentences(data, "test")
    assert sorted(target for _, target in found) == ["he' s here .", "x", "you aren' t"]


@given(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40), st.integers(0, 5))
def test_equal_sources_stay_in_one_part_of_the_split(sources, seed):
    def parts(order: list[str]) -> dict[str, list[str]]:
        found = split_by_source(hash_sources(order, seed), val=0.2, test=0.3)
        assert sorted(torch.cat(list(found.values())).tolist()) == list(range(len(order)))
        return {part: sorted(order[row] for row in rows) for part, rows in found.items()}

    assert parts(sources) == parts(sorted(sources)) == parts(sources[::-1])
    sets = [set(part) for part in parts(sources).values()]
    assert sum(map(len, sets)) == len(set(sources))


def test_held_out_shares_are_exact() -> None:
    sources = [f"s{i}" for i in range(1000)]
    first, second = (split_by_source(hash_sources(sources, seed), 0.05, 0.1) for seed in (1, 2))
    assert [len(rows) for rows in first.values()] == [850, 50, 100]
    assert len(set(first["test"].tolist()) & set(second["test"].tolist())) < 30
    # Adding sentences moves few of the others.
    more = split_by_source(hash_sources(sources + [f"t{i}" for i in range(50)], 1), 0.05, 0.1)
    assert len(set(first["test"].tolist()) & set(more["test"].tolist())) > 90


def test_vocabularies_come_from_the_training_part_only(tmp_path: Path) -> None:
    lines = [f"s{i}\tt{i} t\n" for i in range(100)]
    data = _data(tmp_path, *lines)
    train, test = _sentences(data, "train"), _sentences(data, "test")
    assert set(data.source_vocabulary.tokens[4:]) == {source for source, _ in train}
    assert data.target_vocabulary.tokens[4] == "t"
    assert len(test) == 10
    batch = next(iter(data.test_dataloader()))
    # What was held out is unknown to the network, and known to who scores it.
    assert batch.source[:, 0].eq(UNK).all()
    assert batch.target[:, 1].eq(UNK).all()
    assert sorted(zip(data.source_sentences(batch.numbers), data.target_sentences(batch.numbers))) == sorted(test)
    small = _data(tmp_path, *lines, vocab_size=7)
    assert len(small.source_vocabulary) == len(small.target_vocabulary) == 11


# Predicting with what the checkpoint knows


def test_inputs_of_any_kind_are_predicted_in_order(tmp_path, monkeypatch, caplog):
    state = _data(tmp_path).state_dict()
    listed = _file(tmp_path, "trois\r\n\r\n", "cinq zut", name="in.txt")
    other = _file(tmp_path, "six\n", name="in.list")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfsept\r\nhuit\r\n")))
    inputs = ["Un DEUX!", listed, other, "-", "quatre"]
    data = _words("missing.tsv", predict_inputs=inputs, eval_batch_size=2)
    data.setup("predict")
    data.load_state_dict(state)
    names = ["Un DEUX!", "trois", f"line 2 of {listed}", "cinq zut", "six", "sept", "huit", "quatre"]
    assert data.prediction_names == names
    assert f"{other} is a file: its 1 lines are translated" in caplog.text
    batches = list(data.predict_dataloader())
    assert torch.cat([batch.numbers for batch in batches]).tolist() == [0, 1, *range(3, 8)]
    assert data.unclear_inputs == {2: "blank line"}
    words = [data.source_vocabulary.decode(row) for batch in batches for row in batch.source]
    assert words == ["un deux <unk>", "trois", "cinq <unk>", "six", "sept", "huit", "quatre"]
    assert all(batch.target.tolist() == [[1, 2]] * len(batch.source) for batch in batches)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([], "no sentence to translate"),
        (["@missing"], "there is no file missing"),
        (["\u00ad"], "nothing is left of the sentence '\\\\xad' in unicode normalization"),
    ],
)
def test_nothing_to_predict_is_rejected(tmp_path: Path, inputs: list[str], reason: str) -> None:
    data = _words("missing.tsv", predict_inputs=inputs)
    data.load_state_dict(_data(tmp_path).state_dict())
    with pytest.raises(UserError, match=reason):
        data.predict_dataloader()


def test_a_line_in_another_encoding_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in the C locale, where Python lets every byte pass.
    lines = io.BytesIO("un\nsept été\n".encode("latin-1"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines, encoding="utf-8", errors="surrogateescape"))
    data = _words("missing.tsv", predict_inputs=["-"])
    data.load_state_dict(_data(tmp_path).state_dict())
    assert data.prediction_names == ["un", "line 2 of standard input"]
    (error,) = data.unreadable_inputs.values()
    assert (error.subject, error.problem) == ("line 2 of standard input", "is not in UTF-8; save the file as UTF-8")


def test_a_loaded_checkpoint_replaces_the_vocabularies(tmp_path: Path, caplog: Any) -> None:
    old = _data(tmp_path, normalization="tutorial")
    other = ["Un neuf!\tone nine\n", "deux.\ttwo\n", "six\tsix\n"]
    new = _words(_file(tmp_path, *other), test_fraction=1)
    new.setup("test")
    new.load_state_dict(old.state_dict())
    assert caplog.messages[-1] == "note: the saved normalization is used: tutorial"
    assert new.source_vocabulary == old.source_vocabulary
    assert sorted(new.source_sentences(torch.arange(3))) == ["deux", "six", "un neuf !"]
    (batch,) = new.test_dataloader()
    known = [old.source_vocabulary.decode(row) for row in batch.source]
    assert sorted(known) == ["deux", "six", "un <unk> <unk>"]
    with pytest.raises(UserError, match="nothing is left for the train part"):
        new.setup("fit")


# CSV, columns, counts


def _rows() -> list[tuple[str, str]]:
    first, *others = ((a, b) for a, b in (line.rstrip("\n").split("\t")[:2] for line in _lines()))
    return [(f"{first[0]}, vraiment", f'{first[1]} "really"'), *others]


def _as_csv(rows: list[tuple[str, ...]], delimiter: str = ",") -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(rows)
    return out.getvalue()


ROWS = _rows()
FORMS = {
    "pairs.tsv": "".join(f"{a}\t{b}\n" for a, b in ROWS),
    "pairs.csv": _as_csv([("fr", "en"), *ROWS]),
    "semicolons.csv": _as_csv([("fr", "en"), *ROWS], ";"),
    "lines.csv": _as_csv([("fr", "en"), *((a.replace(" ", "\n", 1), b) for a, b in ROWS)]),
    "quoted.tsv": _as_csv(ROWS, "\t"),
    "more.csv": _as_csv([("fr", "en", "score"), *((a, b, "0.9") for a, b in ROWS)], "\t"),
    "third.tsv": "".join(f"{a}\t{b}\tCC-BY 2.0 (France) #12 (x)\n" for a, b in ROWS),
}


DECLARED = {
    "semicolons.csv": "separator=;",
    "quoted.tsv": "quotes=yes",
    "more.csv": "source=fr,target=en,separator=tab",
    "third.tsv": "source=1,target=2",
}


@pytest.mark.parametrize("name", FORMS)
def test_csv_is_read_as_the_pairs_it_holds(tmp_path: Path, name: str, caplog: Any) -> None:
    (tmp_path / name).write_text(FORMS[name])
    data = _words(str(tmp_path / name), columns=DECLARED.get(name))
    data.setup("test")
    assert _everything(data) == _everything(_data(tmp_path, FORMS["pairs.tsv"]))
    is_csv = name.endswith(".csv")
    assert ("line 1 is a header and no pair: the source is 'fr', the target 'en', as in" in caplog.text) == is_csv
    assert f"as in {ROWS[0][0]!r} and {ROWS[0][1]!r}" in caplog.text
    assert data.left_out.get("header", 0) == is_csv
    assert data.info.read == data.info.kept + sum(data.left_out.values())


def test_columns_are_chosen_by_name_or_number(tmp_path: Path) -> None:
    table = [("id", "Phrase", "Satz", "Sentence"), *(("7", a, "ja", b) for a, b in ROWS)]
    (tmp_path / "a.csv").write_text(_as_csv(table))
    (tmp_path / "b.tsv").write_text("".join(f"7\t{a}\tja\t{b}\n" for a, b in ROWS))
    (tmp_path / "c.tsv").write_text("".join("\t".join(row) + "\n" for row in table))
    expected = _data(tmp_path, FORMS["pairs.tsv"])
    chosen = {
        "a.csv": "source=phrase,target=4",
        "b.tsv": "source=2,target=4",
        "c.tsv": "target=Sentence,source=phrase",
    }
    for name, columns in chosen.items():
        data = _words(str(tmp_path / name), columns=columns)
        assert _everything(data) == _everything(expected)
        assert sum(data.left_out.values()) == (name != "b.tsv")
    reason = "a.csv has the columns 'id', 'Phrase', 'Satz', 'Sentence'; pass columns='source=Phrase,target=Sentence'"
    with pytest.raises(UserError, match=reason):
        _words(str(tmp_path / "a.csv"), columns="source=phrase,target=satz 2").setup("fit")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", FORMS["pairs.csv"] + "alone\n", r"1 with fewer cells than the first line \(line 62\)"),
        ("a.csv", FORMS["pairs.csv"] + '"open,b\nc,d\n', r"1 no CSV: unexpected end of data \(line 62\)"),
        ("a.txt", _as_csv(ROWS), "has quotes, as in .*; pass columns='quotes=yes'"),
    ],
)
def test_wrong_lines_of_csv_are_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=reason):
        _words(str(tmp_path / name)).setup("fit")


@pytest.mark.parametrize("line", ["{i}\t{a}\t{b}\n", "{a}\thttp://a/{i}\t{b}\n"])
def test_a_table_without_two_columns_of_sentences_is_rejected(tmp_path: Path, line: str) -> None:
    lines = [line.format(i=i, a=a, b=b) for i, (a, b) in enumerate(ROWS, 1)]
    with pytest.raises(
        UserError, match="has the columns '1', '2', '3'; expected two; pass columns='source=[12],target=3'"
    ):
        _data(tmp_path, *lines)
    assert _data(tmp_path, *lines, columns="source=2,target=1").info.kept == 60


def test_sentences_as_written_are_there_for_every_held_out_row(tmp_path: Path) -> None:
    lines = [f"Un {WORDS[i % 3]}!\tOne {ENGLISH[i % 3]}, {i}!\n" for i in range(40)]
    for seed in range(3):
        data = _data(tmp_path, *lines, seed=seed, test_fraction=0.05)
        for rows in data.rows.values():
            texts, sentences = data.source_texts(rows), data.source_sentences(rows)
            assert [normalize(text) for text in texts] == sentences
            assert [normalize(text) for text in data.target_texts(rows)] == data.target_sentences(rows)
        written = data.source_texts(torch.cat((data.rows["val"], data.rows["test"])))
        assert all(text.endswith("!") and text[0] == "U" for text in written)
