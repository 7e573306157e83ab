"""One command line for every recipe, ``run(MyRecipe, MyDataModule)``, and the same from Python, `fit`.

A run has these steps: plan the processes, join the other ranks, receive the record that one process has resolved, build
the run, and execute the command. A process that starts the other processes resolves the record itself, and passes it to
them.
"""

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from signal import SIGINT
from typing import Any, get_args

import torch.distributed as dist

from callbacks.lib.signals import SIGNALS, Preempted, ending_on_signals, requeue_on
from callbacks.lib.threads import threads_restored
from datamodules.contract import data_contract
from datamodules.errors import RunFailedError, UserError, first_line, spelled, spelling_as_flags, system_failure
from datamodules.lightning import Callback, MisconfigurationException, is_overridden, pl
from datamodules.lightning_package import check_package, lightning_package
from recipes.base import Recipe
from recipes.export import export
from recipes.registry import recipe_class
from recipes.runner.build import BuiltRun, as_user_errors, build_run
from recipes.runner.command import Command
from recipes.runner.errors import (
    configure_logging,
    difference_of_weights,
    error_lines,
    escape_output,
    exit_now,
    failures_reported,
    is_lost_connection,
    is_rank_zero,
    print_error,
    rank_of_process,
    rank_zero_print,
    relative_path,
    warnings_only,
)
from recipes.runner.flags import ParsedArguments, Request, RunClasses, read_request
from recipes.runner.folder import record_failure, removed_if_unused, requeue_after_loss
from recipes.runner.launch import Launch, check_shared_update, plan_processes
from recipes.runner.loggers import in_notebook
from recipes.runner.machine import detect_machine, stop_gpu_search, tune_allocator
from recipes.runner.report import RunResult, print_pairs, read_result
from recipes.runner.saved_run import process_age
from recipes.runner.spec import Resolver, RunSpec
from recipes.runner.start import program_name
from recipes.runner.training import evaluate, evaluate_each_sample_once, restoring, train, verify
from recipes.runner.variables import started_by_launcher, without_local_rank
from recipes.runner.verify import Interval
from recipes.runner.worker import (
    broadcast_from_rank_zero,
    check_files,
    end_with_torchrun,
    init_distributed,
    shut_down_distributed,
)

_NEEDS = {
    "fit": ("training_step", "train_dataloader"),
    "validate": ("validation_step", "val_dataloader"),
    "test": ("test_step", "test_dataloader"),
    "predict": ("predict_step", "predict_dataloader"),
}
"""The method of the recipe and the method of the data module that each command calls."""
_SETTINGS_OF_OTHER_COMMANDS = frozenset({"ckpt", "output", "format", "graph"})


def run_command(built: BuiltRun, started_at: float, interval: Interval | None = None) -> RunResult | None:
    """Execute a command.

    Args:
        started_at: `time.monotonic` at the start of the program.
        interval: the part of a run that verify trains again.

    Returns:
        The result of fit; None for other commands.
    """
    if built.spec.command == "export":
        _export(built)
        return None
    _check_parts(built)
    # Lightning's sampler repeats samples so that all ranks have equal numbers, and counts them twice
    # (Lightning-AI/pytorch-lightning#7929).
    if built.spec.trainer.options().get("use_distributed_sampler", True):
        evaluate_each_sample_once(built.data, built.launch.rank, built.launch.world_size)
    with as_user_errors(MisconfigurationException):
        if built.spec.command != "fit":
            evaluate(built, _NEEDS[built.spec.command][0])
            return None
        if interval is None:
            return train(built, started_at)
        with restoring(built.spec.point.checkpoint):
            verify(built, interval)
        return None


def _check_parts(built: BuiltRun) -> None:
    """Reject a command for which the recipe or the data module has no method."""
    command = built.spec.command
    step, loader = _NEEDS[command]
    for owner, name in ((built.recipe, step), (built.data, loader)):
        if not is_overridden(name, owner):
            raise UserError(f"{command} needs a method {name}, and {type(owner).__name__} has none")
    validates = built.validates and built.spec.trainer.limit_val_batches != 0
    if command == "fit" and built.spec.run.patience is not None and not validates:
        raise UserError(f"{spelled('patience')} counts validations, and this run has none; leave it out")


def _export(built: BuiltRun) -> None:
    run = built.spec.run
    exported = export(built.recipe, run.ckpt or "", run.format or "", run.output, run.graph)
    inputs = {f"input {name}": description for name, description in exported.inputs.items()}
    print_pairs({"written": relative_path(exported.path), **inputs, "checked": exported.check})


def run(
    recipe_class: type[Recipe],
    data_class: type[pl.LightningDataModule],
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    args: Sequence[str] | None = None,
) -> None:
    """Run the command line of a recipe and its data: fit, validate, test, predict, verify and export.

    Every parameter of the two constructors and of the run is a flag, and every other parameter of the Trainer is
    ``--trainer.NAME``. An error ends the process with a message in one line and a status: 2 if the run could not start,
    1 if it failed later, and 128 + the number of a signal: 130 for Ctrl-C, 138 for SIGUSR1, 143 for SIGTERM, 129 for a
    closed terminal.

    Several devices are processes that import the classes. A program that defines them itself calls `run` under
    ``if __name__ == "__main__":``.

    Args:
        recipe_class: the recipe to train.
        data_class: the data module to train on.
        callbacks: a function that makes your callbacks for the Trainer; it is called again for the scores after
            training.
        args: the command line; by default the arguments of the process.
    """
    escape_output()
    end_with_torchrun()
    # From the age of the process: its imports took seconds before this call.
    started_at = time.monotonic() - (process_age() if args is None else 0.0)
    typed = Command(program_name(), without_local_rank(sys.argv[1:], os.environ) if args is None else args)
    with _ended_in_one_line():
        invocation = Invocation(RunClasses(recipe_class, data_class, _MakeCallbacks(callbacks)), typed, started_at)
        failures = failures_reported(invocation.after_loss, invocation.after_error)
        with spelling_as_flags(invocation.resolver.flags), ending_on_signals(*SIGNALS), failures:
            request = read_request(invocation.resolver.parser, recipe_class, typed.args)
            if request:
                invocation.execute(request)
        shut_down_distributed()


@contextmanager
def _ended_in_one_line() -> Iterator[None]:
    """End this process with a message in one line, and with the status of its error."""
    try:
        with _signals_reported():
            yield
    except UserError as error:
        rank_text = "" if is_rank_zero() else f" rank {rank_of_process()}:"
        print_error(f"error:{rank_text} {error_lines(error)}")
        sys.exit(error.exit_status)
    except Exception as error:
        if not dist.is_initialized():
            raise
        if not is_lost_connection(error):
            traceback.print_exc()
        exit_now(1)  # A regular exit would wait for the ranks in the process group.


@contextmanager
def _signals_reported() -> Iterator[None]:
    """Print the signal that has ended this process outside of training."""
    try:
        yield
    except Preempted as stopped:
        rank_zero_print(f"\nended by {stopped.signal_name}")
        note = requeue_on(stopped.signum) if is_rank_zero() else ""
        if note:
            rank_zero_print(note)
        raise


@contextmanager
def _failures_of_system() -> Iterator[None]:
    """Report errors of the operating system in one line."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError, TypeError) as error:
        problem = system_failure(error)
        if problem:
            raise RunFailedError(problem) from error
        raise


@dataclass(frozen=True)
class Task:
    """Inputs of a process for a run, besides its launch and the record of the run.

    Args:
        classes: the classes of recipe and data module.
        typed: the user's command, for commands in messages.
        flags: the settings that messages spell as flags; empty for a call of `recipes.fit`.
        started_at: `time.monotonic` at the start of the program.
        timeout: seconds to wait for the other ranks.
        verbose: whether to print the messages of the command line; otherwise only warnings are printed.
        request: the user's request; None before it is read.
        spec: the record of the run, for a worker of our agent on the node of rank 0.
    """

    classes: RunClasses
    typed: Command
    flags: frozenset[str]
    started_at: float
    timeout: float
    verbose: bool = True
    request: Request | None = None
    spec: RunSpec | None = None

    def carry_out(
        self, launch: Launch, settle: Callable[[], RunSpec], received: Callable[[RunSpec], None] | None = None
    ) -> RunResult | None:
        """Join the other ranks, receive the record from rank 0, and execute the command.

        Args:
            settle: a function that returns the record of the run; it is called on rank 0 only.
            received: a function that is called with the record on each rank.

        Returns:
            The result of fit; None for other commands.
        """
        tuned = tune_allocator()
        stop_gpu_search()
        launch = init_distributed(launch, self.timeout, self.classes.both)
        spec = broadcast_from_rank_zero(settle)
        if received:
            received(spec)
        if spec.point.finished:
            return self.finished(spec)
        checkpoint = spec.point.checkpoint
        with removed_if_unused(spec.point):
            check_files(launch, spec.point.folder, checkpoint)
            if checkpoint and not spec.point.given and spec.interval is None:
                rank_zero_print(f"resuming from {relative_path(checkpoint)}, after {spec.updates_done:,} updates")
            elif spec.run.resume == "auto" and not checkpoint and spec.point.folder:
                rank_zero_print(f"nothing to resume in {relative_path(spec.point.folder)}: the run starts fresh")
            try:
                notes = ", tuned allocator" if tuned and detect_machine(spec.trainer.accelerator).kind == "cpu" else ""
                built = build_run(spec, self.classes, launch, self.typed, notes)
                return run_command(built, self.started_at, spec.interval)
            except RuntimeError as error:
                difference = difference_of_weights(error)
                if not difference:
                    raise
                checkpoint = checkpoint or spec.run.ckpt
                raise UserError(f"{checkpoint} holds another network than this one: {difference}") from error

    def carry_out_as_worker(self, launch: Launch, store_prefix: str, starts_again: bool) -> None:
        """Execute the run in a process that our agent has started.

        Args:
            launch: the launch of the agent.
            store_prefix: the prefix of this start's keys in the store of the agents.
            starts_again: whether this is a restart, which resumes in the run's folder.
        """
        escape_output()
        output = nullcontext() if self.verbose else warnings_only()
        settle = self._settled_again if starts_again else self._handed
        with _signals_reported(), output, spelling_as_flags(self.flags):
            with ending_on_signals(*SIGNALS), _failures_of_system():
                configure_logging()
                self.carry_out(launch.of_worker(os.environ, store_prefix), settle)
            shut_down_distributed()

    def pickled(self) -> bytes:
        """Return this task for another process.

        Raises:
            UserError: another process could not import a class or a function in it.
        """
        try:
            return pickle.dumps(self)
        except (AttributeError, TypeError, ImportError, pickle.PicklingError) as error:
            raise UserError(
                f"the run cannot be handed to other processes ({first_line(error)}): define classes and functions at"
                " the top level of a file, or train on one device"
            ) from error

    def _handed(self) -> RunSpec:
        assert self.spec is not None, "the agent of rank 0 hands over the record"
        return self.spec

    def _settled_again(self) -> RunSpec:
        assert self.request is not None, "the agent hands over the request"
        return Resolver(self.classes, self.typed).resolve(self.request, before=self._handed())

    def finished(self, spec: RunSpec) -> RunResult | None:
        """Print that a run has finished, and return its result to a program."""
        assert spec.point.folder is not None
        folder = Path(spec.point.folder)
        rank_zero_print(
            f"the run in {relative_path(folder)} has finished, and nothing was done; pass a larger"
            f" {spelled('max_epochs')} or {spelled('max_steps')} (or {spelled('patience')}, if it was stopped early)"
            " to train longer"
        )
        return read_result(folder, self.classes.recipe) if self.typed.in_program else None


class Invocation:
    """Call of a command line, or of `recipes.fit`.

    Args:
        classes: the classes of recipe and data module.
        typed: the user's command, for commands in messages.
        started_at: `time.monotonic` at the start of the program.
        verbose: whether to print the messages of the command line; otherwise only warnings are printed.
    """

    def __init__(self, classes: RunClasses, typed: Command, started_at: float, *, verbose: bool = True) -> None:
        self.resolver = Resolver(classes, typed)
        self._typed = typed
        self._task = Task(classes, typed, self.resolver.flags, started_at, 0.0, verbose)
        self._spec: RunSpec | None = None

    def execute(self, request: Request) -> RunResult | None:
        """Execute a command; report errors of the operating system in one line.

        Returns:
            The result of fit, in a process that has trained or has started the training processes; else None.
        """
        configure_logging()
        with _failures_of_system(), threads_restored():
            request = self.resolver.with_interval(request)
            trainer, options = self.resolver.processes(request)
            started = replace(self._typed, program=program_name()) if self._typed.in_program else self._typed
            launch = plan_processes(request.command, trainer, options, started)
            typed = self._typed.started_by(launch.launcher, launch.num_nodes, launch.devices)
            task = replace(self._task, typed=typed, timeout=options.rendezvous_timeout, request=request)
            if launch.starts_agent:
                return self._start_processes(request, launch, task)
            return task.carry_out(launch, partial(self._settle, request), self._receive)

    def after_loss(self) -> str:
        """Requeue the job after the loss of a process, and return the outcome in words."""
        spec = self._spec
        return requeue_after_loss(spec.point.folder if spec else None, spec.updates_done if spec else 0)

    def after_error(self, error: str) -> None:
        """Record for the other ranks that an error of the program has ended this rank, so that nothing is requeued."""
        record_failure(self._spec.point.folder if self._spec else None, rank_of_process(), error)

    def _settle(self, request: Request) -> RunSpec:
        return self.resolver.in_folder(self.resolver.resolve(request))

    def _receive(self, spec: RunSpec) -> None:
        self._spec = spec

    def _start_processes(self, request: Request, launch: Launch, task: Task) -> RunResult | None:
        """Resolve the run on node 0, and train in processes of this node."""
        from recipes.runner.agent import run_agent  # Imported here: processes that train do not need it.

        # On each node, so that a mistake is reported there immediately, not after a minute of waiting for node 0.
        spec = self.resolver.resolve(request)
        self._check_result(launch, spec)
        if launch.node_rank == 0:
            # The other nodes may not find the folder; they wait for processes of node 0 that report this.
            if spec.point.finished and launch.num_nodes == 1:
                return task.finished(spec)
            batch_size = spec.config.get("batch_size") if spec.saved is None else None
            check_shared_update(launch, spec.run.global_batch_size, batch_size)
            self._spec = self.resolver.in_folder(spec)

        with removed_if_unused(self._spec.point) if self._spec else nullcontext():
            run_agent(launch, replace(task, spec=self._spec), self.after_loss)
        if not self._typed.in_program:
            return None
        assert self._spec is not None
        assert self._spec.point.folder is not None
        return read_result(Path(self._spec.point.folder), task.classes.recipe)

    def _check_result(self, launch: Launch, spec: RunSpec) -> None:
        """Reject a call of `recipes.fit` with several processes that would have no result to return."""
        if self._typed.in_program and launch.num_nodes > 1:
            problem = "fit() starts the processes of one machine"
            to_type = "start the program by torchrun on each node"
            raise UserError(problem, setting="num_nodes", value=launch.num_nodes, to_type=to_type)
        if self._typed.in_program and (spec.trainer.fast_dev_run or spec.trainer.enable_checkpointing is False):
            setting = "fast_dev_run" if spec.trainer.fast_dev_run else spelled("enable_checkpointing", False)
            raise UserError(
                f"fit() reads the result of several processes from the run's folder, and with {setting}"
                f" there is none: pass {spelled('devices', 1)}"
            )


def _data_of(recipe: type[Recipe], data: Any) -> tuple[Any, dict[str, Any], Any]:
    """Return the meaning of `data`: a data module or its class, its arguments, and samples for it."""
    if isinstance(data, (pl.LightningDataModule, type)):
        return data, {}, None
    if recipe.data_class is None:
        raise UserError(f"{recipe.__name__} names no data module as its data_class; pass data=, a LightningDataModule")
    if data is None:
        return recipe.data_class, {}, None
    if isinstance(data, str | os.PathLike):
        named = signature(recipe.data_class).parameters.get("dataset")
        if named and data in get_args(named.annotation) and not Path(data).exists():
            raise UserError(f"data is a path, and {data!r} names a data set; pass {spelled('dataset', data)}")
        return recipe.data_class, {data_contract(recipe.data_class).path_parameter: os.fspath(data)}, None
    return recipe.data_class, {}, data


@dataclass(frozen=True)
class _MakeCallbacks:
    """Picklable function that makes the callbacks of a Trainer."""

    callbacks: Callback | Sequence[Callback] | Callable[[], Callback | Sequence[Callback]]

    def __call__(self) -> Sequence[Callback]:
        made = self.callbacks() if callable(self.callbacks) else self.callbacks
        made = [made] if isinstance(made, Callback) else made
        for callback in made:
            check_package(lightning_package(), callback)
            if isinstance(callback, type) and issubclass(callback, Callback):
                raise UserError(f"callbacks has the class {callback.__name__}; pass an object, {callback.__name__}()")
            if not isinstance(callback, Callback):
                raise UserError(f"callbacks has {callback!r}; expected objects of lightning.pytorch.Callback")
        return made


@contextmanager
def _one_run_of_a_program() -> Iterator[None]:
    """Convert an end by Ctrl-C to a KeyboardInterrupt, and restore the environment after the run."""
    variables = dict(os.environ)
    try:
        with ending_on_signals(*SIGNALS):
            yield
    except Preempted as stopped:
        if stopped.signum == SIGINT:
            raise KeyboardInterrupt from None
        raise
    except SystemExit as stopped:
        if isinstance(stopped.__context__, KeyboardInterrupt):  # Lightning converts a KeyboardInterrupt to an exit.
            raise KeyboardInterrupt from None
        raise
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def _call(recipe: str | type[Recipe], settings: Mapping[str, Any]) -> str:
    """Return the call of `fit`, for results.json."""
    name = repr(recipe) if isinstance(recipe, str) else recipe.__name__
    arguments = [f"{setting}={value!r}" for setting, value in settings.items()]
    return f"fit({', '.join([name, *arguments])})"


def fit(
    recipe: str | type[Recipe],
    data: Any = None,
    *,
    callbacks: Callback | Sequence[Callback] | Callable[[], Sequence[Callback]] = (),
    verbose: bool = True,
    **settings: Any,
) -> RunResult:
    """Train a recipe with the settings and guarantees of its command line, and return the best model.

    The run has a folder with checkpoints, curves and results, can be interrupted and resumed, and ends with the same
    weights as on the command line. Ctrl-C saves and raises KeyboardInterrupt.

    By default, one device trains. ``devices=N`` starts N processes on this machine, which import the classes: a program
    that defines them itself calls `fit` under ``if __name__ == "__main__":``. The result is read from the run's folder.
    A program that torchrun or Slurm starts trains on all devices of the job.

    Args:
        recipe: the name of a recipe, such as mnist, resnet or seq2seq, or a class of yours.
        data: a path; images and labels in memory, as in `MNISTDataModule.set_samples`, or a dict of such pairs for
            "train", "val" and "test"; a LightningDataModule or its class; or None for the data of the settings.
        callbacks: callbacks for the Trainer; or a function that makes them, for callbacks that must not see both
            training and test.
        verbose: whether to print the messages of the command line; otherwise only warnings are printed.
        settings: the parameters of the recipe, its data module, and the run, by the names of the flags, which
            ``python -m recipes.mnist --help-all`` explains. Other parameters of the Trainer go into a dict, as in
            ``trainer={"benchmark": True}``.

    Raises:
        UserError: a setting, the data or a checkpoint cannot be used.
        RunFailedError: the run failed after it had started.
        KeyboardInterrupt: Ctrl-C was pressed; the state has been saved.

    Example:
        >>> from datamodules import bundled_digits
        >>> options = {"max_epochs": 1, "verbose": False, "run_dir": getfixture("tmp_path")}
        >>> result = fit("mnist", data=bundled_digits(), **options)
        >>> result.model.training, result.checkpoint.name, sorted(result.scores)[:2]
        (False, 'best.ckpt', ['test/accuracy', 'test/accuracy_class_0'])
    """
    for value in (data, callbacks):
        check_package(lightning_package(), value)
    recipe_type = recipe_class(recipe) if isinstance(recipe, str) else recipe
    if isinstance(recipe, Recipe):
        raise UserError(f"fit() builds the recipe: pass the class, {type(recipe).__name__}, and its settings by name")
    if not (isinstance(recipe_type, type) and issubclass(recipe_type, Recipe)):
        kind = getattr(recipe, "__name__", type(recipe).__name__)
        raise UserError(
            f"fit() takes the name of a recipe or a subclass of recipes.Recipe, and was given {kind}; train any other"
            " LightningModule by a Trainer with the callbacks of this library"
        )
    data_source, arguments, samples = _data_of(recipe_type, data)
    if isinstance(data_source, type) and not issubclass(data_source, pl.LightningDataModule):
        raise UserError(f"data={data_source.__name__}: expected a LightningDataModule or its class, a path, or samples")
    unsupported = _SETTINGS_OF_OTHER_COMMANDS & settings.keys()
    if unsupported:
        raise UserError(f"fit() takes no {', '.join(sorted(unsupported))}: other commands of a recipe do")
    if "devices" not in settings and not started_by_launcher(os.environ):
        arguments["devices"] = 1
    make_callbacks = _MakeCallbacks(callbacks)
    program = f"python -m recipes.{recipe}" if isinstance(recipe, str) else "python PROGRAM.py"
    typed = Command(program, call=_call(recipe, settings))
    with nullcontext() if verbose else warnings_only():
        classes = RunClasses(recipe_type, data_source, make_callbacks, samples)
        invocation = Invocation(classes, typed, time.monotonic(), verbose=verbose)
        request = Request(
            "fit", ParsedArguments(invocation.resolver.parser.read_arguments({**arguments, **settings}), {})
        )
        # A notebook separates standard error from standard output.
        stream = redirect_stderr(sys.stdout) if in_notebook() else nullcontext()
        with stream, _one_run_of_a_program(), failures_reported(invocation.after_loss, invocation.after_error):
            result = invocation.execute(request)
    assert result is not None
    result.model.cpu().eval()
    return result
