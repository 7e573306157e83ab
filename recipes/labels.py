"""Loss of a classifier over its labels, and the check that the labels are classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from typing_extensions import override

from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.images.labels import IGNORED, check_form, check_labels
from datamodules.lightning import pl
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from datamodules.loading.numbered import NumberedDataLoader
from datamodules.loading.worker_loaders import WorkerEvaluationLoader, WorkerTrainLoader
from datamodules.notes import inform

_BATCHES_BETWEEN_CHECKS = 50  # On a GPU, where each check waits for the device.
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def labels_in_memory(loader: Any) -> tuple[Tensor, Tensor] | None:
    """Return the labels of all samples of a loader and their rows in the data set, or None if they are not in memory.

    The labels are known for the loaders of this package, and for a `DataLoader` over a `TensorDataset` of inputs and
    labels or over its `Subset`.
    """
    match loader:
        case TrainLoader() | EvaluationLoader():
            return loader.targets.index_select(0, loader.rows.to(loader.targets.device)), loader.rows
        case WorkerTrainLoader() | WorkerEvaluationLoader():
            return loader.reader.targets.index_select(0, loader.rows), loader.rows
        case NumberedDataLoader():
            return labels_in_memory(loader.source)
        case DataLoader(collate_fn=collate) if collate is default_collate:
            return _labels_of_set(loader.dataset)
    return None


def _labels_of_set(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """Return the labels and rows of a `TensorDataset` or of its `Subset`, or None for other data sets."""
    # Not isinstance: a subclass may yield other samples.
    if type(dataset) is Subset:
        known = _labels_of_set(dataset.dataset)
        if known is None:
            return None
        labels, rows = known
        indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return labels[indices], rows[indices]
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return dataset.tensors[1], torch.arange(len(dataset))
    return None


def _as_int64(labels: Tensor) -> Tensor:
    """Convert integers of any type to int64, the only type that cross-entropy takes."""
    return labels if labels.is_floating_point() else labels.long()


def is_on_cpu(labels: Tensor) -> bool:
    """Return whether labels are on the CPU; reading labels on a GPU would wait for all queued work."""
    return labels.device.type == "cpu"


def as_classes(labels: Tensor, num_classes: int) -> Tensor:
    """Return hard labels as int64; on a GPU, labels out of range become -100 (ignored). Soft labels are unchanged.

    An index out of range raises an error on a CPU, but ends the process on a GPU before `CheckLabels` can report it.
    """
    if labels.is_floating_point():
        return labels
    labels = labels.long()
    if is_on_cpu(labels):
        return labels
    return torch.where(labels.clamp(0, num_classes - 1) == labels, labels, IGNORED)


def mean_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    all_count: bool = False,
) -> tuple[Tensor, int | Tensor]:
    """Return the mean cross-entropy over the labels that are not -100, and their number; 0 without labels.

    With weights, the weighted sum is divided by the number of labels. torch's weighted mean divides by the sum of the
    weights in the batch, so it changes if the batch is cut in two. Half precision is then computed in float32.

    Args:
        logits: logits of shape (batch, classes).
        labels: integers of shape (batch,), or probabilities of shape (batch, classes).
        weight: weights of the classes, of shape (classes,).
        label_smoothing: share of the target spread over all classes (Szegedy et al., 2016).
        all_count: whether no label is known to be -100, for example because `CheckLabels` has checked the whole set.

    Example:
        >>> logits, labels = torch.zeros(3, 2), torch.tensor([1, 0, -100])
        >>> mean_cross_entropy(logits, labels)
        (tensor(0.6931), 2)
    """
    labels = as_classes(labels, logits.shape[1])
    is_soft = labels.is_floating_point()
    on_cpu = is_on_cpu(labels)
    count: int | Tensor = labels.shape[0]
    # Fast path: usually no label is -100, and on the CPU one pass over the labels shows it.
    all_count = all_count or is_soft or not count or (on_cpu and labels.min().item() >= 0)
    if not all_count:
        counted = (labels != IGNORED).count_nonzero()
        count = int(counted) if on_cpu else counted
    if weight is not None:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = labels.to(logits) if is_soft else labels
        total = F.cross_entropy(logits, labels, weight.to(logits), reduction="sum", label_smoothing=label_smoothing)
        divisor = count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)
        return total / divisor, count
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    if isinstance(count, Tensor) or not count:
        # torch's mean over zero labels is NaN.
        loss = torch.where(torch.as_tensor(count, device=loss.device) > 0, loss, 0.0)
    return loss, count


def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the number of correct predictions, a scalar; a soft label counts as its most probable class."""
    classes = labels.argmax(1) if labels.is_floating_point() else labels
    return (logits.argmax(1) == classes).count_nonzero()


class LabelCheck:
    """Check of the labels of one part of the data: all at once if they are in memory, else batch by batch.

    On a GPU, a check waits for the device, so it runs once in 50 batches and in `raise_found`.

    Args:
        num_classes: number of classes; labels are 0 to num_classes - 1, or -100, which leaves the sample out.
        part: the part of the data: "training", "validation" or "test".
    """

    def __init__(self, num_classes: int, part: str) -> None:
        self.num_classes = num_classes
        self.part = part
        self.all_count = False
        """Whether all labels have been checked, and none is -100."""
        self._unchecked: list[Tensor] = []

    def check_set(self, loaders: Any) -> None:
        """Check all labels of the loaders, if they are in memory.

        Args:
            loaders: a loader, a list of loaders, or None if hooks may change the batches after loading.

        Raises:
            UserError: a label is out of range, or all labels are -100.
        """
        loader_list = loaders if isinstance(loaders, list) else [loaders]
        label_sets = [labels_in_memory(loader) for loader in loader_list]
        ignored_counts = [self._check_all(*labels) for labels in label_sets if labels is not None]
        self.all_count = len(ignored_counts) == len(label_sets) and not any(ignored_counts)

    def _check_all(self, labels: Tensor, rows: Tensor) -> int:
        source = f"the {self.part} set"
        labels = _as_int64(labels)
        if self.part == "training" and labels.is_floating_point():
            check_form(labels, self.num_classes, source, soft=True)
            return 0
        ignored = check_labels(labels, self.num_classes, source, rows)
        if 0 < len(labels) == ignored:
            raise UserError(f"all {ignored:,} labels of {source} are {IGNORED}, which leaves every sample out")
        return ignored

    def check_batch(self, labels: Tensor) -> None:
        """Check the labels of a batch, unless the whole set has been checked.

        Raises:
            RunFailedError: a label is out of range.
        """
        if self.all_count or not len(labels):
            return
        labels = _as_int64(labels)
        source = f"a {self.part} batch"
        is_soft = self.part == "training" and labels.is_floating_point()
        check_form(labels, self.num_classes, source, is_soft, RunFailedError)
        if is_soft:
            return
        if is_on_cpu(labels):
            check_labels(labels, self.num_classes, source, error=RunFailedError)
            return
        self._unchecked.append(labels.clone())  # A loader may write the next batch into the same tensor.
        if len(self._unchecked) == _BATCHES_BETWEEN_CHECKS:
            self.raise_found()

    def raise_found(self) -> None:
        """Check the labels on the device that have not been checked yet; this waits for the device.

        Raises:
            RunFailedError: a label was out of range.
        """
        if not self._unchecked:
            return
        labels = torch.cat(self._unchecked)
        self._unchecked = []
        check_labels(labels, self.num_classes, f"the last {self.part} batches", error=RunFailedError)


class CheckLabels(pl.Callback):
    """Callback that rejects labels out of range, and data with other classes than the classifier's.

    Labels are checked before training if they are in memory, else in each batch. The callback passes the names of the
    data's classes to the classifier.

    Runs on: `setup`, the start of each part, each batch of labels that are not in memory, and the end of each part.

    Args:
        num_classes: number of classes; labels are 0 to num_classes - 1, or -100, which leaves the sample out.

    Raises:
        UserError: the data have other classes, or a label in memory is out of range.
        RunFailedError: a label in a batch is out of range.
    """

    def __init__(self, num_classes: int) -> None:
        parts = {"train": "training", "validate": "validation", "test": "test"}
        self.checks = {stage: LabelCheck(num_classes, part) for stage, part in parts.items()}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Reject data with another number of classes; for prediction, images need no classes."""
        if stage == "predict":
            return
        contract = data_contract(pl_module.data_module())
        names = contract.class_names
        count = contract.num_classes or len(names)
        if count and count != len(pl_module.class_names):
            name_list = ""
            if len(names) == count:
                name_list = f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
            raise UserError(
                f"the data has {count} classes{name_list}, the network {len(pl_module.class_names)}; pass"
                f" {spelled('num_classes', count)}, or data with the classes that the network was trained on"
            )

    def _name_classes(self, pl_module: Any) -> None:
        """Set the class names of the data, and reject them if the checkpoint has different names.

        This runs after `setup`, because the checkpoint may determine the data set that the data module reads.
        """
        names = data_contract(pl_module.data_module()).class_names
        if len(names) != len(pl_module.class_names):
            return
        saved_names = pl_module.names_in_checkpoint
        has_same_names = set(saved_names) == set(names)
        if has_same_names and list(saved_names) != list(names) and pl_module.reorder_head(names):
            inform(f"the rows of {pl_module.head_name} are in the order of the data's classes now")
            saved_names = names
        for i, (saved_name, data_name) in enumerate(zip(saved_names, names)):
            if saved_name != data_name:
                order = "the order of the classes differs: " if has_same_names else ""
                raise UserError(
                    f"{order}class {i} is {saved_name!r} in the checkpoint and {data_name!r} in the data; rename the"
                    " data's classes to the names in the checkpoint, or train on other classes with it as"
                    f" {spelled('weights')} and {spelled('weights_skip', pl_module.head_name)}"
                )
        pl_module.set_class_names(names)

    def _check_set(self, pl_module: Any, stage: str, loaders: Any) -> None:
        """Check the labels of a part of the data, if they are in memory and no user hook changes them."""
        owners = [type(owner) for owner in (pl_module, pl_module.data_module()) if owner is not None]
        packages = {getattr(owner, name).__module__.partition(".")[0] for owner in owners for name in _TRANSFER_HOOKS}
        self.checks[stage].check_set(loaders if packages <= {"lightning", "datamodules"} else None)
        pl_module.all_labels_count = self.checks["train"].all_count

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._name_classes(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # A run that resumes within an epoch has no `on_train_epoch_start`, and its first validation may be hours away.
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
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        check = self.checks["train"]
        if not check.all_count:
            check.check_batch(batch[1])

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, *args: Any) -> None:
        self.checks["validate"].check_batch(batch[1])

    @override
    def on_test_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, *args: Any) -> None:
        self.checks["test"].check_batch(batch[1])

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for check in self.checks.values():
            check.raise_found()

    on_validation_epoch_end = on_test_epoch_end = on_train_epoch_end

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.checks["train"].raise_found()
