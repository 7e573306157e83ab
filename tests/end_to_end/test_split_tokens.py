"""A translation run in batches of tokens, resumed on another number of devices by the command that a user types."""

from pathlib import Path

import pytest
import torch

from tests.recipes.seq2seq.test_recipe import corpus
from tests.support.command_lines import type_line
from tests.support.ranks import run_ranks
from tests.support.tables import equal

ARGS = ["--max-tokens", "60", "--hidden-size", "8", "--precision", "32", "--schedule", "constant"]
ARGS += ["--accelerator", "cpu", "--no-enable-progress-bar", "--data-file", "pairs.tsv"]
LAST = Path("runs/seq2seq/run/checkpoints/last.ckpt")


def on(devices: int, folder: Path, *args: str) -> tuple[int, str]:
    split = ["--devices", str(devices), *(["--strategy", "ddp"] if devices > 1 else [])]
    classes = "recipes:Seq2SeqTranslator", "datamodules:TranslationDataModule"
    ended = run_ranks(type_line, devices, *classes, [*ARGS, *split, *args], str(folder))[0]
    return ended.status, ended.out + ended.err


@pytest.mark.slow
def test_batches_of_tokens_make_the_same_updates_on_two_devices(tmp_path):
    whole, split = tmp_path / "whole", tmp_path / "split"
    for folder in (whole, split):
        folder.mkdir()
        corpus(folder)
    begin, more = ["--name", "run", "--accumulate", "2"], ["--resume", str(LAST), "--max-epochs", "4"]
    status, out = on(1, whole, *begin, "--max-epochs", "4")
    assert status == 0, out
    assert "global batch 120 tokens = 2 micro-batches of 60 tokens on 1 device of 1 node, precision" in out
    assert on(1, split, *begin, "--max-epochs", "2")[0] == 0
    status, out = on(2, split, *more)
    assert status == 0, out
    assert "devices: 1 before, 2 now; the updates and their order stay" in out
    assert "global batch 120 tokens = 2 micro-batches of 60 tokens on 2 devices of 1 node, precision" in out
    found, expected = (torch.load(folder / LAST, weights_only=True) for folder in (split, whole))
    assert found["global_step"] == expected["global_step"]
    assert equal(found["state_dict"], expected["state_dict"])
    more[-1] = "5"
    for flag, value, saved in (("--accumulate", 4, 2), ("--max-tokens", 90, 60), ("--global-batch-size", 8, None)):
        status, out = on(1, split, *more, flag, str(value))
        assert status == 2
        assert f"{flag} is {value}, and {saved} in the checkpoint" in out
