"""Translates with an exported encoder and decoder; needs onnxruntime and numpy, and sentencepiece for subwords.

Run it in its folder with sentences, or without any to read them from standard input, one a line:

    python translate.py "je suis fatigué ." --beam 5
"""

import argparse
import base64
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np

PAD, SOS, EOS, UNK = range(4)


def _character(char: str, how: str) -> str:
    """What a character of a sentence becomes, by the vocabularies' normalisation."""
    category = unicodedata.category(char)
    if how == "none":
        return " " if category in ("Cc", "Zs", "Zl", "Zp") else char
    if how == "unicode":
        if char in "'\u2019\u02bc\u2032":
            return "'"
        if char in "\u00ad\u200b\u2060\ufeff":
            return ""
        if category[0] in "PS":
            return f" {char} "
        return " " if category[0] == "Z" or category == "Cc" else char
    if "a" <= char <= "z" or category == "Mn":
        return char if category != "Mn" else ""
    return f" {char}" if char in "!?" else " "


def tokens_of(sentence: str, how: str) -> list[str]:
    """The tokens of a sentence, as in training."""
    if how == "tutorial":
        sentence = unicodedata.normalize("NFD", sentence.lower())
    text = "".join(_character(char, how) for char in (sentence if how != "unicode" else sentence.lower()))
    if how == "none":
        text = unicodedata.normalize("NFC", text)
    if how != "unicode":
        return text.split()
    # An apostrophe ends its token, or is a token where none precedes it.
    first, *rest = unicodedata.normalize("NFC", text).split("'")
    for piece in rest:
        first += f"' {piece}" if first[-1:].strip() else f" ' {piece}"
    return first.split()


def _subwords(model: str) -> Any:
    """Sentencepiece's model of one side."""
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=base64.b64decode(model))


class Translator:
    """Translates with the files of a folder: encoder.onnx, decoder.onnx and metadata.json."""

    def __init__(self, folder: str | Path) -> None:
        import onnxruntime

        folder = Path(folder)
        metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        source, self.target = metadata["source_vocabulary"], metadata["target_vocabulary"]
        self.ids = {token: number for number, token in enumerate(source) if number > UNK}
        self.subwords = [
            _subwords(metadata[f"{side}_subwords"]) for side in ("source", "target") if f"{side}_subwords" in metadata
        ]
        self.normalisation = metadata["normalisation"]
        self.beam = metadata["hyper_parameters"]["beam"]
        self.length_penalty = metadata["hyper_parameters"]["length_penalty"]
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
            for name in ("encoder", "decoder")
        )

    def __call__(self, sentence: str, beam: int | None = None) -> str:
        """Translate a sentence by beam search; a beam of 1 is greedy."""
        tokens = tokens_of(sentence, self.normalisation)
        if not tokens:
            return ""
        if self.subwords:
            numbers = [number for token in tokens for number in self.subwords[0].encode(token)]
        else:
            numbers = [self.ids.get(token, UNK) for token in tokens]
        found = self.search([*numbers, EOS], beam or self.beam)
        if self.subwords:
            return " ".join(self.subwords[1].decode([number for number in found if number != UNK]).split())
        return " ".join(self.target[number] for number in found)

    def search(self, source: list[int], beam: int) -> list[int]:
        """The best translation that a beam search finds, without the end mark."""
        state, memory, keys, mask = self.encoder.run(None, {"source": np.array([source])})
        hypotheses: list[list[int]] = [[]]
        totals, last = np.zeros(1, np.float32), np.array([SOS])
        finished: list[tuple[float, list[int]]] = []
        limit = 2 * len(source) + 10
        for length in range(1, limit + 1):
            feeds: dict[str, Any] = {"memory": memory, "keys": keys, "mask": mask}
            feeds = {name: np.repeat(value, len(last), 0) for name, value in feeds.items()}
            feeds |= {"tokens": last, "state": state}
            logits, state = self.decoder.run(["logits", "next_state"], feeds)
            logits[:, [PAD, SOS, UNK]] = -np.inf
            logits -= logits.max(1, keepdims=True)
            scores = totals[:, None] + logits - np.log(np.exp(logits).sum(1, keepdims=True))
            if length == limit:  # Nothing but the end.
                scores[:, np.arange(scores.shape[1]) != EOS] = -np.inf
            # The best continuations, one for each place; one that ends takes its place away.
            width = min(beam, scores.size)
            best = np.argpartition(-scores, width - 1, axis=None)[:width]
            rows, last = np.divmod(best, scores.shape[1])
            totals = scores[rows, last]
            ends = last == EOS
            penalty = ((5 + length) / 6) ** self.length_penalty
            finished += [(totals[i] / penalty, hypotheses[rows[i]]) for i in np.flatnonzero(ends)]
            beam -= int(ends.sum())
            goes_on = ~ends & (totals > -np.inf)
            rows, last, totals = rows[goes_on], last[goes_on], totals[goes_on]
            hypotheses = [[*hypotheses[row], int(token)] for row, token in zip(rows, last)]
            state = state[rows]
            if not len(rows):
                break
        return max(finished, key=lambda pair: pair[0])[1]


def main() -> None:
    """Translate the sentences of the command line."""
    parser = argparse.ArgumentParser(description="Translates sentences.")
    parser.add_argument("sentences", nargs="*")
    parser.add_argument("--beam", type=int, help="width of the beam search; 1 is greedy")
    arguments = parser.parse_args()
    translate = Translator(Path(__file__).parent)
    for sentence in arguments.sentences or sys.stdin:
        print(translate(sentence, arguments.beam))  # noqa: T201


if __name__ == "__main__":
    main()
