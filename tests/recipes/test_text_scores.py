"""Scores of translations are sacrebleu's, and do not depend on the order of the sentences."""

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from recipes.seq2seq.scores import standard_scores, token_scores

HYPOTHESES = [
    "i am very happy to see you here today",
    "He is a teacher!",
    "",
    "they are not going to the old house anymore",
    "she is she is she is",
]
REFERENCES = [
    "i am happy to see you here",
    "He is a teacher!",
    "we are lost",
    "They are not coming to the old house",
    "she is tall",
]


def test_standard_scores_are_those_of_sacrebleu_with_their_signatures():
    found = standard_scores(HYPOTHESES, REFERENCES)
    for name, metric in (("", BLEU()), ("_lower", BLEU(lowercase=True)), ("_chrf", CHRF())):
        assert found[f"sacrebleu{name}"].score == metric.corpus_score(HYPOTHESES, [REFERENCES]).score
        assert found[f"sacrebleu{name}"].signature == str(metric.get_signature())
    assert found["sacrebleu"].score < found["sacrebleu_lower"].score < 95
    with pytest.raises(ValueError, match="longer"):
        standard_scores(HYPOTHESES[:1], REFERENCES)


@pytest.mark.parametrize("name", ["zh", "char", "intl", "none"])
def test_other_tokenisers_are_those_of_sacrebleu(name):
    references, hypotheses = (
        ["我有3只猫。你呢?", "Ça va (bien)! Je suis là."],
        ["我有三只猫。你呢?", "Ça va bien! Je suis là."],
    )
    found = standard_scores(hypotheses, references, name)["sacrebleu"]
    assert found.score == BLEU(tokenize=name).corpus_score(hypotheses, [references]).score > 0
    assert f"tok:{name}" in found.signature


def test_scores_of_tokens_are_not_smoothed_and_do_not_depend_on_the_order():
    found = token_scores(HYPOTHESES, REFERENCES)
    assert found["bleu"] == BLEU(tokenize="none", smooth_method="none").corpus_score(HYPOTHESES, [REFERENCES]).score
    assert found["chrf"] == CHRF().corpus_score(HYPOTHESES, [REFERENCES]).score
    assert found["exact_match"] == 0.2
    assert token_scores(HYPOTHESES[::-1], REFERENCES[::-1]) == found
    assert token_scores(["a b"], ["a c"])["bleu"] == 0
    assert token_scores([], []) == {"bleu": 0.0, "chrf": 0.0, "exact_match": 0.0}
