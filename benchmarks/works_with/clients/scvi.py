"""scvi-tools: a facade with a subclass of Trainer, loaders with batch_size=None and a BatchSampler of its own."""

from typing import Any

import anndata
import numpy as np
import scvi

from ..rows import Row, Run

LIBRARY = "scvi-tools"
PACKAGE = "lightning.pytorch"
CHECKPOINTING = "`scvi.settings.seed = 1`, `enable_checkpointing=True`"


def model(run: Run, name: str) -> None:
    scvi.settings.seed = 1  # Without it, the split into training and validation differs from run to run.
    callbacks = run.callbacks()
    scvi.settings.logging_dir = str(run.folder / f"rank-{run.rank}")
    cells = 60
    counts = anndata.AnnData(np.random.default_rng(1).poisson(2, (cells, 30)).astype("f4"))
    counts.obs["batch"] = ["a", "b"] * (cells // 2)
    if name == "TOTALVI":
        counts.obsm["protein"] = np.random.default_rng(2).poisson(3, (cells, 5)).astype("f4")
        scvi.model.TOTALVI.setup_anndata(counts, batch_key="batch", protein_expression_obsm_key="protein")
        trained = scvi.model.TOTALVI(counts, n_latent=2)
    else:
        scvi.model.SCVI.setup_anndata(counts, batch_key="batch")
        noise: dict[str, Any] = {} if run.noise else {"use_batch_norm": "none", "dropout_rate": 0.0}
        trained = scvi.model.SCVI(counts, n_hidden=8, n_latent=2, **noise)
    options = run.options(logger=name == "TOTALVI", default_root_dir=str(run.folder))
    if run.processes > 1:
        options["strategy"] = "ddp_find_unused_parameters_true"
        options["datasplitter_kwargs"] = {"drop_dataset_tail": True, "drop_last": False}
    if run.checkpoint:
        options["ckpt_path"] = run.checkpoint
    trained.train(batch_size=run.batch_size, train_size=0.8, early_stopping=False, callbacks=callbacks, **options)


ROWS = {
    "SCVI": Row(lambda run: model(run, "SCVI"), "SCVI, `global_batch_size`", CHECKPOINTING, whole="noise"),
    "SCVI, steps": Row(
        lambda run: model(run, "SCVI"), "SCVI, `steps`", CHECKPOINTING, accumulate="steps", whole="noise", stops=(1, 1)
    ),
    "SCVI, no checkpoints": Row(
        lambda run: model(run, "SCVI"), "SCVI, `steps`, without ours", accumulate="steps", whole="noise", stops=()
    ),
    "TOTALVI": Row(
        lambda run: model(run, "TOTALVI"), "two optimizers by hand", CHECKPOINTING, accumulate="nothing", stops=(2, 3)
    ),
}
