"""chemprop: message passing over molecules in ragged batches, BatchNorm, its own loader function."""

import numpy as np
from chemprop import data, models, nn

from ..rows import SAMPLES, Row, Run

LIBRARY = "chemprop"
PACKAGE = "lightning.pytorch"


def mpnn(run: Run, seed: int | None = None) -> None:
    callbacks = run.callbacks()
    points = [
        data.MoleculeDatapoint.from_smi("C" * (1 + index % 9) + "O", np.array([float(index % 9), float(index % 5)]))
        for index in range(SAMPLES)
    ]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=run.batch_size, seed=seed)
    held_out = data.build_dataloader(data.MoleculeDataset(points[:10]), batch_size=4, shuffle=False)
    head = nn.RegressionFFN(input_dim=16, n_tasks=2, dropout=0.1 if run.noise else 0.0)
    module = models.MPNN(
        nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), head, batch_norm=run.noise, warmup_epochs=1
    )
    run.fit(module, loader, held_out, callbacks=callbacks)


ROWS = {
    "MPNN": Row(mpnn, "graphs of unequal size, two targets, validation, learning rate by step"),
    "seeded": Row(lambda run: mpnn(run, seed=3), "the same with its SeededSampler (own NumPy generator)"),
}
