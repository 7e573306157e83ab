"""Early stopping on a score, by Lightning's callback."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, EarlyStopping
from typing_extensions import override

from datamodules.errors import RunFailedError, UserError

_LESS_IS_BETTER = {"loss", "error", "ece", "perplexity", "mae", "mse", "rmse", "wer", "cer"}
_MORE_IS_BETTER = {"accuracy", "acc", "f1", "bleu", "chrf", "auroc", "precision", "recall", "iou", "score"}


def score_mode(score: str, monitor: str = "", monitor_mode: str = "min") -> str:
    """Whether less or more of a score is better: "min" or "max".

    Args:
        monitor: the recipe's score, whose mode is known; likewise `monitor_mode`.

    Raises:
        UserError: neither the recipe nor the score's name tells.

    Example:
        >>> score_mode("val/loss"), score_mode("val/top5_accuracy"), score_mode("val/reward", "val/reward", "max")
        ('min', 'max', 'max')
    """
    if score == monitor:
        return monitor_mode
    words = set(score.lower().replace("/", "_").split("_"))
    if words & _LESS_IS_BETTER:
        return "min"
    if words & _MORE_IS_BETTER:
        return "max"
    raise UserError(
        f"early_stopping={score}: cannot tell whether less or more {score} is better; pass a score with a name such as"
        " val/loss or val/accuracy, or the recipe's `monitor`"
    )


class PatientStopping(EarlyStopping):
    """Lightning's `EarlyStopping` with the patience of this command, also where a checkpoint was saved with another."""

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with _naming_scores(self.monitor, trainer):
            super().on_train_epoch_end(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with _naming_scores(self.monitor, trainer):
            super().on_validation_end(trainer, pl_module)


@contextmanager
def _naming_scores(monitor: str, trainer: pl.Trainer) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        names = (name for name in sorted(trainer.callback_metrics) if "_class_" not in name)
        scores = ", ".join(name for name in names if name.split("/")[0] != "lr")
        raise RunFailedError(
            f"`early_stopping={monitor}` is no score of this run, whose scores are {scores}"
        ) from error


def why_stopped(callbacks: Sequence[Callback]) -> str:
    """The reason of the callback that has ended the training early; empty where none has."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return callback.stopping_reason_message.replace(" Signaling Trainer to stop.", "").rstrip(".")
    return ""
