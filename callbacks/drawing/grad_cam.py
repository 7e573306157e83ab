"""Grad-CAM: the parts of an image that raise the logit of a class, for any module that maps images to logits.

Works on frozen and compiled networks and inside Lightning's inference mode, and leaves the module as it was.
`captum.attr.LayerGradCam` (0.9.0) gives the same maps, but raises an error in inference mode ("does not require grad")
and on compiled modules ("Forward hook did not obtain any outputs"), and computes in whatever mode the module is in:
what it would replace here is one call of `torch.autograd.grad`.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from callbacks.drawing.classification_images import label_text, labelled_grid, prediction_texts, samples_of_batch
from callbacks.drawing.evaluation_samples import EvaluationSamples
from callbacks.lib.layers import evaluating, find_layer
from datamodules.errors import UserError
from datamodules.ranges import NATURAL, check_ranges

__all__ = ["GradCAM", "grad_cam", "grad_cam_grid"]


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
            with evaluating(module):
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


def grad_cam_grid(images: Tensor, maps: Tensor, logits: Tensor, targets: Tensor, class_names: Sequence[str]) -> Any:
    """Images, and below each the same under its map, with the class that the map explains, as `labelled_grid`.

    Args:
        images: of shape (n, 1 or 3, height, width), in any range.
        maps: of shape (n, height, width), 0 to 1.
        logits: of shape (n, classes).
        targets: of shape (n,); a negative one is not known.
    """
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    grey = ((images - low) / (high - low).clamp(min=1e-6)).expand(-1, 3, -1, -1)
    # From blue to red.
    heat = torch.stack((maps, torch.zeros_like(maps), 1 - maps), 1)
    labels = [label_text(target, class_names) for target in targets] + prediction_texts(logits, targets, class_names)
    return labelled_grid(torch.cat((grey, (grey + heat) / 2)), labels, columns=len(images), side=192)


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
        if found := samples_of_batch(outputs, batch, self.samples, batch_idx, batches[dataloader_idx]):
            self._kept.append(found)

    @override
    def _figures(self, pl_module: pl.LightningModule, stage: str) -> dict[str, Any]:
        if not self._kept:
            return {}
        images, logits, targets = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        maps = grad_cam(pl_module, self.layer, images, logits.argmax(1)).cpu()
        names = getattr(pl_module, "class_names", None) or [str(i) for i in range(logits.shape[1])]
        return {f"{stage}/grad_cam": grad_cam_grid(images.float().cpu(), maps, logits.cpu(), targets.cpu(), names)}
