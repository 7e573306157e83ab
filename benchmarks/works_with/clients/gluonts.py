"""GluonTS: DeepAR, an endless iterable data set cut by `num_batches_per_epoch`, NumPy's random windows."""

from typing import Any

import numpy as np
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator

from ..rows import Row, Run

LIBRARY = "gluonts"
INSTALL = "gluonts[torch]"
PACKAGE = "lightning.pytorch"


def deepar(run: Run) -> None:
    callbacks = run.callbacks()
    draws = np.random.default_rng(0)
    start = pd.Period("2024-01-01", freq="D")
    series = [{"start": start, "target": draws.normal(size=40).cumsum()} for _ in range(6)]
    options: dict[str, Any] = run.options(callbacks=callbacks, default_root_dir=str(run.folder))
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=4,
        context_length=8,
        num_layers=1,
        hidden_size=8,
        lags_seq=[1, 2],
        time_features=[],
        dropout_rate=0.1 if run.noise else 0.0,
        batch_size=run.batch_size,
        num_batches_per_epoch=12 if run.batch_size == 4 else 4,
        trainer_kwargs=options,
    )
    checkpoint = str(run.checkpoint) if run.checkpoint else None
    estimator.train(ListDataset(series, freq="D"), ckpt_path=checkpoint)


ROWS = {
    "samples": Row(deepar, "DeepAR, `global_batch_size`", whole="random windows"),
    "steps": Row(deepar, "DeepAR, `steps`", accumulate="steps", whole="random windows", stops=(1, 2)),
}
