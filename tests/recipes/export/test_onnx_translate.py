"""The script of an exported translator makes the tokens that the recipe makes."""

import pytest

from datamodules.translation.text import normalise_lines
from recipes.seq2seq.onnx_translate import tokens_of

SENTENCES = [
    *(
        "",
        "   ",
        "J’ai 2 chats, n'est-ce pas?",
        "L'été -- déjà !",
        "'quoted' ''",
        "rock'n'roll'",
        "Ça va, n'est-ce pas?",
    ),
    *(
        "soft\u00adhyphen zero\u200bwidth",
        "e\u0301 e\u200b\u0301 E\u0301",
        "नमस्ते, दुनिया।",
        "你好，世界！",
        "🙂👩\u200d🚀",
    ),
    *(
        "tab\tand\u00a0space\u2003em\u2028line",
        "İstanbul Straße ΣΊΣΥΦΟΣ",
        "«Bonjour» … — 50 % €5",
        "a.b!c?d",
        "\ufeffbom \x07bell",
    ),
]


@pytest.mark.parametrize("how", ["unicode", "none", "tutorial"])
def test_the_script_splits_sentences_as_training_does(how):
    expected = [line.split(" ") if line else [] for line in normalise_lines(SENTENCES, how)]
    assert [tokens_of(sentence, how) for sentence in SENTENCES] == expected
