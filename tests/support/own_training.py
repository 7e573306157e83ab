"""Bases for small recipes of tests: an optimizer, and a classifier's step, as the recipes of the package have them."""

from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from recipes import Classifier, Recipe, build_optimizer, build_schedule
from recipes.labels import count_correct, mean_cross_entropy


class TrainedRecipe(Recipe):
    """A recipe with an optimizer and a schedule."""

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = build_optimizer(self.parameters(), self)
        return build_schedule(optimizer, self)


class TrainedClassifier(Classifier, TrainedRecipe):
    """A classifier with a step, an optimizer and a schedule."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, labels = batch
        logits = self(inputs)
        loss, count = mean_cross_entropy(logits, labels, self.class_weights, self.hparams.label_smoothing)
        return {"loss": loss, "count": count, "correct": count_correct(logits, labels)}
