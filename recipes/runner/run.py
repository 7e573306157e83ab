"""Provide one command line for every recipe, ``run(MyRecipe, MyDataModule)``.

`Run` takes these steps, in order: find the checkpoint to resume from, merge the settings, plan the processes and wait
for the other ranks, build the experiment, and carry out the command. The settings are one mapping throughout:
``defaults | checkpoint | files | typed``, merged by `merge`.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from callbacks.lib.signals import SIGNALS, Preempted, ending_on_signals
from callbacks.lib.slurm_job import requeue_on
from callbacks.lib.threads import threads_restored
from datamodules.errors import RunFailedError, UserError, system_failure
from datamodules.lightning import Callback, pl
from recipes.base import Recipe
from recipes.runner.classes import Classes, free_parameters, marks_of
from recipes.runner.command import Command, as_flags, errors_with_flags, flag_of
from recipes.runner.commands import run_command
from recipes.runner.console import configure_logging, escape_output, one_line
from recipes.runner.experiment import build_experiment
from recipes.runner.failures import exit_now, failures_reported, is_lost_connection
from recipes.runner.flags import FlagParser
from recipes.runner.join import UPDATES_DONE, fingerprint, join_run, leave_run, shared_folder
from recipes.runner.launch import LaunchSettings
from recipes.runner.machine import detect_machine, resolve_precision, stop_gpu_search, tune_allocator
from recipes.runner.merging import as_plain, describe_differences, merge, same_setting, with_length
from recipes.runner.printing import is_rank_zero, print_error, rank_of_process, rank_zero_print
from recipes.runner.processes import check_shared_update, plan_processes
from recipes.runner.quick_imports import program_name
from recipes.runner.report import relative_path
from recipes.runner.requests import SCORING, Request, check_request, read_request
from recipes.runner.results import process_age
from recipes.runner.resume import ResumePoint, find_resume_point, requeue_after_loss, resume_in
from recipes.runner.run_result import RunResult, read_result
from recipes.runner.saved_run import SavedRun, note_unknown_settings, read_run
from recipes.runner.settings import RunSettings, TrainerSettings
from recipes.runner.verify import find_interval
from recipes.runner.weights_record import Interval
from recipes.runner.worker import STARTED_AT, end_with_torchrun, is_worker
from recipes.weights import read_settings_beside


def run(
    recipe_class: type[Recipe],
    data_class: type[pl.LightningDataModule],
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    args: Sequence[str] | None = None,
) -> None:
    """Give a recipe and its data a command line: fit, validate, test, predict, verify and export.

    Every parameter of the two constructors and of the run is a flag, and every parameter of the Trainer that has none
    of its own is ``--trainer.NAME``. Ends the process with a message in one line: status 2 where the run could not
    start, 1 where it failed on the way, and 128 + the number of a signal: 130 for Ctrl-C, 138 for SIGUSR1, 143 for
    SIGTERM, 129 for a closed terminal.

    Args:
        recipe_class: the recipe to train.
        data_class: the data module to train on.
        callbacks: makes further callbacks for the Trainer, new ones for the scores after training.
        args: the command line; by default that of the process.
    """
    escape_output()
    end_with_torchrun(os.environ)
    # The process is older than this call: its imports took seconds.
    started_at = time.monotonic() - (process_age() if args is None else 0.0)
    if is_worker(os.environ):
        started_at = float(os.environ[STARTED_AT])
    typed = Command(program_name(), sys.argv[1:] if args is None else args)
    try:
        this_run = Run(Classes(recipe_class, data_class, callbacks), typed, started_at)
        names = this_run.parser.flags
        with ending_on_signals(*SIGNALS), failures_reported(this_run.after_loss), errors_with_flags(names):
            request = read_request(this_run.parser, recipe_class, typed.args)
            if request:
                this_run.execute(request)
        leave_run()
    except Preempted as stopped:
        rank_zero_print(f"\nended by {stopped.signal_name}")
        note = requeue_on(stopped.signum) if is_rank_zero() else ""
        if note:
            rank_zero_print(note)
        raise
    except UserError as error:
        if not is_worker(os.environ):  # The agent of a worker prints the error, once for all workers.
            rank_text = ""
            if not is_rank_zero():
                # If rank 0 has the same error, it prints first, and its launcher may then end this process.
                time.sleep(3)
                rank_text = f" on rank {rank_of_process()}"
            print_error(f"error{rank_text}: {one_line(str(error))}")
        sys.exit(error.exit_status)
    except Exception as error:
        if not is_worker(os.environ) and not dist.is_initialized():
            raise
        if not is_lost_connection(error):
            traceback.print_exc()
        exit_now(1)  # A regular exit would wait for the ranks in the process group.


class Run:
    """A call of a command line, or of `recipes.fit`.

    Args:
        classes: the classes of recipe and data module.
        typed: what the user typed, for commands in messages.
        started_at: `time.monotonic` at the start of the program.
    """

    def __init__(self, classes: Classes, typed: Command, started_at: float) -> None:
        self.classes = classes
        self.typed = typed
        self.started_at = started_at
        self.parser: FlagParser = classes.parser(typed.program)
        self._marks = marks_of(self.parser)
        self._point = ResumePoint()

    def execute(self, request: Request) -> RunResult | None:
        """Carry out a command; errors of the operating system are reported in one line.

        Returns:
            The result of fit, in a process that has trained; None for the other commands.
        """
        configure_logging(() if self.typed.in_program else self.parser.flags)
        try:
            with threads_restored():
                if request.command == "verify":
                    self._verify(request)
                    return None
                return self._find_and_start(request)
        except (MemoryError, OSError, RuntimeError, TypeError) as error:
            problem = system_failure(error)
            if problem:
                raise RunFailedError(problem) from error
            raise

    def after_loss(self) -> str:
        """Requeue the job where a process was lost, and return what was done, in words."""
        return requeue_after_loss(self._point.folder, self._updates_done())

    def _updates_done(self) -> int:
        return read_run(self._point.checkpoint).updates if self._point.checkpoint else 0

    def _find_and_start(self, request: Request) -> RunResult | None:
        command = request.command
        given = request.given.settings
        settings = self._merge(request)
        check_request(request, settings, self.classes)
        if command == "fit":
            self._point = self._find_resume_point(settings, given)
        checkpoint = self._point.checkpoint or settings["ckpt"]
        if checkpoint:
            # The settings of the checkpoint replace the defaults, so that the command needs none of them.
            saved = self._saved_run(checkpoint)
            settings = self._merge(request, saved.config, saved.auto_settings if self._point.checkpoint else None)
        elif command in SCORING:
            # All tensors of a file of weights have to match.
            settings = self._merge(request, read_settings_beside(settings["weights"]) | {"weights_skip": None})
        if self._point.checkpoint:
            self._check_experiment(self._point.checkpoint, settings)
        if self._point.finished:
            return self._finished(Path(self._point.folder or ""))
        if self._point.checkpoint:
            self._check_resume(self._point.checkpoint, settings)
        self.parser.check_required(settings, given)
        if command == "fit":
            self.parser.import_optimizer(settings, given)
        return self._start(command, settings, request.given.inputs)

    def _merge(
        self,
        request: Request,
        saved: Mapping[str, Any] | None = None,
        auto_settings: Sequence[str] | None = None,
        keeps: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Merge the settings of a request on top of saved ones; see `merge`."""
        given = request.given.settings
        defaults = self.parser.defaults()
        if request.command == "fit":
            defaults = with_length(defaults, given)
        if saved is not None:
            saved = self.parser.read(saved, "the saved settings")
        return merge(self._marks, defaults, given, saved, auto_settings, keeps, request.given.typed)

    def _config(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that define the experiment, as they are saved."""
        return {name: as_plain(value) for name, value in settings.items() if name not in self._marks.one_call}

    def _find_resume_point(self, settings: Mapping[str, Any], given: Mapping[str, Any]) -> ResumePoint:
        name = settings["name"]
        if name is not None and Path(name).name != name:
            raise UserError(f"name={name} is not the name of a folder; pass `run_dir` for where runs go")
        resume = settings["resume"]
        if settings["fast_dev_run"] or settings["enable_checkpointing"] is False:
            resume = "none" if resume in (None, "auto") else resume
        parent = Path(settings["run_dir"]) / self.classes.recipe.title
        point = find_resume_point(resume, name, parent, self._config(settings), given, self._marks.free)
        folder = shared_folder()
        if folder:
            # The agents have restarted the run, so that it resumes in its own folder.
            point_in_folder = resume_in(Path(folder), given)
            return point_in_folder if point_in_folder.checkpoint else replace(point, folder=folder)
        return point

    def _saved_run(self, checkpoint: str) -> SavedRun:
        """Read the run of a checkpoint, which has to be one of this recipe."""
        saved = read_run(checkpoint)
        recipe = self.classes.recipe
        if not recipe.owns(saved.recipes):
            title = recipe.titles()[0]
            raise UserError(
                f"{relative_path(checkpoint)} is a checkpoint of the recipe {saved.recipes[0]}, and this is {title};"
                f" run that recipe, or pass a checkpoint of {title}"
            )
        return saved

    def _check_experiment(self, checkpoint: str, settings: Mapping[str, Any]) -> None:
        """Refuse settings of another experiment than the one to resume."""
        saved = read_run(checkpoint)
        config = self._config(settings)
        # Other threads round otherwise, as another precision does, and a line of the run says so.
        free = self._marks.free | {"threads"} | {name for name in self._marks.null_ends if config[name] is None}
        differences = describe_differences(saved.config, config, free, saved.auto_settings)
        if differences:
            raise UserError(
                f"{relative_path(checkpoint)} is of another experiment: {'; '.join(differences)}; leave these out, or"
                ' start fresh: pass another `name`, and weights="FILE" for a warm start'
            )

    def _check_resume(self, checkpoint: str, settings: Mapping[str, Any]) -> None:
        """Refuse to resume a run that has finished."""
        saved = read_run(checkpoint)
        if self._point.given and saved.is_finished(settings["max_epochs"], settings["max_steps"]):
            length = "max_steps" if settings["max_epochs"] == -1 else "max_epochs"
            trained = saved.updates if length == "max_steps" else saved.epochs
            raise UserError(
                f"this run has finished its {saved.epochs} epochs and {saved.updates:,} updates; pass"
                f" {length}={2 * max(1, trained)} to train longer"
            )

    def _finished(self, folder: Path) -> RunResult | None:
        """Print that a run has finished, and return its result to a program."""
        message = (
            f"the run in {relative_path(folder)} has finished, and stays as it is; pass a larger `max_epochs` or"
            " `max_steps` (or `patience`, where it was stopped early) to train longer"
        )
        rank_zero_print(message if self.typed.in_program else as_flags(message, self.parser.flags))
        return read_result(folder, self.classes.recipe) if self.typed.in_program else None

    def _verify(self, request: Request) -> None:
        """Train an interval of a run again, with the settings of that interval."""
        recipe = self.classes.recipe
        folder = request.folder
        if folder is None:
            raise UserError(f"verify needs the folder of a run; pass verify runs/{recipe.title}/NAME")
        interval = find_interval(folder)
        start = interval.start
        if not recipe.owns([start.recipe]):
            raise UserError(
                f"{relative_path(folder)} is a run of the recipe {start.recipe}, and this is {recipe.title}: pass it to"
                " that recipe's command"
            )
        given = request.given.settings
        may_differ = self._marks.of_machine | {"enable_progress_bar"} | free_parameters(self.classes)
        compared = [name for name in given if name not in self._marks.one_call | may_differ]
        changed = [name for name in compared if not same_setting(name, start.config.get(name), given[name])]
        if changed:
            raise UserError(f"verify trains with the settings of the run: leave out {', '.join(map(flag_of, changed))}")
        # By default on as many devices as the run had.
        user_chose_devices = "devices" in given or "TORCHELASTIC_RUN_ID" in os.environ
        split = {} if user_chose_devices else {name: start.environment.get(name) for name in ("devices", "num_nodes")}
        keeps = ("accelerator", "strategy", *split)
        settings = self._merge(request, {**start.config, **split}, keeps=keeps)
        check_request(request, settings, self.classes)
        self.parser.import_optimizer(settings, given)
        settings["max_time"] = None  # A slower machine must not end before the interval does.
        self._point = ResumePoint(checkpoint=str(interval.checkpoint) if interval.checkpoint else None)
        self._start("fit", settings, interval=interval)

    def _start(
        self, command: str, settings: dict[str, Any], inputs: Sequence[str] = (), interval: Interval | None = None
    ) -> RunResult | None:
        tuned = tune_allocator()
        stop_gpu_search()
        if command == "predict":
            settings["devices"] = 1
        settings["precision"], reason = resolve_precision(settings["precision"], settings["accelerator"])
        config = self._config(settings)
        # These constructors check ranges: a wrong setting is refused before a process waits for another.
        run_settings = RunSettings(**self.parser.select(settings, "Run"))
        trainer = TrainerSettings(**self.parser.select(settings, "Trainer"))
        options = LaunchSettings(**self.parser.select(settings, "Launch"))
        launch = plan_processes(command, trainer, options, self.typed)
        typed = self.typed.started_by(launch.launcher, launch.num_nodes, launch.devices)
        if launch.starts_agent:
            starts_fresh = self._point.checkpoint is None
            batch_size = settings.get("batch_size") if starts_fresh else None
            check_shared_update(launch, run_settings.global_batch_size, batch_size)
            modules = {kind.__module__ for kind in (self.classes.recipe, self.classes.data_class)} - {"__main__"}
            from recipes.runner.agent import run_agent  # Imported here, since processes that train do not need it.

            run_agent(launch, sorted(modules), options.rendezvous_timeout, typed, self.after_loss, self.started_at)
            return None

        def settings_to_compare() -> dict[str, Any]:
            classes = (self.classes.recipe, self.classes.data_class)
            return fingerprint(config, classes) | {UPDATES_DONE: self._updates_done()}

        launch = join_run(launch, settings_to_compare, options, typed)
        if self._point.checkpoint and not self._point.given and interval is None:
            rank_zero_print(
                f"resuming from {relative_path(self._point.checkpoint)}, after {self._updates_done():,} updates"
            )
        checkpoint = self._point.checkpoint or settings["ckpt"]
        if checkpoint:
            note_unknown_settings(checkpoint, self.parser.flags)
        notes = f" ({reason})" if reason else ""
        if tuned and detect_machine(trainer.accelerator).kind == "cpu":
            notes += ", tuned allocator"
        try:
            experiment = build_experiment(
                command,
                settings,
                self.parser,
                self.classes,
                run=run_settings,
                trainer=trainer,
                config=config,
                launch=launch,
                point=self._point,
                typed=typed,
                inputs=inputs,
                notes=notes,
            )
            return run_command(experiment, self.started_at, interval)
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            # torch's first line names the module only; the second has the first tensor that differs.
            reason = str(error).splitlines()[1].strip()
            raise UserError(f"{checkpoint} holds another network than this one: {reason[:200]}") from error
