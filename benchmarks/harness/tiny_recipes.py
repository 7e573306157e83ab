"""Smallest forms of the three recipes, without downloads, for runs whose training does not matter."""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet
from typing_extensions import override

from recipes import ResNetFineTuner

__all__ = ["TINY_RECIPES", "ThinResNet", "TinyRecipe"]


class _Eighth(ResNet):  # type: ignore[misc]
    """ResNet with one block per stage and an eighth of ResNet-18's channels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(BasicBlock, [1, 1, 1, 1], num_classes)
        self.fc = nn.Linear(64, num_classes)

    @override
    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        layer: nn.Sequential = super()._make_layer(block, planes // 8, *args, **kwargs)
        return layer


class ThinResNet(ResNetFineTuner):
    """ResNet recipe with a network of 92,000 parameters, whose checkpoints take 1 MB."""

    @override
    def build_network(self) -> nn.Module:
        return _Eighth(self.hparams.num_classes or 10)


@dataclass(frozen=True)
class TinyRecipe:
    """Recipe and data module, as ``module:name``, and the flags of a small run."""

    recipe: str
    data: str
    flags: tuple[str, ...]

    def classes(self) -> tuple[Any, Any]:
        """Return the classes of the recipe and the data module."""
        return resolve_name(self.recipe), resolve_name(self.data)


TINY_RECIPES = {
    "mnist": TinyRecipe("recipes:MNISTClassifier", "datamodules:MNISTDataModule", ("--dataset", "digits")),
    "resnet": TinyRecipe(
        "benchmarks.harness.tiny_recipes:ThinResNet",
        "datamodules:ImageFolderDataModule",
        ("--dataset", "digits", "--weights", "none", "--image-size", "32"),
    ),
    "seq2seq": TinyRecipe(
        "recipes:Seq2SeqTranslator",
        "datamodules:TranslationDataModule",
        ("--hidden-size", "16", "--val-sentences", "8"),
    ),
}
"""Recipes by their titles, which are the names of their run folders."""
