"""Record of a run, resolved from a request in one process, which passes it to all other processes.

`Resolver` finds the checkpoint to resume from and merges the settings, which are one mapping throughout:
``defaults | checkpoint | files | typed``, merged by `merge`.

Tested in `tests/recipes/runner/test_build.py`.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, flag_of, spelled
from recipes.runner.command import Command
from recipes.runner.errors import relative_path
from recipes.runner.flags import (
    SCORING,
    FlagParser,
    Request,
    RunClasses,
    changeable_parameters,
    check_request,
    marks_of,
)
from recipes.runner.folder import ResumePoint, find_resume_point, resume_in, settle_folder
from recipes.runner.launch import LaunchSettings
from recipes.runner.machine import resolve_precision
from recipes.runner.saved_run import SavedRun, note_unknown_settings, read_run, readable_checkpoints
from recipes.runner.settings import (
    RunSettings,
    TrainerSettings,
    as_plain,
    describe_differences,
    drop_epoch_limit,
    is_auto,
    merge,
    same_setting,
)
from recipes.runner.variables import started_by_launcher
from recipes.runner.verify import Interval, find_interval
from recipes.weights import read_settings_beside

_SEEDS = 1_000_000_000
"""The number of seeds for a random draw; each seed is short enough to be typed."""


@dataclass(frozen=True)
class RunSpec:
    """Record of a run in plain values: resolved in one process, and equal on all ranks.

    Args:
        command: fit, validate, test, predict or export.
        recipe: the arguments of the recipe; None and "auto" are completed from the data.
        data: the arguments of the data module.
        run: the settings of the run, with the resolved precision.
        trainer: the settings of the Trainer, with the requested devices.
        config: the saved settings, which define the experiment.
        auto_settings: the settings that the first command of the run has left to the run.
        point: the folder and the checkpoint from which the run starts or resumes.
        interval: the part of a run that verify trains again.
        notes: notes on the precision and a drawn seed, for the run's first line.
    """

    command: str
    recipe: dict[str, Any]
    data: dict[str, Any]
    run: RunSettings
    trainer: TrainerSettings
    config: dict[str, Any]
    auto_settings: tuple[str, ...]
    point: ResumePoint
    interval: Interval | None = None
    notes: str = ""

    @property
    def saved(self) -> SavedRun | None:
        """The settings and the progress in the checkpoint from which the run resumes."""
        return self.point.saved

    @property
    def updates_done(self) -> int:
        """Number of updates in the checkpoint from which the run resumes."""
        return self.saved.updates if self.saved else 0


class Resolver:
    """Resolver of the runs of a command line, or of `recipes.fit`.

    Args:
        classes: the classes of recipe and data module.
        typed: the user's command, for commands in messages.
    """

    def __init__(self, classes: RunClasses, typed: Command) -> None:
        self.classes = classes
        self.typed = typed
        self.parser: FlagParser = classes.parser(typed.program)
        self.flags: frozenset[str] = frozenset() if typed.in_program else frozenset(self.parser.flags)
        """The settings that messages spell as flags."""
        self._marks = marks_of(self.parser)

    def with_interval(self, request: Request) -> Request:
        """Return the request with the part of a run that verify trains again; other requests are unchanged.

        Raises:
            UserError: no part of the run can be trained again.
        """
        return replace(request, interval=self._find_interval(request)) if request.command == "verify" else request

    def processes(self, request: Request) -> tuple[TrainerSettings, LaunchSettings]:
        """Return the settings that determine the processes of a command; a checkpoint does not change these.

        Raises:
            UserError: the command does not use one of its settings, or lacks one.
        """
        if request.interval:
            settings = self._settings_of_interval(request, request.interval)
        else:
            settings = self._merge(request)
            check_request(request, settings, self.classes)
        return TrainerSettings(**self.parser.select(settings, "Trainer")), LaunchSettings(
            **self.parser.select(settings, "Launch")
        )

    def resolve(self, request: Request, before: RunSpec | None = None) -> RunSpec:
        """Resolve a run.

        Args:
            before: the record of the first start, if an agent restarts the processes; the run continues in its folder.

        Raises:
            UserError: a setting, a checkpoint or a combination of them is rejected.
        """
        if request.interval:
            return self._spec_of_interval(request, request.interval)
        command = request.command
        given = request.given.settings
        settings = self._merge(request)
        point = ResumePoint()
        if command == "fit":
            point = self._find_resume_point(settings, given, before)
        saved = point.saved
        if settings["ckpt"]:
            saved = read_run(settings["ckpt"])
        if saved:
            self._check_recipe(saved)
            # The settings of the checkpoint replace the defaults, so the command needs no settings.
            settings = self._merge(request, saved.config, saved.auto_settings if point.saved else None)
            note_unknown_settings(saved, self.parser.flags)
            if point.saved and before is None:
                self._check_experiment(saved, settings)
                if point.given:
                    _reject_finished(saved, settings)
        elif command in SCORING:
            # All tensors of a file of weights have to match.
            beside = read_settings_beside(settings["weights"]) | {"weights_skip": None, "weights_classes": None}
            settings = self._merge(request, beside)
        self.parser.check_required(settings, given)
        if command == "fit":
            self.parser.import_optimizer(settings, given)
        return self._spec(command, settings, request, point, before=before)

    def in_folder(self, spec: RunSpec) -> RunSpec:
        """Make the run's folder, and return the record with it; a trial and other commands have no folder."""
        if spec.command != "fit" or spec.interval or spec.trainer.fast_dev_run or spec.point.finished:
            return spec
        parent = Path(spec.run.run_dir) / self.classes.recipe.title
        return replace(spec, point=settle_folder(parent, spec.run.name, spec.point))

    def _spec(
        self,
        command: str,
        settings: dict[str, Any],
        request: Request,
        point: ResumePoint,
        interval: Interval | None = None,
        before: RunSpec | None = None,
    ) -> RunSpec:
        if command == "predict":
            settings["devices"] = 1
        settings["precision"], reason = resolve_precision(settings["precision"], settings["accelerator"])
        notes = f" ({reason})" if reason else ""
        open_settings = tuple(name for name, value in self._config(settings).items() if is_auto(value))
        if settings["seed"] == "random":
            settings["seed"] = before.config["seed"] if before else secrets.randbelow(_SEEDS)
            notes += f", seed {settings['seed']} (drawn)"
        config = self._config(settings)
        # The argument of verify is a folder.
        inputs = () if interval else request.given.inputs
        auto_settings = point.saved.auto_settings if point.saved else None
        if auto_settings is None:
            auto_settings = open_settings
        return RunSpec(
            command=command,
            recipe=self.parser.select(settings, "Recipe"),
            data=self.classes.with_inputs(self.parser.select(settings, "Data"), inputs),
            # These constructors check ranges: a wrong setting is rejected before a process starts.
            run=RunSettings(**self.parser.select(settings, "Run")),
            trainer=TrainerSettings(**self.parser.select(settings, "Trainer")),
            config=config,
            auto_settings=tuple(auto_settings),
            point=point,
            interval=interval,
            notes=notes,
        )

    def _merge(
        self,
        request: Request,
        saved: Mapping[str, Any] | None = None,
        auto_settings: Sequence[str] | None = None,
        keeps: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Merge the settings of a request with saved settings; see `merge`."""
        given = request.given.settings
        defaults = self.parser.defaults()
        if request.command == "fit":
            defaults = drop_epoch_limit(defaults, given)
        if saved is not None:
            saved = self.parser.read(saved, "the saved settings")
        return merge(self._marks, defaults, given, saved, auto_settings, keeps, request.given.typed)

    def _config(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings to save, which define the experiment."""
        return {name: as_plain(value) for name, value in settings.items() if name not in self._marks.transient}

    def _find_resume_point(
        self, settings: Mapping[str, Any], given: Mapping[str, Any], before: RunSpec | None
    ) -> ResumePoint:
        if before and before.point.folder:
            point = resume_in(Path(before.point.folder), given)
            return replace(point, made=before.point.made) if point.checkpoint else before.point
        name = settings["name"]
        if name is not None and Path(name).name != name:
            raise UserError(
                f"{spelled('name', name)} is not the name of a folder; pass {spelled('run_dir')} for another place"
            )
        resume = settings["resume"]
        if settings["fast_dev_run"] or settings["enable_checkpointing"] is False:
            resume = "none" if resume in (None, "auto") else resume
        parent = Path(settings["run_dir"]) / self.classes.recipe.title
        return find_resume_point(resume, name, parent, self._config(settings), given, self._marks.changeable)

    def _check_recipe(self, saved: SavedRun) -> None:
        """Reject a checkpoint of another recipe."""
        recipe = self.classes.recipe
        if not recipe.owns(saved.recipes):
            raise UserError(
                f"{relative_path(saved.path)} is a checkpoint of the recipe {saved.recipes[0]}, and this is"
                f" {recipe.title}; run that recipe, or pass a checkpoint of {recipe.title}"
            )

    def _check_experiment(self, saved: SavedRun, settings: Mapping[str, Any]) -> None:
        """Reject settings that contradict the experiment to resume."""
        config = self._config(settings)
        # A different number of threads changes only the rounding, like the precision, and a line of the run reports it.
        changeable = self._marks.changeable | {"threads"}
        changeable |= {name for name in self._marks.null_disables if config[name] is None}
        differences = describe_differences(saved.config, config, changeable, saved.auto_settings)
        if differences:
            raise UserError(
                f"{relative_path(saved.path)} is of another experiment: {'; '.join(differences)}; leave these out, or"
                f" start fresh: pass another {spelled('name')}, and {spelled('weights', 'FILE')} for a warm start"
            )

    def _spec_of_interval(self, request: Request, interval: Interval) -> RunSpec:
        """Resolve the training of an interval."""
        settings = self._settings_of_interval(request, interval)
        self.parser.import_optimizer(settings, request.given.settings)
        settings["max_time"] = None  # A slower machine must not end before the end of the interval.
        begin = interval.begin
        point = ResumePoint(checkpoint=str(begin.path), saved=begin) if begin else ResumePoint()
        return self._spec("fit", settings, request, point, interval)

    def _find_interval(self, request: Request) -> Interval:
        """Return the part of a run that verify trains again."""
        recipe = self.classes.recipe
        folder = request.folder
        if folder is None:
            raise UserError(f"verify needs the folder of a run; pass verify runs/{recipe.title}/NAME")
        interval = find_interval(folder, readable_checkpoints(folder / "checkpoints"))
        if interval is None:
            raise UserError(
                f"no part of {relative_path(folder)} can be trained again: it was resumed from elsewhere, and no"
                " checkpoint from before one of its recorded saves is left"
            )
        if not recipe.owns([interval.recipe]):
            raise UserError(
                f"{relative_path(folder)} is a run of the recipe {interval.recipe}, and this is {recipe.title}:"
                " pass it to that recipe's command"
            )
        return interval

    def _settings_of_interval(self, request: Request, interval: Interval) -> dict[str, Any]:
        """Return the settings of an interval's training; the default number of devices is the run's."""
        given = request.given.settings
        may_differ = self._marks.machine_only | {"enable_progress_bar"} | changeable_parameters(self.classes)
        compared = [name for name in given if name not in self._marks.transient | may_differ]
        changed = [name for name in compared if not same_setting(name, interval.config.get(name), given[name])]
        if changed:
            raise UserError(f"verify trains with the settings of the run: leave out {', '.join(map(flag_of, changed))}")
        user_chose_devices = "devices" in given or started_by_launcher(os.environ)
        split = {}
        if not user_chose_devices:
            split = {name: interval.environment.get(name) for name in ("devices", "num_nodes")}
        keeps = ("accelerator", "strategy", *split)
        settings = self._merge(request, {**interval.config, **split}, keeps=keeps)
        check_request(request, settings, self.classes)
        return settings


def _reject_finished(saved: SavedRun, settings: Mapping[str, Any]) -> None:
    """Reject a resume from a given checkpoint if its run has finished."""
    if saved.is_finished(settings["max_epochs"], settings["max_steps"]):
        length = "max_steps" if settings["max_epochs"] == -1 else "max_epochs"
        trained = saved.updates if length == "max_steps" else saved.epochs
        raise UserError(
            f"this run has finished its {saved.epochs} epochs and {saved.updates:,} updates; pass"
            f" {spelled(length, 2 * max(1, trained))} to train longer"
        )
