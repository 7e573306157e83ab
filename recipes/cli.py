"""One command line for every recipe: ``run(MyRecipe, MyDataModule)``."""

import csv
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from recipes.flags import FlagGroup, FlagParser
from recipes.launch import is_rank_zero, resolve_precision, tune_allocator
from recipes.recipe import Recipe
from recipes.report import Stopwatch, check_output, hardware, print_pairs, print_rows, report, shown, write_rows
from recipes.settings import RunSettings, checkpoint_callback, run_callbacks

__all__ = ["RunSettings", "run"]

_COMMANDS = {
    "fit": "train, then test the best checkpoint (this is what no command means)",
    "validate": "score a checkpoint on the validation part",
    "test": "score a checkpoint on the test set",
    "predict": "what a checkpoint says of your files",
}

# The command line sets these itself, or they hold objects that no flag can spell.
_OWN_TRAINER_PARAMETERS = """
    logger callbacks plugins precision default_root_dir enable_autolog_hparams enable_model_summary
"""
# Ours are exact where these are not: --accumulate, --sync-bn, --deterministic, --benchmark.
_REPLACED_TRAINER_PARAMETERS = "accumulate_grad_batches sync_batchnorm deterministic benchmark"
_COMMON_TRAINER_PARAMETERS = """
    accelerator strategy devices num_nodes max_epochs max_steps fast_dev_run gradient_clip_val log_every_n_steps
    limit_train_batches profiler
"""
_COMMON_RUN_SETTINGS = """
    name run_dir resume ckpt output seed deterministic precision global_batch_size accumulate warmup lr_scale sync_bn
"""


def run(
    recipe_class: type[Recipe],
    data_class: type[pl.LightningDataModule],
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    args: Sequence[str] | None = None,
) -> None:
    """Give a recipe and its data a command line: fit, validate, test and predict.

    Every parameter of the two constructors and of the Trainer is a flag. Ends the process with status 2 and one line
    for a user's mistake, and with 130 for Ctrl-C.

    Args:
        recipe_class: what to train.
        data_class: what to train on.
        callbacks: makes further callbacks for the Trainer.
        args: the command line; by default that of the process.
    """
    try:
        _CommandLine(recipe_class, data_class, callbacks).main(list(sys.argv[1:] if args is None else args))
    except UserError as error:
        if is_rank_zero():
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def program_name() -> str:
    """What the user typed to start us: ``python -m recipes.mnist``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.endswith(".__main__"):
        return f"python -m {spec.parent}"
    return f"python {sys.argv[0]}"


def _quiet() -> None:
    """Keep Lightning's tips, deprecations and notes about our own choices from the user."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("lightning", "torch", "tensorboard", "torchmetrics"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
    warnings.filterwarnings("ignore", message=r".*(isinstance\(treespec, LeafSpec\)|trace might not generalize).*")
    logging.getLogger("lightning_recipes").addHandler(_OneLine())
    logging.getLogger("lightning_recipes").propagate = False


class _OneLine(logging.Handler):
    """Our own notes, as a plain line each."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if is_rank_zero():
            print(record.getMessage(), file=sys.stderr)  # noqa: T201


def _say(message: str) -> None:
    if is_rank_zero():
        print(message, flush=True)  # noqa: T201


def _load(path: str) -> dict[str, Any]:
    """A checkpoint, without running code from it."""
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a readable checkpoint: {reason}") from error


@contextmanager
def _as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Exceptions that a user's settings cause."""
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


class _CommandLine:
    def __init__(
        self,
        recipe_class: type[Recipe],
        data_class: type[pl.LightningDataModule],
        callbacks: Callable[[], Sequence[Callback]],
    ) -> None:
        self.began = time.monotonic()
        self.recipe_class, self.data_class, self.callbacks = recipe_class, data_class, callbacks
        self.program = program_name()

    # Reading the command line

    def _parser(self) -> FlagParser:
        groups = [
            FlagGroup("Run", RunSettings, common=frozenset(_COMMON_RUN_SETTINGS.split())),
            FlagGroup("Data", self.data_class, frozenset({"predict_files"})),
            FlagGroup("Recipe", self.recipe_class),
            FlagGroup(
                "Trainer",
                pl.Trainer,
                skip=frozenset((_OWN_TRAINER_PARAMETERS + _REPLACED_TRAINER_PARAMETERS).split()),
                common=frozenset(_COMMON_TRAINER_PARAMETERS.split()),
            ),
        ]
        parser = FlagParser(groups, self.program, self.recipe_class.__doc__ or "")
        parser.set_defaults(self.recipe_class.trainer_defaults)
        return parser

    def _print_help(self, parser: FlagParser, everything: bool) -> None:
        summary = (self.recipe_class.__doc__ or "").strip().splitlines()[0]
        commands = "\n".join(f"  {name:<10} {text}" for name, text in _COMMANDS.items())
        print(f"usage: {self.program} [{'|'.join(_COMMANDS)}] [flags]\n\n{summary}\n\nCommands:\n{commands}")  # noqa: T201
        parser.print_flags(everything)
        rest = "" if everything else "  --help-all                        every flag, with its whole text\n"
        print(  # noqa: T201
            f"\nSettings:\n{rest}"
            "  --config FILE                     YAML file of settings; the command line wins over it\n"
            "  --print-config                    print all settings as such a file, and end"
        )

    def main(self, args: list[str]) -> None:
        command = args.pop(0) if args and args[0] in _COMMANDS else "fit"
        if args and not args[0].startswith("-") and command != "predict":
            raise UserError(f"unknown command {args[0]!r}; expected one of {', '.join(_COMMANDS)}, or a flag")
        parser = self._parser()
        if {"-h", "--help", "--help-all", "--help_all"} & set(args):
            self._print_help(parser, any("all" in a for a in args if a.startswith("--help")))
            return
        files: list[str] = []
        if command == "predict":
            parser.add_argument("files", nargs="*")
        checkpoint = self._named_in(args, "resume" if command == "fit" else "ckpt")
        if checkpoint:
            saved = _load(checkpoint).get("config", {})
            mine = {"name", "run_dir", "resume", "ckpt", "output"}
            if command != "fit":
                mine |= {"devices", "num_nodes", "accelerator", "strategy"}  # Those of the machine that trained it.
            parser.set_defaults({k: v for k, v in saved.items() if k in parser._flags and k not in mine})
        namespace = parser.parse(args)
        config = namespace.as_dict()
        config.pop("config", None)
        if command == "predict":
            files = config.pop("files")
            config |= {"devices": 1, "num_nodes": 1}
        if command != "fit" and not config["ckpt"]:
            example = f"runs/{self.recipe_class.title}/NAME/checkpoints/best.ckpt"
            raise UserError(f"{command} needs a checkpoint; pass --ckpt {example}")
        _quiet()
        self._execute(command, parser, config, files)

    @staticmethod
    def _named_in(args: Sequence[str], flag: str) -> str | None:
        """The value of a flag that has to be known before the others are read."""
        for i, arg in enumerate(args):
            if arg == f"--{flag}" and i + 1 < len(args):
                return args[i + 1]
            if arg.startswith(f"--{flag}="):
                return arg.partition("=")[2]
        return None

    # Building and running

    def _execute(self, command: str, parser: FlagParser, config: dict[str, Any], files: list[str]) -> None:
        settings = RunSettings(**parser.select(config, "Run"))
        tuned = settings.tune_allocator and tune_allocator()
        precision, why = resolve_precision(settings.precision, config["accelerator"])
        config["precision"] = precision
        check_output(settings.output)
        stopwatch = Stopwatch()
        with _as_user_errors(ValueError, TypeError, MisconfigurationException):
            # First of all: it seeds the initial weights.
            seeds = SeedControl(settings.seed, settings.deterministic, settings.benchmark)
            data_options = parser.select(config, "Data") | ({"predict_files": files} if files else {})
            data = self.data_class(**data_options)
            recipe = self.recipe_class(**parser.select(config, "Recipe"))
            callbacks = [stopwatch, *run_callbacks(settings, recipe, seeds), *self.callbacks()]
        recipe.run_config = config
        folder = self._folder(settings) if command == "fit" and not config["fast_dev_run"] else None
        if folder is not None:
            validates = getattr(data.hparams, "val_fraction", 1) > 0
            callbacks.append(checkpoint_callback(folder, recipe.monitor if validates else None, recipe.monitor_mode))
        try:
            with _as_user_errors(ValueError, TypeError, MisconfigurationException):
                trainer = pl.Trainer(
                    **parser.select(config, "Trainer"),
                    precision=precision,  # type: ignore[arg-type]
                    logger=self._loggers(folder, settings.resume),
                    callbacks=callbacks,
                    default_root_dir=str(folder) if folder else None,
                    enable_autolog_hparams=False,
                    enable_model_summary=False,
                )
            if folder is not None and is_rank_zero():
                (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
            kept = ", memory kept between steps" if tuned and trainer.strategy.root_device.type == "cpu" else ""
            if command != "predict":
                _say(f"{self.recipe_class.title}: {hardware(trainer)}, precision {precision} ({why}){kept}")
            with _as_user_errors(MisconfigurationException):
                if command == "fit":
                    self._fit(trainer, recipe, data, folder, settings, stopwatch, config)
                elif command == "predict":
                    outputs = trainer.predict(recipe, data, ckpt_path=settings.ckpt, weights_only=True)
                    rows = recipe.prediction_rows(outputs or [], files)
                    print_rows(rows)
                    if settings.output:
                        write_rows(Path(settings.output), rows)
                else:
                    evaluate = trainer.validate if command == "validate" else trainer.test
                    scores = evaluate(recipe, data, ckpt_path=settings.ckpt, weights_only=True, verbose=False)
                    if is_rank_zero():
                        print_pairs({name: f"{value:.4f}" for name, value in scores[0].items()})
                        if settings.output:
                            write_rows(Path(settings.output), dict(scores[0]))
        except UserError:
            if folder is not None and is_rank_zero() and not (folder / "checkpoints").exists():
                shutil.rmtree(folder)  # Nothing was learnt: leave no empty run behind.
            raise
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            first = str(error).splitlines()[1].strip()
            raise UserError(
                f"{settings.resume or settings.ckpt} holds another network than this one: {first[:200]}"
            ) from error

    def _folder(self, settings: RunSettings) -> Path:
        """The run's folder, made by this call: a second run never writes into the first one's."""
        if settings.resume:
            return Path(settings.resume).resolve().parent.parent
        parent = Path(settings.run_dir) / self.recipe_class.title
        name = settings.name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        if not is_rank_zero():
            return parent / name
        for number in range(1, sys.maxsize):
            folder = parent / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise UserError(f"cannot make the run's folder {folder}: {error.strerror}; pass --run-dir") from error
            return folder
        raise AssertionError

    @staticmethod
    def _loggers(folder: Path | None, resume: str | None) -> list[Logger] | bool:
        if folder is None:
            return False
        rows: list[dict[str, Any]] = []
        metrics_file = folder / "metrics.csv"
        if resume and metrics_file.is_file():
            done = _load(resume)["global_step"]
            with metrics_file.open(newline="") as file:
                rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file) if int(row["step"]) < done]
        csv_logger = CSVLogger(str(folder), name="", version="")
        if is_rank_zero() and rows:
            # The logger begins with an empty file; what was logged up to the checkpoint stays in front.
            csv_logger.experiment.metrics.extend(rows)
            csv_logger.save()
        graph = TensorBoardLogger(str(folder), name="", version="", log_graph=True, default_hp_metric=False)
        return [graph, csv_logger]

    def _fit(
        self,
        trainer: pl.Trainer,
        recipe: Recipe,
        data: pl.LightningDataModule,
        folder: Path | None,
        settings: RunSettings,
        stopwatch: Stopwatch,
        config: dict[str, Any],
    ) -> None:
        try:
            trainer.fit(recipe, data, ckpt_path=settings.resume, weights_only=True)
        except SystemExit:
            # Lightning ends the process on Ctrl-C after it has put its house in order.
            if trainer.state.status == "interrupted":
                self._say_how_to_go_on(folder)
                sys.exit(130)
            raise
        best = getattr(trainer.checkpoint_callback, "best_model_path", "") or None
        scores = {name: float(value) for name, value in trainer.callback_metrics.items()}
        scores |= trainer.test(recipe, data, ckpt_path=best, weights_only=True, verbose=False)[0]
        if trainer.is_global_zero:
            wall = time.monotonic() - self.began
            report(trainer, recipe, data, folder, stopwatch, scores, config, self.program, wall)

    def _say_how_to_go_on(self, folder: Path | None) -> None:
        last = folder / "checkpoints" / "last.ckpt" if folder else None
        if last is None or not last.exists():
            _say("\ninterrupted before the first checkpoint, which comes at the end of the first epoch")
        else:
            _say(f"\ninterrupted; go on with\n  {self.program} --resume {shown(last)}")
