"""One command line for every recipe, ``run(MyRecipe, MyDataModule)``: from what was typed to what was trained.

`CommandLine` goes on as a run does: parse, find the checkpoint to resume from, take its settings, find out which
process of the run this one is and wait for the others, build the experiment, and carry out the command.
"""

import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks.lib.signals import SIGNALS, Preempted, ending_on_signals
from callbacks.lib.slurm_job import requeue_on
from datamodules.errors import RunFailedError, UserError, system_failure
from datamodules.ranges import COUNT, NOT_NEGATIVE, check_ranges
from recipes.base import Recipe
from recipes.runner.command import Command, flag_of
from recipes.runner.commands import Trained, carry_out
from recipes.runner.console import configure_logging, escape_output, one_line
from recipes.runner.experiment import Classes, as_user_errors, build_experiment, takes_inputs
from recipes.runner.failures import exit_now, failures_reported, is_lost_connection
from recipes.runner.flags import FlagGroup, FlagParser, help_width, nearest, without_markup
from recipes.runner.join import UPDATES_DONE, fingerprint, join_run, leave_run, shared_folder
from recipes.runner.launch import LaunchSettings
from recipes.runner.limits import LIMIT_TEXTS
from recipes.runner.loggers import logger_names
from recipes.runner.machine import (
    detect_machine,
    resolve_precision,
    stop_gpu_search,
    tune_allocator,
)
from recipes.runner.printing import is_rank_zero, print_error, rank_of_process, rank_zero_print
from recipes.runner.processes import check_shared_update, plan_processes
from recipes.runner.quick_imports import program_name
from recipes.runner.report import check_output, shown
from recipes.runner.results import process_age
from recipes.runner.resume import ResumePoint, find_resume_point, requeue_after_loss, resume_in
from recipes.runner.saved_run import describe_differences, is_open, read_run, same_setting
from recipes.runner.settings import RunSettings
from recipes.runner.verify import find_interval
from recipes.runner.weights_record import Interval
from recipes.runner.worker import STARTED_AT, end_with_torchrun, is_worker
from recipes.weights import read_settings_beside

_COMMANDS = {
    "fit": "train, then test the best checkpoint (the default)",
    "validate": "score a checkpoint on the validation part",
    "test": "score a checkpoint on the test set",
    "predict": "run inference on the given inputs: predict --ckpt FILE INPUT ...",
    "verify": "train a part of a run again, and compare the weights to the bit: verify runs/RECIPE/NAME",
    "export": "write the network of a checkpoint for other programs, and verify the file",
}

# The command line sets these itself, or they hold objects that no flag can express; or ours are exact where these are
# not: --accumulate, --sync-bn, --deterministic.
_NO_FLAGS_OF_TRAINER = """
    logger callbacks plugins num_nodes precision default_root_dir enable_autolog_hparams enable_model_summary
    accumulate_grad_batches sync_batchnorm deterministic barebones
"""
_COMMON_TRAINER_PARAMETERS = """
    accelerator strategy devices max_epochs max_steps fast_dev_run gradient_clip_val log_every_n_steps
    limit_train_batches
"""
_TRAINER_TEXTS = LIMIT_TEXTS | {
    "strategy": "ddp, or auto, which is one device or ddp",
}
# They take weights alone, too.
_SCORING = ("validate", "test")
_OF_THE_MACHINE = {"devices", "num_nodes", "accelerator", "strategy"}
_ENDED_BY_NULL = {"ema"}  # A resumed run goes on without.


def run(
    recipe_class: type[Recipe],
    data_class: type[pl.LightningDataModule],
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    args: Sequence[str] | None = None,
) -> None:
    """Give a recipe and its data a command line: fit, validate, test, predict, verify and export.

    Every parameter of the two constructors and of the Trainer is a flag. Ends the process with a message in one line:
    status 2 where the run could not start, 1 where it failed on the way, and 128 + the number of a signal: 130 for
    Ctrl-C, 138 for SIGUSR1, 143 for SIGTERM, 129 for a closed terminal.

    Args:
        recipe_class: what to train.
        data_class: what to train on.
        callbacks: makes further callbacks for the Trainer, new ones for the scores after training.
        args: the command line; by default that of the process.
    """
    escape_output()
    end_with_torchrun(os.environ)
    # A program has begun with its imports, which take seconds.
    started_at = time.monotonic() - (process_age() if args is None else 0.0)
    if is_worker(os.environ):
        started_at = float(os.environ[STARTED_AT])
    classes = Classes(recipe_class, data_class, callbacks)
    program = CommandLine(classes, sys.argv[1:] if args is None else args, started_at, program_name())
    try:
        with ending_on_signals(*SIGNALS), failures_reported(program.after_loss):
            program.main()
        leave_run()
    except Preempted as stopped:
        rank_zero_print(f"\nended by {stopped.signal_name}")
        if is_rank_zero() and (note := requeue_on(stopped.signum)):
            rank_zero_print(note)
        raise
    except UserError as error:
        if not is_worker(os.environ):  # Else the agent prints it, once for all workers.
            who = ""
            if not is_rank_zero():
                # Where rank 0 makes the same error, it prints first, and its launcher may end the others.
                time.sleep(3)
                who = f" on rank {rank_of_process()}"
            print_error(f"error{who}: {one_line(str(error))}")
        sys.exit(error.exit_status)
    except Exception as error:
        if not is_worker(os.environ) and not dist.is_initialized():
            raise
        if not is_lost_connection(error):
            traceback.print_exc()
        exit_now(1)  # A regular exit would wait for the process group.


def _print_texts(title: str, texts: dict[str, str], width: int) -> None:
    """Print names and their texts in two columns."""
    column = max(map(len, texts)) + 2
    print(f"{title}:")  # noqa: T201
    for name, text in texts.items():
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        options |= {"initial_indent": f"  {name:<{column}}", "subsequent_indent": " " * (column + 2)}
        print(textwrap.fill(text, width, **options))  # noqa: T201


def build_parser(classes: Classes, program: str) -> FlagParser:
    """The parser of a recipe's flags; see `CommandLine`."""
    trainer_common = frozenset(_COMMON_TRAINER_PARAMETERS.split())
    groups = [
        FlagGroup("Run", RunSettings),
        FlagGroup("Launch", LaunchSettings),
        FlagGroup("Data", classes.data, frozenset({"predict_inputs"})),
        FlagGroup("Recipe", classes.recipe),
        FlagGroup("Trainer", pl.Trainer, frozenset(_NO_FLAGS_OF_TRAINER.split()), trainer_common, _TRAINER_TEXTS),
    ]
    parser = FlagParser(groups, program)
    parser.set_defaults(classes.recipe.trainer_defaults)
    return parser


def _refuse(*rules: tuple[Any, str]) -> None:
    """Refuse with the message of the first rule whose condition holds."""
    for holds, message in rules:
        if holds:
            raise UserError(message)


class CommandLine:
    """One call of the command line.

    Args:
        args: what was typed after the program's name.
        started_at: `time.monotonic` at the start of the program.
        program: its name, for the commands to print.
    """

    def __init__(self, classes: Classes, args: Sequence[str], started_at: float, program: str) -> None:
        self.classes, self.program, self.args, self.started_at = classes, program, list(args), started_at
        self.parser = build_parser(classes, program)
        self._not_saved = classes.call_parameters
        self._point = ResumePoint()

    def main(self) -> Trained | None:
        """Carry out the command; an error by which the system refuses files, processes or memory takes one line.

        Returns:
            What fit has trained; of a run that had finished before, its folder only.
        """
        try:
            return self._carry_out()
        except (MemoryError, OSError, RuntimeError, TypeError) as error:
            if problem := system_failure(error):
                raise RunFailedError(problem) from error
            raise

    def after_loss(self) -> str:
        """What is done where a process of the run was lost, in words."""
        return requeue_after_loss(self._point.folder, self._updates_done())

    def _updates_done(self) -> int:
        return read_run(self._point.checkpoint).updates if self._point.checkpoint else 0

    def _carry_out(self) -> Trained | None:
        command, args = self._command()
        folder = Path(args.pop(0)) if command == "verify" and args and not args[0].startswith("-") else None
        if asked := {"-h", "--help", "--help-all", "--help_all"} & set(args):
            self._print_help(everything=any(arg.endswith("all") for arg in asked))
            return None
        namespace = self.parser.parse(args)
        if command == "fit" and namespace.max_steps != -1 and self.parser.typed(args).get("max_epochs") is None:
            # The recipe's default could end it before.
            namespace = self._with_settings({"max_epochs": -1}, args)
        self._check("fit" if command == "verify" else command, namespace)
        if namespace.ckpt and any(arg.partition("=")[0] == "--weights" for arg in args):
            raise UserError("--ckpt and --weights are two sources of weights; leave one of them out")
        configure_logging()
        if command == "verify":
            self._verify(folder, args)
            return None
        if command == "fit":
            self._point = self._find_resume_point(namespace, args)
        if checkpoint := self._point.checkpoint or namespace.ckpt:
            namespace = self._with_settings_of(checkpoint, args)
        elif command in _SCORING:
            # All tensors of a file of weights have to match.
            namespace = self._with_settings(read_settings_beside(namespace.weights) | {"weights_skip": None}, args)
        if self._point.checkpoint:
            self._check_experiment(self._point.checkpoint, namespace)
        if self._point.finished:
            longer = "--max-epochs or --max-steps (or --patience, where it was stopped early)"
            rank_zero_print(
                f"the run in {shown(self._point.folder or '')} has finished, and stays as it is; pass a larger {longer}"
                " to train longer"
            )
            return Trained(Path(self._point.folder or ""))
        if self._point.checkpoint:
            self._check_going_on(self._point.checkpoint, namespace)
        if command == "fit":
            self.parser.import_optimizer(namespace, args)
        return self._go(command, namespace)

    # Parse

    def _command(self) -> tuple[str, list[str]]:
        args = list(self.args)
        command = args.pop(0) if args and args[0] in _COMMANDS else "fit"
        if args and not args[0].startswith("-") and command not in ("predict", "verify"):
            if args[0] in _COMMANDS:
                raise UserError(f"{command} and {args[0]} are two commands; pass one of them")
            hint = nearest(args[0], _COMMANDS) or f"; expected one of {', '.join(_COMMANDS)}, or a flag"
            raise UserError(f"unknown command {args[0]!r}{hint}")
        if command == "predict":
            self.parser.add_argument("inputs", nargs="*")
        return command, args

    def _check(self, command: str, given: Namespace) -> None:
        """Refuse flags that the command does not use, and a command without what it needs."""
        logger_names(given.logger)
        for time_or_number in (given.max_time, given.val_check_interval):
            if isinstance(time_or_number, (str, dict)):
                with as_user_errors(MisconfigurationException, TypeError):
                    Timer(time_or_number)
        check_ranges(
            check_val_every_n_epoch=(given.check_val_every_n_epoch, COUNT),
            gradient_clip_val=(given.gradient_clip_val, NOT_NEGATIVE),
        )
        fits, predicts = command == "fit", command == "predict"
        _refuse(
            (
                given.val_check_interval == 0,
                "--val-check-interval 0 is no interval; --limit-val-batches 0 leaves the validation out",
            ),
            (
                fits and given.limit_train_batches == 0,
                "--limit-train-batches 0 trains nothing; --max-epochs 0 scores the initial weights",
            ),
            (
                command != "export" and given.format is not None,
                "--format is for export; a run writes its own checkpoints, and the others go by the suffix of --output",
            ),
            (fits and given.ckpt, "fit begins with new weights; pass --resume FILE to resume from a checkpoint"),
            (
                fits and given.output,
                "fit writes results.json into its run's folder; --output is for the other commands",
            ),
            (not fits and given.resume, f"--resume continues training; pass --ckpt FILE to {command}"),
        )
        if fits:
            return
        data, bare = self.classes.data.__name__, ", or --weights FILE, weights alone" if command in _SCORING else ""
        _refuse(
            (
                predicts and given.inputs and not takes_inputs(self.classes.data),
                f"{data} takes no inputs, because its constructor has no parameter predict_inputs; leave"
                f" {' '.join(given.inputs or ()) if predicts else ''} out to predict what {data}.predict_dataloader()"
                " yields",
            ),
            (
                not given.ckpt and (command not in _SCORING or given.get("weights") in (None, "none")),
                f"{command} needs a checkpoint; pass --ckpt"
                f" runs/{self.classes.recipe.title}/NAME/checkpoints/best.ckpt{bare}",
            ),
            (
                command == "export" and given.format is None,
                "export needs a format; pass --format safetensors, state-dict or onnx",
            ),
        )
        if command != "export":
            check_output(given.output, self.classes.recipe.prediction_files if predicts else (".json", ".csv"))

    def _print_help(self, everything: bool) -> None:
        width = help_width()
        summary = without_markup((self.classes.recipe.__doc__ or "").strip().splitlines()[0])
        usage = f"usage: {self.program} [{'|'.join(_COMMANDS)}] [flags]"
        lines = textwrap.wrap(usage, width, subsequent_indent="  ", break_on_hyphens=False)
        print("\n".join([*lines, "", *textwrap.wrap(summary, width), ""]))  # noqa: T201
        _print_texts("Commands", _COMMANDS, width)
        self.parser.print_flags(everything)
        rest = {} if everything else {"--help-all": "all flags, with their full texts"}
        settings = {
            "--config FILE": "YAML file of settings; the last wins, and what is typed wins over all",
            "--print-config": "print all settings as such a file, and exit",
        }
        print()  # noqa: T201
        _print_texts("Settings (--no-NAME is the same as --NAME false)", rest | settings, width)

    # Find the checkpoint to resume from, and take its settings

    def _config(self, namespace: Namespace) -> dict[str, Any]:
        """The settings that make the experiment, as they are saved."""
        return {k: v for k, v in self.parser.as_plain(namespace).items() if k not in self._not_saved}

    def _find_resume_point(self, namespace: Namespace, args: list[str]) -> ResumePoint:
        if namespace.name is not None and Path(namespace.name).name != namespace.name:
            raise UserError(f"--name {namespace.name} is not the name of a folder; pass --run-dir for where runs go")
        resume = namespace.resume
        if namespace.fast_dev_run or namespace.enable_checkpointing is False:
            resume = "none" if resume in (None, "auto") else resume
        parent = Path(namespace.run_dir) / self.classes.recipe.title
        config, typed = self._config(namespace), self.parser.typed(args)
        point = find_resume_point(resume, namespace.name, parent, config, typed, self.classes.free_settings)
        if folder := shared_folder():
            # The agents have started the run again: it goes on in its own folder.
            own = resume_in(Path(folder), typed)
            return own if own.checkpoint else replace(point, folder=folder)
        return point

    def _with_settings(self, saved: Mapping[str, Any], args: list[str], keeps: Sequence[str] = ()) -> Namespace:
        """Parse again, with saved settings as defaults, but those of the machine, unless `keeps` names them.

        A null or "auto" that was typed stands for what the run has resolved it to.
        """
        other = (self._not_saved | _OF_THE_MACHINE) - set(keeps)
        self.parser.set_known_defaults({name: value for name, value in saved.items() if name not in other})
        namespace, defaults = self.parser.parse(args), self.parser.parse([])
        resolved = read_run(self._point.checkpoint).left_open if self._point.checkpoint else None
        for name in vars(namespace).keys() & saved.keys() - self.classes.free_settings - _ENDED_BY_NULL:
            if is_open(namespace[name]) and (resolved is None or name in resolved):
                namespace[name] = defaults[name]
        return namespace

    def _with_settings_of(self, checkpoint: str, args: list[str]) -> Namespace:
        saved, own = read_run(checkpoint), self.classes.recipe.titles()
        if own and saved.recipes and not set(own) & set(saved.recipes):
            raise UserError(
                f"{shown(checkpoint)} is a checkpoint of the recipe {saved.recipes[0]}, and this is {own[0]}; run that"
                f" recipe, or pass a checkpoint of {own[0]}"
            )
        return self._with_settings(saved.config, args)

    def _check_experiment(self, checkpoint: str, namespace: Namespace) -> None:
        """Refuse settings of another experiment than the one to resume."""
        saved, config = read_run(checkpoint), self._config(namespace)
        free = self.classes.free_settings | {name for name in _ENDED_BY_NULL if config[name] is None}
        if differences := describe_differences(saved.config, config, free, saved.left_open):
            raise UserError(
                f"{shown(checkpoint)} is of another experiment: {'; '.join(differences)}; leave these out, or start"
                " fresh: pass another --name, and --weights FILE for a warm start"
            )

    def _check_going_on(self, checkpoint: str, namespace: Namespace) -> None:
        """Refuse to resume a run that has finished."""
        saved = read_run(checkpoint)
        if self._point.given and saved.is_finished(namespace.max_epochs, namespace.max_steps):
            flag, done = ("steps", saved.updates) if namespace.max_epochs == -1 else ("epochs", saved.epochs)
            raise UserError(
                f"this run has finished its {saved.epochs} epochs and {saved.updates:,} updates; pass --max-{flag}"
                f" {2 * max(1, done)} to train longer"
            )

    def _verify(self, folder: Path | None, args: list[str]) -> None:
        """Train an interval of a run again, with the settings that it had there."""
        if folder is None:
            raise UserError(f"verify needs the folder of a run; pass verify runs/{self.classes.recipe.title}/NAME")
        interval = find_interval(folder)
        recipe, own = interval.start.recipe, self.classes.recipe.titles()
        if own and recipe not in own:
            raise UserError(
                f"{shown(folder)} is a run of the recipe {recipe}, and this is {self.classes.recipe.title}: pass it to"
                " that recipe's command"
            )
        config, before = interval.start.config, interval.start.environment
        may_differ = _OF_THE_MACHINE | {"enable_progress_bar"} | self.classes.free_parameters
        free, typed = self._not_saved | may_differ, self.parser.typed(args)
        if wrong := [n for n, value in typed.items() if n not in free and not same_setting(n, config.get(n), value)]:
            raise UserError(f"verify trains with the settings of the run: leave out {', '.join(map(flag_of, wrong))}")
        # By default on as many devices as the run had.
        chosen = "devices" in typed or "TORCHELASTIC_RUN_ID" in os.environ
        split = {} if chosen else {name: before.get(name) for name in ("devices", "num_nodes")}
        namespace = self._with_settings({**config, **split}, args, keeps=("accelerator", "strategy", *split))
        self.parser.import_optimizer(namespace, args)
        namespace.max_time = None  # It is not to end by this machine's speed.
        self._point = ResumePoint(checkpoint=str(interval.checkpoint) if interval.checkpoint else None)
        self._go("fit", namespace, interval)

    # Find out which process this is, start the others or wait for them, build, and go

    def _go(self, command: str, namespace: Namespace, interval: Interval | None = None) -> Trained | None:
        tuned = tune_allocator()
        stop_gpu_search()
        if command == "predict":
            namespace.devices = 1
        namespace.precision, reason = resolve_precision(namespace.precision, namespace.accelerator)
        on_cpu, config = detect_machine(namespace.accelerator).kind == "cpu", self._config(namespace)
        values = namespace.as_dict()

        def options(title: str) -> dict[str, Any]:
            inputs = values.get("inputs") if title == "Data" else None
            return self.parser.select(values, title) | ({"predict_inputs": inputs} if inputs else {})

        run = RunSettings(**options("Run"))  # What is out of its range is refused before a process waits for another.
        launch_options = LaunchSettings(**options("Launch"))
        typed = Command(self.program, self.args, in_program=self.classes.in_program)
        launch = plan_processes(command, values, launch_options, typed)
        typed = typed.started_by(launch.launcher, launch.num_nodes, launch.devices)
        if launch.starts_agent:
            begins = self._point.checkpoint is None
            check_shared_update(launch, run.global_batch_size, values.get("batch_size") if begins else None)
            modules = {kind.__module__ for kind in (self.classes.recipe, self.classes.data)} - {"__main__"}
            timeout = launch_options.rendezvous_timeout
            from recipes.runner.agent import run_agent  # A process that trains does not need it.

            run_agent(launch, sorted(modules), timeout, typed, self.after_loss, self.started_at)
            return None

        def settings() -> dict[str, Any]:
            classes = (self.classes.recipe, self.classes.data)
            return fingerprint(config, classes) | {UPDATES_DONE: self._updates_done()}

        launch = join_run(launch, settings, launch_options, typed)
        if self._point.checkpoint and not self._point.given and interval is None:
            updates = read_run(self._point.checkpoint).updates
            rank_zero_print(f"resuming from {shown(self._point.checkpoint)}, after {updates:,} updates")
        checkpoint = self._point.checkpoint or values["ckpt"]
        try:
            experiment = build_experiment(
                command,
                run,
                options,
                values,
                config,
                self.classes,
                launch=launch,
                point=self._point,
                typed=typed,
                notes=(f" ({reason})" if reason else "") + (", tuned allocator" if tuned and on_cpu else ""),
            )
            return carry_out(experiment, self.started_at, interval)
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            first = str(error).splitlines()[1].strip()
            raise UserError(f"{checkpoint} holds another network than this one: {first[:200]}") from error
