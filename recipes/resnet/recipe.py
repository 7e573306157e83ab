"""Fine-tuning of a network on images: AdamW with a one-cycle schedule, the last block and a new head, for 20 epochs.

    python -m recipes.resnet --data-dir hymenoptera_data.zip --arch timm:tf_efficientnet_lite0 --weights lite0.pt \
        --freeze-until classifier --augment none --cache-features --label-smoothing 0.1 --max-epochs 10

94.2 % of the 153 validation images of ants and bees (mean of seeds 1 to 5, last epoch), 14 to 16 s for the whole
process on one thread of an AMD EPYC with AVX512-BF16; measured on 25 November 2026. In docs/recipes/, the page
"Fine-tuning" gives the source of lite0.pt, and "Small images" has the scores of networks with new weights.

Logged are train/loss and train/accuracy of updates, and after each epoch, by `Classifier`, val/loss, val/accuracy,
val/macro_f1 and the accuracy of each class; the test logs the same under test/.
"""

import math
from collections.abc import Sized
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks.freezing import FreezeLayers
from datamodules import ImageFolderDataModule
from datamodules.contract import Advanced, Changeable, data_contract
from datamodules.errors import UserError, spelled
from datamodules.images.decoding import crop_pct, is_small
from datamodules.lightning import OptimizerLRScheduler, pl
from datamodules.notes import inform
from datamodules.ranges import RATE, Range, check_ranges
from recipes.classifier import Classifier
from recipes.forward import call_network, check_logits
from recipes.inputs import in_dtype_of
from recipes.labels import count_correct, mean_cross_entropy
from recipes.mistakes import Explanation
from recipes.optim import build_optimizer, layer_groups
from recipes.schedules import ScheduleName, build_schedule
from recipes.weights import read_settings_beside

from .explanation import MistakeExplainer
from .feature_cache import FeatureCache
from .layers import Layer, last_block_of, layers_line, layers_of, parameters_of_layers
from .network import RESNETS, SMALL_NETWORKS, build_network
from .pretrained import published_weights, weights_statistics

_IMAGE_SIZE = 224
"""The default side of the images in pixels, for data without a default."""


class ResNetFineTuner(Classifier):
    """Fine-tuning of a network of torchvision or timm on images; override `build_network` for your own network.

    Layers are frozen by name. Their learning rates follow the order of their definition (`layers_of`).

    Batches are ``(images, labels)``: normalized floats of shape (batch, 3, height, width), and int64 of shape (batch,)
    or, after mixing, probabilities of shape (batch, classes).

    Args:
        arch: a classification model of torchvision, such as resnet18, convnext_tiny or vit_b_16; timm:NAME if timm is
            installed; resnet20, 32, 44, 56 or 110 for images of about 32 pixels; or cifarnet and cifarnet_wide, which
            learn faster.
        num_classes: number of classes; labels are 0 to num_classes - 1. By default, the number in the data.
        image_size: side of the images in pixels; by default the data's.
        weights: imagenet, none or a file; by default imagenet for photographs of 64 pixels or more if such weights
            exist, and none for your own network.
        small_images: CIFAR stem of a ResNet (3x3, no stride, no pooling), for images of about 32 pixels; by default
            below 64 pixels without weights.
        freeze_until: first layer that trains, or none to train all layers; by default the last block, such as layer4,
            and none without weights.
        unfreeze: times from which layers train, as in '{layer4: "1 epochs", layer3: "3 epochs"}'.
        bn: statistics of BatchNorm in layers that train: of the batch (train), or fixed (eval).
        lr: peak learning rate of the last block; by default 0.0003, 0.001 without weights.
        head_lr_factor: factor on the learning rate of the head; by default 10, and 1 without weights.
        layer_lr_decay: factor on the learning rate from each layer to the layer below it, such as 0.5.
        cache_features: compute the inputs of the head once while only the head trains; needs ``augment="none"``.
        explain_mistakes: show Grad-CAM and the nearest training images next to the mistakes in ``report.html``; by
            default if this takes less than 3 % of the run.
        tta: test-time augmentation: in test and predict, the mean of the probabilities of an image and its mirror
            image, in twice the time.
    """

    title = __name__.split(".")[-2]  # The name of this folder, so that a copy of the folder is a new recipe.
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
        optimizer: str = "adamw",
        lr: float | None = None,
        head_lr_factor: float | None = None,
        layer_lr_decay: float = 1.0,
        weight_decay: float = 0.01,
        schedule: ScheduleName = "one_cycle",
        label_smoothing: float = 0.0,
        cache_features: Changeable[bool] = False,
        explain_mistakes: Advanced[Changeable[bool | None]] = None,
        tta: Changeable[bool] = False,
        **kwargs: Any,
    ) -> None:
        # None and "auto" are resolved here, so that a checkpoint has the actual values.
        if weights is None:
            is_published = arch not in SMALL_NETWORKS and not self._has_own_network()
            weights = "imagenet" if is_published else "none"
        has_weights = weights != "none"
        if image_size is None:
            image_size = _IMAGE_SIZE
        if small_images is None:
            can_be_small = arch in RESNETS or arch in SMALL_NETWORKS
            small_images = can_be_small and is_small(image_size) and not has_weights
        if lr is None:
            lr = 0.0003 if has_weights else 0.001
        if head_lr_factor is None:
            head_lr_factor = 10.0 if has_weights else 1.0
        check_ranges(
            image_size=(image_size, Range(8, 2**14, whole=True)),
            head_lr_factor=(head_lr_factor, RATE),
            layer_lr_decay=(layer_lr_decay, Range(0, 1, above=True)),
        )
        if cache_features and kwargs.get("compile"):
            raise UserError(
                f"with {spelled('cache_features', True)} the head trains alone, and the network is not called",
                setting="compile",
                value=True,
                to_type=f"pass {spelled('compile', False)}",
            )
        super().__init__(
            num_classes=num_classes,
            weights=weights,
            optimizer=optimizer,
            lr=lr,
            weight_decay=weight_decay,
            schedule=schedule,
            label_smoothing=label_smoothing,
            **kwargs,
        )
        self.example_input_array = torch.zeros(1, 3, image_size, image_size)
        self.cached_head = ""
        self.tta = tta
        self._explainer = MistakeExplainer(self)
        # After the base class has built the network: the last block is found in it.
        if freeze_until == "auto":
            freeze_until = last_block_of(self.network, self.example_input_array) if has_weights else None
        if freeze_until == "none":
            freeze_until = None
        self.hparams.update(
            weights=weights,
            image_size=image_size,
            small_images=small_images,
            freeze_until=freeze_until,
            lr=lr,
            head_lr_factor=head_lr_factor,
        )

    @override
    def build_network(self) -> nn.Module:
        """Build the network from floats of shape (batch, 3, height, width) to logits of shape (batch, num_classes)."""
        options = self.hparams
        return build_network(options.arch, options.num_classes, options.image_size or _IMAGE_SIZE, options.small_images)

    def layers(self) -> list[Layer]:
        """Return the layers of the network from the images to the head; each has its own learning rate."""
        return layers_of(self.network)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of images or, if `cached_head` names a layer, of that layer's inputs."""
        network = self.network.get_submodule(self.cached_head) if self.cached_head else self.network
        return check_logits(call_network(network, in_dtype_of(self, inputs)), len(self.class_names))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        """Return the mean loss, the number of labels and the number of correct predictions."""
        images, labels = batch
        logits = self(images)
        loss, count = mean_cross_entropy(
            logits, labels, self.class_weights, self.hparams.label_smoothing, self.all_labels_count
        )
        return {"loss": loss, "count": count, "correct": count_correct(logits, labels)}

    @override
    def final_logits(self, inputs: Tensor) -> Tensor:
        """Return the logits; with `tta`, the logarithm of the mean probabilities of an image and its mirror image."""
        logits = super().final_logits(inputs).float()
        if not self.tta:
            return logits
        both = torch.stack([logits, self(inputs.flip(-1)).float()])
        return both.log_softmax(2).logsumexp(0) - math.log(2)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.hparams
        groups = layer_groups(
            parameters_of_layers(self, self.layers()),
            options.weight_decay,
            options.lr,
            options.layer_lr_decay,
            options.head_lr_factor,
        )
        optimizer = build_optimizer(groups, self)
        return build_schedule(optimizer, self)

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
    def explain(self, images: Tensor, classes: Tensor) -> Explanation | None:
        """Return Grad-CAM and the nearest training images of each mistake, as requested by `explain_mistakes`."""
        return self._explainer.explain(images, classes)

    @override
    def on_fit_start(self) -> None:
        inform(layers_line(self.layers()))

    @override
    def on_train_end(self) -> None:
        loader = self.trainer.train_dataloader
        # The loader yields updates, on any number of devices.
        self._explainer.epochs = self.trainer.global_step / len(loader) if isinstance(loader, Sized) else 0.0

    @classmethod
    @override
    def settings_from_data(cls, data: pl.LightningDataModule, **settings: Any) -> dict[str, Any]:
        """Return the numbers of classes and pixels; for small images and drawings, no ImageNet weights."""
        contract = data_contract(data)
        are_small = contract.image_size is not None and is_small(contract.image_size)
        from_data = super().settings_from_data(data, **settings)
        from_data["image_size"] = contract.image_size
        if not contract.natural_images:
            # Digits have large features, so the first layer may have a stride.
            from_data["small_images"] = False
        if are_small or not contract.natural_images:
            from_data["weights"] = "none"
        return from_data

    @override
    def settings_for_data(self) -> dict[str, Any]:
        """Return the pixel statistics of the weights: the statistics of their run, or of `arch`."""
        options = self.hparams
        saved = read_settings_beside(options.weights)
        if saved.get("pixel_mean") and saved.get("pixel_std"):
            return {"pixel_mean": saved["pixel_mean"], "pixel_std": saved["pixel_std"]}
        if options.weights == "imagenet":
            return weights_statistics(options.arch)
        # `arch` does not describe the weights of your own network in a file.
        if options.weights == "none" or options.small_images or self._has_own_network():
            return {}
        return weights_statistics(options.arch)

    @classmethod
    def _has_own_network(cls) -> bool:
        return cls.build_network is not ResNetFineTuner.build_network

    @override
    def photograph_crop(self) -> float | None:
        """Return the share of the short side that evaluation keeps, if the data module is for photographs."""
        has_photographs = self.data_class is not None and issubclass(self.data_class, ImageFolderDataModule)
        return crop_pct(self.hparams.image_size) if has_photographs else None

    @override
    def export_metadata(self) -> dict[str, Any]:
        """Return the metadata, with the crop of photographs under timm's names."""
        crop = {"crop_pct": crop_pct(self.hparams.image_size), "crop_mode": "center", "interpolation": "bilinear"}
        return super().export_metadata() | crop

    @override
    def pretrained_weights(self, weights: str) -> tuple[dict[str, Tensor], str]:
        """Return the tensors of a file, or the published tensors for "imagenet"."""
        if weights == "imagenet":
            state = published_weights(self.hparams.arch, self.hparams.image_size)
            source = f"ImageNet ({self.hparams.arch})"
        else:
            state, source = super().pretrained_weights(weights)
        # Without the auxiliary outputs of Inception and GoogLeNet, which `build_network` leaves out.
        auxiliary = ("aux1.", "aux2.", "AuxLogits.")
        return {name: tensor for name, tensor in state.items() if not name.startswith(auxiliary)}, source
