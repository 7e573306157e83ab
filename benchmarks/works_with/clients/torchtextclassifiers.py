"""torchTextClassifiers: `pytorch_lightning`, sample weights, a scheduler by class, metrics as modules."""

from typing import Any

import torch
from torch.utils.data import DataLoader
from torchTextClassifiers.model.lightning import TextClassificationModule

from ..rows import SAMPLES, Row, Run

LIBRARY = "torchTextClassifiers"
INSTALL = "torchTextClassifiers scikit-learn"
PACKAGE = "pytorch_lightning"


class Bag(torch.nn.Module):
    """Classifier as the library wants it."""

    num_classes = 3

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(50, 8)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, input_ids: Any, attention_mask: Any, categorical_vars: Any) -> Any:
        return self.head(self.dropout(self.embedding(input_ids)))


def classifier(run: Run, weighted: bool = False, plateau: bool = False) -> None:
    callbacks = run.callbacks()
    generator = torch.Generator().manual_seed(0)
    rows: Any = [
        {
            "input_ids": torch.randint(50, (6,), generator=generator),
            "attention_mask": torch.ones(6),
            "labels": torch.tensor(index % 3),
            "sample_weights": torch.tensor(1.0 + (index % 4 if weighted else 0)),
        }
        for index in range(SAMPLES)
    ]
    schedule: tuple[Any, dict[str, Any]] = (torch.optim.lr_scheduler.StepLR, {"step_size": 1, "gamma": 0.5})
    optimizer: tuple[Any, dict[str, Any]] = (torch.optim.Adam, {"lr": 0.01})
    if plateau:
        schedule = (torch.optim.lr_scheduler.ReduceLROnPlateau, {"patience": 0})
        optimizer = (torch.optim.SGD, {"lr": 0.5})
    module = TextClassificationModule(
        Bag(0.2 if run.noise else 0.0), torch.nn.CrossEntropyLoss(), *optimizer, *schedule
    )
    loader = DataLoader(rows, run.batch_size, shuffle=True)
    run.fit(module, loader, DataLoader(rows[:12], 4), callbacks=callbacks, max_epochs=8 if plateau else 2)


ROWS = {
    "plain": Row(classifier, "classifier with dropout, validation, a schedule by epoch"),
    "weighted": Row(
        lambda run: classifier(run, weighted=True),
        "the same with sample weights: a weighted mean",
        "`count=lambda batch: batch['sample_weights'].sum()`",
        count=lambda batch: batch["sample_weights"].sum(),
    ),
    "plateau": Row(
        lambda run: classifier(run, plateau=True),
        "ReduceLROnPlateau on its train_loss, which each rank logs for itself, 8 epochs",
        stops=(2, 14),
    ),
}
