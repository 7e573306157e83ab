"""What all recipes share: the network, the optimiser, the schedule, and exact means."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from callbacks.lib.exact_sums import DIGITS, from_whole_numbers, to_whole_numbers
from callbacks.lib.lightning_internals import attached_trainer
from callbacks.lib.trainer_attributes import datamodule_of
from callbacks.train_loss import TrainLoss
from datamodules.contract import DataContract, data_contract
from datamodules.errors import UserError
from datamodules.images.augmentation import Normalise
from datamodules.ranges import RATE, Range, check_ranges
from recipes.compilation import CompileMode, check_compile_mode, check_compiler, compile_network, restore_network
from recipes.graphs import Graph, network_graph
from recipes.optim import build_optimizer, check_optimizer, default_rate, is_lbfgs
from recipes.parameter_groups import parameter_groups
from recipes.schedules import Plateau, Schedule, ScheduleName, ScheduleSettings
from recipes.version import __version__
from recipes.weights import WeightsReport, load_weights, read_weights

__all__ = ["MeanOverTargets", "Recipe", "RecipeParameters", "Table"]

log = logging.getLogger("lightning_recipes")


def _as_text(value: Any) -> str:
    """A cell of a table."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _in_dtype(batch: Any, dtype: torch.dtype | str) -> Any:
    """A batch whose floating-point tensors have this type, as Lightning's precision plugins convert it."""
    return apply_to_collection(batch, Tensor, lambda part: part.to(dtype) if part.is_floating_point() else part)


class Table(NamedTuple):
    """Rows with the same columns; there may be none."""

    columns: Sequence[str]
    rows: list[dict[str, Any]]


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


class MeanOverTargets(Metric):
    """The mean over all targets of all batches and ranks, equal to the bit on any number of ranks and in any order.

    A batch's sum counts as whole numbers, whose sums are exact; see `callbacks.lib.exact_sums`. So batches have to be
    the same on any number of ranks. The mean is NaN where a batch's sum was not finite.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(DIGITS, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(1, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, total: Tensor, count: int | Tensor) -> None:
        """Add a batch.

        Args:
            total: the sum over the batch's targets, a scalar.
            count: how many targets it has.
        """
        self.total += to_whole_numbers(total)
        self.count += count

    @override
    def compute(self) -> Tensor:
        *total, count = torch.cat((self.total, self.count)).tolist()
        return torch.tensor(from_whole_numbers(total) / max(1, count), device=self.device)


class RecipeParameters(AttributeDict):
    """The parameters of a recipe, as ``self.hparams`` holds them, for type checkers.

    A recipe with further parameters may declare them in a subclass, and ``hparams: MyParameters`` in its own; those
    that are not declared have the type Any.
    """

    optimizer: str
    lr: float
    weight_decay: float
    momentum: float
    schedule: ScheduleName
    schedule_args: dict[str, Any] | None
    optimizer_args: dict[str, Any] | None
    channels_last: bool
    compile: bool | CompileMode
    weights: str | None
    weights_skip: str | Sequence[str] | None


class Recipe(pl.LightningModule):
    """The base of every recipe; a recipe overrides `build_network` and `training_step`.

    `training_step` returns ``{"loss": mean, "count": targets behind that mean}``, and may add ``correct``, how many of
    them were right, as a tensor; a bare mean counts the batch's samples. Nothing here waits for the device during a
    step: `TrainLoss` reads the loss once per ``log_every_n_steps`` of the Trainer.

    Args:
        optimizer: an optimiser of torch.optim, such as sgd, adamw or lbfgs, or any class by its import path, such as
            lion_pytorch.Lion.
        lr: peak learning rate; by default 0.001, and 1 for lbfgs.
        weight_decay: weight decay of weights; the parameters of norms and biases are exempt.
        momentum: momentum, if the optimiser has it.
        schedule: shape of the learning rate over the run; the warm-up is a factor on top. Without an end of the run,
            those that lead to it stay at the peak: one_cycle, linear, cosine.
        schedule_args: further arguments of the schedule, as in '{milestones: "60 epochs, 80%", gamma: 0.2}': milestones
            of multistep, by default at 50% and 75%, and of inverse_sqrt, by default the end of the warm-up or 10,000
            steps; gamma of multistep and plateau, by default 0.1; patience of plateau in validations, by default 2;
            min_lr, the rate at which a schedule ends or stops to fall.
        optimizer_args: further arguments of the optimiser, as in '{betas: [0.9, 0.95]}'.
        channels_last: the memory layout of convolutions in which bf16 kernels are fast.
        compile: train with torch.compile, of the network only; or one of its modes, such as max-autotune.
        weights: file of weights to begin with, or none; FILE:NAME for one of several networks in it, as in a.pth:ema.
        weights_skip: layers by name that keep their initial weights, and are left out of the file, as in "fc.*".
    """

    title = "recipe"
    """The name of the folder of its runs: runs/<title>/."""

    trainer_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of the Trainer's parameters on this recipe's command line, such as ``max_epochs``."""

    monitor = "val/loss"
    """The score that decides which checkpoint is the best, and whether more is better."""
    monitor_mode: Literal["min", "max"] = "min"

    default_lr = 0.001
    """The peak learning rate where none is given."""

    base_batch_size = 256
    """The global batch size to which the default learning rate refers."""

    free_parameters: ClassVar[frozenset[str]] = frozenset({"channels_last", "compile"})
    """Parameters of the constructor that do not make the experiment: a run may be resumed with other values.

    A subclass joins its own, as in ``free_parameters = Recipe.free_parameters | {"top_k"}``.
    """

    call_parameters: ClassVar[frozenset[str]] = frozenset()
    """Parameters of the constructor that belong to one call, such as an output file, and are not saved with a run."""

    prediction_files: ClassVar[tuple[str, ...]] = (".json", ".csv")
    """Endings of the files that predict can write."""

    rare_parameters: ClassVar[frozenset[str]] = frozenset(
        {
            *("momentum", "optimizer_args", "schedule_args", "channels_last", "compile"),
            "weights_skip",
        }
    )
    """Parameters of the constructor whose flags ``--help-all`` shows, and ``--help`` does not.

    A subclass joins its own, as in `free_parameters`.
    """

    varying_dims = 1
    """How many of the first dimensions of the network's inputs may have another size in the next batch."""

    predict_example = "FILE"
    """The arguments of the predict command that the final table shows."""

    data_class: ClassVar[type[pl.LightningDataModule] | None] = None
    """The data module that prepares the inputs of `predict`; a recipe for another one names it here."""

    targets = "samples"
    """What the mean loss is over, for the rate that is logged."""

    hparams: RecipeParameters

    @override
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # For help() and notebooks, which show **kwargs otherwise.
        cls.__signature__ = _all_parameters(cls)  # type: ignore[attr-defined]

    def __init__(
        self,
        optimizer: str = "adamw",
        lr: float | None = None,
        weight_decay: float = 0.01,
        momentum: float = 0.9,
        schedule: ScheduleName = "one_cycle",
        schedule_args: dict[str, Any] | None = None,
        optimizer_args: dict[str, Any] | None = None,
        channels_last: bool = True,
        compile: bool | CompileMode = False,
        weights: str | None = None,
        weights_skip: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        lr = default_rate(optimizer, self.default_lr) if lr is None else lr
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
        self.hparams.update({"lr": lr})  # A subclass passes its argument on as it was.
        network = self.build_network()
        self.network = network if network.training else network.train()
        if channels_last and not is_lbfgs(optimizer):  # Its vectors are views of contiguous gradients.
            self.network.to(memory_format=torch.channels_last)
        self.run_config: dict[str, Any] = {}
        self._has_weights = False
        self._saved_data: tuple[dict[str, Any], dict[str, Any]] | None = None

    @property
    def lr_schedule(self) -> ScheduleSettings:
        """The schedule with its parameters."""
        return ScheduleSettings(self.hparams.schedule, self.hparams.lr, self.hparams.schedule_args or {})

    @classmethod
    def titles(cls) -> list[str]:
        """The titles of this recipe and of those that it is derived from: its checkpoints belong to these."""
        return [str(vars(kind)["title"]) for kind in cls.__mro__ if "title" in vars(kind) and kind is not Recipe]

    def build_network(self) -> nn.Module:
        """The network to train; one in evaluation mode is put into training mode. ``self.hparams`` is set by then."""
        raise NotImplementedError(f"{type(self).__name__} has to override build_network()")

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(inputs)
        return outputs

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        """The callbacks that belong to the recipe, in any Trainer."""
        return [TrainLoss(targets=self.targets)]

    def headline(self, scores: dict[str, float]) -> dict[str, str]:
        """The rows of the final table with the main scores, from all logged scores."""
        return {name: f"{value:.4f}" for name, value in scores.items()}

    def result_tables(self) -> dict[str, Table]:
        """Tables that a run keeps beside ``results.json``, by file name (.csv, .json or .txt); of the last evaluation.

        The validate and test commands write them beside the file of ``--output``, whose name theirs begin with.
        """
        return {}

    @classmethod
    def settings_from_data(cls, data: pl.LightningDataModule) -> dict[str, Any]:  # noqa: ARG003
        """The arguments of the constructor that depend on the data, such as ``num_classes``.

        The command line passes it on where the user has given no value, and saves it with the settings.
        """
        return {}

    def settings_for_data(self) -> dict[str, Any]:
        """The arguments of the data module that depend on the recipe's, such as the statistics that its weights expect.

        The command line passes them on where the user has given no value, and saves them with the settings.
        """
        return {}

    @classmethod
    def rate_of_run(cls, samples: int, epochs: int, settings: Mapping[str, Any]) -> float | None:  # noqa: ARG003
        """The peak learning rate of a run of so many epochs where none is given; None is `default_lr`.

        The command line passes it on where the data module knows its sizes before training, except to LBFGS, and saves
        it with the settings: a resumed run keeps it.

        Args:
            samples: the size of the training set.
            settings: the other arguments of the constructor, as far as they are given.
        """
        return None

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """What the network makes of the inputs: of the batch, or of its first part where it is a tuple or a list."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def prediction_rows(self, outputs: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """A row per prediction, for the table and the file of the predict command: here the network's output.

        Args:
            outputs: what `predict_step` returned, a batch each.
            names: the data module's ``prediction_names``: of each sample, such as its file; may be empty.

        Raises:
            UserError: the outputs are no tensors of shape (batch, ...), so a subclass has to override this method.
        """
        if wrong := [output for output in outputs if not isinstance(output, Tensor) or not output.ndim]:
            raise UserError(
                f"predict_step of {type(self).__name__} returns a {type(wrong[0]).__name__}, and predict prints tensors"
                " of shape (batch, ...): override prediction_rows(outputs, names)"
            )
        values = [value for output in outputs for value in output.tolist()]
        if names:
            return [{"file": name, "output": value} for name, value in zip(names, values, strict=True)]
        return [{"sample": number, "output": value} for number, value in enumerate(values)]

    def prediction_table(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        """What the predict command prints of `prediction_rows`, whose values go into the file as they are.

        Args:
            rows: the predictions, at least one; all rows have the same keys.

        Returns:
            A row per prediction, with the cells as text under the column's name; no rows print no table.
        """
        hidden = {"note"} if not any(row.get("note") for row in rows) else set()
        table = [{name: _as_text(value) for name, value in row.items() if name not in hidden} for row in rows]
        return [row | {"note": ""} if row.get("note") == "-" else row for row in table]

    def prediction_lines(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """What the predict command writes into a .txt file, where `prediction_files` has one: a line for each input."""
        raise NotImplementedError

    def no_prediction(self, name: str) -> dict[str, Any]:
        """The row of an input for which there is no prediction, with the main columns of `prediction_rows`."""
        return {"file": name, "output": None}

    def all_rows(self, outputs: Sequence[Any], data: DataContract) -> list[dict[str, Any]]:
        """The rows of all inputs in their order: those of `prediction_rows`, and one for each without a prediction.

        Args:
            outputs: what `predict_step` returned, a batch each.
            data: the data module of the inputs, after the last batch.

        Returns:
            Where something is to be said of an input, all rows have the column ``note``.
        """
        names, notes = data.prediction_names, {**data.unclear_inputs, **data.unreadable_inputs}
        rows = self.prediction_rows(outputs, names)
        if not notes:
            return rows
        columns = {column: None for row in rows[:1] for column in row}
        found: list[dict[str, Any]] = []
        # The same input may be given twice in succession; the first column is its name.
        for name, group in groupby(enumerate(names), key=itemgetter(1)):
            numbers = [number for number, _ in group]
            count = sum(1 for _ in takewhile(lambda row: next(iter(row.values())) == name, rows))  # noqa: B023
            mine, rows = rows[:count], rows[count:]
            for place, number in enumerate(numbers):
                each = mine[place * count // len(numbers) : (place + 1) * count // len(numbers)]
                if not each and number in notes:
                    each = [columns | self.no_prediction(name)]
                note = notes.get(number)
                found += [row | {"note": note.removeprefix(f"{name} ") if note else row.get("note")} for row in each]
        return found

    @torch.inference_mode()
    def predict(self, inputs: Any) -> list[dict[str, Any]]:
        """Predict as the predict command does, on the device of this module.

        The recipe needs to know how its data were prepared: from a checkpoint that it was loaded from, or from the data
        module of a Trainer that it is attached to.

        Args:
            inputs: what the predict command takes, and objects in memory: images as files, folders, PIL images, arrays
                or tensors, or a list of them (`datamodules.images.given_images`); sentences as text.

        Returns:
            The rows that the command writes into its ``--output``, one or more for each input.

        Raises:
            UserError: nothing that was given can be read, or it is not known how the data were prepared.

        Example:
            >>> recipe = MNISTClassifier.load_from_checkpoint("best.ckpt")  # doctest: +SKIP
            >>> [row["class"] for row in recipe.predict(["3.png", "photographs/"])]  # doctest: +SKIP
            ['3', '7', '1']
        """
        data = self._new_data_module()
        if data is None:
            name = type(self).__name__
            if self.data_class is None:
                raise UserError(f"{name} names no data module that prepares its inputs; set {name}.data_class")
            raise UserError(
                f"this {name} does not know how its data were prepared; load it from the checkpoint of a run, as in"
                f" {name}.load_from_checkpoint(FILE)"
            )
        contract = data_contract(data)
        contract.take_inputs(inputs)
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            data.setup("predict")
            outputs = []
            for i, batch in enumerate(data.predict_dataloader()):
                batch = data.on_after_batch_transfer(data.transfer_batch_to_device(batch, self.device, 0), 0)
                outputs.append(self.predict_step(_in_dtype(batch, self.dtype), i))
        finally:
            data.teardown("predict")
            for module, training in modes:
                module.training = training
        return self.all_rows(outputs, contract)

    def data_module(self) -> pl.LightningDataModule | None:
        """The data module of the run; None without a Trainer, and where the Trainer was given loaders.

        Ask it through `datamodules.contract.data_contract`, which has defaults for what it does not have.
        """
        trainer = attached_trainer(self)
        return None if trainer is None else datamodule_of(trainer)

    def _new_data_module(self) -> pl.LightningDataModule | None:
        """A data module with the settings and the state of the one that the network was trained on, without its files.

        None where there was none of `data_class`.
        """
        data, saved = self.data_module(), self._saved_data
        if self.data_class is None:
            return None
        if isinstance(data, self.data_class):
            saved = dict(data.hparams), data.state_dict()
        if saved is None:
            return None
        # What belongs to one call, such as a folder to write into, is not taken from a checkpoint.
        of_one_call = data_contract(self.data_class).call_parameters
        wanted = inspect.signature(self.data_class).parameters.keys() - of_one_call
        made = self.data_class(**{name: value for name, value in saved[0].items() if name in wanted})
        made.load_state_dict(saved[1])
        return made

    def preprocessing(self) -> nn.Module | None:
        """What maps uint8 images of the data set's form to the network's inputs, as the data module does in training.

        It is known while a data module of `data_class` is attached and after a checkpoint of one has been loaded; None
        otherwise, and where the inputs are no images.
        """
        return data_contract(self._new_data_module()).preprocessing()

    def named_outputs(self, outputs: Tensor) -> dict[str, Tensor]:
        """The outputs of an exported graph by name, from the output of the network."""
        return {"outputs": outputs}

    def graphs(self) -> list[Graph]:
        """What is exported with its computation: the network, for inputs of the shape of `example_input_array`.

        It takes uint8 images, where their preprocessing is known.
        """
        example = self.example_input_array
        if not isinstance(example, Tensor):
            return []
        return [network_graph(self.network, example, self.preprocessing(), self.named_outputs)]

    def export_metadata(self) -> dict[str, Any]:
        """What the users of an exported file have to know; an override adds to it.

        ``hyper_parameters`` are the arguments of the constructor. Of images it has the names that timm gives them:
        ``mean`` and ``std`` of pixels from 0 to 1, ``input_size`` as (channels, height, width).
        """
        arguments = {name: value for name, value in self.hparams.items() if name not in self.call_parameters}
        metadata: dict[str, Any] = {"recipe": self.title, "version": __version__, "hyper_parameters": arguments}
        preprocessing, example = self.preprocessing(), self.example_input_array
        if isinstance(preprocessing, Normalise) and isinstance(example, Tensor):
            metadata |= {"mean": preprocessing.mean, "std": preprocessing.std, "input_size": tuple(example.shape[1:])}
            metadata["layout"] = "NCHW"
        return metadata

    def export_files(self) -> dict[str, str]:
        """Texts that belong into the folder of an export of several graphs, by the name of the file."""
        return {}

    def pretrained_weights(self, weights: str) -> tuple[dict[str, Tensor], str]:
        """The tensors that ``weights`` stands for by name, and what messages call them; an override may know names.

        Raises:
            UserError: there is no such file, or it cannot be used.
        """
        return read_weights(weights), weights

    def load_weights(self, min_share: float = 0.5) -> WeightsReport | None:
        """Load what ``weights`` names into the network, and log which tensors were loaded; None where it names nothing.

        Args:
            min_share: the least share of the network's tensors that has to match.

        Raises:
            UserError: as `recipes.weights.read_weights` and `recipes.weights.load_weights` do.
        """
        options = self.hparams
        if options.weights is None or options.weights == "none":
            return None
        state, source = self.pretrained_weights(options.weights)
        report = load_weights(self.network, state, source, min_share, options.weights_skip)
        rank_zero_only(log.warning)(report.line())
        return report

    @override
    def on_fit_start(self) -> None:
        """Load the weights to begin with, unless there is a checkpoint, and compile; an override has to call it."""
        # Some strategies load the checkpoint later.
        if not self._has_weights and self.trainer.ckpt_path is None:
            self.load_weights()
        self._has_weights = True
        if self.hparams.compile:
            check_compiler(self.trainer.strategy.root_device)
            compile_network(self.network, self.hparams.compile, self.varying_dims)

    @override
    def on_fit_end(self) -> None:
        """Leave the network as it was, not compiled; an override has to call it."""
        if self.hparams.compile:
            restore_network(self.network)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups, each with a ``name``: all parameters, those that are frozen now too."""
        return parameter_groups(self, self.hparams.weight_decay)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        # A fused optimiser under AMP with gradient clipping raises inside Lightning (#21435).
        fused = False if getattr(attached_trainer(self), "gradient_clip_val", None) else None
        optimizer = build_optimizer(
            self.hparams.optimizer,
            self.parameter_groups(),
            self.hparams.lr,
            self.hparams.momentum,
            fused,
            self.hparams.optimizer_args,
        )
        schedule = self.lr_schedule
        if schedule.schedule == "plateau":
            plateau = Plateau(optimizer, schedule, self.monitor_mode)
            every = getattr(attached_trainer(self), "check_val_every_n_epoch", None) or 1
            config: Any = {"scheduler": plateau, "monitor": self.monitor, "frequency": every}
            return {"optimizer": optimizer, "lr_scheduler": config}
        closed = Schedule(optimizer, lambda done: schedule.factor(done, self.trainer) if done else schedule.first)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": closed, "interval": "step"}}

    @override
    def on_train_start(self) -> None:
        """Log what somebody may not expect of the schedule in this run; an override has to call it.

        Raises:
            UserError: the schedule follows a score, and nothing is validated.
        """
        followed = self.monitor if self.lr_schedule.schedule == "plateau" else ""
        if followed.startswith("val/") and not self.trainer.enable_validation:
            raise UserError(
                f"schedule='plateau' follows {followed}, and this run validates nothing; pass another schedule"
            )
        if note := self.lr_schedule.note(self.trainer):
            rank_zero_only(log.warning)(note)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the settings of the command line with the weights; an override has to call it."""
        checkpoint["config"] = self.run_config
        checkpoint["recipes"] = self.titles()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take what the checkpoint holds of the data module; an override has to call it."""
        self._has_weights = True
        name = self.data_class.__qualname__ if self.data_class else ""
        if name in checkpoint:
            self._saved_data = checkpoint.get("datamodule_hyper_parameters", {}), checkpoint[name]
