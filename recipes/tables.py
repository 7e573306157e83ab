"""Tables of an evaluation: a row for each class, and the mistakes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from callbacks.lib.exchange import gather
from datamodules.contract import data_contract
from datamodules.loading.loaders import EvaluationSampling, sample_numbers
from recipes.figures.images import Picture
from recipes.figures.plots import confusion_plot
from recipes.labels import as_classes
from recipes.mistakes import MistakeImages, is_image_batch, mistakes_grid


class Table(NamedTuple):
    """Rows with the same columns; there may be none."""

    columns: Sequence[str]
    rows: list[dict[str, Any]]


def _scored(logits: Tensor, targets: Tensor) -> Tensor:
    """True and predicted class, and their probabilities: float32, which holds the number of any class, (batch, 4)."""
    probabilities = logits.float().softmax(1)
    probability, predicted = probabilities.max(1)
    of_target = probabilities.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.stack((targets.float(), predicted.float(), probability, of_target), 1)


def _mistakes(samples: list[Tensor], numbers: Tensor) -> Tensor | None:
    """Number, true and predicted class and their probabilities of each mistake, float64 of shape (m, 5).

    Args:
        samples: the batches of this rank, as `_scored` gives them.
        numbers: of the samples in their order, int64 of shape (n,) or longer; None is returned for fewer.
    """
    found = (torch.cat(samples).cpu() if samples else torch.empty(0, 4)).double()
    if len(numbers) < len(found):
        return None
    wrong = (found[:, 0] >= 0) & (found[:, 0] != found[:, 1])
    return torch.cat((numbers[: len(found), None].double(), found), 1)[wrong].nan_to_num(0.0)


def mistakes_table(mistakes: Tensor, class_names: Sequence[str], sample_names: Sequence[str] = ()) -> Table:
    """A row for each mistake, the most confident first.

    Args:
        mistakes: those of all ranks: number, true and predicted class and their probabilities, of shape (m, 5).
        sample_names: of the samples by their numbers; by default the numbers stand for themselves.

    Example:
        >>> table = mistakes_table(torch.tensor([[7.0, 0.0, 1.0, 0.75, 0.25]]), ["cat", "dog"])
        >>> list(table.rows[0].values())
        [7, 'cat', 'dog', 0.75, 0.25]
    """
    columns = ("file" if sample_names else "sample", "true", "predicted", "probability_predicted", "probability_true")
    order = sorted(mistakes.tolist(), key=lambda row: (-row[3], row[0]))
    rows = []
    for number, *classes, predicted, true in order:
        name = sample_names[int(number)] if sample_names else int(number)
        rows.append((name, *(class_names[int(index)] for index in classes), round(predicted, 6), round(true, 6)))
    return Table(columns, [dict(zip(columns, row, strict=True)) for row in rows])


def class_table(confusion: Tensor, class_names: Sequence[str]) -> Table:
    """A row for each class: samples, precision, recall, F1, and which other class its samples are taken for most often.

    What is not defined is None: the recall of a class without samples, the precision of one that is never predicted.

    Args:
        confusion: counts of shape (classes, classes): true class by predicted class.

    Example:
        >>> class_table(torch.tensor([[3, 1], [0, 2]]), ["cat", "dog"]).rows[0]
        {'class': 'cat', 'samples': 4, 'precision': 1.0, 'recall': 0.75, 'f1': 0.857143, 'taken_for': 'dog', 'times': 1}
    """
    columns = ("class", "samples", "precision", "recall", "f1", "taken_for", "times")
    counts = [part.tolist() for part in (confusion.diagonal(), confusion.sum(1), confusion.sum(0))]
    times, other = (confusion - confusion.diagonal().diag()).max(1)
    rows = []
    for name, right, samples, predicted, most, taken in zip(class_names, *counts, times.tolist(), other.tolist()):
        shares = ((right, predicted), (right, samples), (2 * right, samples + predicted))
        scores = (round(part / whole, 6) if whole else None for part, whole in shares)
        rows.append((name, samples, *scores, class_names[taken] if most else None, most))
    return Table(columns, [dict(zip(columns, row, strict=True)) for row in rows])


class EvaluationTables(pl.Callback):
    """Makes the tables of a classifier: all classes and all mistakes of the last validation and the last test.

    They are ``val_per_class.csv``, ``test_mistakes.csv`` and so on in `tables`, for a module with a
    ``confusion_matrix`` and ``class_names``, as `Classifier`. A sample that is no file is named by its number in the
    data set. There are no mistakes of a loader whose order is not known, such as one that shuffles.

    In `figures` are the confusion matrix and the images of the most confident mistakes.

    Runs on: each batch and the end of an evaluation; not in training.
    """

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.figures: dict[str, Picture] = {}
        self.samples: list[Tensor] = []
        self.images = MistakeImages()

    @override
    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.state.fn != "fit" and isinstance(outputs, dict) and "logits" in outputs:
            logits = outputs["logits"]
            scored = _scored(logits, as_classes(batch[1], logits.shape[1]))
            self.samples.append(scored)
            if is_image_batch(batch[0]):
                self.images.add(batch[0], scored)

    on_test_batch_end = on_validation_batch_end

    def _keep(self, trainer: pl.Trainer, pl_module: Any, part: str, loaders: Any) -> None:
        if trainer.state.fn == "fit" or pl_module.confusion_matrix is None:
            return
        tables = self.tables
        tables[f"{part}_per_class.csv"] = class_table(pl_module.confusion_matrix, pl_module.class_names)
        title = {"val": "validation"}.get(part, part)
        self.figures["confusion"] = confusion_plot(pl_module.confusion_matrix.tolist(), pl_module.class_names, title)
        loader = loaders[0] if isinstance(loaders, list) and len(loaders) == 1 else loaders
        numbers, names = sample_numbers(loader), data_contract(pl_module.data_module()).sample_names(part)
        if not isinstance(loader, EvaluationSampling) and len(names) != len(getattr(loader, "dataset", ())):
            names = ()  # Of a data module whose loader was replaced.
        mine = _mistakes(self.samples, numbers) if numbers is not None else None
        preprocessing = data_contract(pl_module.data_module()).preprocessing()
        images = gather(self.images.displayed(numbers, preprocessing))
        self.figures.pop("mistakes", None)
        if grid := mistakes_grid(images, pl_module.class_names, names, title):
            self.figures["mistakes"] = grid
        self.samples = []
        self.images = MistakeImages()
        mistakes = gather(mine)
        tables.pop(f"{part}_mistakes.csv", None)
        if all(found is not None for found in mistakes):
            tables[f"{part}_mistakes.csv"] = mistakes_table(torch.cat(mistakes), pl_module.class_names, names)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._keep(trainer, pl_module, "val", trainer.val_dataloaders)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._keep(trainer, pl_module, "test", trainer.test_dataloaders)
