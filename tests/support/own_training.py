"""Bases for small recipes of tests: the optimiser, and a classifier's step, as the recipes of the package have them."""

from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from recipes import Classifier, Recipe
from recipes.labels import count_correct, mean_cross_entropy
from recipes.optim import build_optimizer, may_be_fused, parameter_groups
from recipes.schedules import build_schedule


class TrainedRecipe(Recipe):
    """A recipe with an optimiser and a schedule."""

    def groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self.parameters(), self.hparams.weight_decay)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.hparams
        arguments = options.momentum, may_be_fused(self), options.optimizer_args
        return build_schedule(build_optimizer(options.optimizer, self.groups(), options.lr, *arguments), self)


class TrainedClassifier(Classifier, TrainedRecipe):
    """A classifier with a step, an optimiser and a schedule."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        logits = self(inputs)
        loss, count = mean_cross_entropy(logits, targets, self.class_weights, self.label_smoothing)
        return {"loss": loss, "count": count, "correct": count_correct(logits, targets)}
