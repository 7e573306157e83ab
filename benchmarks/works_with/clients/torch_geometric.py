"""PyTorch Geometric: `LightningDataset`, whose loader is a subclass of DataLoader, graphs of unequal size."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GCNConv, global_mean_pool

from ..rows import SAMPLES, Row, Run

LIBRARY = "torch-geometric"
PACKAGE = "lightning.pytorch"


class GraphClassifier(pl.LightningModule):
    """The network of its tutorial on Lightning."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = GCNConv(5, 8)
        self.second = GCNConv(8, 8)
        self.head = torch.nn.Linear(8, 3)
        self.dropout = dropout

    def forward(self, batch: Any) -> Any:
        hidden = self.first(batch.x, batch.edge_index).relu()
        hidden = self.second(hidden, batch.edge_index).relu()
        pooled = global_mean_pool(hidden, batch.batch)
        return self.head(F.dropout(pooled, self.dropout, self.training))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("train_cross_entropy", loss, batch_size=batch.num_graphs, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch), batch.y)
        self.log("val_loss", loss, batch_size=batch.num_graphs, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def graphs(run: Run) -> None:
    callbacks = run.callbacks()
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(SAMPLES):
        nodes = 2 + index % 6
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        features = torch.randn(nodes, 5, generator=generator)
        samples.append(Data(x=features, edge_index=edges, y=torch.tensor([index % 3])))
    data = LightningDataset(samples, samples[:12], batch_size=run.batch_size)
    run.fit(GraphClassifier(0.2 if run.noise else 0.0), callbacks=callbacks, datamodule=data)


ROWS = {"graphs": Row(graphs, "graph classification, LightningDataset, validation")}
