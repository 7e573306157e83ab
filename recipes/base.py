"""Base class of all recipes: hyperparameters, optimizer, schedule, checkpoint contents."""

from collections.abc import Collection, Mapping, Sequence
from io import IOBase
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from callbacks import StepMetrics
from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.lightning_internals import attached_trainer
from datamodules.contract import Advanced, Changeable
from datamodules.errors import UserError
from datamodules.lightning import OptimizerLRScheduler, pl
from datamodules.lightning_package import OneLightning
from datamodules.ranges import RATE, Range, check_ranges
from recipes.check_optimization import CheckOptimization
from recipes.compilation import CompileMode, CompileNetwork, check_compile_mode
from recipes.evaluation_tables import Headline, ResultTable
from recipes.forward import call_network
from recipes.optim import check_optimizer
from recipes.schedules import ScheduleName, ScheduleSettings
from recipes.weights import InitialWeights, load_initial_weights, read_weights

if TYPE_CHECKING:
    from recipes.figures.images import Picture  # Not imported at runtime: it imports Pillow.


class Recipe(OneLightning, pl.LightningModule):
    """Base class of every recipe; a recipe adds `build_network`, `training_step` and `configure_optimizers`.

    `training_step` returns ``{"loss": mean, "count": number of targets}``, and may add ``correct``, the number of
    correct predictions as a tensor. If it returns only the mean, the samples of the batch are counted. No step waits
    for the device: `StepMetrics` reads the loss once per ``log_every_n_steps`` of the Trainer.

    `configure_optimizers` calls `build_optimizer` and `build_schedule`, which read the parameters below. A recipe with
    other defaults repeats these parameters in its constructor, and passes them on. The arguments of its constructor are
    saved in ``self.hparams``; a constructor that replaces None by a value ends with ``self.hparams.update(lr=lr)``.

    A recipe may override `headline` for the closing table, `prediction_rows` for predict, and `named_outputs`,
    `photograph_crop` and `export_metadata` for export.

    Args:
        optimizer: an optimizer of torch.optim, such as sgd or adamw, or any class by its import path, such as
            lion_pytorch.Lion.
        lr: peak learning rate.
        weight_decay: weight decay of weights; the parameters of norms and biases are exempt.
        momentum: momentum, if the optimizer has it.
        schedule: shape of the learning rate over the run, which the warm-up multiplies. If the run has no end,
            one_cycle, linear and cosine stay at the peak.
        schedule_args: arguments of the schedule, as in '{milestones: "60 epochs, 80%", gamma: 0.2}': gamma, the factor
            of each epoch of exponential (default 0.95), of each milestone of multistep and of each plateau (default
            0.1); milestones of multistep (default 50% and 75%) and of exponential (default none, with milestone_gamma,
            default 0.1); patience of plateau in validations (default 2); min_lr, the lowest rate.
        optimizer_args: arguments of the optimizer without a flag, as in '{betas: [0.9, 0.95]}'.
        channels_last: memory layout of convolutions in which bf16 kernels are fast.
        compile: train the network with torch.compile; or one of its modes, such as max-autotune.
        weights: file of initial weights, or none.
        weights_skip: layers by name that keep their initial weights, and are left out of the file, as in "fc.*".
    """

    title = "recipe"
    """The name of the folder of its runs: `runs/TITLE/`."""

    trainer_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of the Trainer's parameters on this recipe's command line, such as ``max_epochs``."""

    monitor = "val/loss"
    """The score that selects the best checkpoint."""
    monitor_mode: Literal["min", "max"] = "min"
    """Whether the best score is the lowest ("min") or the highest ("max")."""

    base_batch_size = 256
    """The global batch size for which `lr` is meant; the command line scales `lr` with the batch size of the run."""

    prediction_columns: ClassVar[tuple[str, ...]] = ("file", "output")
    """The columns of the table of predictions: the name of an input, its prediction, and other values."""

    prediction_files: ClassVar[tuple[str, ...]] = (".json", ".csv")
    """Endings of the files that predict can write; a .txt file has the second of the `prediction_columns`."""

    varying_dims = 1
    """Number of leading dimensions of the network's inputs whose size varies between batches, for torch.compile."""

    predict_example = "FILE"
    """The arguments of the predict command that the final table shows."""

    data_class: ClassVar[type[pl.LightningDataModule] | None] = None
    """The class of the data module that prepares the inputs of `recipes.predict`; a recipe sets its own."""

    targets = "samples"
    """The unit of the targets of the mean loss, for the logged throughput."""

    hparams: Any
    """The hyperparameters. Typed as Any: Lightning declares a mapping, but its values are also attributes."""

    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float = 0.001,
        weight_decay: float = 0.01,
        momentum: Advanced[float] = 0.9,
        schedule: ScheduleName = "one_cycle",
        schedule_args: Advanced[dict[str, Any] | None] = None,
        optimizer_args: Advanced[dict[str, Any] | None] = None,
        channels_last: Advanced[Changeable[bool]] = True,
        compile: Advanced[Changeable[bool | CompileMode]] = False,
        weights: str | None = None,
        weights_skip: Advanced[str | Sequence[str] | None] = None,
    ) -> None:
        super().__init__()
        # In the constructor, so that a wrong setting is rejected before data are read and processes are started.
        check_ranges(
            lr=(lr, RATE),
            weight_decay=(weight_decay, Range(0, 10**6)),
            momentum=(momentum, Range(0, 1, below=True)),
        )
        check_compile_mode(compile)
        check_optimizer(optimizer, optimizer_args or {})
        ScheduleSettings(schedule, lr, schedule_args or {})
        # Lightning reads the arguments of a subclass's constructor from the frame of its call.
        super().save_hyperparameters()
        network = self.build_network()
        if not isinstance(network, nn.Module):
            raise UserError(
                f"build_network of {type(self).__name__} returned {type(network).__name__}, expected the network, an"
                " nn.Module: end it with return network"
            )
        self.network = network if network.training else network.train()
        if channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.tables: dict[str, ResultTable] = {}
        """The tables of the last evaluation by file name (.csv, .json or .txt); a run writes them into its folder."""
        self.figures: dict[str, Picture] = {}
        """The pictures of the last evaluation by name, for ``report.html``, TensorBoard and ``figures/``.

        A callback may also have `tables` and `figures`.
        """
        self.has_weights = False
        """Whether `weights` or a checkpoint has been loaded; a checkpoint replaces the weights."""
        self.saved_data: tuple[dict[str, Any], dict[str, Any]] | None = None
        """The settings and the state of the data module in the loaded checkpoint."""
        self.saved_precision = "32-true"
        """The precision of the run in the loaded checkpoint, by Lightning's name."""

    @override
    def save_hyperparameters(self, *args: Any, **kwargs: Any) -> None:
        """Save the given values. The arguments of all constructors have already been saved.

        Saving the arguments again would undo ``self.hparams.update`` of a constructor that replaced None by a value.
        """
        if args and not isinstance(args[0], str):
            super().save_hyperparameters(*args, **kwargs)

    @classmethod
    def titles(cls) -> list[str]:
        """Return the titles of this recipe and of its base classes."""
        return [str(vars(kind)["title"]) for kind in cls.__mro__ if "title" in vars(kind) and kind is not Recipe]

    @classmethod
    def owns(cls, titles: Collection[str]) -> bool:
        """Return whether this recipe can load a checkpoint saved with these `titles`; an empty list matches."""
        own_titles = cls.titles()
        return not own_titles or not titles or not set(own_titles).isdisjoint(titles)

    @classmethod
    def settings_from_data(cls, data: pl.LightningDataModule, **settings: Any) -> dict[str, Any]:  # noqa: ARG003
        """Return the arguments of the constructor that depend on the data, such as ``num_classes``.

        The command line uses them if the user gives no value, and saves them with the settings.

        Args:
            data: the data module, before its `setup`.
            settings: the given arguments of the constructor, and ``max_epochs`` and ``max_steps`` of the run.
        """
        return {}

    def settings_for_data(self) -> dict[str, Any]:
        """Return arguments for the data module, such as pixel statistics of the weights; the user's arguments win."""
        return {}

    def build_network(self) -> nn.Module:
        """Return the network to train, from ``self.hparams``. The recipe calls ``train()`` on the result."""
        raise NotImplementedError(f"{type(self).__name__} has to override build_network()")

    def pretrained_weights(self, weights: str) -> tuple[dict[str, Tensor], str]:
        """Return the tensors of ``weights``, and their source for messages; an override may accept names of weights.

        Raises:
            UserError: there is no such file, or it cannot be used.
        """
        return read_weights(weights), weights

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = call_network(self.network, inputs)
        return outputs

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and its schedule; every recipe overrides this."""
        raise NotImplementedError(
            f"{type(self).__name__} has to override configure_optimizers(), as in:"
            " optimizer = build_optimizer(self.parameters(), self); return build_schedule(optimizer, self)"
        )

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that belong to the recipe, in any Trainer; an override adds to them."""
        callbacks = [StepMetrics(self.targets), CheckOptimization()]
        if self.hparams.weights not in (None, "none"):
            callbacks.append(InitialWeights())
        if self.hparams.compile:
            callbacks.append(CompileNetwork())
        return callbacks

    def initialize_weights(self, resumes: bool) -> None:
        """Load `weights` before the first training step, unless the run resumes from a checkpoint."""
        # `has_weights` alone is not sufficient: some strategies load the checkpoint after this call.
        if not self.has_weights and not resumes:
            load_initial_weights(self)
        self.has_weights = True

    def problem_of_head(self, content: Mapping[str, Any]) -> str:
        """Return why the last layer in a file of weights cannot be used, and what to pass; "" if it can be used.

        Args:
            content: the content of the file, such as ``class_names``.
        """
        return ""

    def set_names_of_weights(self, content: Mapping[str, Any]) -> None:
        """Keep the class names of a file of weights whose last layer has been loaded."""

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the output of the network for a batch, or for the first item of a tuple or list."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def training_figures(self, batch: Any) -> "dict[str, Picture]":
        """Return pictures of a training batch as the network sees it, by name; called once per run."""
        return {}

    def headline(self, scores: dict[str, float]) -> list[Headline]:
        """Return the main scores as rows of the closing table, from all logged scores."""
        return [Headline(name, name, f"{value:.4f}") for name, value in scores.items()]

    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return a row for each input; by default, a row for each row of the tensors that `predict_step` returned.

        Args:
            outputs: results of `predict_step`, one for each batch.
            names: the data module's ``prediction_names``, such as the file of each sample; may be empty.
        """
        unsupported = [output for output in outputs if not isinstance(output, Tensor) or not output.ndim]
        if unsupported:
            kind = type(unsupported[0]).__name__
            raise UserError(
                f"predict_step of {type(self).__name__} returns a {kind}, and predict prints tensors of shape"
                " (batch, ...): write prediction_rows(outputs, names)"
            )
        values = [value for output in outputs for value in output.tolist()]
        if not names:
            return [{"sample": number, "output": value} for number, value in enumerate(values)]
        return [{"file": name, "output": value} for name, value in zip(names, values, strict=True)]

    def named_outputs(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs of an exported graph by name, from the output of the network."""
        return {"outputs": outputs}

    def photograph_crop(self) -> float | None:
        """Return the share of an RGB image's short side that evaluation keeps (`evaluation_pixels`).

        With a share, the exported graph takes an image of any size; with None, images of the network's size.
        """
        return None

    def export_metadata(self) -> dict[str, Any]:
        """Return metadata for exported files, in addition to constructor arguments and preprocessing."""
        return {}

    def data_module(self) -> pl.LightningDataModule | None:
        """Return the data module of the Trainer; None without a Trainer, or if the Trainer was given loaders."""
        trainer = attached_trainer(self)
        return None if trainer is None else getattr(trainer, "datamodule", None)

    @classmethod
    @override
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a recipe as Lightning does, and reject a checkpoint of another recipe with a one-line message.

        Raises:
            UserError: the checkpoint is of another recipe.
        """
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except (TypeError, RuntimeError, UserError) as error:
            saved = [] if isinstance(checkpoint_path, IOBase) else load_plain(checkpoint_path).get("recipes", [])
            if not cls.owns(saved):
                raise UserError(
                    f"{checkpoint_path} is a checkpoint of the recipe {saved[0]}, and {cls.__name__} is"
                    f" {cls.title}; load it with the class of that recipe"
                ) from error
            raise

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the recipe's titles with the weights; an override has to call this method."""
        checkpoint["recipes"] = self.titles()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the data module's settings from the checkpoint; an override has to call this method."""
        self.has_weights = True
        self.saved_precision = checkpoint.get("config", {}).get("precision", self.saved_precision)
        # Lightning's key for the state of a data module is the name of its class.
        name = self.data_class.__qualname__ if self.data_class else ""
        if name in checkpoint:
            self.saved_data = checkpoint.get("datamodule_hyper_parameters", {}), checkpoint[name]
