"""Base class of image classifiers: scores, class names, predictions."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from callbacks.lib.lightning_internals import attached_trainer
from datamodules.contract import Advanced, Changeable, data_contract
from datamodules.errors import RunFailedError, UserError, spelled
from datamodules.lightning import pl
from datamodules.ranges import COUNT, SHARE, check_ranges
from recipes.base import Recipe
from recipes.evaluation_tables import EvaluationTables, Headline
from recipes.figures.images import Picture
from recipes.forward import call_network, check_logits
from recipes.inputs import in_dtype_of
from recipes.labels import CheckLabels, as_classes
from recipes.mistakes import Explanation, is_image_batch, training_grid
from recipes.scores import ClassificationScores
from recipes.weights import head_of, order_head
from recipes.weights_file import read_class_names


class Classifier(Recipe):
    """Base class of the classification recipes: batches are ``(images, labels)``.

    A recipe adds `build_network`, `training_step` and `configure_optimizers`; see `MNISTClassifier`.

    Images may be float32, float64 or integers, and labels integers of any type. In training the labels may be soft:
    floats of shape (batch, classes), as from MixUp and CutMix. A sample with the label -100 is ignored in losses and
    scores. A label out of range is an error: before training if all labels are in memory (the loaders of
    `datamodules`, a `DataLoader` over a `TensorDataset`), else in its batch. The names of the classes come from the
    data module (``class_names``) and are saved in the checkpoint. Data with different names is then rejected, because
    labels are numbered in the order of the names.

    If the data module has ``class_weights``, the training loss is the weighted sum over the targets, divided by the
    number of targets. torch's mean divides by the sum of the weights instead; here, an update is the same on any split,
    and rare classes weigh the same in each batch. The weights are saved in the checkpoint, and a resumed run uses them.
    The losses of validation and test have no class weights. `training_step` passes `class_weights` and
    ``label_smoothing`` to `mean_cross_entropy`.

    Args:
        num_classes: number of classes; labels are 0 to num_classes - 1. null: the number in the data.
        label_smoothing: share of the target spread over all classes (Szegedy et al., 2016).
        top_k: number of classes that ``predict`` lists for each image, the most probable first.
        weights_classes: classes of the last layer in a file of ``weights`` that does not name them: a file with a name
            in each line, or a JSON list; or data if they are in the order of the data's classes.
    """

    monitor = "val/accuracy"
    monitor_mode = "max"
    predict_example = "IMAGE.png"
    prediction_columns: ClassVar[tuple[str, ...]] = ("file", "class", "probability")

    min_confidence: ClassVar[float] = 0.0
    """The smallest probability of the predicted class; below it, `predict` calls an image unclear."""

    class_weights: Tensor | None
    """The weights of the data's classes in the training loss, of shape (classes,); None if all weights are 1."""

    def __init__(
        self,
        num_classes: int | None = 10,
        label_smoothing: float = 0.0,
        top_k: Advanced[Changeable[int]] = 5,
        weights_classes: Advanced[str | None] = None,
        **kwargs: Any,
    ) -> None:
        if num_classes is None:
            raise UserError(
                "the number of classes was neither given nor found in the data; pass one such as"
                f" {spelled('num_classes', 10)}"
            )
        if num_classes < 2:
            raise UserError(
                f"{spelled('num_classes', num_classes)} leaves nothing to classify; pass {spelled('num_classes', 2)} or"
                " more"
            )
        if weights_classes and kwargs.get("weights") in (None, "none", "imagenet"):
            raise UserError(
                f"{spelled('weights_classes')} names the classes in a file of weights; pass"
                f" {spelled('weights', 'FILE')} with it"
            )
        check_ranges(num_classes=(num_classes, COUNT), label_smoothing=(label_smoothing, SHARE), top_k=(top_k, COUNT))
        super().__init__(**kwargs)
        # A buffer, so that it moves to the device. It is not persistent: the names in the state dict would then depend
        # on the data. `on_save_checkpoint` saves it.
        self.register_buffer("class_weights", None, persistent=False)
        self.top_k = top_k
        self.val_scores = ClassificationScores(num_classes)
        self.test_scores = ClassificationScores(num_classes)
        self.class_names: Sequence[str] = [str(i) for i in range(num_classes)]
        self.names_in_checkpoint: Sequence[str] = ()
        self.has_head_of_file = False
        """Whether the last layer was loaded from a file of weights; its rows can then still be reordered."""
        self.confusion_matrix: Tensor | None = None
        self.all_labels_count = False
        """Whether it is known that no label of the training set is -100; `CheckLabels` sets it."""

    @classmethod
    @override
    def settings_from_data(cls, data: pl.LightningDataModule, **settings: Any) -> dict[str, Any]:
        """Return the number of classes, if the data has one."""
        count = data_contract(data).num_classes
        return {} if count is None else {"num_classes": count}

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of shape (batch, num_classes) for images of shape (batch, channels, height, width)."""
        return check_logits(call_network(self.network, in_dtype_of(self, inputs)), len(self.class_names))

    def set_class_names(self, names: Sequence[str]) -> None:
        """Set the class names, in the order of the labels; `CheckLabels` passes the names of the data."""
        self.class_names = names

    def _names_of_head(self, content: Mapping[str, Any]) -> Sequence[str]:
        """Return the class names of the last layer in a file of weights; empty if they are not known.

        Raises:
            UserError: `weights_classes` contradicts the file or the number of classes.
        """
        saved: Sequence[str] = content.get("class_names", ())
        given = self.hparams.weights_classes
        if given in (None, "data"):
            return saved
        names = read_class_names(given)
        if saved and list(saved) != names:
            raise UserError(
                f"{given} has other classes than {self.hparams.weights}, which names its own: {', '.join(saved[:12])};"
                f" leave {spelled('weights_classes')} out"
            )
        if len(names) != len(self.class_names):
            raise UserError(f"{given} has {len(names)} classes, and the network {len(self.class_names)}")
        return names

    @override
    def problem_of_head(self, content: Mapping[str, Any]) -> str:
        names = data_contract(self.data_module()).class_names
        # Without names in the data, the classes are numbers, and so are the rows of the last layer.
        is_in_trainer = attached_trainer(self) is not None
        if self._names_of_head(content) or self.hparams.weights_classes or (is_in_trainer and not names):
            return ""
        order = f" (the data has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''})" if names else ""
        return (
            f"does not name the classes of its last layer; pass {spelled('weights_classes', 'FILE')} with their names"
            f" in its order, or {spelled('weights_classes', 'data')} if that is the order of the data's{order}"
        )

    @override
    def set_names_of_weights(self, content: Mapping[str, Any]) -> None:
        """Keep the class names in a file of weights; `CheckLabels` compares them with the names of the data."""
        self.names_in_checkpoint = self._names_of_head(content)
        self.has_head_of_file = True

    def reorder_head(self, names: Sequence[str]) -> bool:
        """Reorder the rows of the last layer of a file of weights by class names; return whether this was possible.

        Args:
            names: the names in `names_in_checkpoint` in another order.
        """
        if not self.has_head_of_file:
            return False
        position = {name: row for row, name in enumerate(self.names_in_checkpoint)}
        if not order_head(self.network, [position[name] for name in names]):
            return False
        self.names_in_checkpoint = names
        return True

    @property
    def head_name(self) -> str:
        """The name of the last layer of the network."""
        return head_of(self.network)

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        return [*super().configure_callbacks(), CheckLabels(len(self.class_names)), EvaluationTables()]

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            # Lightning restores a checkpoint after this hook; the class weights in the checkpoint replace these.
            self.class_weights = data_contract(self.data_module()).class_weights

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        return self._score(self.val_scores, self(inputs), targets)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, targets = batch
        return self._score(self.test_scores, self.final_logits(inputs), targets)

    def _score(self, scores: ClassificationScores, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = logits.float()
        scores.update(logits, as_classes(targets, logits.shape[1]))
        return {"logits": logits}

    def final_logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of test and predict; an override may average over views of an image."""
        logits: Tensor = self(inputs)
        return logits

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_scores, "validation")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_scores, "test")

    def _log_scores(self, prefix: str, scores: ClassificationScores, part: str) -> None:
        values, self.confusion_matrix = scores.compute()
        if not (self.confusion_matrix.any() or self.trainer.sanity_checking):
            raise RunFailedError(f"no {part} sample has a label, so there is no score: all labels are -100")
        # The values are equal on all ranks. A maximum over ranks keeps every bit; a mean would round again.
        values = {f"{prefix}/{name}": value.float().to(self.device) for name, value in values.items()}
        self.log_dict(values, sync_dist=True, reduce_fx="max")
        scores.reset()

    @override
    def predict_step(self, batch: Tensor | Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the probabilities of shape (batch, classes).

        Batches are ``inputs`` or ``(inputs, ...)``. The numbers in ``(inputs, numbers)`` are returned as well; they are
        indices of the data module's ``prediction_names``.
        """
        inputs, *numbers = (batch,) if isinstance(batch, Tensor) else batch
        outputs = {"number": numbers[0]} if numbers else {}
        return outputs | {"probabilities": self.final_logits(inputs).float().softmax(1)}

    @override
    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return a row for each image with its most probable classes, the most probable first."""
        rows: list[dict[str, Any]] = []
        for batch in outputs:
            likeliest = batch["probabilities"].topk(min(self.top_k, len(self.class_names)))
            numbers = batch["number"].tolist() if names else range(len(likeliest.values))
            for number, classes, values in zip(numbers, likeliest.indices.tolist(), likeliest.values.tolist()):
                row = {"file": names[number]} if names else {"sample": len(rows)}
                for rank_in_list, (index, probability) in enumerate(zip(classes, values), 1):
                    suffix = f"_{rank_in_list}" if rank_in_list > 1 else ""
                    row[f"class{suffix}"] = self.class_names[index]
                    row[f"probability{suffix}"] = probability
                note = "unclear: low probability" if values[0] < self.min_confidence else None
                rows.append(row | {"note": note})
        return rows

    @override
    def training_figures(self, batch: tuple[Tensor, Tensor]) -> dict[str, Picture]:
        """Return the first augmented images of a batch with their labels; the normalization is undone."""
        images = batch[0]
        labels = batch[1]
        if not is_image_batch(images):
            return {}
        preprocessing = data_contract(self.data_module()).preprocessing()
        return {"training_images": training_grid(images, labels, self.class_names, preprocessing)}

    def explain(self, images: Tensor, classes: Tensor) -> Explanation | None:
        """Return images that explain the mistakes of an evaluation; called on all ranks with the same mistakes.

        Args:
            images: images as the network got them, of shape (n, channels, height, width), on the CPU.
            classes: the predicted classes, int64 of shape (n,).
        """
        return None

    @override
    def headline(self, scores: dict[str, float]) -> list[Headline]:
        prefix = "test" if "test/accuracy" in scores else "val"
        keys = {
            "val accuracy": "val/accuracy",
            f"{prefix} accuracy": f"{prefix}/accuracy",
            f"{prefix} macro-F1": f"{prefix}/macro_f1",
        }
        return [Headline(title, key, f"{100 * scores[key]:.2f} %") for title, key in keys.items() if key in scores]

    @override
    def named_outputs(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"logits": outputs, "probabilities": outputs.softmax(1)}

    @override
    def export_metadata(self) -> dict[str, Any]:
        return {"class_names": list(self.class_names)}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["class_names"] = list(self.class_names)
        if self.class_weights is not None:
            checkpoint["class_weights"] = self.class_weights.cpu()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        names = checkpoint.get("class_names")
        if names:
            self.class_names = names
            self.names_in_checkpoint = names
            self.has_head_of_file = False
        weights = checkpoint.get("class_weights")
        if weights is not None:
            self.class_weights = weights.to(self.device)
