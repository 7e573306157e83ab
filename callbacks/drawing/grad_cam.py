"""Grad-CAM: the parts of an image that raise the logit of a class, for any module that maps images to logits.

Works on frozen and compiled networks and inside Lightning's inference mode, and leaves the module as it was.
`captum.attr.LayerGradCam` (0.9.0) gives the same maps, but raises an error in inference mode ("does not require grad")
and on compiled modules ("Forward hook did not obtain any outputs"), and computes in whatever mode the module is in:
what it would replace here is one call of `torch.autograd.grad`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from callbacks.drawing.classification_images import are_images, share_of_batch, stretched, wrapped
from callbacks.drawing.evaluation_samples import EvaluationSamples
from callbacks.lib.layers import find_layer
from datamodules.errors import UserError
from datamodules.ranges import NATURAL, check_ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GradCAM", "grad_cam", "grad_cam_figure"]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards each layer has its own mode, whatever its `train` method does."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training


def grad_cam(module: nn.Module, layer: nn.Module | str, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """The contribution of each place in an image to a class, by Grad-CAM (Selvaraju et al., 2017).

    It runs in evaluation mode and without autocast, under `torch.no_grad` and inference mode too, on frozen and on
    compiled networks. The gradient begins behind `layer`: no parameter gets one, and the trunk costs no backward pass.

    Args:
        module: maps images to logits of shape (n, classes).
        layer: a part of it, or its name, whose output has shape (n, channels, height, width), such as the last block.
        images: of shape (n, channels, height, width).
        classes: the class to explain in each image, of shape (n,); by default the predicted one.

    Returns:
        float32 of shape (n, height, width): 0 where nothing contributes to the class, 1 at the largest contribution.

    Raises:
        UserError: the layer did not run, its output is no map, or what follows it runs without gradients.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
        >>> grad_cam(net, net[1], torch.randn(4, 3, 16, 16)).shape
        torch.Size([4, 16, 16])
    """
    layer = find_layer(module, layer) if isinstance(layer, str) else layer
    seen: list[Tensor] = []

    def cut(_layer: nn.Module, _inputs: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() != 4:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise UserError(f"Grad-CAM needs a layer with maps (n, channels, height, width), this one gives {shape}")
        seen[:] = [output.detach().clone().requires_grad_()]
        return seen[0].clone()  # What follows may change it in place.

    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    # Hooks are not called in code that is compiled already.
    eager = torch.compiler.set_stance("force_eager")
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(images.device.type, enabled=False), eager:
        handle = layer.register_forward_hook(cut)
        try:
            with _evaluating(module):
                logits = module(images.detach().clone().to(dtype))
        finally:
            handle.remove()
        if not seen or not logits.requires_grad:
            why = "runs without gradients" if seen else "does not run"
            raise UserError(f"Grad-CAM finds that the {type(layer).__name__} or what follows it {why}; choose another")
        chosen = logits.argmax(1) if classes is None else classes.detach().clone()
        (gradient,) = torch.autograd.grad(logits.gather(1, chosen.unsqueeze(1)).sum(), seen[0])
    weights = gradient.float().mean((2, 3), keepdim=True)
    maps = (weights * seen[0].detach().float()).sum(1, keepdim=True).relu()
    maps = F.interpolate(maps, size=images.shape[2:], mode="bilinear", align_corners=False).squeeze(1)
    strongest = maps.amax((1, 2), keepdim=True)
    return torch.where(strongest > 0, maps / strongest, 0.0)


def grad_cam_figure(
    images: Tensor, maps: Tensor, logits: Tensor, targets: Tensor, class_names: Sequence[str], title: str
) -> "Figure":
    """Images with their true class, and below each the same under its map, with the class that the map explains.

    Args:
        images: of shape (n, channels, height, width), in any range.
        maps: of shape (n, height, width), 0 to 1.
        logits: of shape (n, classes).
        targets: of shape (n,); a negative one is not known.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.0 * len(images), 5.0), layout="constrained")
    figure.suptitle(title)
    confidence, predicted = (part.tolist() for part in logits.softmax(1).max(1))
    true = targets.tolist()
    for i, (above, below) in enumerate(figure.subplots(2, len(images), squeeze=False).T):
        for axes in (above, below):
            axes.set_axis_off()
            axes.imshow(stretched(images[i]), cmap="gray")
        below.imshow(maps[i].numpy(), cmap="turbo", vmin=0, vmax=1, alpha=0.5)
        if true[i] >= 0:
            above.set_title(wrapped(f"is {class_names[true[i]]}", 28), fontsize=8)
        label = wrapped(f"{class_names[predicted[i]]} ({100 * confidence[i]:.0f} %)", 28)
        below.set_title(label, fontsize=8, color="tab:red" if 0 <= true[i] != predicted[i] else "black")
    return figure


class GradCAM(EvaluationSamples, pl.Callback):
    """Draws Grad-CAM of a few images of the validation and the test set into TensorBoard.

    Runs on: `setup` (to find the layer), every validation and test batch (it keeps the images), and the end of
    training and of a test (the drawing, on rank 0, from the batches of that rank). It needs a module whose `forward`
    maps images to logits and whose evaluation steps return ``{"logits": ...}``, and batches of ``(images, targets)``;
    batches of other inputs are left out.

    Args:
        layer: its name, or the end of it: the last block of convolutions is usual.
        samples: images, spread over the set.

    Raises:
        UserError: at set-up, if there is no such layer.

    Example:
        >>> trainer = pl.Trainer(callbacks=[GradCAM("layer4", samples=4)], logger=False, accelerator="cpu")
    """

    def __init__(self, layer: str = "layer4", samples: int = 6) -> None:
        check_ranges(samples=(samples, NATURAL))
        self.layer, self.samples = layer, samples
        self._forget()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        find_layer(pl_module, self.layer)

    @override
    def _forget(self) -> None:
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    @override
    def _keep(self, outputs: Any, batch: Any, batch_idx: int, batches: Sequence[float], dataloader_idx: int) -> None:
        if not isinstance(outputs, dict) or "logits" not in outputs or not are_images(batch[0]):
            return
        images, targets = batch
        if count := min(share_of_batch(self.samples, batch_idx, batches[dataloader_idx]), len(images)):
            step = len(images) // count
            images, logits, targets = (part[::step][:count].clone() for part in (images, outputs["logits"], targets))
            self._kept.append((images, logits, targets))

    @override
    def _figures(self, pl_module: pl.LightningModule, stage: str) -> "dict[str, Figure]":
        if not self._kept:
            return {}
        images, logits, targets = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        maps = grad_cam(pl_module, self.layer, images, logits.argmax(1)).cpu()
        names = getattr(pl_module, "class_names", None) or [str(i) for i in range(logits.shape[1])]
        images, logits, targets = images.float().cpu(), logits.float().cpu(), targets.cpu()
        title = f"{stage}: Grad-CAM of the predicted class"
        return {f"{stage}/grad_cam": grad_cam_figure(images, maps, logits, targets, names, title)}
