"""NeuralForecast: windows drawn at random inside `training_step`, its own loader and data module, masked loss."""

from typing import Any

import numpy as np
import pandas as pd
from neuralforecast.losses.pytorch import MAE
from neuralforecast.models import NHITS
from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

from ..rows import SAMPLES, Row, Run

LIBRARY = "neuralforecast"
PACKAGE = "pytorch_lightning"
ENVIRONMENT = {"LIGHTNING_RECIPES_LIGHTNING": PACKAGE}
"""Its dependency `ray` imports the other package as well."""


def windows(run: Run) -> None:
    callbacks = run.callbacks()
    draws = np.random.default_rng(0)
    frame = pd.concat(
        pd.DataFrame({"unique_id": index, "ds": range(30), "y": draws.normal(size=30).cumsum()})
        for index in range(SAMPLES)
    )
    dataset, *_ = TimeSeriesDataset.from_df(frame)
    data = TimeSeriesDataModule(dataset, batch_size=run.batch_size)
    options: dict[str, Any] = {"windows_batch_size": 16}
    module = NHITS(
        h=4,
        input_size=8,
        loss=MAE(),
        max_steps=8,
        mlp_units=[[8, 8]] * 3,
        dropout_prob_theta=0.1 if run.noise else 0.0,
        learning_rate=0.01,
        **options,
    )
    run.fit(module, callbacks=callbacks, datamodule=data, limit_val_batches=0)


ROWS = {
    "NHITS": Row(
        windows,
        "random windows of each micro-batch",
        "`LIGHTNING_RECIPES_LIGHTNING=pytorch_lightning`",
        whole="random windows",
    )
}
