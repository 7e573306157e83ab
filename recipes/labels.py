"""The labels of a classifier: the loss over those that count, and checks of those that cannot be."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from callbacks.lib.hooks import is_training
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError
from datamodules.images.labels import IGNORED, check_form, check_labels, labels_in_memory
from datamodules.loading.updates import micro_batches

_BATCHES = 50  # On a GPU, between two looks at what was found there.
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _as_int64(labels: Tensor) -> Tensor:
    """Whole numbers of any type as int64, which alone cross-entropy takes."""
    return labels if labels.is_floating_point() else labels.long()


def _is_class(labels: Tensor, num_classes: int) -> Tensor:
    return labels.clamp(0, num_classes - 1) == labels


def is_at_hand(labels: Tensor) -> bool:
    """Whether reading labels costs nothing; on a GPU it waits for all that the device has to do."""
    return labels.device.type == "cpu"


def as_classes(labels: Tensor, num_classes: int) -> Tensor:
    """Labels as int64, or soft as they are; on a GPU those that are no class as -100, which is left out.

    An index out of range is an error of torch on a CPU, and on a GPU the end of the process: `CheckLabels` names it.
    """
    if labels.is_floating_point():
        return labels
    labels = labels.long()
    if is_at_hand(labels):
        return labels
    return torch.where(_is_class(labels, num_classes), labels, IGNORED)


def mean_cross_entropy(
    logits: Tensor, labels: Tensor, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> tuple[Tensor, int | Tensor]:
    """The mean cross-entropy over the labels that are not -100, and how many these are; 0 where there are none.

    With weights it is their weighted sum over the number of labels, so that it is equal on any split: torch's weighted
    mean divides by the weights of the batch, and a batch cut in two has another mean. Half precision is then computed
    in float32.

    Args:
        logits: of shape (batch, classes).
        labels: whole numbers of shape (batch,), or probabilities of shape (batch, classes).
        weight: of the classes, of shape (classes,).
        label_smoothing: share of the target spread over all classes (Szegedy et al., 2016).

    Example:
        >>> logits, labels = torch.zeros(3, 2), torch.tensor([1, 0, -100])
        >>> mean_cross_entropy(logits, labels)
        (tensor(0.6931), 2)
    """
    labels = as_classes(labels, logits.shape[1])
    is_soft = labels.is_floating_point()
    at_hand = is_at_hand(labels)
    count: int | Tensor = labels.shape[0]
    # Nearly always all count, which one pass over labels at hand shows.
    all_count = is_soft or not count or (at_hand and labels.min().item() >= 0)
    if not all_count:
        counted = (labels != IGNORED).count_nonzero()
        count = int(counted) if at_hand else counted
    if weight is not None:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = labels.to(logits) if is_soft else labels
        total = F.cross_entropy(logits, labels, weight.to(logits), reduction="sum", label_smoothing=label_smoothing)
        return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)), count
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    if isinstance(count, Tensor) or not count:
        # The mean over no label is NaN.
        loss = torch.where(torch.as_tensor(count, device=loss.device) > 0, loss, 0.0)
    return loss, count


def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many predictions are right, a scalar: of soft labels the likeliest class."""
    return (logits.argmax(1) == (labels.argmax(1) if labels.is_floating_point() else labels)).count_nonzero()


class LabelCheck:
    """Checks the labels of one part of the data, before its batches where they are in memory, and else in each batch.

    On a GPU the device is waited for once in 50 batches, and when `raise_found` is called.

    Args:
        num_classes: labels are 0 to this less one, or -100, which leaves the sample out.
        part: of the data: "training", "validation" or "test".
    """

    def __init__(self, num_classes: int, part: str) -> None:
        self.num_classes, self.part = num_classes, part
        self.all_count = False
        """Whether all labels have been checked, and none is -100."""
        self._unchecked: list[Tensor] = []

    def check_set(self, loaders: Any) -> None:
        """Check all labels of the loaders, where they are in memory.

        Args:
            loaders: one, several, or None where the batches may be changed after loading.

        Raises:
            UserError: one is out of range, or none is left.
        """
        known = [labels_in_memory(loader) for loader in (loaders if isinstance(loaders, list) else [loaders])]
        ignored = [self._check_all(*labels) for labels in known if labels is not None]
        self.all_count = len(ignored) == len(known) and not any(ignored)

    def _check_all(self, labels: Tensor, rows: Tensor) -> int:
        source, labels = f"the {self.part} set", _as_int64(labels)
        if self.part == "training" and labels.is_floating_point():
            check_form(labels, self.num_classes, source, soft=True)
            return 0
        ignored = check_labels(labels, self.num_classes, source, rows)
        if 0 < len(labels) == ignored:
            raise UserError(f"all {ignored:,} labels of {source} are {IGNORED}, which leaves every sample out")
        return ignored

    def check_batch(self, labels: Tensor) -> None:
        """Check the labels of a batch, where those of the set are not known to be right.

        Raises:
            RunFailedError: one is out of range.
        """
        if self.all_count or not len(labels):
            return
        labels, source = _as_int64(labels), f"a {self.part} batch"
        soft = self.part == "training" and labels.is_floating_point()
        check_form(labels, self.num_classes, source, soft, RunFailedError)
        if soft:
            return
        if is_at_hand(labels):
            check_labels(labels, self.num_classes, source, error=RunFailedError)
            return
        self._unchecked.append(labels.clone())  # A loader may write the next batch into the same tensor.
        if len(self._unchecked) == _BATCHES:
            self.raise_found()

    def raise_found(self) -> None:
        """Wait for the device, where labels on it were not checked yet.

        Raises:
            RunFailedError: one was out of range.
        """
        if not self._unchecked:
            return
        labels, self._unchecked = torch.cat(self._unchecked), []
        # 0 is a class, so it stands for all that are in range.
        outside = labels.masked_fill(_is_class(labels, self.num_classes) | (labels == IGNORED), 0)
        low, high = torch.stack(outside.aminmax()).tolist()
        if low < 0 or high >= self.num_classes:
            how = f"pass num_classes={high + 1} or correct" if high >= self.num_classes else "correct"
            raise RunFailedError(
                f"labels {low} to {high} of {self.part} batches were found, expected 0..{self.num_classes - 1};"
                f" {how} the labels ({IGNORED} leaves a sample out)"
            )


class CheckLabels(pl.Callback):
    """Refuses labels that are no class, and data with other classes than those that a classifier was trained on.

    Labels are checked before training where they are in memory, else in each batch. The classifier takes the names of
    the classes from the data.

    Runs on: `setup`, the start of each part, each batch of labels that are not in memory, and the end of each part.

    Args:
        num_classes: labels are 0 to this less one, or -100, which leaves the sample out.

    Raises:
        UserError: the data have other classes, or a label in memory is out of range.
        RunFailedError: a label in a batch is.
    """

    def __init__(self, num_classes: int) -> None:
        parts = {"train": "training", "validate": "validation", "test": "test"}
        self.checks = {stage: LabelCheck(num_classes, part) for stage, part in parts.items()}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Refuse data with another number of classes. Images to predict need no classes."""
        if stage == "predict":
            return
        contract = data_contract(pl_module.data_module())
        names = contract.class_names
        count = contract.num_classes or len(names)
        if count and count != len(pl_module.class_names):
            listed = f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if len(names) == count else ""
            raise UserError(
                f"the data has {count} classes{listed}, the network {len(pl_module.class_names)}; pass"
                f" num_classes={count}, or data with the classes that the network was trained on"
            )

    def _name_classes(self, pl_module: Any) -> None:
        """Take the names of the classes from the data, where it has them, unless the checkpoint has others.

        Later than `setup`: the checkpoint may have settled which data set the data module reads.
        """
        names = data_contract(pl_module.data_module()).class_names
        if len(names) != len(pl_module.class_names):
            return
        for i, (old, new) in enumerate(zip(pl_module.names_in_checkpoint, names)):
            if old != new:
                head = [*pl_module.network.state_dict()][-1].rpartition(".")[0]
                raise UserError(
                    f"class {i} is {old!r} in the checkpoint and {new!r} in the data; rename the data's classes to "
                    f"those of the checkpoint, or train on others with it as `weights` and weights_skip={head!r}"
                )
        pl_module.take_class_names(names)

    def _check_set(self, pl_module: Any, stage: str, loaders: Any) -> None:
        """Check the labels of a part of the data, where they are in memory and no hook of the user changes them."""
        owners = [type(owner) for owner in (pl_module, pl_module.data_module()) if owner is not None]
        packages = {getattr(owner, name).__module__.partition(".")[0] for owner in owners for name in _TRANSFERS}
        self.checks[stage].check_set(loaders if packages <= {"lightning", "datamodules"} else None)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._name_classes(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # A run that resumes within an epoch does not start it, and the first validation may be hours away.
        self._check_set(pl_module, "train", trainer.train_dataloader)
        self._check_set(pl_module, "validate", trainer.val_dataloaders)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._check_set(pl_module, "train", trainer.train_dataloader)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._name_classes(pl_module)
        self._check_set(pl_module, "validate", trainer.val_dataloaders)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._name_classes(pl_module)
        self._check_set(pl_module, "test", trainer.test_dataloaders)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        stage = "train" if is_training(trainer) else "test" if trainer.testing else "validate"
        for _, labels, *_ in micro_batches(batch):
            self.checks[stage].check_batch(labels)

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for check in self.checks.values():
            check.raise_found()

    on_validation_epoch_end = on_test_epoch_end = on_train_epoch_end

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.checks["train"].raise_found()
