"""The ResNet fine-tuning recipe as a LightningModule."""

from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.freezing import FreezeLayers
from datamodules.contract import Free, data_contract
from datamodules.errors import UserError
from datamodules.images.decoding import is_small
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.reading import share_kept
from datamodules.notes import inform
from datamodules.ranges import RATE, Range, check_ranges
from recipes.calls import call_network
from recipes.classifier import Classifier
from recipes.inputs import in_dtype_of
from recipes.optim import layer_groups
from recipes.resnet.feature_cache import FeatureCache
from recipes.resnet.layers import Layer, last_block_of, layers_line, layers_of, parameters_of_layers
from recipes.resnet.network import RESNETS, SMALL_NETWORKS, build_network
from recipes.resnet.pretrained import published_weights, weights_statistics
from recipes.weights import read_settings_beside

_IMAGE_SIZE = 224
"""The default side of the images in pixels, where the data has none."""


class ResNetFineTuner(Classifier):
    """Fine-tunes a network of torchvision, of timm or your own on images; override `build_network` for the last.

    Layers are frozen by name, and have learning rates by the order of their definition, which `layers_of` finds.

    Batches are ``(images, labels)``: normalised floats of shape (batch, 3, height, width), and int64 of shape (batch,)
    or, mixed, probabilities of shape (batch, classes).

    Args:
        arch: a classification model of torchvision, such as resnet18, convnext_tiny or vit_b_16; timm:NAME where timm
            is installed; or resnet20, 32, 44, 56 or 110 for images of about 32 pixels; or cifarnet and cifarnet_wide,
            which learn faster.
        num_classes: labels are 0 to this less one; by default as many as the data has.
        image_size: side of the images in pixels; by default the data's.
        weights: imagenet, none or a file; by default imagenet for photographs of 64 pixels or more, where there are
            such weights, and none for a network of your own.
        small_images: no stride and no pooling in the first layer of a ResNet, for images of about 32 pixels; by default
            below 64 where there are no weights.
        freeze_until: freeze what comes before this layer, or none; by default the last block, such as layer4, and none
            without weights.
        unfreeze: when layers begin to train, as in '{layer4: "1 epochs", layer3: "3 epochs"}'.
        bn: BatchNorm of layers that train: by the batch (train), or by fixed statistics (eval).
        lr: peak learning rate of the last block; by default 0.0003, 0.001 without weights.
        head_lr_factor: how much faster the head learns; by default 10, and 1 without weights.
        layer_lr_decay: how much slower each layer learns than the one above it, as in 0.5.
        cache_features: while only the head trains, compute its inputs once; needs ``augment="none"``.
    """

    title = "resnet"
    data_class = ImageFolderDataModule
    trainer_defaults: ClassVar[dict[str, Any]] = {"max_epochs": 20}
    base_batch_size = 32
    predict_example = "IMAGE.jpg FOLDER"

    example_input_array: Tensor

    def __init__(
        self,
        arch: str = "resnet18",
        num_classes: int | None = None,
        image_size: int | None = None,
        weights: str | None = None,
        small_images: bool | None = None,
        freeze_until: str | None = "auto",
        unfreeze: dict[str, int | str] | None = None,
        bn: Literal["train", "eval"] = "train",
        lr: float | None = None,
        head_lr_factor: float | None = None,
        layer_lr_decay: float = 1.0,
        cache_features: Free[bool] = False,
        **kwargs: Any,
    ) -> None:
        # Resolved here, so that a checkpoint holds the values that were used.
        published = arch not in SMALL_NETWORKS and type(self).build_network is ResNetFineTuner.build_network
        weights = weights or ("imagenet" if published else "none")
        image_size = image_size or _IMAGE_SIZE
        new = weights == "none"
        if small_images is None:
            small_images = new and is_small(image_size) and arch in (*RESNETS, *SMALL_NETWORKS)
        lr = lr if lr is not None else 0.001 if new else 0.0003
        head_lr_factor = head_lr_factor if head_lr_factor is not None else (1.0 if new else 10.0)
        check_ranges(
            image_size=(image_size, Range(8, 2**14, whole=True)),
            head_lr_factor=(head_lr_factor, RATE),
            layer_lr_decay=(layer_lr_decay, Range(0, 1, above=True)),
        )
        if cache_features and kwargs.get("compile"):
            raise UserError(
                "compile=True: with cache_features=True the head trains alone, and the network is not called; pass"
                " compile=False"
            )
        super().__init__(num_classes=num_classes, lr=lr, weights=weights, **kwargs)
        self.example_input_array = torch.zeros(1, 3, image_size, image_size)
        self.cached_head = ""
        if freeze_until == "auto":
            freeze_until = "none" if new else last_block_of(self.network, self.example_input_array)
        freeze_until = freeze_until if freeze_until != "none" else None
        self.settle(weights=weights, image_size=image_size, freeze_until=freeze_until, lr=lr)
        self.settle(small_images=small_images, head_lr_factor=head_lr_factor)

    @classmethod
    @override
    def settings_from_data(cls, data: pl.LightningDataModule, **settings: Any) -> dict[str, Any]:
        """Beside the number of classes: the size of the images, and ImageNet's weights for large photographs only."""
        contract = data_contract(data)
        small = contract.image_size is not None and is_small(contract.image_size)
        known = super().settings_from_data(data, **settings) | {"image_size": contract.image_size}
        if not contract.photographs:
            # What digits show is large.
            known["small_images"] = False
        return known if contract.photographs and not small else known | {"weights": "none"}

    @override
    def settings_for_data(self) -> dict[str, Any]:
        """The mean and the standard deviation of pixels that the weights expect: their run's, or those of `arch`."""
        weights, names = self.hparams.weights, ("pixel_mean", "pixel_std")
        saved = read_settings_beside(weights)
        if all(saved.get(name) for name in names):
            return {name: saved[name] for name in names}
        own = type(self).build_network is not ResNetFineTuner.build_network or self.hparams.small_images
        return {} if weights == "none" or (own and weights != "imagenet") else weights_statistics(self.hparams.arch)

    @override
    def build_network(self) -> nn.Module:
        """Maps floats of shape (batch, 3, height, width) to logits of shape (batch, num_classes)."""
        options = self.hparams
        return build_network(options.arch, options.num_classes, options.image_size or _IMAGE_SIZE, options.small_images)

    def layers(self) -> list[Layer]:
        """The network in parts, from the images to the head: the units of learning rates."""
        return layers_of(self.network)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of images, or of the inputs of `cached_head`, the name of a layer, where it is set."""
        network = self.network.get_submodule(self.cached_head) if self.cached_head else self.network
        logits: Tensor = call_network(network, in_dtype_of(self, inputs))
        return logits

    @override
    def parameter_groups(self) -> list[dict[str, Any]]:
        options, layers = self.hparams, parameters_of_layers(self, self.layers())
        rates = options.lr, options.layer_lr_decay, options.head_lr_factor
        return layer_groups(layers, options.weight_decay, *rates)

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        options = self.hparams
        callbacks = super().configure_callbacks()
        if options.freeze_until or options.unfreeze or options.bn == "eval":
            frozen = FreezeLayers(options.freeze_until, unfreeze=options.unfreeze, train_bn=options.bn == "train")
            callbacks.append(frozen)
        if options.cache_features:
            callbacks.append(FeatureCache())
        return callbacks

    @override
    def on_fit_start(self) -> None:
        inform(layers_line(self.layers()))

    @override
    def export_metadata(self) -> dict[str, Any]:
        """How photographs come to the size of the inputs, too, under timm's names."""
        crop = {"crop_pct": share_kept(self.hparams.image_size), "crop_mode": "center", "interpolation": "bilinear"}
        return super().export_metadata() | crop

    @override
    def pretrained_weights(self, weights: str) -> tuple[dict[str, Tensor], str]:
        """Those of torchvision and timm, too: "imagenet"."""
        if weights == "imagenet":
            options = self.hparams
            state, source = published_weights(options.arch, options.image_size), f"ImageNet ({options.arch})"
        else:
            state, source = super().pretrained_weights(weights)
        # Further outputs of Inception and GoogLeNet, for losses of their own.
        return {name: state[name] for name in state if not name.startswith(("aux1.", "aux2.", "AuxLogits."))}, source
