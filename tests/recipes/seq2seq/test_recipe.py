"""The translation recipe with real Trainers: splits, interruptions, scores, checkpoints, predictions, figures."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from datamodules.translation.data_module import TranslationDataModule
from datamodules.translation.loaders import TranslationBatch
from datamodules.translation.text import UNK, Vocabulary
from recipes.export import export
from recipes.prediction import all_rows, predict
from recipes.runner.run import fit
from recipes.runner.saved_run import write_rows
from recipes.seq2seq.decoding import sentences_of
from recipes.seq2seq.recipe import Seq2SeqTranslator
from recipes.seq2seq.scores import standard_scores, token_scores
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

OF_WORDS = {"val_fraction": 0.1, "test_fraction": 0.1, "eval_batch_size": 3, "subwords": "none"}
SUBWORDS: dict[str, Any] = {"subwords": "bpe", "vocab_size": 290}
TINY: dict[str, Any] = {"hidden_size": 16, "lr": 0.01}
SUBJECTS = [("je", "i"), ("tu", "you"), ("il", "he"), ("elle", "she"), ("nous", "we")]
VERBS = [("vois", "see"), ("veux", "want"), ("mange", "eat")]
OBJECTS = [
    ("le chat", "the cat"),
    ("la grande maison", "the big house"),
    ("cela", "that"),
    ("du pain noir", "black bread"),
]


def corpus(folder: Path) -> str:
    """60 pairs of 3 to 5 words, and a longer one, in a file."""
    pairs = [(f"{a} {c} {e}", f"{b} {d} {f}") for a, b in SUBJECTS for c, d in VERBS for e, f in OBJECTS]
    pairs.append(("je vois le chat et la maison et le pain", "i see the cat and the house and the bread"))
    file = folder / "pairs.tsv"
    file.write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    return str(file)


def data(file: str, **options: Any) -> TranslationDataModule:
    return TranslationDataModule(file, **(OF_WORDS | options))


def translator(module: TranslationDataModule, **options: Any) -> Seq2SeqTranslator:
    return Seq2SeqTranslator(**Seq2SeqTranslator.settings_from_data(module), **(TINY | options))


def weights(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.network.state_dict().items()}


def trained(
    file: str, world_size: int, micro_batches: int, options: dict[str, Any], data_options: dict[str, Any]
) -> dict[str, Any]:
    """Three epochs of updates of 12 sentences, in float64; the weights and the scores at the end."""
    seeds = SeedControl(seed=1)
    module = data(file, batch_size=12 // world_size // micro_batches, **data_options)
    recipe = translator(module, dropout=0.0, val_sentences=4, **options)
    run = quiet_trainer(
        GradientAccumulation(micro_batches), seeds, world_size=world_size, max_epochs=3, precision="64-true"
    )
    run.fit(recipe, module)
    validated = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("val/")}
    tested = run.test(recipe, module, verbose=False)[0]
    return {"weights": weights(recipe), "updates": recipe.global_step, "val": validated, "test": tested}


# 49 sentences are four updates of 12, and one that leaves a rank of two without any.
@pytest.mark.parametrize(
    ("options", "data_options"),
    [({}, {}), ({"num_layers": 2}, SUBWORDS), ({"network": "transformer"}, SUBWORDS)],
    ids=["words", "subwords", "transformer"],
)
def test_two_processes_learn_what_one_process_learns(options, data_options, tmp_path):
    file = corpus(tmp_path)
    expected = trained(file, 1, 1, options, data_options)
    assert expected["updates"] == 15
    others = [trained(file, 1, 3, options, data_options), *run_ranks(trained, 2, file, 2, 2, options, data_options)]
    for found in others:
        assert found["updates"] == expected["updates"]
        for name, weight in found["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], atol=1e-9, rtol=0, msg=name)
        for part in ("val", "test"):
            assert found[part] == pytest.approx(expected[part], abs=1e-5)


class Stop(pl.Callback):
    """Ends a run abruptly before a batch of its second epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 3):
            raise RuntimeError("stopped")


def exact_run(
    file: str, folder: Path, network: str, options: dict[str, Any], *callbacks: pl.Callback, ckpt: Path | None = None
) -> dict[str, torch.Tensor]:
    seeds = SeedControl(seed=1)
    module = data(file, batch_size=4, **options)
    recipe = translator(module, dropout=0.3, num_layers=2, network=network)
    saves = ExactCheckpoint(folder, save_last=True, every_n_train_steps=1)
    run = quiet_trainer(GradientAccumulation(2), seeds, saves, *callbacks, max_epochs=2)
    run.fit(recipe, module, ckpt_path=str(ckpt) if ckpt else None, weights_only=True)
    return weights(recipe)


@pytest.mark.parametrize(
    ("network", "options"),
    [("rnn", {"max_tokens": 60}), ("transformer", SUBWORDS)],
    ids=["batches of tokens", "transformer"],
)
def test_a_run_resumed_within_an_epoch_ends_with_the_same_bits(network, options, tmp_path):
    file = corpus(tmp_path)
    expected = exact_run(file, tmp_path / "whole", network, options)
    with pytest.raises(RuntimeError, match="stopped"):
        exact_run(file, tmp_path / "cut", network, options, Stop())
    found = exact_run(file, tmp_path / "cut", network, options, ckpt=tmp_path / "cut" / "last.ckpt")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_resume_learns_no_vocabularies(tmp_path, monkeypatch):
    file = corpus(tmp_path)
    settings = TINY | SUBWORDS | {"run_dir": str(tmp_path), "name": "run", "logger": "none", "accelerator": "cpu"}
    settings["verbose"] = False
    first = fit("seq2seq", file, max_epochs=1, **settings)
    monkeypatch.setattr("datamodules.translation.corpus.Corpus.subwords", None)
    resumed = fit("seq2seq", file, max_epochs=2, resume="auto", **settings)
    assert resumed.epochs == 2
    assert resumed.data.vocabularies() == resumed.model.vocabularies == first.model.vocabularies


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> tuple[str, Path, dict[str, float]]:
    """A corpus, a run's folder with a checkpoint that has learned it, and the run's test scores."""
    folder = tmp_path_factory.mktemp("learned")
    file = corpus(folder)
    SeedControl(seed=3)
    module = data(file, batch_size=8)
    recipe = translator(module, hidden_size=32)
    run = quiet_trainer(
        max_epochs=36, logger=TensorBoardLogger(str(folder), name="", version=""), check_val_every_n_epoch=12
    )
    run.fit(recipe, module)
    run.save_checkpoint(folder / "a.ckpt")
    return file, folder, run.test(recipe, module, verbose=False)[0]


def test_the_rate_follows_the_number_of_updates(tmp_path):
    lengths = {"max_epochs": 64_000}, {"max_epochs": -1, "max_steps": 49_000}  # There are 49 pairs to train on.
    pairs = data(corpus(tmp_path))
    assert [Seq2SeqTranslator.settings_from_data(pairs, **length)["lr"] for length in lengths] == [0.0009] * 2


def test_it_translates_unseen_sentences_of_a_small_grammar(learned):
    _, _, scores = learned
    assert scores["test/bleu"] > 70
    assert scores["test/chrf"] > 70
    assert scores["test/exact_match"] >= 0.5
    assert scores["test/perplexity"] < 2


def evaluated(file: str, checkpoint: str, world_size: int) -> list[dict[str, float]]:
    module = data(file, val_fraction=0.4, test_fraction=0.3)
    recipe = translator(data(file.replace("free", "pairs")), hidden_size=32, val_sentences=13)
    run = quiet_trainer(world_size=world_size)
    options = {"ckpt_path": checkpoint, "weights_only": True, "verbose": False}
    return [evaluate(recipe, module, **options)[0] for evaluate in (run.validate, run.test)]


def test_scores_are_equal_on_three_processes_to_the_last_digit(learned):
    file, folder, _ = learned
    free = folder / "free.tsv"
    # References that it cannot hit, some of them with words that it does not know.
    free.write_text(Path(file).read_text().replace("the big", "a large"))
    alone = evaluated(str(free), str(folder / "a.ckpt"), 1)
    assert 0 < alone[0]["val/bleu"] < 100
    assert 0 < alone[1]["test/bleu"] < 100
    assert alone[0]["val/perplexity"] == pytest.approx(torch.tensor(alone[0]["val/loss"]).exp().item(), rel=1e-5)
    assert 0 < alone[1]["test/sacrebleu_lower"] < 100
    for found in run_ranks(evaluated, 3, str(free), str(folder / "a.ckpt"), 3):
        assert found == alone


def test_standard_scores_compare_with_the_references_as_written(learned, tmp_path):
    file, folder, _ = learned
    cased, lines = tmp_path / "cased.tsv", (line.split("\t") for line in Path(file).read_text().splitlines())
    cased.write_text("".join(f"{source}\t{target.title()}!\n" for source, target in lines))
    module = data(str(cased), test_fraction=0.3)
    recipe = translator(data(file), hidden_size=32)
    scores = quiet_trainer().test(recipe, module, ckpt_path=str(folder / "a.ckpt"), weights_only=True, verbose=False)[0]
    tables = recipe.tables
    rows = tables["test_translations.csv"].rows
    for name, column in (("test_hypotheses.txt", "translation"), ("test_references.txt", "reference")):
        write_rows(tmp_path / name, tables[name].rows, tables[name].columns)
        assert (tmp_path / name).read_text().split("\n") == [*(row[column] for row in rows), ""]
    assert [row["reference"] for row in rows] == module.target_texts(module.rows["test"])
    assert all(row["reference"].istitle() and row["reference"].endswith("!") for row in rows)
    hypotheses, references = [row["translation"] for row in rows], [row["reference"] for row in rows]
    for key, metric in (("sacrebleu", BLEU()), ("sacrebleu_lower", BLEU(lowercase=True)), ("sacrebleu_chrf", CHRF())):
        expected = metric.corpus_score(hypotheses, [references]).score
        assert scores[f"test/{key}"] == pytest.approx(expected, rel=1e-6)
    assert scores["test/sacrebleu_lower"] > scores["test/sacrebleu"]


def test_a_bare_checkpoint_translates_typed_sentences(learned):
    recipe = Seq2SeqTranslator.load_from_checkpoint(learned[1] / "a.ckpt", map_location="cpu", weights_only=True)
    rows = predict(recipe, ["Je  vois le chat", "elle mange du pain noir", "tu veux cela"])
    assert [row["translation"] for row in rows] == ["i see the cat", "she eat black bread", "you want that"]
    assert recipe.training, "translating leaves the mode of the network as it was"


def test_predict_gives_translations_in_order(learned, tmp_path):
    file, folder, _ = learned
    long = "je vois le chat " * 40
    sentences = [long, "elle mange du pain noir", "je vois le chien", "nous mange la grande maison", "tu veux cela"]
    module = data(file, predict_inputs=[*sentences, "oui " * 30_000], eval_batch_size=3)
    recipe = translator(data(file), hidden_size=32, beam=4)
    outputs = quiet_trainer().predict(recipe, module, ckpt_path=str(folder / "a.ckpt"), weights_only=True)
    assert [len(batch["numbers"]) for batch in outputs] == [2, 1, 2], "the long sentence is in a batch of its own"
    rows = all_rows(recipe, outputs, module)
    assert [row["sentence"] for row in rows[1:5]] == sentences[1:]
    assert [row["normalized"] for row in rows[1:5]] == [sentences[1], "je vois le [chien]", *sentences[3:]]
    translations = [rows[i]["translation"] for i in (1, 3, 4)]
    assert translations == ["she eat black bread", "we eat the big house", "you want that"]
    assert rows[5]["translation"] is None
    assert "has 120,000 bytes, more than 100,000" in rows[5]["note"]


def test_subwords_translate_any_text_line_by_line(tmp_path):
    pairs = [("Ein Hund läuft.", "A dog doesn't sleep."), ("Zwei Hunde laufen, ja!", "Two dogs run, yes!")]
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"{a}\t{b}\n" for a, b in pairs * 6), encoding="utf-8")
    module = data(str(file), val_fraction=0, test_fraction=0, batch_size=4, subwords="bpe")
    recipe = translator(module, dropout=0.0, lr=0.02, hidden_size=32)
    run = quiet_trainer(max_epochs=60, limit_val_batches=0)
    run.fit(recipe, module)
    run.save_checkpoint(tmp_path / "a.ckpt")
    lines = tmp_path / "lines.txt"
    lines.write_text("Zwei Hunde laufen, ja!\n\n你好 🙂\nEin Hund läuft.\n", encoding="utf-8")
    asked = data("missing.tsv", predict_inputs=[str(lines)], subwords="bpe")
    other = translator(module, hidden_size=32)
    outputs = quiet_trainer().predict(other, asked, ckpt_path=str(tmp_path / "a.ckpt"), weights_only=True)
    rows = all_rows(other, outputs, asked)
    assert [row["sentence"] for row in rows][::3] == ["Zwei Hunde laufen, ja!", "Ein Hund läuft."]
    blank = {
        "sentence": f"line 2 of {lines}",
        "translation": None,
        "score": None,
        "normalized": None,
        "note": "blank line",
    }
    assert rows[1] == blank
    assert [row[other.prediction_columns[1]] for row in rows][::3] == ["Two dogs run, yes!", "A dog doesn't sleep."]
    assert len(rows) == 4


def test_testing_a_checkpoint_learns_no_subwords_again(tmp_path, caplog):
    caplog.set_level("INFO", "lightning_recipes")  # A run in this process has set the level of this logger.
    file = corpus(tmp_path)
    module = data(file, **SUBWORDS)
    recipe, other = translator(module), translator(module)
    run = quiet_trainer(max_steps=1, limit_val_batches=0)
    run.fit(recipe, module)
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert "learning up to 290 subwords" in caplog.text
    caplog.clear()
    tester = quiet_trainer()
    tester.test(other, data(file, **SUBWORDS), ckpt_path=str(tmp_path / "a.ckpt"), weights_only=True, verbose=False)
    assert "learning" not in caplog.text


def test_unknown_words_are_never_written(learned):
    recipe = Seq2SeqTranslator.load_from_checkpoint(learned[1] / "a.ckpt", beam=3, weights_only=True)
    recipe.network.output.bias.data[UNK] += 30
    sentences = ["elle mange du pain bleu", "je vois le chien"]
    found = [row["translation"] for row in predict(recipe, sentences)]
    assert all(found)
    assert "<unk>" not in " ".join(found)


def test_unknown_words_of_a_reference_are_matched_by_nothing():
    vocabularies = Vocabulary.of(["a"]), Vocabulary.of(["b"])
    batch = TranslationBatch(*(torch.tensor(x) for x in ([[4, 2]], [2], [[1, 4, 3, 2]], [4])))
    assert sentences_of(batch, vocabularies, None) == (["a"], ["b \ufffd"])


def test_a_batch_without_sentences_has_gradients_of_zero():
    recipe = Seq2SeqTranslator(source_vocab_size=5, target_vocab_size=5, **TINY)
    empty, none = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    out = recipe.training_step(TranslationBatch(empty, none, empty, none, none), 0)
    out["loss"].backward()
    assert out["count"] == 0
    assert all(p.grad is not None and not p.grad.any() for p in recipe.parameters())


SIZES = {"source_vocab_size": 9, "target_vocab_size": 9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass `source_vocab_size` and `target_vocab_size`"),
        (SIZES | {"hidden_size": 7}, "pass an even number"),
        (SIZES | {"network": "gpt"}, "expected one of rnn, transformer"),
        (SIZES | {"heads": 8}, "heads=8 and feedforward_size=512: network='rnn' has neither; leave them at 4 and 512"),
        (SIZES | {"bleu_tokenize": "zz"}, "bleu_tokenize='zz': expected one of 13a, intl, zh"),
        (SIZES | {"network": "transformer", "hidden_size": 30}, "hidden_size=30 cannot be split into heads=4"),
    ],
)
def test_mistakes_are_answered_with_what_to_type(options, message):
    with pytest.raises(UserError, match=message):
        Seq2SeqTranslator(**options)


def test_data_with_other_vocabularies_is_rejected(tmp_path):
    module = data(corpus(tmp_path))
    recipe = Seq2SeqTranslator(source_vocab_size=99, target_vocab_size=99, **TINY)
    with pytest.raises(UserError, match="the network has 99 source tokens, and the data has"):
        quiet_trainer(max_epochs=1).fit(recipe, module)


def test_a_run_that_begins_with_weights_takes_their_vocabularies(tmp_path):
    file, one = corpus(tmp_path), {"max_epochs": 1}
    module = data(file, **SUBWORDS)
    recipe, run, checkpoint = translator(module), quiet_trainer(**one), str(tmp_path / "a.ckpt")
    run.fit(recipe, module)
    run.save_checkpoint(checkpoint)
    written = [export(translator(module), checkpoint, kind).path for kind in ("safetensors", "state-dict")]
    for path in (checkpoint, *map(str, written)):
        by_flags, attached = data(file, **SUBWORDS, seed=2), data(file, **SUBWORDS, seed=2)
        assert module.vocabularies() != attached.vocabularies()
        sizes = Seq2SeqTranslator.settings_from_data(by_flags, weights=path)
        quiet_trainer(**one).fit(Seq2SeqTranslator(**sizes, **TINY, weights=path), attached)
        assert module.vocabularies() == by_flags.vocabularies() == attached.vocabularies()
    renormalized = data(file, normalization="tutorial")
    rate = Seq2SeqTranslator.settings_from_data(renormalized, weights=path, max_epochs=1)["lr"]
    assert rate == Seq2SeqTranslator.settings_from_data(module, max_epochs=1)["lr"], "it depends on the number of pairs"
    for new in (["source_embedding", "target_embedding", "output"], ["*_embedding", "network.output"]):
        other = data(file, **SUBWORDS, seed=2)
        quiet_trainer(**one).fit(translator(other, weights=path, weights_skip=new), other)
        assert module.vocabularies() != other.vocabularies()


# Scores are sacrebleu's, and do not depend on the order of the sentences


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


def test_standard_scores_are_the_scores_of_sacrebleu():
    found = standard_scores(HYPOTHESES, REFERENCES)
    for name, metric in (("", BLEU()), ("_lower", BLEU(lowercase=True)), ("_chrf", CHRF())):
        assert found[f"sacrebleu{name}"].score == metric.corpus_score(HYPOTHESES, [REFERENCES]).score
        assert found[f"sacrebleu{name}"].signature == str(metric.get_signature())
    assert found["sacrebleu"].score < found["sacrebleu_lower"].score < 95
    with pytest.raises(ValueError, match="longer"):
        standard_scores(HYPOTHESES[:1], REFERENCES)


@pytest.mark.parametrize("name", ["zh", "char", "intl", "none"])
def test_other_tokenizers_are_those_of_sacrebleu(name):
    references, hypotheses = (
        ["我有3只猫。你呢?", "Ça va (bien)! Je suis là."],
        ["我有三只猫。你呢?", "Ça va bien! Je suis là."],
    )
    found = standard_scores(hypotheses, references, name)["sacrebleu"]
    assert found.score == BLEU(tokenize=name).corpus_score(hypotheses, [references]).score > 0
    assert f"tok:{name}" in found.signature


def test_scores_of_tokens_do_not_depend_on_the_order():
    found = token_scores(HYPOTHESES, REFERENCES)
    assert found["bleu"] == BLEU(tokenize="none", smooth_method="none").corpus_score(HYPOTHESES, [REFERENCES]).score
    assert found["chrf"] == CHRF().corpus_score(HYPOTHESES, [REFERENCES]).score
    assert found["exact_match"] == 0.2
    assert token_scores(HYPOTHESES[::-1], REFERENCES[::-1]) == found
    assert token_scores(["a b"], ["a c"])["bleu"] == 0
    assert token_scores([], []) == {"bleu": 0.0, "chrf": 0.0, "exact_match": 0.0}
