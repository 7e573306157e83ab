"""What a classifier sees and where it is wrong, as pictures in TensorBoard."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ClassificationPictures", "confusion_figure", "most_confident_mistakes", "samples_figure"]


def mistake_confidence(logits: Tensor, targets: Tensor) -> Tensor:
    """The probability of each wrong prediction, and -1 for each right one, of shape (batch,)."""
    confidence, predicted = logits.softmax(1).max(1)
    return torch.where(predicted != targets, confidence, -1.0)


def most_confident_mistakes(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    """The positions of the wrong predictions with the highest probability, int64 of shape (count or fewer,).

    Args:
        logits: of shape (batch, classes).
        targets: of shape (batch,).
    """
    wrong = mistake_confidence(logits, targets)
    best = wrong.topk(min(count, len(wrong)))
    return best.indices[best.values >= 0]


def samples_figure(
    images: Tensor, logits: Tensor, targets: Tensor, class_names: Sequence[str], title: str, columns: int = 8
) -> "Figure":
    """A grid of pictures under their predictions, the wrong ones in red with the true class.

    Args:
        images: of shape (n, channels, height, width), in any range: each is stretched to black and white.
        logits: of shape (n, classes).
        targets: of shape (n,).
    """
    from matplotlib.figure import Figure

    rows = max(1, -(-len(images) // columns))
    figure = Figure(figsize=(1.35 * columns, 1.6 * rows + 0.5), layout="constrained")
    figure.suptitle(title)
    confidence, predicted = logits.softmax(1).max(1)
    for i, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set_axis_off()
        if i >= len(images):
            continue
        low, high = images[i].amin(), images[i].amax()
        picture = ((images[i] - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0)
        axes.imshow(picture.squeeze(2).numpy(), cmap="gray" if picture.shape[2] == 1 else None)
        label = f"{class_names[int(predicted[i])]} ({100 * float(confidence[i]):.0f} %)"
        wrong = int(predicted[i]) != int(targets[i])
        if wrong:
            label += f"\nis {class_names[int(targets[i])]}"
        axes.set_title(label, fontsize=8, color="tab:red" if wrong else "black")
    return figure


def confusion_figure(matrix: Tensor, class_names: Sequence[str], title: str) -> "Figure":
    """The confusion matrix as a picture: each cell says how often, its colour the root of the share of the true class.

    Args:
        matrix: counts of shape (classes, classes): true class by predicted class.
    """
    from matplotlib.figure import Figure

    classes = len(class_names)
    side = min(16.0, max(4.5, 0.55 * classes + 1.5))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    share = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    # A root: the few mistakes of a good classifier would be white on a linear scale.
    axes.imshow(share.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(classes), class_names, rotation=45 if max(map(len, class_names)) > 2 else 0)
    axes.set_yticks(range(classes), class_names)
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if classes <= 25:
        for (row, column), value in zip(torch.cartesian_prod(*[torch.arange(classes)] * 2), matrix.flatten()):
            if value:
                colour = "white" if share[row, column] > 0.25 else "black"
                axes.text(int(column), int(row), f"{int(value)}", ha="center", va="center", fontsize=8, color=colour)
    return figure


class ClassificationPictures(pl.Callback):
    """Draws sample predictions, the most confident mistakes and the confusion matrix into TensorBoard.

    Runs on: every validation and test batch (one top-k on the device), and the end of training and of a test (the
    drawing, on rank 0, from the batches of that rank). It needs a module whose evaluation steps return
    ``{"logits": ...}`` and batches of ``(images, targets)``; the matrix comes from the module's `confusion_matrix`.

    Args:
        samples: pictures in the grid of samples.
        mistakes: pictures in the grid of mistakes.

    Example:
        >>> logits, targets = torch.tensor([[2.0, 0.0], [5.0, 0.0]]), torch.tensor([0, 1])
        >>> most_confident_mistakes(logits, targets, count=4).tolist()
        [1]
    """

    def __init__(self, samples: int = 32, mistakes: int = 32) -> None:
        self.samples, self.mistakes = samples, mistakes
        self._first: tuple[Tensor, Tensor, Tensor] | None = None
        self._worst: tuple[Tensor, Tensor, Tensor] | None = None

    @rank_zero_only
    def _add(self, outputs: Any, batch: Any) -> None:
        if not isinstance(outputs, dict) or "logits" not in outputs:
            return
        images, targets = batch
        new = (images.float(), outputs["logits"].float(), targets)
        if self._first is None:
            self._first = tuple(part[: self.samples] for part in new)  # type: ignore[assignment]
        if self._worst is not None:
            new = tuple(torch.cat(pair) for pair in zip(self._worst, new, strict=True))  # type: ignore[assignment]
        # A fixed number, right ones too where there are few mistakes: to count them the device would have to answer.
        keep = mistake_confidence(new[1], new[2]).topk(min(self.mistakes, len(new[2]))).indices
        self._worst = tuple(part[keep] for part in new)  # type: ignore[assignment]

    @rank_zero_only
    def _draw(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not loggers or self._first is None or self._worst is None:
            return
        matrix = getattr(pl_module, "confusion_matrix", None)
        names = getattr(pl_module, "class_names", None) or [str(i) for i in range(self._first[1].shape[1])]
        figures = {}
        for name, parts in (("predictions", self._first), ("most confident mistakes", self._worst)):
            images, logits, targets = (part.cpu() for part in parts)
            if parts is self._worst:
                keep = most_confident_mistakes(logits, targets, self.mistakes)
                images, logits, targets = images[keep], logits[keep], targets[keep]
            if len(images):
                figure = samples_figure(images, logits, targets, names, f"{stage}: {name}")
                figures[f"{stage}/{name.split()[-1]}"] = figure
        if matrix is not None:
            figures[f"{stage}/confusion_matrix"] = confusion_figure(matrix.cpu(), names, f"{stage}: confusion matrix")
        for logger in loggers:
            for name, figure in figures.items():
                logger.experiment.add_figure(name, figure, global_step=trainer.global_step)
            logger.experiment.flush()
        self._first = self._worst = None

    def _on_evaluation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first = self._worst = None

    def _on_evaluation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._add(outputs, batch)

    on_validation_start = on_test_start = _on_evaluation_start
    on_validation_batch_end = on_test_batch_end = _on_evaluation_batch_end

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, pl_module, "val")

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, pl_module, "test")
