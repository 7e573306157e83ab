"""Tables of an evaluation: a row for each class, and the mistakes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from callbacks.lib.ranks import gather
from datamodules.contract import data_contract
from datamodules.lightning import pl
from datamodules.loading.loaders import EvaluationSampling, sample_numbers
from recipes.figures.images import Picture
from recipes.figures.plots import confusion_plot
from recipes.labels import as_classes
from recipes.mistakes import MistakeImages, is_image_batch, mistakes_grid, most_confident


class ResultTable(NamedTuple):
    """Rows with the same columns; there may be none."""

    columns: Sequence[str]
    rows: list[dict[str, Any]]


class Headline(NamedTuple):
    """One of the main scores of a run, for the closing table and the page."""

    title: str
    """The label of the score."""
    score: str
    """Its name in the logged scores, such as "test/accuracy"."""
    value: str
    """The score as text, with its unit."""
    remark: str = ""
    """The way of measuring, in a few words."""
    signature: str = ""
    """The settings of the metric, for a repetition elsewhere."""

    @property
    def text(self) -> str:
        """The value with its details in parentheses.

        Example:
            >>> Headline("test BLEU", "test/bleu", "62.00", "greedy").text
            '62.00 (greedy)'
        """
        details = "; ".join(filter(None, (self.remark, self.signature)))
        return f"{self.value} ({details})" if details else self.value


def _scored(logits: Tensor, targets: Tensor) -> Tensor:
    """Return true and predicted class and their probabilities, (batch, 4); float32 represents every class number."""
    probabilities = logits.float().softmax(1)
    probability, predicted = probabilities.max(1)
    target_probability = probabilities.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.stack((targets.float(), predicted.float(), probability, target_probability), 1)


def _mistakes(samples: list[Tensor], numbers: Tensor) -> Tensor | None:
    """Return number, true and predicted class and their probabilities of each mistake: float64, (m, 5).

    Args:
        samples: the batches of this rank from `_scored`.
        numbers: the numbers of the samples in their order, int64; if there are fewer numbers than samples, the result
            is None.
    """
    rows = (torch.cat(samples).cpu() if samples else torch.empty(0, 4)).double()
    if len(numbers) < len(rows):
        return None
    wrong = (rows[:, 0] >= 0) & (rows[:, 0] != rows[:, 1])
    return torch.cat((numbers[: len(rows), None].double(), rows), 1)[wrong].nan_to_num(0.0)


def _by_confidence(row: Sequence[float]) -> tuple[float, float]:
    number, _, _, probability, _ = row
    return -probability, number


def mistakes_table(mistakes: Tensor, class_names: Sequence[str], sample_names: Sequence[str] = ()) -> ResultTable:
    """Return a row for each mistake, the most confident first.

    Args:
        mistakes: number, true and predicted class and their probabilities, of all ranks, of shape (m, 5).
        class_names: the names of the classes by label.
        sample_names: the names of the samples by number; by default the table has the numbers.

    Example:
        >>> table = mistakes_table(torch.tensor([[7.0, 0.0, 1.0, 0.75, 0.25]]), ["cat", "dog"])
        >>> list(table.rows[0].values())
        [7, 'cat', 'dog', 0.75, 0.25]
    """
    columns = ("file" if sample_names else "sample", "true", "predicted", "probability_predicted", "probability_true")
    # Ties are ordered by number, so that the order does not depend on the number of ranks.
    order = sorted(mistakes.tolist(), key=_by_confidence)
    rows = []
    for number, *classes, predicted, true in order:
        name = sample_names[int(number)] if sample_names else int(number)
        rows.append((name, *(class_names[int(index)] for index in classes), round(predicted, 6), round(true, 6)))
    return ResultTable(columns, [dict(zip(columns, row, strict=True)) for row in rows])


def _share(count: int, total: int) -> float | None:
    return round(count / total, 6) if total else None


def class_table(confusion: Tensor, class_names: Sequence[str]) -> ResultTable:
    """Return a row for each class: samples, precision, recall, F1, and the most frequent confusion.

    Undefined values are None: the recall of a class without samples, the precision of a class that is never predicted.

    Args:
        confusion: counts of shape (classes, classes): true class by predicted class.

    Example:
        >>> class_table(torch.tensor([[3, 1], [0, 2]]), ["cat", "dog"]).rows[0]
        {'class': 'cat', 'samples': 4, 'precision': 1.0, 'recall': 0.75, 'f1': 0.857143, 'taken_for': 'dog', 'times': 1}
    """
    columns = ("class", "samples", "precision", "recall", "f1", "taken_for", "times")
    counts = (confusion.diagonal().tolist(), confusion.sum(1).tolist(), confusion.sum(0).tolist())
    times, confused_with = (confusion - confusion.diagonal().diag()).max(1)
    rows = []
    columns_of_counts = (class_names, *counts, times.tolist(), confused_with.tolist())
    for name, correct, samples, predicted, confusions, confused_class in zip(*columns_of_counts):
        precision = _share(correct, predicted)
        recall = _share(correct, samples)
        f1 = _share(2 * correct, samples + predicted)
        taken_for = class_names[confused_class] if confusions else None
        rows.append((name, samples, precision, recall, f1, taken_for, confusions))
    return ResultTable(columns, [dict(zip(columns, row, strict=True)) for row in rows])


class EvaluationTables(pl.Callback):
    """Callback that builds a classifier's tables: classes and mistakes of the last validation and the last test.

    `tables` has ``val_per_class.csv``, ``test_mistakes.csv`` and so on, for a module with a ``confusion_matrix`` and
    ``class_names``, such as `Classifier`. A sample that is not a file is identified by its number in the data set.
    There is no table of mistakes for a loader of unknown order, such as a shuffling loader.

    `figures` has the confusion matrix and the images of the most confident mistakes.

    Runs on: each batch and the end of an evaluation; not in training.
    """

    def __init__(self) -> None:
        self.tables: dict[str, ResultTable] = {}
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
        numbers = sample_numbers(loader)
        names = data_contract(pl_module.data_module()).sample_names(part)
        if not isinstance(loader, EvaluationSampling) and len(names) != len(getattr(loader, "dataset", ())):
            names = ()  # The names describe the data module's loader, not the loader passed to the Trainer.
        mistakes_of_rank = _mistakes(self.samples, numbers) if numbers is not None else None
        preprocessing = data_contract(pl_module.data_module()).preprocessing()
        self.figures.pop("mistakes", None)
        shown = most_confident(self.images.mistakes(numbers), trainer.global_rank)
        if shown is not None:
            images, rows = shown
            explanation = pl_module.explain(images, rows[:, 2].long())
            grid = mistakes_grid(images, rows, pl_module.class_names, names, title, preprocessing, explanation)
            self.figures["mistakes"] = grid
        self.samples = []
        self.images = MistakeImages()
        mistakes = gather(mistakes_of_rank)
        tables.pop(f"{part}_mistakes.csv", None)
        if all(rows is not None for rows in mistakes):
            tables[f"{part}_mistakes.csv"] = mistakes_table(torch.cat(mistakes), pl_module.class_names, names)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._keep(trainer, pl_module, "val", trainer.val_dataloaders)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._keep(trainer, pl_module, "test", trainer.test_dataloaders)
