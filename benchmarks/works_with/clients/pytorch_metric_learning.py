"""pytorch-metric-learning: its sampler (NumPy's generator), a miner, a loss over pairs, a loss with weights."""

from typing import Any

import lightning.pytorch as pl
import torch
from pytorch_metric_learning.losses import ArcFaceLoss, ContrastiveLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.samplers import MPerClassSampler
from torch.utils.data import DataLoader, TensorDataset

from ..rows import SAMPLES, Row, Run

LIBRARY = "pytorch-metric-learning"
PACKAGE = "lightning.pytorch"


class Embedding(pl.LightningModule):
    def __init__(self, loss: Any, miner: Any) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        self.loss = loss
        self.miner = miner

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        embeddings = self.network(inputs)
        pairs = None if self.miner is None else self.miner(embeddings, labels)
        return self.loss(embeddings, labels, pairs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def embedding(run: Run, pairs: bool) -> None:
    callbacks = run.callbacks()
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(SAMPLES) % 3
    samples = TensorDataset(inputs, labels)
    if pairs:
        module = Embedding(ContrastiveLoss(), MultiSimilarityMiner())
        sampler = MPerClassSampler(labels, 2, batch_size=run.batch_size, length_before_new_iter=40)
        loader = DataLoader(samples, run.batch_size, sampler=sampler)
    else:
        module = Embedding(ArcFaceLoss(3, 4), None)
        loader = DataLoader(samples, run.batch_size, shuffle=True)
    run.fit(module, loader, callbacks=callbacks)


ROWS = {
    "pairs": Row(
        lambda run: embedding(run, True),
        "contrastive loss, miner, MPerClassSampler",
        whole="pairs within a batch",
        unused=True,
    ),
    "ArcFace": Row(lambda run: embedding(run, False), "a loss with weights"),
}
