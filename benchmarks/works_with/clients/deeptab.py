"""deeptab: a facade as scikit-learn's, metrics logged in each step with sync_dist."""

from typing import Any

import numpy as np
import pandas as pd
from deeptab.models import MLPLSS, MLPRegressor

from ..rows import Row, Run

LIBRARY = "deeptab"
PACKAGE = "lightning.pytorch"


def regressor(run: Run, model: Any, **more: Any) -> None:
    callbacks = run.callbacks()
    draws = np.random.default_rng(0)
    table = pd.DataFrame({"a": draws.normal(size=54), "b": draws.normal(size=54), "c": draws.choice(list("xyz"), 54)})
    targets = table["a"].to_numpy() * 2 + (table["c"] == "x")
    options = run.options("enable_checkpointing", "max_steps", **more)
    model().fit(table, targets, callbacks=callbacks, batch_size=run.batch_size, **options)


ROWS = {
    "MLP": Row(
        lambda run: regressor(run, MLPRegressor), "regressor, step metrics with sync_dist", whole="no max_steps"
    ),
    "LSS": Row(lambda run: regressor(run, MLPLSS, family="normal"), "a normal distribution", whole="no max_steps"),
}
