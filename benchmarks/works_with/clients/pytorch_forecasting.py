"""pytorch-forecasting: TFT, batches of a dict and a tuple, clipping, a plateau, hooks that log and save."""

from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data.examples import generate_ar_data

from ..rows import Row, Run

LIBRARY = "pytorch-forecasting"
PACKAGE = "lightning.pytorch"


def fusion_transformer(run: Run, weighted: bool = False) -> None:
    callbacks = run.callbacks()
    frame = generate_ar_data(n_series=3, timesteps=27, seed=1).assign(static=2)
    frame["weight"] = 1.0 + frame["time_idx"] % 4
    windows = TimeSeriesDataSet(
        frame,
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=10,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        weight="weight" if weighted else None,
    )
    held_out = TimeSeriesDataSet.from_dataset(windows, frame, predict=True, stop_randomization=True)
    module = TemporalFusionTransformer.from_dataset(
        windows,
        hidden_size=8,
        attention_head_size=1,
        hidden_continuous_size=4,
        dropout=0.1 if run.noise else 0.0,
        learning_rate=0.01,
        log_interval=-1,
        reduce_on_plateau_patience=1,
    )
    run.fit(
        module,
        windows.to_dataloader(train=True, batch_size=run.batch_size, num_workers=0),
        held_out.to_dataloader(train=False, batch_size=4, num_workers=0),
        callbacks=callbacks,
        gradient_clip_val=0.1 if run.noise else None,
    )


ROWS = {
    "TFT": Row(fusion_transformer, "temporal fusion transformer, 42 windows, clipping, plateau", unused=True),
    "weighted": Row(
        lambda run: fusion_transformer(run, weighted=True), "the same with weights: a weighted mean", unused=True
    ),
}
