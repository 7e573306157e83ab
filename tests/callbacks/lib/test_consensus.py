"""What ranks tell each other during a run arrives in time, and waits neither for a device nor for ever."""

import time
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from callbacks.lib.consensus import DeferredFlags
from callbacks.preemption import Preemption
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, silence

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Dawdle(pl.Callback):
    """Keeps rank 1 from its last vote for some seconds."""

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == 1:
            time.sleep(8)


def _wait_for_rank_1() -> tuple[float, str]:
    silence()
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=2))
    callbacks = [Dawdle(), Preemption()]
    trainer = pl.Trainer(
        **QUIET, strategy=strategy, devices=2, max_steps=1, callbacks=callbacks, enable_checkpointing=False
    )
    loader = DataLoader(TensorDataset(*noisy_images(8)), 4)
    began = time.monotonic()
    try:
        trainer.fit(Tiny(image_network().double(), torch.optim.SGD, lr=0.1), loader)
    except RuntimeError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""


def test_a_vote_waits_for_the_other_ranks_no_longer_than_the_strategys_timeout() -> None:
    seconds, error = run_ranks(_wait_for_rank_1, 2)[0]
    assert "Timed out" in error
    assert seconds < 7


def test_on_a_cpu_an_answer_is_heard_at_once_and_once() -> None:
    flags = DeferredFlags()
    heard = [flags.pop()]
    for vote in (0.0, 2.0, 0.0):
        flags.push(torch.tensor(vote))
        heard += [flags.pop(), flags.pop()]
    assert heard == [False, False, False, True, False, False, False]


@needs_gpu
def test_on_a_gpu_an_answer_is_heard_one_call_later_and_nobody_waits_for_the_work_around_it() -> None:
    flags = DeferredFlags()
    votes = [torch.full((), float(vote), device="cuda") for vote in (0, 1, 0, 0)]
    torch.cuda.synchronize()
    heard, done = [], []
    for vote in votes:
        flags.push(vote)
        torch.cuda._sleep(2_000_000_000)  # About a second: the rest of the update.
        finished = torch.cuda.Event()
        finished.record()
        heard.append(flags.pop())
        done.append(finished.query())
    assert heard == [False, False, True, False]
    assert not any(done)
