"""Image classification: cross-entropy, and every score from integer counts."""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from callbacks.drawing.classification_images import ClassificationImages
from callbacks.lib.exchange import gather
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError
from datamodules.loading.loaders import EvaluationSampling
from datamodules.loading.sample_numbers import sample_numbers
from datamodules.ranges import COUNT, SHARE, check_choice, check_ranges
from recipes.classification_scores import (
    ClassificationScores,
    ScoredSamples,
    class_table,
    mistakes_table,
)
from recipes.labels import LabelCheck
from recipes.recipe import Recipe, RecipeParameters, Table
from recipes.tta import TTA, check_views, mean_log_probabilities

__all__ = ["Classifier", "ClassifierParameters"]

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_RUNNER_UP = re.compile(r"(class|probability)_\d+")


def _classes_of(data: pl.LightningDataModule | None) -> tuple[int, Sequence[str]]:
    """How many classes a data module has, and their names; 0 and none where they are not known."""
    contract = data_contract(data)
    names = contract.class_names
    count = contract.num_classes or len(names)
    return count, names if len(names) == count else ()


def _in_dtype_of(module: torch.nn.Module, inputs: Tensor) -> Tensor:
    """Float64 inputs, and images of whole numbers, in the type of the module's parameters; others as they are.

    Whole numbers of another shape may be tokens, and Lightning converts the other floats where its precision needs it.
    """
    if inputs.dtype != torch.float64 and (inputs.is_floating_point() or inputs.dim() != 4):
        return inputs
    return inputs.to(next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32))


def weighted_loss(logits: Tensor, targets: Tensor, weight: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The sum of the weighted cross-entropy over the targets; divided by their number it is equal on any split.

    torch's weighted mean divides by the weights of the batch, so that a batch cut in two has another mean. Half
    precision is computed in float32.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits) if targets.is_floating_point() else targets
    return F.cross_entropy(logits, targets, weight.to(logits), reduction="sum", label_smoothing=label_smoothing)


def _has_own_transfers(owner: pl.LightningModule | pl.LightningDataModule | None) -> bool:
    """Whether batches go through a hook of the user, who may change labels there; those of this package do not."""
    if owner is None:
        return False
    packages = {getattr(type(owner), name).__module__.partition(".")[0] for name in _TRANSFERS}
    return not packages <= {"lightning", "datamodules"}


class ClassifierParameters(RecipeParameters):
    """The parameters of a classifier, as ``self.hparams`` holds them."""

    num_classes: int
    label_smoothing: float
    top_k: int
    tta: TTA


class Classifier(Recipe):
    """The base of the classification recipes: batches are ``(images, labels)``.

    Images may be float32, float64 or whole numbers, and labels whole numbers of any type. In training the labels may be
    soft, that is floats of shape (batch, classes) as MixUp and CutMix give them. A label of -100 leaves its sample out
    of the loss, of its count and of all scores. One that is no class is refused: before training where all labels are
    in memory (the loaders of `datamodules`, a `DataLoader` over a `TensorDataset`), else in its batch. The names of the
    classes come from the data module (``class_names``) and are saved in the checkpoint; data with other names is
    refused later, because labels are numbered in the order of the names.

    Where the data module has ``class_weights``, the training loss is the weighted sum over the targets divided by their
    number, and not by their weights as in torch's mean: so an update is the same on any split, and rare classes weigh
    the same in each batch. The weights are saved in the checkpoint, with which a run resumes. The losses of validation
    and test are cross-entropy without weights.

    With ``tta`` an image is scored and predicted by the mean of the probabilities of several views of it, in validate,
    test, predict and the scores at the end of a run; the loss is the cross-entropy of that mean. Training, its
    validations and exports are without.

    Args:
        num_classes: labels are 0 to this less one; null takes the data's.
        label_smoothing: share of the target spread over all classes (Szegedy et al., 2016).
        top_k: how many classes ``predict`` names for each image, the likeliest first.
        tta: test-time augmentation of the final scores, validate, test and predict: the mean over the image and its
            mirror image (flip), or over five shifted crops, and their mirror images where the data allow it (crops).
    """

    monitor = "val/accuracy"
    monitor_mode = "max"
    predict_example = "IMAGE.png"

    unclear_below: ClassVar[float] = 0.0
    """The probability of the likeliest class below which `predict` calls an image unclear."""

    free_parameters: ClassVar[frozenset[str]] = Recipe.free_parameters | {"top_k", "tta"}
    rare_parameters: ClassVar[frozenset[str]] = Recipe.rare_parameters | {"top_k"}

    hparams: ClassifierParameters
    class_weights: Tensor | None
    """The data's weights of the classes in the training loss, of shape (classes,); None where all weigh 1."""

    def __init__(
        self,
        num_classes: int | None = 10,
        label_smoothing: float = 0.0,
        top_k: int = 5,
        tta: TTA = "none",
        **kwargs: Any,
    ) -> None:
        if num_classes is None:
            raise UserError(
                "the number of classes was neither given nor found in the data; pass one such as num_classes=10"
            )
        if num_classes < 2:
            raise UserError(f"num_classes={num_classes} leaves nothing to classify; pass num_classes=2 or more")
        check_ranges(
            num_classes=(num_classes, COUNT),
            label_smoothing=(label_smoothing, SHARE),
            top_k=(top_k, COUNT),
        )
        check_choice("tta", tta, get_args(TTA))
        super().__init__(**kwargs)
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", None, persistent=False)
        self.top_k, self.tta = top_k, tta
        self.val_scores, self.val_samples = ClassificationScores(num_classes), ScoredSamples()
        self.test_scores, self.test_samples = ClassificationScores(num_classes), ScoredSamples()
        parts = {"train": "training", "val": "validation", "test": "test"}
        self.label_checks = {name: LabelCheck(num_classes, part) for name, part in parts.items()}
        self.class_names: Sequence[str] = [str(i) for i in range(num_classes)]
        self._names_in_checkpoint: Sequence[str] | None = None
        self.confusion_matrix: Tensor | None = None
        self._tables: dict[str, Table] = {}

    @classmethod
    @override
    def settings_from_data(cls, data: pl.LightningDataModule) -> dict[str, Any]:
        """The number of classes, where the data has one."""
        count = data_contract(data).num_classes
        return {} if count is None else {"num_classes": count}

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        return [*super().configure_callbacks(), ClassificationImages()]

    @override
    def headline(self, scores: dict[str, float]) -> dict[str, str]:
        percent = {"accuracy": "accuracy", "macro-F1": "macro_f1", "calibration error": "ece"}
        part = "test" if "test/accuracy" in scores else "val"
        wanted = {"val accuracy": "val/accuracy"} | {f"{part} {k}": f"{part}/{v}" for k, v in percent.items()}
        return {name: f"{100 * scores[key]:.2f} %" for name, key in wanted.items() if key in scores}

    @override
    def result_tables(self) -> dict[str, Table]:
        """All classes and all mistakes of the last validation and the last test: val_per_class.csv, test_mistakes.csv.

        A sample that is no file is named by its number in the data set. There are no mistakes of a loader whose order
        is not known, such as one that shuffles.
        """
        return self._tables

    @override
    def named_outputs(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"logits": outputs, "probabilities": outputs.softmax(1)}

    @override
    def export_metadata(self) -> dict[str, Any]:
        return super().export_metadata() | {"class_names": list(self.class_names)}

    @override
    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for batch in outputs:
            best = batch["probabilities"].topk(min(self.top_k, len(self.class_names)))
            numbers = batch["number"].tolist() if names else range(len(best.values))
            for number, classes, values in zip(numbers, best.indices.tolist(), best.values.tolist()):
                row = {"file": names[number]} if names else {"sample": len(rows)}
                for place, (index, probability) in enumerate(zip(classes, values), 1):
                    suffix = f"_{place}" if place > 1 else ""
                    row |= {f"class{suffix}": self.class_names[index], f"probability{suffix}": probability}
                note = "unclear: low probability" if values[0] < self.unclear_below else None
                rows.append(row | {"note": note})
        return rows

    @override
    def no_prediction(self, name: str) -> dict[str, Any]:
        return {"file": name, "class": None, "probability": None}

    @override
    def prediction_table(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        """The most likely class of each image; the file of ``--output`` has the others, too."""
        table = super().prediction_table(rows)
        return [{name: text for name, text in row.items() if not _RUNNER_UP.fullmatch(name)} for row in table]

    @override
    def setup(self, stage: str) -> None:
        """Refuse data with another number of classes. Images to predict need no classes."""
        super().setup(stage)
        if stage == "predict":
            return
        count, names = _classes_of(self.data_module())
        if count and count != len(self.class_names):
            listed = f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""
            raise UserError(
                f"the data has {count} classes{listed}, the network {len(self.class_names)}; pass num_classes={count}"
                ", or data with the classes that the network was trained on"
            )
        if stage == "fit":
            # Those of a checkpoint take their place later.
            self.class_weights = data_contract(self.data_module()).class_weights

    def _name_classes(self) -> None:
        """Take the names of the classes from the data, where it has them.

        Later than `setup`: the checkpoint may have settled which data set the data module reads.

        Raises:
            UserError: the checkpoint has other names.
        """
        _, names = _classes_of(self.data_module())
        for i, (old, new) in enumerate(zip(self._names_in_checkpoint or [], names)):
            if old != new:
                raise UserError(
                    f"class {i} is {old!r} in the checkpoint and {new!r} in the data; rename the data's classes to "
                    "those of the checkpoint, or take only its weights to train on other classes"
                )
        self.class_names = names or self.class_names

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._name_classes()

    def _check_labels(self, part: str, loaders: Any) -> None:
        """Check the labels of a part of the data, where they are in memory and no hook changes them later."""
        changed = any(_has_own_transfers(owner) for owner in (self, self.data_module()))
        self.label_checks[part].check_set(None if changed else loaders)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # A run that resumes within an epoch does not start it, and the first validation may be hours away.
        self._check_labels("train", self.trainer.train_dataloader)
        self._check_labels("val", self.trainer.val_dataloaders)

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._check_labels("train", self.trainer.train_dataloader)

    @override
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.label_checks["train"].raise_found()

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._name_classes()
        self._check_labels("val", self.trainer.val_dataloaders)

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._name_classes()
        self._check_labels("test", self.trainer.test_dataloaders)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        targets, count = self.label_checks["train"](targets)
        logits = self(_in_dtype_of(self, inputs))
        if self.class_weights is not None:
            total = weighted_loss(logits, targets, self.class_weights, self.label_smoothing)
            loss = total / (count.clamp(min=1) if isinstance(count, Tensor) else max(1, count))
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
            if isinstance(count, Tensor) or not count:
                # The mean over no label is NaN.
                loss = torch.where(torch.as_tensor(count, device=loss.device) > 0, loss, 0.0)
        labels = targets.argmax(1) if targets.is_floating_point() else targets
        return {"loss": loss, "count": count, "correct": (logits.argmax(1) == labels).sum()}

    def _logits(self, inputs: Tensor, training: bool = False) -> Tensor:
        """Logits in float32; with `tta`, and not in training, the logarithms of the mean probabilities of the views."""
        inputs = _in_dtype_of(self, inputs)
        if self.tta != "none":
            data = data_contract(self.data_module() or self._new_data_module())
            # In training too, whose end is late for an error, but whose inputs may be cached features.
            example = self.example_input_array if training else None
            check_views(example if isinstance(example, Tensor) else inputs, self.tta, data.may_flip, data.title)
            if not training:
                return mean_log_probabilities(self, inputs, self.tta, data.may_flip)
        logits: Tensor = self(inputs).float()
        return logits

    def _evaluation_step(
        self, part: str, scores: ClassificationScores, samples: ScoredSamples, batch: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        inputs, targets = batch
        targets, _ = self.label_checks[part](targets)
        training = self.trainer.state.fn == "fit"
        logits = self._logits(inputs, training)
        scores.update(logits, targets)
        if not training:
            samples.update(logits, targets)
        return {"logits": logits}

    def _log_scores(self, prefix: str, scores: ClassificationScores) -> None:
        self.label_checks[prefix].raise_found()
        values, self.confusion_matrix = scores.compute()
        if not (self.confusion_matrix.any() or self.trainer.sanity_checking):
            part = self.label_checks[prefix].part
            raise RunFailedError(f"no {part} sample has a label, so there is no score: all labels are -100")
        # Equal on all ranks already: the maximum keeps the last digit, where a mean over ranks would round again.
        values = {f"{prefix}/{name}": value.float().to(self.device) for name, value in values.items()}
        self.log_dict(values, sync_dist=True, reduce_fx="max")
        scores.reset()

    def _keep_tables(self, prefix: str, samples: ScoredSamples, loaders: Any) -> None:
        """Make the tables of an evaluation outside training."""
        if self.trainer.state.fn == "fit" or self.confusion_matrix is None:
            return
        self._tables[f"{prefix}_per_class.csv"] = class_table(self.confusion_matrix, self.class_names)
        loader = loaders[0] if isinstance(loaders, list) and len(loaders) == 1 else loaders
        numbers, names = sample_numbers(loader), data_contract(self.data_module()).sample_names(prefix)
        if not isinstance(loader, EvaluationSampling) and len(names) != len(getattr(loader, "dataset", ())):
            names = ()  # Of a data module whose loader was replaced.
        mine = samples.mistakes(numbers) if numbers is not None else None
        samples.reset()
        mistakes = gather(self.trainer.strategy, mine)
        self._tables.pop(f"{prefix}_mistakes.csv", None)
        if all(found is not None for found in mistakes):
            self._tables[f"{prefix}_mistakes.csv"] = mistakes_table(torch.cat(mistakes), self.class_names, names)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluation_step("val", self.val_scores, self.val_samples, batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_scores)
        self._keep_tables("val", self.val_samples, self.trainer.val_dataloaders)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluation_step("test", self.test_scores, self.test_samples, batch)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_scores)
        self._keep_tables("test", self.test_samples, self.trainer.test_dataloaders)

    @override
    def predict_step(self, batch: Tensor | Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The probabilities of shape (batch, classes).

        Batches are ``inputs`` or ``(inputs, ...)``; of ``(inputs, numbers)`` the numbers of the samples are returned
        too, as indices of the data module's ``prediction_names``.
        """
        inputs, *numbers = (batch,) if isinstance(batch, Tensor) else batch
        return dict(zip(["number"], numbers)) | {"probabilities": self._logits(inputs).softmax(1)}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self.label_checks["train"].raise_found()
        checkpoint["class_names"] = list(self.class_names)
        if self.class_weights is not None:
            checkpoint["class_weights"] = self.class_weights.cpu()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if names := checkpoint.get("class_names"):
            self.class_names = self._names_in_checkpoint = names
        if (weights := checkpoint.get("class_weights")) is not None:
            self.class_weights = weights.to(self.device)
