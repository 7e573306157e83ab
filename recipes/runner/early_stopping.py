"""Stop early on the score that chooses the best checkpoint, by Lightning's callback."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from datamodules.errors import RunFailedError, spelled
from datamodules.lightning import Callback, EarlyStopping, pl


class PatientStopping(EarlyStopping):
    """Lightning's `EarlyStopping` with the patience of this command, not the one in the checkpoint."""

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with self._naming_scores(trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with self._naming_scores(trainer, pl_module):
            super().on_validation_end(trainer, pl_module)

    @contextmanager
    def _naming_scores(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            scores = sorted(name for name in trainer.callback_metrics if "_class_" not in name)
            raise RunFailedError(
                f"{spelled('patience')} follows {self.monitor}, the `monitor` of {type(pl_module).__name__}, and this"
                f" run has no such score; it has {', '.join(scores)}"
            ) from error


def why_stopped(callbacks: Sequence[Callback]) -> str:
    """Return the reason of the callback that ended the training early; empty where none did."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return callback.stopping_reason_message.replace(" Signaling Trainer to stop.", "").rstrip(".")
    return ""
