"""pytorch-lifestream: CoLES, a contrastive loss over the subsequences of a batch, with sequence lengths."""

import functools

import numpy as np
import torch
from ptls.frames import PtlsDataModule
from ptls.frames.coles import ColesDataset, CoLESModule
from ptls.frames.coles.split_strategy import SampleSlices
from ptls.nn import RnnSeqEncoder, TrxEncoder

from ..rows import SAMPLES, Row, Run

LIBRARY = "pytorch-lifestream"
PACKAGE = "pytorch_lightning"


def coles(run: Run) -> None:
    callbacks = run.callbacks()
    draws = np.random.default_rng(0)
    clients = []
    for index in range(SAMPLES):
        events = 12 + index % 9
        codes = torch.from_numpy(draws.integers(1, 9, events))
        amounts = torch.from_numpy(draws.normal(size=events)).float()
        clients.append({"event_time": torch.arange(events), "code": codes, "amount": amounts})
    slices = SampleSlices(split_count=3, cnt_min=4, cnt_max=8)
    data = PtlsDataModule(
        train_data=ColesDataset(clients, slices),
        train_batch_size=run.batch_size,
        valid_data=ColesDataset(clients[:8], slices),
        valid_batch_size=4,
    )
    encoder = TrxEncoder(embeddings={"code": {"in": 10, "out": 4}}, numeric_values={"amount": "identity"})
    module = CoLESModule(
        seq_encoder=RnnSeqEncoder(encoder, hidden_size=8, type="gru"),
        optimizer_partial=functools.partial(torch.optim.Adam, lr=0.01),
        lr_scheduler_partial=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    )
    run.fit(module, callbacks=callbacks, datamodule=data)


ROWS = {"CoLES": Row(coles, "contrastive loss, NumPy's random slices, validation", whole="pairs within a batch")}
