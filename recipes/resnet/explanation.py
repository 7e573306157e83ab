"""Explanations of predictions: the positions that raised the predicted class, and training images with similar
features.

All functions expect a network in evaluation mode. They draw no random numbers, and do not change its parameters or
gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from callbacks.lib.ranks import checksums, gather
from datamodules.contract import DataContract, data_contract
from datamodules.errors import spelled
from recipes.figures.images import displayed
from recipes.mistakes import EXPLAINED_SIDE, MAX_IMAGES, Explanation

from .feature_cache import inputs_of
from .layers import layers_of, random_images

_MAX_SEARCHED = 2_000
_MIN_SEARCHED = 100
_NEAREST = 3
_SHARE_OF_RUN = 0.03


def map_before_pooling(network: nn.Module, example: Tensor) -> str:
    """Return the name of the last module whose output has positions, or "" if these are not positions of an image.

    Args:
        network: the network.
        example: an input of the network, of shape (1, channels, side, side); its values are not used.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> map_before_pooling(network, torch.zeros(1, 3, 8, 8))
        '1'
    """
    last_name = ""
    last_shape = torch.Size()
    handles = []
    for name, module in network.named_modules():

        def record(_: nn.Module, inputs: object, output: object, name: str = name) -> None:
            nonlocal last_name, last_shape
            if name and isinstance(output, Tensor) and output.ndim > 2 and output.shape[2:].numel() > 1:
                last_name, last_shape = name, output.shape

        handles.append(module.register_forward_hook(record))
    try:
        with torch.no_grad():
            network(random_images(network, example))
    finally:
        for handle in handles:
            handle.remove()
    # Tokens have one dimension of positions. In the layout (batch, height, width, channels), the last two sizes differ.
    is_map = len(last_shape) == 4 and last_shape[2] == last_shape[3]
    return last_name if is_map else ""


def grad_cam(network: nn.Module, layer: str, images: Tensor, classes: Tensor) -> Tensor:
    """Return a map of the positions of a layer that raise a class's logit (Grad-CAM, Selvaraju et al., 2017).

    The channels are summed with weights, the means of the logit's gradient over the positions; negative sums become 0.

    Args:
        network: maps images to logits of shape (batch, classes).
        layer: the name of a module whose output has the shape (batch, channels, height, width).
        images: inputs of the network, of shape (batch, 3, side, side).
        classes: a class for each image, int64 of shape (batch,).

    Returns:
        Values from 0 to 1, of shape (batch, height, width); all are 0 if no position raises the logit.
    """
    maps: list[Tensor] = []

    def cut(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        # The graph begins here, so that no gradient is computed for the layers below.
        maps.append(output.detach().requires_grad_())
        return maps[0].clone()  # A later layer may change its input in place, which a leaf of the graph forbids.

    handle = network.get_submodule(layer).register_forward_hook(cut)
    try:
        with torch.enable_grad():
            logits = network(images)
    finally:
        handle.remove()
    (gradient,) = torch.autograd.grad(logits.gather(1, classes.unsqueeze(1)).sum(), maps[0])
    weights = gradient.float().mean((2, 3), keepdim=True)
    heat = (weights * maps[0].detach().float()).sum(1).relu()
    return heat / heat.amax((1, 2), keepdim=True).clamp(min=1e-12)


@torch.no_grad()
def features_before_head(network: nn.Module, images: Tensor) -> Tensor:
    """Return the inputs of the head scaled to length 1, float32 of shape (batch, features); maps are averaged.

    Raises:
        ValueError: the head does not run once on one tensor.
    """
    features = inputs_of(network, layers_of(network)[-1][0], images).float()
    if features.ndim == 4:
        features = features.mean((2, 3))
    return F.normalize(features.flatten(1))


def nearest(features: Tensor, candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and the rows of the most similar candidates; among equal candidates, the first win.

    Args:
        features: vectors of length 1, of shape (n, features).
        candidates: vectors of length 1, of shape (m, features).
        count: number of candidates for each vector.

    Returns:
        Cosines and rows, of shape (n, count), the most similar first; fewer if there are fewer candidates.

    Example:
        >>> nearest(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), 2)[1]
        tensor([[1, 2]])
    """
    # One by one: the rounding of a matrix product depends on the shapes, which depend on the number of devices.
    cosines = torch.stack([candidates @ vector for vector in features])
    values, rows = cosines.sort(dim=1, descending=True, stable=True)
    return values[:, :count], rows[:, :count]


def evenly_spaced(total: int, count: int) -> Tensor:
    """Return `count` numbers from 0 to `total` - 1, int64 of shape (count,).

    >>> evenly_spaced(10, 4)
    tensor([0, 2, 5, 7])
    """
    return torch.arange(count) * total // count


def overlay(images: Tensor, heat: Tensor) -> Tensor:
    """Draw Grad-CAM over images: gray where the map is 0, orange where it is 1.

    Args:
        images: uint8 of shape (n, channels, height, width).
        heat: values from 0 to 1, of shape (n, rows, columns).

    Returns:
        uint8 of shape (n, 3, height, width).
    """
    size = (images.shape[2], images.shape[3])
    strength = F.interpolate(heat.unsqueeze(1), size, mode="bilinear").cpu() * 0.7
    gray = images[:, :3].float().mean(1, keepdim=True)
    orange = torch.tensor([255.0, 110.0, 0.0]).view(1, 3, 1, 1)
    return (gray * (1 - strength) + orange * strength).round().to(torch.uint8)


def affordable(total: int, passes: float) -> int:
    """Return the number of training images to search, so that all explanations take less than 3 % of a run.

    Args:
        total: number of training images.
        passes: forward passes of single images in the run; a backward pass counts as another pass.

    Returns:
        At most 2,000; 0 if less than 100 images, or less than all of a smaller set, are affordable.

    Example:
        >>> affordable(50_000, 1e6), affordable(50_000, 10_000), affordable(50_000, 5_000)
        (2000, 204, 0)
    """
    # A run explains two evaluations, validation and test, with two passes for each of their mistakes.
    budget = int(_SHARE_OF_RUN * passes) - 4 * MAX_IMAGES
    count = min(_MAX_SEARCHED, total, budget)
    return count if count >= min(_MIN_SEARCHED, total) else 0


class MistakeExplainer:
    """Explanation of a recipe's mistakes by Grad-CAM and by the nearest of at most 2,000 evenly spaced training images.

    The ranks share the training images, in batches that do not depend on the number of ranks, and each rank explains
    all mistakes in one batch: the images are the same on any number of devices. The features of the training images are
    computed once per state of the weights.

    Args:
        recipe: a classifier with ``network``, ``example_input_array`` and the setting ``explain_mistakes``.
    """

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.epochs = 0.0
        """The trained epochs of the whole training set, as a fraction; 0 in a command that only evaluates."""
        self._weights = 0
        self._training: tuple[Tensor, Tensor, Tensor] | None = None

    def explain(self, images: Tensor, classes: Tensor) -> Explanation | None:
        """Return the explanation of mistakes, for `Classifier.explain`; a collective call."""
        wanted = self.recipe.hparams.explain_mistakes
        total = data_contract(self.recipe.data_module()).sizes.get("train", 0)
        count = min(_MAX_SEARCHED, total)
        if wanted is None:
            passes = self._passes_of_run()
            count = affordable(total, passes)
            # There is no page after a command that only evaluates.
            if not count and passes:
                setting = spelled("explain_mistakes", True)
                note = f"Grad-CAM and training images beside them would take over 3 % of the run: {setting} shows them."
                return Explanation(torch.zeros(0, 0), (), note)
            wanted = bool(count)
        return self._explained(images, classes, count) if wanted else None

    def _passes_of_run(self) -> float:
        """Return the passes of `affordable`; 0 without training."""
        recipe = self.recipe
        sizes = data_contract(recipe.data_module()).sizes
        if recipe.hparams.cache_features or "train" not in sizes:
            return float(self.epochs > 0)
        head = layers_of(recipe.network)[-1][0]
        only_head_trains = recipe.hparams.freeze_until == head and not recipe.hparams.unfreeze
        passes_of_sample = 1 if only_head_trains else 2
        return self.epochs * (passes_of_sample * sizes["train"] + sizes.get("val", 0))

    def _explained(self, images: Tensor, classes: Tensor, count: int) -> Explanation:
        preprocessing = data_contract(self.recipe.data_module()).preprocessing()
        # Lightning evaluates in inference mode, in which tensors have no gradients.
        with torch.inference_mode(False), self.recipe.trainer.precision_plugin.forward_context():
            pixels = displayed(images, preprocessing, EXPLAINED_SIDE)
            images = images.to(self.recipe.device, copy=True)
            classes = classes.to(self.recipe.device, copy=True)
            heat = self._grad_cam(images, classes, pixels)
            similar = self._nearest(images, count, pixels, preprocessing)
        captions = [[*first, *second] for first, second in zip(heat.captions, similar.captions, strict=True)]
        note = " ".join(filter(None, (heat.note, similar.note)))
        return Explanation(torch.cat((heat.images, similar.images), 1), captions, note)

    def _grad_cam(self, images: Tensor, classes: Tensor, pixels: Tensor) -> Explanation:
        """Return an image with Grad-CAM for each mistake.

        Args:
            images: images as the network got them, of shape (n, 3, side, side).
            classes: the predicted classes, int64 of shape (n,).
            pixels: the same images as bytes.
        """
        network = self.recipe.network
        layer = map_before_pooling(network, self.recipe.example_input_array)
        if not layer:
            reason = f"{self.recipe.hparams.arch} has no map of (channels, height, width) before its pooling"
            return _nothing(pixels, f"Grad-CAM is left out: {reason}.")
        drawn = overlay(pixels, grad_cam(network, layer, images, classes))
        captions = [[("Grad-CAM", f"of {self.recipe.class_names[number]}")] for number in classes.tolist()]
        note = f"In orange: what raised the predicted class, in {layer} (Grad-CAM, Selvaraju et al., 2017)."
        return Explanation(drawn.unsqueeze(1), captions, note)

    def _nearest(self, images: Tensor, count: int, pixels: Tensor, preprocessing: nn.Module | None) -> Explanation:
        """Return the nearest training images of each mistake; a collective call."""
        if not count:
            return _nothing(pixels)
        network = self.recipe.network
        contract = data_contract(self.recipe.data_module())
        try:
            # On all ranks alike, before a collective call waits for them.
            features_before_head(network, random_images(network, self.recipe.example_input_array))
        except ValueError as error:
            return _nothing(pixels, f"The nearest training images are left out: {error}.")
        numbers, labels, candidates = self._training_features(contract, count)
        total = contract.sizes["train"]
        of_total = "" if len(numbers) == total else f"{len(numbers):,} of "
        note = (
            f"Then the nearest of {of_total}the {total:,} training images, by the cosine of the features before the"
            " head."
        )
        features = features_before_head(network, images)
        cosines, rows = nearest(features.cpu(), candidates, _NEAREST)
        neighbors = numbers[rows]
        chosen = neighbors.unique()
        inputs = torch.cat([batch for batch, *_ in contract.chosen_batches("train", chosen)])
        training_pixels = displayed(inputs, preprocessing, EXPLAINED_SIDE)
        names = contract.sample_names("train")
        captions = []
        for columns in zip(neighbors.tolist(), labels[rows].tolist(), cosines.tolist(), strict=True):
            of_mistake = []
            for number, label, cosine in zip(*columns, strict=True):
                name = str(names[number]).rpartition("/")[2] if names else f"sample {number:,}"
                of_mistake.append((self.recipe.class_names[label], f"cosine {cosine:.2f}", name))
            captions.append(of_mistake)
        return Explanation(training_pixels[torch.searchsorted(chosen, neighbors)], captions, note)

    def _training_features(self, contract: DataContract, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers, labels and features of training images, in the order of the numbers; a collective call."""
        network = self.recipe.network
        trainer = self.recipe.trainer
        weights = int(checksums(network.state_dict().values(), self.recipe.device).sum())
        if self._training is None or weights != self._weights:
            chosen = evenly_spaced(contract.sizes["train"], count)
            batches = []
            for images, *integers in contract.chosen_batches("train", chosen, trainer.global_rank, trainer.world_size):
                features = features_before_head(network, trainer.precision_plugin.convert_input(images))
                labels, numbers = integers
                batches.append((numbers.cpu(), labels.cpu(), features.cpu()))
            of_all_ranks = [batch for batches_of_rank in gather(batches) for batch in batches_of_rank]
            numbers, labels, features = (torch.cat(column) for column in zip(*of_all_ranks, strict=True))
            order = numbers.argsort()
            self._training = (numbers[order], labels[order], features[order])
            self._weights = weights
        return self._training


def _nothing(pixels: Tensor, note: str = "") -> Explanation:
    """Return an explanation without images.

    Args:
        pixels: the images of the predictions as bytes, of shape (n, channels, height, width).
        note: the reason.
    """
    return Explanation(pixels.unsqueeze(1)[:, :0], [[] for _ in pixels], note)
