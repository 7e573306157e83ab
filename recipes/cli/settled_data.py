"""Which data set "auto" has found goes into the checkpoints: found again elsewhere, it might be another one."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

__all__ = ["SettledData"]


class SettledData(pl.Callback):
    """Writes the data set that a run trains on into its settings, where it was left open.

    Runs on: `setup` of a training, after that of the data.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        config: dict[str, Any] = getattr(pl_module, "run_config", {})
        found = getattr(trainer.datamodule, "dataset", None)  # type: ignore[attr-defined]
        if stage == "fit" and config.get("dataset") == "auto" and isinstance(found, str):
            config["dataset"] = found
