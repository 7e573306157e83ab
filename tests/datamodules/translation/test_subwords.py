"""Subwords: any text comes back, models are functions of the training part, and checkpoints hold them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.errors import UserError
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.loaders import PackedSentences
from datamodules.translation.text import EOS, UNK, normalize, train_subwords

WORDS = {"Der": 9, "Mann,": 5, "Männer": 4, "Mannschaft": 3, "don't": 2, "3.14": 2, "你好世界": 1}
TEXTS = [
    "Der Mann, den niemand kennt.",
    "I don't pay 3.14!",
    "你好，世界",
    "สวัสดี ชาวโลก",
    "🙂👩\u200d🚀",
    "<unk> </s> <0x41>",
]
PAIRS = [(f"Der Hund Nr. {i} läuft.", f"Dog no. {i} runs, doesn't it?") for i in range(40)]


def corpus(folder: Path, pairs: list[tuple[str, str]] = PAIRS) -> str:
    file = folder / "pairs.tsv"
    file.write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    return str(file)


def data(file: str, **options: Any) -> TranslationDataModule:
    return TranslationDataModule(file, **({"subwords": "bpe", "vocab_size": 320, "test_fraction": 0.2} | options))


VOCABULARY = train_subwords(WORDS, 400)


def encode(text: str) -> list[int]:
    return [number for word in text.split() for number in VOCABULARY.spell(word)]


def test_any_text_comes_back_without_unknown_words() -> None:
    for text in TEXTS:
        ids = encode(text)
        assert UNK not in ids
        assert VOCABULARY.decode([*ids, EOS, *ids]) == VOCABULARY.mark_unknown(text) == text


def test_a_line_feed_in_bytes_does_not_end_a_translation() -> None:
    line_feed = VOCABULARY.tokens.index("<0x0A>")
    man, dont = VOCABULARY.spell("Mann,"), VOCABULARY.spell("don't")
    assert VOCABULARY.decode([*man, line_feed, line_feed, *dont, line_feed]) == "Mann, don't"


# Control characters and spaces are no part of a normalized sentence; U+2581 is sentencepiece's own mark.
@given(st.text(st.characters(exclude_characters="▁", exclude_categories=("Cs",)), max_size=30))
def test_any_normalized_text_comes_back(text: str) -> None:
    sentence = normalize(text, "none")
    assert VOCABULARY.decode(encode(sentence)) == sentence


def test_a_model_is_the_same_bytes_in_any_order_of_the_words() -> None:
    again = train_subwords(dict(reversed(WORDS.items())), 400)
    assert again.model == VOCABULARY.model


def test_a_text_with_few_words_has_fewer_subwords() -> None:
    assert 256 < len(train_subwords({"a": 1}, 8000)) < 300
    with pytest.raises(UserError, match="vocab_size=40 is below the 2.. tokens for single bytes and the characters"):
        train_subwords(WORDS, 40)


@given(st.data())
def test_spelling_packed_sentences_is_spelling_each_word(draw: st.DataObject) -> None:
    numbers = draw.draw(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5))
    words = st.integers(0, len(numbers) - 1)
    lines = draw.draw(st.lists(st.lists(words, min_size=1, max_size=6), min_size=1, max_size=6))
    lengths = torch.tensor([0, *map(len, lines)]).cumsum(0)
    packed = PackedSentences(torch.tensor(sum(lines, []), dtype=torch.int32), lengths).retokenized(numbers)
    expected = [sum((numbers[w] for w in line), []) for line in lines]
    assert [packed[row] for row in range(len(packed))] == expected
    padded, widths = packed.padded(torch.arange(len(packed)))
    assert [row[:width].tolist() for row, width in zip(padded, widths.tolist())] == expected
    assert int(padded.sum()) == sum(map(sum, expected))
    assert packed.lengths.tolist() == widths.tolist() == list(map(len, expected))


def test_subwords_come_from_the_training_part_only(tmp_path: Path) -> None:
    module = data(corpus(tmp_path))
    module.setup("fit")
    source, target = module.vocabularies()
    rows = module.rows["train"]
    words = " ".join(module.source_sentences(rows)).split()
    assert source == train_subwords({word: words.count(word) for word in words}, 320)
    batch = next(iter(module.train_dataloader()))
    assert batch.numbers is not None
    assert [source.decode(row) for row in batch.source] == module.source_sentences(batch.numbers)
    assert [target.decode(row) for row in batch.target] == module.target_sentences(batch.numbers)
    assert "doesn't it?" in module.target_sentences(batch.numbers)[0]


def test_a_data_modules_state_holds_the_models(tmp_path: Path) -> None:
    old = data(corpus(tmp_path))
    state = old.state_dict()
    torch.save(state, tmp_path / "state.ckpt")
    new = data(corpus(tmp_path, [("ein anderer Satz", "another sentence")] * 9))
    new.load_state_dict(torch.load(tmp_path / "state.ckpt", weights_only=True))
    assert new.vocabularies() == old.vocabularies()


def test_files_as_published_are_learned_in_subwords(tmp_path: Path) -> None:
    found = TranslationDataModule(corpus(tmp_path))
    assert (found.hparams.subwords, found.hparams.vocab_size, found.normalization) == ("bpe", 8000, "none")


def test_settings_of_words_turn_subwords_off(tmp_path: Path) -> None:
    file = corpus(tmp_path)
    for options in ({"normalization": "unicode"}, {"normalization": "none"}, {"prefixes": "tutorial"}):
        assert TranslationDataModule(file, **options).hparams.subwords == "none"


def test_the_bundled_sentences_are_learned_in_words() -> None:
    made = TranslationDataModule()
    assert (made.hparams.subwords, made.hparams.vocab_size, made.normalization) == ("none", None, "unicode")
