import re
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.errors import UserError
from datamodules.translation.text import (
    EOS,
    PAD,
    SOS,
    SPECIAL_TOKENS,
    UNK,
    Vocabulary,
    build_vocabulary,
    encode_tokens,
    normalize,
    normalize_lines,
)

LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=40)


def _as_the_tutorial_does(sentence: str) -> str:
    sentence = unicodedata.normalize("NFD", sentence.lower().strip())
    sentence = "".join(char for char in sentence if unicodedata.category(char) != "Mn")
    sentence = re.sub(r"([.!?])", r" \1", sentence)
    return " ".join(re.sub(r"[^a-zA-Z!?]+", " ", sentence).split())


@given(st.lists(LINES, min_size=1))
def test_the_tutorials_normalization_equals_its_functions(lines: list[str]) -> None:
    assert normalize_lines(lines, "tutorial") == [_as_the_tutorial_does(line) for line in lines]


@given(st.lists(LINES, min_size=1))
def test_whole_files_are_normalized_as_single_sentences(lines: list[str]) -> None:
    for how in ("unicode", "none", "tutorial"):
        once = normalize_lines(lines, how)
        assert once == [normalize(line, how) for line in lines] == [normalize(line, how) for line in once]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Élan, NAÏVE!", "élan , naïve !"),
        ("cafe\u0301", "café"),
        ("caf\u00ade\u0301", "café"),
        ("J’ai l'Oeuf.", "j' ai l' oeuf ."),
        ("the dogs' house", "the dogs' house"),
        ("'quoted", "' quoted"),
        ("Привет, мир!", "привет , мир !"),
        ("हिन्दी भाषा।", "हिन्दी भाषा ।"),
        ("你好，世界。", "你好 ， 世界 。"),
        ("مرحبا؟", "مرحبا ؟"),
        ("a\u00a0b\u202fc\td\u2028e\x0bf\x85g", "a b c d e f g"),
        ("100 € (brut)", "100 € ( brut )"),
        ("İstanbul", "i̇stanbul"),
        ("  ", ""),
    ],
)
def test_unicode_makes_tokens_of_punctuation(text: str, tokens: str) -> None:
    assert normalize(text) == tokens


def test_none_only_splits_at_spaces() -> None:
    assert normalize(" Don't  split\u00a0me, please.\x03", "none") == "Don't split me, please."


def test_no_normalized_sentence_holds_a_control_character() -> None:
    for how in ("unicode", "none", "tutorial"):  # `pack` marks the ends of sentences with them.
        assert normalize("a\x02b\x03c\x00", how) == "a b c"


def test_a_vocabulary_numbers_the_special_tokens_first() -> None:
    vocabulary = Vocabulary.of(["le", "chat", "<eos>"])
    assert vocabulary.tokens == [*SPECIAL_TOKENS, "le", "chat"]
    assert (len(vocabulary), PAD, SOS, EOS, UNK) == (6, 0, 1, 2, 3)
    assert vocabulary.decode(torch.tensor([SOS, 4, UNK, 5, EOS, 5, PAD])) == "le <unk> chat"
    assert encode_tokens(vocabulary, [*SPECIAL_TOKENS, "chat", "chien"]) == [[0], [1], [2], [3], [5], [3]]
    assert vocabulary.mark_unknown("le chien") == "le [chien]"
    assert "chat" in vocabulary
    assert vocabulary == Vocabulary(vocabulary.tokens)
    assert vocabulary != Vocabulary.of(["chat", "le"])


def test_a_special_token_in_a_text_is_an_ordinary_word() -> None:
    vocabulary = Vocabulary.of(["le", "chat", "<pad>"])
    tokens = [*SPECIAL_TOKENS, "<pad>", "<sos>", "le", "<eos>"]
    assert encode_tokens(vocabulary, tokens) == [[0], [1], [2], [3], [UNK], [UNK], [4], [UNK]]
    assert vocabulary.mark_unknown("<eos> le") == "[<eos>] le"


@pytest.mark.parametrize("tokens", [["le", "chat"], [*SPECIAL_TOKENS, "le", "le"], []])
def test_a_list_that_is_no_vocabulary_is_rejected(tokens: list[str]) -> None:
    with pytest.raises(UserError, match=f"begins with <pad> <sos> <eos> <unk>, found {len(tokens)} tokens"):
        Vocabulary(tokens)


@given(st.lists(st.text("abcd", min_size=1, max_size=2), max_size=60))
def test_a_vocabulary_does_not_depend_on_the_order_of_the_text(tokens: list[str]) -> None:
    def vocabulary(text: list[str]) -> Vocabulary:
        distinct = [*SPECIAL_TOKENS, *dict.fromkeys(text)]
        return build_vocabulary(distinct, [text.count(word) for word in distinct], most=3)

    chosen = vocabulary(tokens)
    assert chosen == vocabulary(sorted(tokens)) == vocabulary(tokens[::-1])
    counts = [tokens.count(word) for word in chosen.tokens[4:]]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) <= 3
    assert len(counts) == min(3, len(set(tokens)))
