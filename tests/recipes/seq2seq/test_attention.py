"""Attention is that with which a translation was made, and changes none; teacher forcing is the same on any split."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from datamodules.translation.loaders import TranslationBatch
from datamodules.translation.text import EOS, SOS
from recipes.prediction import predict
from recipes.seq2seq import translate
from recipes.seq2seq.attention import add_examples
from recipes.seq2seq.network import Seq2SeqNet, TranslationNetwork, target_positions
from recipes.seq2seq.recipe import Seq2SeqTranslator
from recipes.seq2seq.vocabularies import known
from tests.recipes.seq2seq.test_network import TRANSFORMER, batch, network
from tests.recipes.seq2seq.test_recipe import corpus, data, translator, weights
from tests.support.command_lines import typed
from tests.support.pages import read_page
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

ONE_HEAD: dict[str, Any] = {**TRANSFORMER, "heads": 1}
TRANSLATOR = {"recipe": "recipes:Seq2SeqTranslator", "data": "datamodules:TranslationDataModule"}


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, ONE_HEAD], ids=["rnn", "two layers", "transformer"])
def test_attention_is_what_the_decoder_takes_means_with(settings: dict[str, Any]) -> None:
    net = network(**settings).eval()
    source, source_lengths, target, _ = batch([0, 1, 2, 3], padding=2)
    found = net.attention(source, source_lengths, target[:, :-1])
    assert found.shape == (4, target.shape[1] - 1, source.shape[1])
    torch.testing.assert_close(found.sum(2), torch.ones_like(found[:, :, 0]))
    for row, length in zip(found, source_lengths.tolist(), strict=True):
        assert not row[:, length:].any(), "padding has no weight"
    encoded, state = net.encode(source, source_lengths)
    is_rnn = not settings.get("heads")
    memory = encoded.memory if is_rnn else encoded.memory.chunk(net.layers, 2)[-1]
    means: list[Tensor] = []
    # What follows the attention gets the means: in the recurrent network behind the queries.
    after = net.combine if is_rnn else net.decoder[-1].source_output
    after.register_forward_pre_hook(lambda _, args: means.append(args[0].reshape(4, -1)[:, -memory.shape[2] :]))
    for time in range(target.shape[1] - 1):
        _, state = net.step(target[:, time], state, encoded)
        torch.testing.assert_close(torch.bmm(found[:, time : time + 1], memory).squeeze(1), means[-1])


@pytest.fixture(scope="module", params=["rnn", "transformer"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seq2SeqTranslator:
    SeedControl(seed=1)
    module = data(corpus(tmp_path_factory.mktemp("attention")))
    recipe = translator(module, network=request.param)
    quiet_trainer(max_epochs=1).fit(recipe, module)
    return recipe


def test_attention_changes_no_translation(trained: Seq2SeqTranslator) -> None:
    sentences = ["je vois le chat", "tu veux cela", "elle mange du pain noir et la grande maison"]
    texts = translate(trained, sentences)
    with_attention = translate(trained, sentences, return_attention=True)
    assert (
        [found.text for found in with_attention] == texts == [row["translation"] for row in predict(trained, sentences)]
    )
    for sentence, found in zip(sentences, with_attention, strict=True):
        assert found.attention.source == [*sentence.split(), "<eos>"]
        assert found.attention.translation[:-1] == found.text.split()[: len(found.attention.translation) - 1]
        assert found.attention.weights.shape == (len(found.attention.translation), len(found.attention.source))
    assert trained.attention_maps is None, "nothing is computed that nobody asks for"


def test_a_row_of_a_map_belongs_to_the_token_that_follows(trained: Seq2SeqTranslator) -> None:
    source, target = known(trained.vocabularies)
    for found in translate(trained, ["je vois le chat", "tu veux cela"], return_attention=True):
        columns = torch.tensor([[source.tokens.index(token) for token in found.attention.source]])
        rows = [target.tokens.index(token) for token in found.attention.translation]
        inputs = torch.tensor([[SOS, *rows[:-1]]])
        with torch.no_grad():
            (expected,) = trained.network.eval().attention(columns, torch.tensor([columns.shape[1]]), inputs)
        torch.testing.assert_close(found.attention.weights, expected.float())


def test_a_test_shows_the_attention_of_four_translations(tmp_path: Path) -> None:
    corpus(tmp_path)
    command = "--data-file pairs.tsv --subwords bpe --vocab-size 290 --hidden-size 16 --max-epochs 1 --name a"
    predicts = "predict --ckpt runs/seq2seq/a/checkpoints/best.ckpt --attention {} 'je vois le chat' 'tu veux <b>'"
    done, page, png, rejected = typed(
        tmp_path,
        command,
        predicts.format("a.html"),
        predicts.format("a.png"),
        f"{command} --attention a.html",
        **TRANSLATOR,
    )
    assert (done.status, page.status, png.status, rejected.status) == (0, 0, 0, 2), done.err + page.err + png.err
    run = tmp_path / "runs" / "seq2seq" / "a"
    report = read_page(run / "report.html")
    assert "Attention of each token of a translation over the source" in " ".join(report.text.split())
    assert "Translations" in report.text
    shown = len(list(run.glob("figures/attention_*.png")))
    assert shown == 4
    attention = read_page(tmp_path / "a.html")
    assert attention.tags.count("svg") == 2
    assert "▁chat" in attention.text
    assert "tu veux <b>" in attention.text
    assert "attention: 2 translations in a.html" in page.err
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) > 100
    assert page.out == png.out
    assert "--attention a.html is for predict" in rejected.err
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert "attention" not in {**saved["hyper_parameters"], **saved["config"]}


class WithoutAttention(Seq2SeqNet):
    attention = TranslationNetwork.attention


def test_a_network_without_attention_has_no_example() -> None:
    figures: dict[str, Any] = {}
    pairs = TranslationBatch(*batch([0]), torch.tensor([0]))
    add_examples(figures, WithoutAttention(9, 9, 8), pairs, torch.tensor([[5, 6, EOS]]), None)
    assert figures == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "a.jpg"}, r"attention='a.jpg': expected a name that ends in .html or .png"),
        ({"attention": "no/a.png"}, "there is no folder no"),
        ({"teacher_forcing": 1.5}, "teacher_forcing"),
    ],
)
def test_what_cannot_be_is_rejected_in_the_constructor(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Seq2SeqTranslator(source_vocab_size=9, target_vocab_size=9, **options)


@pytest.mark.parametrize("settings", [{}, TRANSFORMER], ids=["rnn", "transformer"])
def test_a_free_running_decoder_reads_its_own_predictions(settings: dict[str, Any]) -> None:
    net = network(**settings)
    source, source_lengths, target, target_lengths = batch([0, 1, 3])
    positions = target_positions(target, target_lengths)
    found = net.free_running(source, source_lengths, target, positions)
    told = target.clone()
    for time in range(1, target.shape[1]):
        every = torch.arange(target[:, 1:].numel())
        logits = net(source, source_lengths, told, every).view(*target[:, 1:].shape, -1)
        told[:, time] = logits[:, time - 1].argmax(1)
    torch.testing.assert_close(found, net(source, source_lengths, told, positions))
    assert not torch.allclose(found, net(source, source_lengths, target, positions))


def learned(file: str, world_size: int, micro_batches: int, share: float) -> dict[str, Tensor]:
    """The weights after two epochs of updates of 12 sentences in micro-batches of 3."""
    seeds = SeedControl(seed=1)
    module = data(file, batch_size=3)
    recipe = translator(module, teacher_forcing=share)
    trainer = quiet_trainer(GradientAccumulation(micro_batches), seeds, world_size=world_size, max_epochs=2)
    trainer.fit(recipe, module)
    return weights(recipe)


def test_teacher_forcing_is_the_same_to_the_bit_on_two_processes(tmp_path: Path) -> None:
    file = corpus(tmp_path)
    half = learned(file, 1, 4, 0.5)
    for found in run_ranks(learned, 2, file, 2, 2, 0.5):
        assert all(torch.equal(found[name], half[name]) for name in half)
    for share in (0.0, 1.0):
        other = learned(file, 1, 4, share)
        assert any(not torch.equal(other[name], half[name]) for name in half), share
