"""Recipes: complete LightningModules with a command line. Names are imported when they are used."""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from callbacks.checkpointing.guard import CheckpointGuard
    from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
    from recipes.classification import Classifier
    from recipes.cli.command_line import run
    from recipes.mnist.recipe import MNISTClassifier
    from recipes.recipe import Recipe
    from recipes.resnet.recipe import ResNetFineTuner
    from recipes.seq2seq.recipe import Seq2SeqTranslator

__all__ = [
    "CheckpointGuard",
    "Classifier",
    "MNISTClassifier",
    "Recipe",
    "ResNetFineTuner",
    "Seq2SeqTranslator",
    "VerifiedCheckpointIO",
    "run",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CheckpointGuard": "callbacks.checkpointing.guard",
        "Classifier": "recipes.classification",
        "MNISTClassifier": "recipes.mnist.recipe",
        "Recipe": "recipes.recipe",
        "ResNetFineTuner": "recipes.resnet.recipe",
        "Seq2SeqTranslator": "recipes.seq2seq.recipe",
        "VerifiedCheckpointIO": "callbacks.checkpointing.verified_io",
        "run": "recipes.cli.command_line",
    },
)
