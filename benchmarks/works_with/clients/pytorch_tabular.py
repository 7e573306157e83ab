"""PyTorch Tabular: its own data module over data frames, configurations, metrics and losses by name."""

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

from ..rows import SAMPLES, Row, Run

LIBRARY = "pytorch-tabular"
INSTALL = "pytorch-tabular requests"
PACKAGE = "pytorch_lightning"


def tabular(run: Run) -> None:
    callbacks = run.callbacks()
    draws = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "a": draws.normal(size=SAMPLES),
            "b": draws.normal(size=SAMPLES),
            "c": draws.choice(list("xyz"), SAMPLES),
            "target": draws.normal(size=SAMPLES),
        }
    )
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a", "b"], categorical_cols=["c"]),
        model_config=CategoryEmbeddingModelConfig(
            task="regression", layers="8-8", dropout=0.1 if run.noise else 0.0, batch_norm_continuous_input=False
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=run.batch_size, checkpoints=None, early_stopping=None),
    )
    data = model.prepare_dataloader(train=frame, validation=frame[:12], seed=1)
    module = model.prepare_model(data)
    # Its own `fit` has no argument for a checkpoint.
    run.fit(module, data.train_dataloader(), data.val_dataloader(), callbacks=callbacks)


ROWS = {"embedding": Row(tabular, "category embeddings, its own loaders and losses, validation")}
