"""lightning-uq-box: burn-in by epoch, torchmetrics, and SGLD: noise in the optimizer's step, by hand."""

import functools
from typing import Any

import lightning_uq_box.uq_methods as methods
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..rows import SAMPLES, Row, Run

LIBRARY = "lightning-uq-box"
PACKAGE = "lightning.pytorch"


class Numbers(Dataset[dict[str, Any]]):
    def __init__(self, size: int) -> None:
        self.inputs = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": self.inputs[index], "target": self.inputs[index].sum(0, keepdim=True)}


def regression(run: Run, method: str) -> None:
    callbacks = run.callbacks()
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.1 if run.noise else 0.0), nn.Linear(8, 2))
    module: Any
    if method == "MVE":
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        module = methods.MVERegression(network, burnin_epochs=1, optimizer=adam)
    else:
        module = methods.SGLDRegression(
            network,
            loss_fn=methods.loss_functions.NLL(),
            lr=0.01,
            weight_decay=0.0,
            noise_factor=0.1,
            burnin_epochs=1,
            n_sgld_samples=1,
        )
    loader = DataLoader(Numbers(SAMPLES), run.batch_size, shuffle=True)
    root = str(run.folder / f"root-{run.rank}")
    run.fit(module, loader, DataLoader(Numbers(8), 4), callbacks=callbacks, default_root_dir=root)


ROWS = {
    "MVE": Row(lambda run: regression(run, "MVE"), "mean and variance, burn-in by epoch"),
    "SGLD, accumulated": Row(lambda run: regression(run, "SGLD"), "by hand, with GradientAccumulation"),
    "SGLD": Row(
        lambda run: regression(run, "SGLD"),
        "by hand, noise in the optimizer's step",
        accumulate="nothing",
        stops=(5, 3),
    ),
}
