"""Base class of all recipes: hyperparameters, optimizer, schedule, checkpoint contents."""

import inspect
from collections.abc import Collection, Sequence
from io import IOBase
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from typing_extensions import override

from callbacks.checkpointing.plain_loading import load_plain
from callbacks.lib.hooks import attached_trainer
from callbacks.train_loss import TrainLoss
from datamodules.contract import Free, Rare
from datamodules.errors import UserError
from datamodules.ranges import RATE, Range, check_ranges
from recipes.calls import call_network
from recipes.compilation import CompileMode, CompileNetwork, check_compile_mode
from recipes.optim import check_optimizer
from recipes.optimization import CheckOptimization
from recipes.schedules import ScheduleName, ScheduleSettings
from recipes.tables import Table
from recipes.weights import InitialWeights, load_initial_weights, read_weights

if TYPE_CHECKING:
    from recipes.figures.images import Picture  # Which imports Pillow.


def _all_parameters(kind: type) -> inspect.Signature:
    """The parameters of a constructor, with those that it passes on to the constructors of its bases."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        (_, *own) = inspect.signature(vars(base)["__init__"]).parameters.values()
        found |= {p.name: p for p in own if p.name not in found and p.kind != p.VAR_KEYWORD}
        if all(p.kind != p.VAR_KEYWORD for p in own):
            break
    return inspect.Signature(sorted(found.values(), key=lambda p: (p.kind, p.default is not p.empty)))


class Recipe(pl.LightningModule):
    """The base of every recipe: a recipe adds `build_network`, `training_step` and `configure_optimizers`.

    `training_step` returns ``{"loss": mean, "count": targets behind that mean}``, and may add ``correct``, how many of
    them were right, as a tensor; a bare mean counts the batch's samples. Nothing here waits for the device during a
    step: `TrainLoss` reads the loss once per ``log_every_n_steps`` of the Trainer.

    `configure_optimizers` calls `build_optimizer` and `build_schedule`, which read the parameters below. A recipe whose
    defaults differ repeats them in its constructor, and passes them on.

    A recipe may override `headline` for the closing table, `prediction_rows` for predict, and `named_outputs` and
    `export_metadata` for export.

    Args:
        optimizer: an optimiser of torch.optim, such as sgd or adamw, or any class by its import path, such as
            lion_pytorch.Lion.
        lr: peak learning rate.
        weight_decay: weight decay of weights; the parameters of norms and biases are exempt.
        momentum: momentum, if the optimiser has it.
        schedule: shape of the learning rate over the run; the warm-up is a factor on top. Without an end of the run,
            those that lead to it stay at the peak: one_cycle, linear, cosine.
        schedule_args: further arguments of the schedule, as in '{milestones: "60 epochs, 80%", gamma: 0.2}': milestones
            of multistep, by default at 50% and 75%; gamma of multistep and plateau, by default 0.1; patience of plateau
            in validations, by default 2; min_lr, the rate at which a schedule ends or stops to fall.
        optimizer_args: further arguments of the optimiser, as in '{betas: [0.9, 0.95]}'.
        channels_last: the memory layout of convolutions in which bf16 kernels are fast.
        compile: train with torch.compile, of the network only; or one of its modes, such as max-autotune.
        weights: file of weights to begin with, or none.
        weights_skip: layers by name that keep their initial weights, and are left out of the file, as in "fc.*".
    """

    title = "recipe"
    """The name of the folder of its runs: runs/<title>/."""

    trainer_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of the Trainer's parameters on this recipe's command line, such as ``max_epochs``."""

    monitor = "val/loss"
    """The score that decides which checkpoint is the best, and whether more is better."""
    monitor_mode: Literal["min", "max"] = "min"

    base_batch_size = 256
    """The global batch size to which the learning rate refers: the command line scales it with the batch of the run."""

    prediction_columns: ClassVar[tuple[str, ...]] = ("file", "output")
    """What predict says of each input: its name, the prediction, and what goes with it."""

    prediction_files: ClassVar[tuple[str, ...]] = (".json", ".csv")
    """Endings of the files that predict can write; a .txt file has the second of the `prediction_columns`."""

    varying_dims = 1
    """How many of the first dimensions of the network's inputs may have another size in the next batch."""

    predict_example = "FILE"
    """The arguments of the predict command that the final table shows."""

    data_class: ClassVar[type[pl.LightningDataModule] | None] = None
    """The data module that prepares the inputs of `recipes.predict`; a recipe for another one names it here."""

    targets = "samples"
    """What the mean loss is over, for the rate that is logged."""

    hparams: Any
    """The parameters; Lightning declares a mapping without attributes, and makes one with them."""

    _resolved: dict[str, Any] = {}  # noqa: RUF012  Replaced, not changed.

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # For help() and notebooks, which show **kwargs otherwise.
        cls.__signature__ = _all_parameters(cls)  # type: ignore[attr-defined]

    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float = 0.001,
        weight_decay: float = 0.01,
        momentum: Rare[float] = 0.9,
        schedule: ScheduleName = "one_cycle",
        schedule_args: Rare[dict[str, Any] | None] = None,
        optimizer_args: Rare[dict[str, Any] | None] = None,
        channels_last: Rare[Free[bool]] = True,
        compile: Rare[Free[bool | CompileMode]] = False,
        weights: str | None = None,
        weights_skip: Rare[str | Sequence[str] | None] = None,
    ) -> None:
        super().__init__()
        # Refused here, not when training begins.
        check_ranges(
            lr=(lr, RATE),
            weight_decay=(weight_decay, Range(0, 10**6)),
            momentum=(momentum, Range(0, 1, below=True)),
        )
        check_compile_mode(compile)
        check_optimizer(optimizer, optimizer_args or {})
        ScheduleSettings(schedule, lr, schedule_args or {})
        self.save_hyperparameters()
        network = self.build_network()
        self.network = network if network.training else network.train()
        if channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.tables: dict[str, Table] = {}
        """What a run keeps beside ``results.json``, by file name (.csv, .json or .txt); of the last evaluation."""
        self.figures: dict[str, Picture] = {}
        """What a run shows in ``report.html``, TensorBoard and ``figures/``, by name; of the last evaluation.

        A callback may also have `tables` and `figures`.
        """
        self.has_weights = False
        """Whether `weights` have been loaded, or a checkpoint that stands for them."""
        self.saved_data: tuple[dict[str, Any], dict[str, Any]] | None = None
        """The settings and the state of the data module in the checkpoint that was loaded."""
        self.saved_precision = "32-true"
        """The precision of the run in the checkpoint that was loaded, as Lightning names it."""

    def resolve_hparams(self, **values: Any) -> None:
        """Save the values that None and "auto" stand for, such as a learning rate.

        A subclass passes its own arguments on to the base class as they were given.
        """
        self._resolved = self._resolved | values
        self.hparams.update(values)

    @override
    def save_hyperparameters(self, *args: Any, frame: Any = None, **kwargs: Any) -> None:
        """Save the arguments as Lightning does, but keep the values that a base class has resolved."""
        caller = inspect.currentframe()
        super().save_hyperparameters(*args, frame=frame or (caller and caller.f_back), **kwargs)
        self.hparams.update(self._resolved)

    @classmethod
    def titles(cls) -> list[str]:
        """The titles of this recipe and of those that it is derived from: its checkpoints belong to these."""
        return [str(vars(kind)["title"]) for kind in cls.__mro__ if "title" in vars(kind) and kind is not Recipe]

    @classmethod
    def owns(cls, titles: Collection[str]) -> bool:
        """Whether a checkpoint that holds these `titles` is one of this recipe; so is one that holds none."""
        own = cls.titles()
        return not own or not titles or not set(own).isdisjoint(titles)

    @classmethod
    def settings_from_data(cls, data: pl.LightningDataModule, **settings: Any) -> dict[str, Any]:  # noqa: ARG003
        """The arguments of the constructor that depend on the data, such as ``num_classes``.

        The command line passes them on where the user has given no value, and saves them with the settings.

        Args:
            data: before its `setup`.
            settings: the constructor's arguments as they were given, and ``max_epochs`` and ``max_steps`` of the run.
        """
        return {}

    def settings_for_data(self) -> dict[str, Any]:
        """Arguments of the data module, such as statistics that the weights expect, for those that are not given."""
        return {}

    def build_network(self) -> nn.Module:
        """The network to train; one in evaluation mode is put into training mode. ``self.hparams`` is set by then."""
        raise NotImplementedError(f"{type(self).__name__} has to override build_network()")

    def pretrained_weights(self, weights: str) -> tuple[dict[str, Tensor], str]:
        """The tensors that ``weights`` stands for by name, and what messages call them; an override may know names.

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
        """The optimiser and its schedule, which a recipe builds itself."""
        raise NotImplementedError(
            f"{type(self).__name__} has to override configure_optimizers(), as in:"
            " optimizer = build_optimizer(self.parameters(), self); return build_schedule(optimizer, self)"
        )

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        """The callbacks that belong to the recipe, in any Trainer; an override adds to them."""
        callbacks = [TrainLoss(targets=self.targets), CheckOptimization()]
        if self.hparams.weights not in (None, "none"):
            callbacks.append(InitialWeights())
        if self.hparams.compile:
            callbacks.append(CompileNetwork())
        return callbacks

    def take_initial_weights(self, resumes: bool) -> None:
        """Load `weights` when the recipe is first trained, unless it resumes from a checkpoint."""
        # Some strategies load the checkpoint later.
        if not self.has_weights and not resumes:
            load_initial_weights(self)
        self.has_weights = True

    def take_names_of_weights(self, names: Sequence[str]) -> None:
        """Take the names of the classes that the last layer of the file of weights tells apart."""

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """What the network makes of the inputs: of the batch, or of its first part where it is a tuple or a list."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def training_figures(self, batch: Any) -> "dict[str, Picture]":
        """Pictures of a batch of training as the network sees it, by name; a run asks for them once, as it begins."""
        return {}

    def headline(self, scores: dict[str, float]) -> dict[str, str]:
        """The rows of the closing table with the main scores, from all logged scores; an override chooses them."""
        return {name: f"{value:.4f}" for name, value in scores.items()}

    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each input; here for each row of the tensors that `predict_step` returned, a batch each.

        Args:
            names: the data module's ``prediction_names``: of each sample, such as its file; may be empty.
        """
        if wrong := [output for output in outputs if not isinstance(output, Tensor) or not output.ndim]:
            raise UserError(
                f"predict_step of {type(self).__name__} returns a {type(wrong[0]).__name__}, and predict prints tensors"
                " of shape (batch, ...): write prediction_rows(outputs, names)"
            )
        values = [value for output in outputs for value in output.tolist()]
        column, of_each = ("file", names) if names else ("sample", range(len(values)))
        return [{column: name, "output": value} for name, value in zip(of_each, values, strict=True)]

    def named_outputs(self, outputs: Tensor) -> dict[str, Tensor]:
        """The outputs of an exported graph by name, from the output of the network."""
        return {"outputs": outputs}

    def export_metadata(self) -> dict[str, Any]:
        """What exported files say beside the constructor's arguments and the preprocessing."""
        return {}

    def data_module(self) -> pl.LightningDataModule | None:
        """The data module of the run, for `data_contract`; None without a Trainer, and where it was given loaders."""
        trainer = attached_trainer(self)
        return None if trainer is None else getattr(trainer, "datamodule", None)

    @classmethod
    @override
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Lightning's; a checkpoint of another recipe is refused in one line.

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
                    f" {cls.titles()[0]}; load it with the class of that recipe"
                ) from error
            raise

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save which recipe it is with the weights; an override has to call it."""
        checkpoint["recipes"] = self.titles()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take what the checkpoint holds of the data module; an override has to call it."""
        self.has_weights = True
        self.saved_precision = checkpoint.get("config", {}).get("precision", self.saved_precision)
        name = self.data_class.__qualname__ if self.data_class else ""
        if name in checkpoint:
            self.saved_data = checkpoint.get("datamodule_hyper_parameters", {}), checkpoint[name]
