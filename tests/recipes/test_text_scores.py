"""Standard scores of translations are sacrebleu's, with its intervals."""

import random

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from datamodules.errors import UserError
from datamodules.translation.bundled_corpus import bundled_pairs
from recipes.text_scores import Estimate, check_tokenizer, standard_metrics, tokenizer

TEXTS = [
    *(f"{target[0].upper()}{target[1:-2]}, isn't it?" for _, target in bundled_pairs()[:80]),
    *("It costs $3.14, or 10% (less).", "Ja!", "A man's T-shirt -- red & blue.", "I", "...", "two  spaces "),
]


def worse(seed: int, share: float) -> list[str]:
    """The texts without some words, and with other capitals."""
    generator = random.Random(seed)
    kept = (" ".join(word for word in text.split() if generator.random() < share) for text in TEXTS)
    return [text.lower() if generator.random() < 0.3 else text for text in kept]


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("sacrebleu", BLEU(force=True)),
        ("sacrebleu_lower", BLEU(lowercase=True, force=True)),
        ("sacrebleu_chrf", CHRF()),
    ],
)
def test_scores_intervals_and_signatures_are_those_of_sacrebleu(name, metric):
    one, other = worse(1, 0.9), worse(2, 0.7)
    ours = standard_metrics()[name]
    found = [Estimate.of(ours, texts, TEXTS) for texts in (one, other)]
    signatures, scores = PairedTest([("one", one), ("other", other)], {name: metric}, [TEXTS], "bs")()
    ((title, (first, second)),) = ((key, value) for key, value in scores.items() if key != "System")
    for mine, theirs in zip(found, (first, second), strict=True):
        assert mine.score == pytest.approx(theirs.score, abs=1e-10)
        assert mine.interval == pytest.approx(theirs.ci, abs=1e-4)  # sacrebleu adds in float32.
    assert ours.signature == str(signatures[title])
    assert 10 < found[1].score < found[0].score < 95


@pytest.mark.parametrize(
    "hypotheses",
    [
        ["", "", ""],
        ["x y z", "p q", "r"],
        ["a b c d", "", "a"],
        ["so long a line of many words", "a", "another long line of text"],
        ["a b", "a", "b"],
    ],
)
def test_scores_of_corpora_without_matches_and_of_short_sentences_are_those_of_sacrebleu(hypotheses):
    references = ["a b c e", "a", "b c"]
    expected = [BLEU(force=True), BLEU(lowercase=True, force=True), CHRF()]
    for ours, theirs in zip(standard_metrics().values(), expected, strict=True):
        score = Estimate.of(ours, hypotheses, references).score
        assert score == pytest.approx(theirs.corpus_score(hypotheses, [references]).score, abs=1e-10)


@pytest.mark.parametrize("name", ["zh", "char", "intl", "none"])
def test_other_tokenisers_are_those_of_sacrebleu(name):
    references, hypotheses = (
        ["我有3只猫。你呢?", "Ça va (bien)! Je suis là."],
        ["我有三只猫。你呢?", "Ça va bien! Je suis là."],
    )
    found = Estimate.of(standard_metrics(name)["sacrebleu"], hypotheses, references).score
    assert found == pytest.approx(BLEU(tokenize=name).corpus_score(hypotheses, [references]).score, abs=1e-10)
    assert found > 0


def test_a_tokeniser_that_is_not_there_is_answered_with_what_to_type(monkeypatch):
    with pytest.raises(UserError, match="no tokeniser 'zz'; expected one of 13a, intl, zh"):
        check_tokenizer("zz")
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    tokenizer.cache_clear()
    with pytest.raises(UserError, match=r"bleu_tokenize=ja-mecab needs MeCab; install it .*'sacrebleu\[ja\]'"):
        check_tokenizer("ja-mecab")
