"""ResNet fine-tuning: torchvision's ResNets on folders of pictures, with freezing that stays frozen."""

from typing import TYPE_CHECKING

from datamodules.lazy import lazy_names

if TYPE_CHECKING:
    from recipes.resnet.network import build_resnet
    from recipes.resnet.recipe import ResNetFineTuner

__all__ = ["ResNetFineTuner", "build_resnet"]

__getattr__ = lazy_names(
    __name__,
    {"ResNetFineTuner": "recipes.resnet.recipe", "build_resnet": "recipes.resnet.network"},
)
