"""One command line for every recipe: ``run(MyRecipe, MyDataModule)``."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from callbacks.checkpointing.guard import CheckpointGuard
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.fast_path.no_profiler import NoProfiler
from callbacks.lib.signals import SIGNALS, Preempted, ending_on_signals, requeue
from callbacks.run_progress import RunProgress
from callbacks.seed_control import SeedControl
from datamodules.errors import UserError
from recipes.cli.console import program_name, quiet, say
from recipes.cli.export import export
from recipes.cli.flags import FlagGroup, FlagParser
from recipes.cli.report import Stopwatch, check_output, hardware, print_pairs, print_rows, report, shown, write_rows
from recipes.cli.run_folder import loggers, run_folder
from recipes.cli.settings import RunSettings, checkpoint_callbacks, global_batch_text, run_callbacks
from recipes.cli.settled_data import SettledData
from recipes.failures.fingerprint import fingerprint
from recipes.failures.monitor import Watched
from recipes.failures.orphans import declare_parent, end_with_parent, forget_strangers, parent_of_rank
from recipes.failures.rendezvous import DONE
from recipes.failures.shared_folder import SharedFolder
from recipes.launch.devices import devices_of
from recipes.launch.host import (
    Command,
    Launch,
    LaunchSettings,
    backend_of,
    begin,
    check_precision,
    is_rank_zero,
    leave,
    machine,
    plan_launch,
    resolve_precision,
    set_collective_timeout,
    stop_gpu_search,
    tune_allocator,
    watched,
)
from recipes.recipe import Recipe
from recipes.resume.rebatch import keep_global_batch
from recipes.resume.saved_run import describe_differences, read_run
from recipes.resume.start import Start, begin_with, find_start

__all__ = ["run"]

_COMMANDS = {
    "fit": "train, then test the best checkpoint (this is what no command means)",
    "validate": "score a checkpoint on the validation part",
    "test": "score a checkpoint on the test set",
    "predict": "what a checkpoint says of your files",
    "export": "write a checkpoint's network for other programs, and check that it computes the same",
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
    name run_dir resume save_every ckpt output format seed precision global_batch_size accumulate warmup
    lr_scale sync_bn
"""
_COMMON_LAUNCH_SETTINGS = "node_rank master_addr master_port launcher"
# Of one call, and not of the experiment: a checkpoint's settings leave them out.
_OF_THIS_CALL = {
    *("name", "run_dir", "resume", "resume_anyway", "ckpt", "output", "format", "config", "inputs", "attention"),
    "profiler",
    *LaunchSettings.__dataclass_fields__,
}
_OF_THIS_MACHINE = {"devices", "num_nodes", "accelerator", "strategy"}


def run(
    recipe_class: type[Recipe],
    data_class: type[pl.LightningDataModule],
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    args: Sequence[str] | None = None,
) -> None:
    """Give a recipe and its data a command line: fit, validate, test and predict.

    Every parameter of the two constructors and of the Trainer is a flag. Ends the process with status 2 and one line
    for a user's mistake, and after a signal with 128 + its number: 130 for Ctrl-C, 138 for SIGUSR1, 143 for SIGTERM.

    Args:
        recipe_class: what to train.
        data_class: what to train on.
        callbacks: makes further callbacks for the Trainer.
        args: the command line; by default that of the process.
    """
    forget_strangers(os.environ)
    end_with_parent(os.environ)
    if parent_of_rank(os.environ) is None:
        declare_parent(os.environ)
    try:
        with watched(), ending_on_signals(*SIGNALS):
            _CommandLine(recipe_class, data_class, callbacks).main(list(sys.argv[1:] if args is None else args))
    except Preempted as stopped:
        say(f"\nended by {stopped.signal_name}{requeue(stopped.signum) if is_rank_zero() else ''}")
        raise
    except UserError as error:
        who = ""
        if not is_rank_zero():
            # Before the ranks have met: where rank 0 makes the same mistake it says so first.
            time.sleep(3)
            who = f" on rank {getattr(rank_zero_only, 'rank', '?')}"
        print(f"error{who}: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read our output has gone, as in `| head`; Python would complain once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


@contextmanager
def _as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Exceptions that a user's settings cause."""
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


class _CommandLine:
    """One call of the command line, from reading it to the final table."""

    def __init__(
        self,
        recipe_class: type[Recipe],
        data_class: type[pl.LightningDataModule],
        callbacks: Callable[[], Sequence[Callback]],
    ) -> None:
        self.began = time.monotonic()
        self.recipe_class, self.data_class, self.callbacks = recipe_class, data_class, callbacks
        self.program = program_name()
        trainer_skips = frozenset((_OWN_TRAINER_PARAMETERS + _REPLACED_TRAINER_PARAMETERS).split())
        groups = [
            FlagGroup("Run", RunSettings, common=frozenset(_COMMON_RUN_SETTINGS.split())),
            FlagGroup("Launch", LaunchSettings, common=frozenset(_COMMON_LAUNCH_SETTINGS.split())),
            FlagGroup("Data", data_class, skip=frozenset({"predict_inputs"})),
            FlagGroup("Recipe", recipe_class),
            FlagGroup("Trainer", pl.Trainer, trainer_skips, frozenset(_COMMON_TRAINER_PARAMETERS.split())),
        ]
        self.parser = FlagParser(groups, self.program)
        self.parser.set_defaults(recipe_class.trainer_defaults)

    # Reading the command line

    def main(self, args: list[str]) -> None:
        self.typed = Command(self.program, list(args))
        command = args.pop(0) if args and args[0] in _COMMANDS else "fit"
        if args and not args[0].startswith("-") and command != "predict":
            raise UserError(f"unknown command {args[0]!r}; expected one of {', '.join(_COMMANDS)}, or a flag")
        if asked := {"-h", "--help", "--help-all", "--help_all"} & set(args):
            self._print_help(everything=any(arg.endswith("all") for arg in asked))
            return
        if command == "predict":
            self.parser.add_argument("inputs", nargs="*")
        namespace = self.parser.parse(args)
        self._check(command, namespace)
        quiet()
        self.start = self._find_start(namespace) if command == "fit" else Start()
        if self.start.finished:
            say(f"the run in {shown(self.start.folder or '')} has finished; pass a larger --max-epochs to go on")
            return
        if checkpoint := self.start.checkpoint or namespace.ckpt:
            other = _OF_THIS_CALL | _OF_THIS_MACHINE
            saved = read_run(checkpoint).config
            self.parser.set_known_defaults({name: value for name, value in saved.items() if name not in other})
            namespace = self.parser.parse(args)
            if command == "fit":
                self._refuse_another_experiment(checkpoint, saved, namespace)
        asked, namespace.resume = namespace.resume, self.start.checkpoint
        self.resumes_by_itself = asked != self.start.checkpoint
        if checkpoint and self.resumes_by_itself:
            say(f"going on from {shown(checkpoint)}, after {read_run(checkpoint).updates:,} updates")
        inputs = namespace.inputs if command == "predict" else []
        if command == "predict":
            namespace.devices, namespace.num_nodes = 1, 1
        try:
            self._execute(command, namespace, inputs)
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            first = str(error).splitlines()[1].strip()
            raise UserError(f"{checkpoint} holds another network than this one: {first[:200]}") from error

    def _find_start(self, namespace: Namespace) -> Start:
        if namespace.name is not None and Path(namespace.name).name != namespace.name:
            raise UserError(f"--name {namespace.name} is not the name of a folder; pass --run-dir for where runs go")
        resume = namespace.resume
        if namespace.fast_dev_run or namespace.enable_checkpointing is False:
            resume = "none" if resume in (None, "auto") else resume
        parent = Path(namespace.run_dir) / self.recipe_class.title
        return find_start(resume, namespace.name, parent, self._config(namespace))

    def _config(self, namespace: Namespace) -> dict[str, Any]:
        """The settings that make the experiment, as they are saved."""
        return {k: v for k, v in self.parser.as_plain(namespace).items() if k not in _OF_THIS_CALL}

    def _refuse_another_experiment(self, checkpoint: str, saved: dict[str, Any], namespace: Namespace) -> None:
        differences = "; ".join(describe_differences(saved, self._config(namespace)))
        if differences and not namespace.resume_anyway:
            raise UserError(
                f"{shown(checkpoint)} is of another experiment: {differences}; leave these out, pass another --name to"
                " begin anew, or --resume-anyway"
            )
        if differences:
            say(f"resuming anyway: {differences}")

    def _check(self, command: str, namespace: Namespace) -> None:
        """Refuse flags that the command has no use for, and a command without what it needs."""
        if command == "fit":
            if namespace.format is not None:
                raise UserError("--format is for export; a run writes its own checkpoints")
            if namespace.ckpt:
                raise UserError("fit begins with new weights; pass --resume FILE to go on from a checkpoint")
            if namespace.output:
                raise UserError("fit writes results.json into its run's folder; --output is for the other commands")
            return
        if namespace.resume:
            raise UserError(f"--resume goes on training; pass --ckpt FILE to {command}")
        if not namespace.ckpt:
            example = f"runs/{self.recipe_class.title}/NAME/checkpoints/best.ckpt"
            raise UserError(f"{command} needs a checkpoint; pass --ckpt {example}")
        if command == "export":
            if namespace.format is None:
                raise UserError(
                    "export needs a format; pass --format safetensors, state-dict, torchscript, onnx or pt2"
                )
            return
        if namespace.format is not None:
            raise UserError(f"--format is for export; {command} chooses by the ending of --output")
        check_output(namespace.output)

    def _print_help(self, everything: bool) -> None:
        summary = (self.recipe_class.__doc__ or "").strip().splitlines()[0]
        commands = "\n".join(f"  {name:<10} {text}" for name, text in _COMMANDS.items())
        print(f"usage: {self.program} [{'|'.join(_COMMANDS)}] [flags]\n\n{summary}\n\nCommands:\n{commands}")  # noqa: T201
        self.parser.print_flags(everything)
        rest = "" if everything else "  --help-all                        every flag, with its whole text\n"
        print(  # noqa: T201
            f"\nSettings:\n{rest}"
            "  --config FILE                     YAML file of settings; the command line wins over it\n"
            "  --print-config                    print all settings as such a file, and end"
        )

    # Carrying it out

    def _launch(self, command: str, values: dict[str, Any], plain: dict[str, Any]) -> Launch:
        """Find our place among the processes of the run, and meet the others."""
        here = machine(values["accelerator"])
        check_precision(str(values["precision"]), here, self.typed)
        if command == "predict":
            return Launch("local", 1, 1)
        settings = LaunchSettings(**self.parser.select(values, "Launch"))
        asked = (values["devices"], values["num_nodes"])
        launch = plan_launch(os.environ, settings, asked, here, self.typed, strategy=values["strategy"])
        if launch.launcher in ("torchrun", "slurm"):
            values["devices"] = devices_of(launch.devices, values["devices"], here)
            values["num_nodes"] = launch.num_nodes
        if values["strategy"] == "fsdp2":
            # Lightning has no short name for it. Checkpoints stay one file, which any strategy loads.
            values["strategy"] = ModelParallelStrategy(save_distributed_checkpoint=False)

        def runs() -> dict[str, Any]:
            done = read_run(self.start.checkpoint).updates if self.start.checkpoint else 0
            return fingerprint(plain, (self.recipe_class, self.data_class)) | {DONE: done}

        return begin(launch, runs, settings, self.typed)

    def _execute(self, command: str, namespace: Namespace, inputs: list[str]) -> None:
        tuned = namespace.tune_allocator and tune_allocator()
        stop_gpu_search()
        namespace.precision, reason = resolve_precision(namespace.precision, namespace.accelerator)
        why = f" ({reason})" if reason else ""
        plain = self._config(namespace)
        values = self.parser.instantiate_classes(namespace).as_dict()
        settings = RunSettings(**self.parser.select(values, "Run"))
        launch = self._launch(command, values, plain)
        with _as_user_errors(MisconfigurationException):
            # First of all: it seeds the initial weights.
            seeds = SeedControl(settings.seed, settings.deterministic, settings.benchmark)
            data_options = self.parser.select(values, "Data") | ({"predict_inputs": inputs} if inputs else {})
            data = self.data_class(**data_options)
            options = self.parser.select(values, "Recipe")
            if command == "fit" and not settings.resume:
                known = self.recipe_class.settings_from_data(data)
                found = {name: value for name, value in known.items() if options.get(name) is None}
                options, plain = options | found, plain | found
            recipe = self.recipe_class(**options)
            # What the recipe has settled where the user left it open.
            plain |= {k: v for k, v in recipe.hparams.items() if plain.get(k, 0) in (None, "auto")}
            recipe.run_config = plain
            callbacks = [*run_callbacks(settings, recipe, seeds), *self.callbacks()]
        if command == "export":
            written = export(recipe, settings.ckpt or "", settings.format or "", settings.output)
            print_pairs({"written": shown(written.path), "checked": written.check})
            return
        if values["enable_progress_bar"] is not False:
            callbacks.append(RunProgress())

        # DeepSpeed writes folders, in its own way.
        saving = [] if "deepspeed" in str(values["strategy"]).lower() else [VerifiedCheckpointIO()]

        def build_trainer(*more: Callback, folder: Path | None = None) -> pl.Trainer:
            with _as_user_errors(ValueError, TypeError, MisconfigurationException):
                options = self.parser.select(values, "Trainer")
                trainer = pl.Trainer(
                    **(options | {"profiler": options["profiler"] or NoProfiler()}),
                    precision=settings.precision,  # type: ignore[arg-type]
                    logger=loggers(folder, settings.resume, plain) if folder else False,
                    callbacks=[Watched(), *callbacks, *more],
                    plugins=[LightningEnvironment(), *saving],
                    default_root_dir=str(folder) if folder else None,
                    enable_autolog_hparams=False,
                    enable_model_summary=False,
                )
            if backend_of(trainer) == "nccl" and trainer.strategy.root_device.type != "cuda":
                raise UserError(
                    "NCCL needs NVIDIA GPUs, and this run is on the CPU; pass --strategy ddp, which takes gloo"
                )
            set_collective_timeout(trainer, values["collective_timeout"])
            kept = ", memory kept between steps" if tuned and trainer.strategy.root_device.type == "cpu" else ""
            if command != "predict":
                start = f"{launch.describe()}, {backend_of(trainer)}, " if trainer.world_size > 1 else ""
                # On other devices than before it is cut anew, and another line says how.
                before = read_run(settings.resume).devices if settings.resume else None
                same = command == "fit" and before in (None, trainer.world_size)
                batch = global_batch_text(settings, values, trainer) if same else ""
                precision = f"precision {settings.precision}{why}"
                say(f"{self.recipe_class.title}: {start}{hardware(trainer)}, {batch}{precision}{kept}")
            return trainer

        with _as_user_errors(MisconfigurationException):
            if command != "fit":
                self._evaluate(command, build_trainer(), recipe, data, settings)
            elif values["fast_dev_run"]:
                self._fit(build_trainer(stopwatch := Stopwatch()), recipe, data, None, settings, stopwatch, plain)
            else:
                stopwatch = Stopwatch()
                title, start = self.recipe_class.title, self.start
                with run_folder(settings, title, start, worth_keeping=lambda: stopwatch.has_begun) as folder:
                    more: list[Callback] = [SharedFolder(folder), SettledData(), stopwatch]
                    if values["enable_checkpointing"] is not False:
                        validates = is_overridden("validation_step", recipe) and is_overridden("val_dataloader", data)
                        validates = validates and getattr(data, "validates", True)
                        more += checkpoint_callbacks(folder, recipe.monitor if validates else None, recipe, settings)
                        more.append(CheckpointGuard(settings.resume))
                    trainer = build_trainer(*more, folder=folder)
                    if is_rank_zero():
                        (folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
                    self._fit(trainer, recipe, data, folder, settings, stopwatch, plain)

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
        if settings.resume:
            saved = read_run(settings.resume)
            if saved.is_finished(trainer.max_epochs) and not self.resumes_by_itself:
                raise UserError(
                    f"this run has finished its {saved.epochs} epochs; pass --max-epochs {2 * saved.epochs} to go on"
                )
            with self._anyway(settings):
                if line := keep_global_batch(trainer, data, saved, config):
                    say(line)
            if folder is not None and not self.resumes_by_itself:
                for path in begin_with(settings.resume, folder, settings.name):
                    say(f"{shown(path)} is farther on, of what is given up here: renamed, and not gone on from")
        with self._interruptible(trainer, folder):
            trainer.fit(recipe, data, ckpt_path=settings.resume, weights_only=True)
        checkpoints = trainer.checkpoint_callback
        best = getattr(checkpoints, "best_model_path", "") or None
        if best is None and folder is not None and (last := folder / "checkpoints" / "last.ckpt").is_file():
            best = str(last)
        scores = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if best and recipe.monitor in scores and getattr(checkpoints, "best_model_score", None) is not None:
            # Of the checkpoint that is tested, not of the last epoch.
            scores = {k: v for k, v in scores.items() if not k.startswith("val/")}
            scores[recipe.monitor] = float(checkpoints.best_model_score)  # type: ignore[union-attr]
        if is_overridden("test_step", recipe) and is_overridden("test_dataloader", data):
            with self._interruptible(trainer, folder):
                final = trainer.test(recipe, data, ckpt_path=best, weights_only=True, verbose=False)
                if not final and recipe.monitor in scores:  # There is no test set.
                    final = trainer.validate(recipe, data, ckpt_path=best, weights_only=True, verbose=False)
            scores |= final[0] if final else {}
        if trainer.is_global_zero:
            wall = time.monotonic() - self.began
            report(trainer, recipe, data, folder, stopwatch, scores, best, config, self.program, wall)

    @contextmanager
    def _anyway(self, settings: RunSettings) -> Iterator[None]:
        """With --resume-anyway, a difference is said and not refused."""
        try:
            yield
        except UserError as error:
            if not settings.resume_anyway:
                raise UserError(f"{error}; or pass --resume-anyway") from error
            say(f"resuming anyway: {error}")

    def _evaluate(
        self,
        command: str,
        trainer: pl.Trainer,
        recipe: Recipe,
        data: pl.LightningDataModule,
        settings: RunSettings,
    ) -> None:
        with self._interruptible(trainer, None):
            if command == "predict":
                outputs = trainer.predict(recipe, data, ckpt_path=settings.ckpt, weights_only=True)
                rows = recipe.prediction_rows(outputs or [], data.prediction_names)  # type: ignore[attr-defined]
            else:
                evaluate = trainer.validate if command == "validate" else trainer.test
                rows = [
                    dict(s) for s in evaluate(recipe, data, ckpt_path=settings.ckpt, weights_only=True, verbose=False)
                ]
        if not rows:
            raise UserError(f"there is nothing to {command}: the data have no such part, or it is empty")
        if not trainer.is_global_zero:
            return
        if command == "predict":
            print_rows(rows)
        else:
            print_pairs({name: f"{value:.4f}" for name, value in rows[0].items()})
        if settings.output:
            write_rows(Path(settings.output), rows if command == "predict" else rows[0])

    @contextmanager
    def _interruptible(self, trainer: pl.Trainer, folder: Path | None) -> Iterator[None]:
        """Say how to go on where a signal has ended the run, and end the process."""
        try:
            yield
        except Preempted as stopped:
            why = f"\nended by {stopped.signal_name}"
            if stopped.at_once and is_rank_zero():
                why += requeue(stopped.signum)
            last = folder / "checkpoints" / "last.ckpt" if folder else None
            if last and not last.exists():
                last = last.with_name("best.ckpt")
            if last is None:
                say(why)
            elif not last.exists():
                say(f"{why} before the first update, so nothing was saved")
            elif stopped.trained or trainer.state.fn == "test":
                say(f"{why}; the training is done, so test with\n  {self.program} test --ckpt {shown(last)}")
            else:
                say(f"{why}; go on with\n  {self.program} --resume {shown(last)}")
            sys.stderr.flush()
            # Loggers and processes are closed; taking the interpreter down in order would take another second.
            leave(int(stopped.code or 1))
