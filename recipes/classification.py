"""Image classification: cross-entropy, and every score from one confusion matrix."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from callbacks.classification_pictures import ClassificationPictures
from datamodules.errors import UserError
from recipes.recipe import MeanOverTargets, Recipe

__all__ = ["ClassificationScores", "Classifier"]


class ClassificationScores(torch.nn.Module):
    """Loss, accuracy, accuracy per class and the confusion matrix of one pass over a set.

    All but the loss come from integer counts, so they are the same on any number of ranks to the last digit. Classes
    without samples have an accuracy of 0.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = MeanOverTargets()
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits of shape (batch, classes), targets of shape (batch,)."""
        self.loss.update(F.cross_entropy(logits.float(), targets, reduction="sum"), len(targets))
        self.confusion.update(logits.argmax(1), targets)

    def compute(self) -> tuple[dict[str, Tensor], Tensor]:
        """The scalars by name, and the confusion matrix of shape (classes, classes): true class by predicted."""
        matrix = self.confusion.compute()
        correct, present = matrix.diagonal(), matrix.sum(1)
        scores = {"loss": self.loss.compute(), "accuracy": correct.sum() / present.sum().clamp(min=1)}
        per_class = correct / present.clamp(min=1)
        return scores | {f"accuracy_class_{i}": value for i, value in enumerate(per_class)}, matrix

    def reset(self) -> None:
        """Forget all batches."""
        self.loss.reset()
        self.confusion.reset()


class Classifier(Recipe):
    """The base of the classification recipes: batches are ``(images, labels)``.

    Args:
        num_classes: labels are 0 to this less one.
        label_smoothing: share of the target spread over all classes (Szegedy et al., 2016).
    """

    monitor = "val/accuracy"
    monitor_mode = "max"
    predict_example = "PICTURE.png"

    def __init__(self, num_classes: int = 10, label_smoothing: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_classes < 2:
            raise UserError(f"{num_classes} classes cannot be told apart; pass --num-classes 2 or more")
        self.label_smoothing = label_smoothing
        self.val_scores = ClassificationScores(num_classes)
        self.test_scores = ClassificationScores(num_classes)
        self.class_names: Sequence[str] = [str(i) for i in range(num_classes)]
        self.confusion_matrix: Tensor | None = None

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        return [*super().configure_callbacks(), ClassificationPictures()]

    @override
    def headline(self, scores: dict[str, float]) -> dict[str, str]:
        shown = {part: scores[f"{part}/accuracy"] for part in ("val", "test") if f"{part}/accuracy" in scores}
        return {f"{part} accuracy": f"{100 * accuracy:.2f} %" for part, accuracy in shown.items()}

    @override
    def prediction_rows(self, outputs: Sequence[Any], files: Sequence[str]) -> list[dict[str, Any]]:
        rows = []
        for batch in outputs:
            values, classes = batch["probabilities"].topk(2)
            for number, (first, second), (p, q) in zip(batch["number"].tolist(), classes.tolist(), values.tolist()):
                best, next_best = self.class_names[first], self.class_names[second]
                rows.append(
                    {
                        "file": files[number],
                        "class": best,
                        "probability": p,
                        "second": next_best,
                        "second_probability": q,
                    }
                )
        return rows

    @override
    def setup(self, stage: str) -> None:
        """Take the names of the classes from the data, where it has them."""
        super().setup(stage)
        info = getattr(getattr(self.trainer, "datamodule", None), "info", None)
        if info is not None and len(info.classes) == len(self.class_names):
            self.class_names = list(info.classes)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs), targets, label_smoothing=self.label_smoothing)
        return {"loss": loss, "count": len(targets)}

    def _evaluation_step(self, scores: ClassificationScores, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, targets = batch
        logits = self(inputs).float()
        scores.update(logits, targets)
        return {"logits": logits}

    def _log_scores(self, prefix: str, scores: ClassificationScores) -> None:
        values, self.confusion_matrix = scores.compute()
        # Equal on all ranks already: the maximum keeps the last digit, where a mean over ranks would round again.
        values = {f"{prefix}/{name}": value.float() for name, value in values.items()}
        self.log_dict(values, sync_dist=True, reduce_fx="max")
        scores.reset()

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluation_step(self.val_scores, batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_scores)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluation_step(self.test_scores, batch)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_scores)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The sample numbers of shape (batch,) and the probabilities of shape (batch, classes)."""
        inputs, numbers = batch
        return {"number": numbers, "probabilities": self(inputs).float().softmax(1)}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["class_names"] = list(self.class_names)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.class_names = checkpoint.get("class_names", self.class_names)
