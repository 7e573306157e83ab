"""Darts: a facade, float64, torchmetrics collections, loss logged with sync_dist in each step."""

import numpy as np
import torchmetrics
from darts import TimeSeries
from darts.models import TCNModel

from ..rows import SAMPLES, Row, Run

LIBRARY = "darts"
INSTALL = "darts[torch]"
PACKAGE = "pytorch_lightning"


def forecast(run: Run) -> None:
    callbacks = run.callbacks()
    draws = np.random.default_rng(0)
    # 42 windows of 8 + 4 values.
    series = TimeSeries.from_values(draws.normal(size=SAMPLES + 13))
    model = TCNModel(
        input_chunk_length=13,
        output_chunk_length=4,
        num_filters=2,
        dropout=0.1 if run.noise else 0.0,
        batch_size=run.batch_size,
        n_epochs=2,
        torch_metrics=torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError()]),
        random_state=1,
        pl_trainer_kwargs=run.options(callbacks=callbacks),
    )
    # What `load_from_checkpoint` sets, for a file of its own.
    model.load_ckpt_path = str(run.checkpoint) if run.checkpoint else None
    model.fit(series, val_series=series[-30:], verbose=False)


ROWS = {"TCN": Row(forecast, "convolutions, metrics, validation, in float64")}
