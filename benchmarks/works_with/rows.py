"""What a client hands over, and what it is given."""

import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLES = 42
MICRO_BATCH = 4
GLOBAL_BATCH = 12
"""Three micro-batches, so that two processes have unequal numbers of them. The last update of an epoch is smaller."""
EPOCHS = 2


@dataclass(frozen=True)
class Row:
    """A training that is repeated on several numbers of processes.

    Args:
        train: function that trains the library's module as its user would.
        what: what is trained, in a few words.
        user: what the user types besides the callbacks.
        accumulate: how updates are formed: by "samples", "steps" (which are divided by the processes) or "nothing", as
            for a module that optimizes manually.
        unused: whether stock DDP needs `find_unused_parameters` for this module.
        whole: why an update in one batch is another update than in three micro-batches, if it is.
        count: function of a batch for `GradientAccumulation(count=...)`, which the user passes.
        stops: number of updates after which the run is stopped on one process, and on two; none without checkpoints.
    """

    train: Callable[["Run"], None]
    what: str
    user: str = ""
    accumulate: str = "samples"
    unused: bool = False
    whole: str = ""
    count: Callable[[Any], Any] | None = None
    stops: tuple[int, ...] = (2, 6)


@dataclass(frozen=True)
class Run:
    """Settings of one run, for the functions of the clients.

    Args:
        package: name of the package that the library imports as Lightning.
        row: training of the library.
        folder: where the run writes its checkpoint.
        processes: number of processes.
        rank: rank of this process.
        ours: whether our callbacks are used; otherwise stock Lightning.
        stop: update after which SIGTERM is sent to the last rank; 0 to train to the end.
        checkpoint: file to resume from.
        batch_size: size of a micro-batch.
        noise: whether the module uses dropout, BatchNorm and the like.
        updates: number of updates after which the run ends; None for two epochs.
        record: what the run ended with, filled in by it.
    """

    package: str
    row: Row
    folder: Path
    processes: int = 1
    rank: int = 0
    ours: bool = True
    stop: int = 0
    checkpoint: Path | None = None
    batch_size: int = MICRO_BATCH
    noise: bool = True
    updates: int | None = None
    record: dict[str, Any] = field(default_factory=dict)

    def callbacks(self) -> list[Any]:
        """Return our callbacks as a program lists them, and those that stop and record the run.

        Call it before the module is built: `SeedControl` seeds the initial weights.
        """
        observers = _observers(self)
        if not self.ours:
            importlib.import_module(self.package).seed_everything(1)
            return observers
        import callbacks

        accumulation: list[Any] = []
        if self.row.accumulate == "samples":
            accumulation = [callbacks.GradientAccumulation(global_batch_size=GLOBAL_BATCH, count=self.row.count)]
        if self.row.accumulate == "steps":
            steps = 2 * GLOBAL_BATCH // self.batch_size // self.processes
            accumulation = [callbacks.GradientAccumulation(steps=steps)]
        checkpoints: list[Any] = []
        if self.row.stops:
            exact = callbacks.ExactCheckpoint(self.folder, save_last=True)
            checkpoints = [exact, callbacks.CheckpointGuard(), callbacks.Preemption()]
        checks = [callbacks.RankConsistency(), callbacks.FiniteWeights(), callbacks.TrainLoss()]
        return [callbacks.SeedControl(seed=1), *accumulation, *checkpoints, *checks, *observers]

    def options(self, *without: str, **others: Any) -> dict[str, Any]:
        """Return arguments of the Trainer, besides `callbacks`.

        Args:
            *without: names that the library sets itself.
            **others: arguments to add.
        """
        options: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": self.processes,
            "max_epochs": EPOCHS,
            "max_steps": self.updates or -1,
            "logger": False,
            "enable_checkpointing": bool(self.row.stops),
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        if self.processes > 1:
            options["strategy"] = "ddp_find_unused_parameters_true" if self.row.unused else "ddp"
        options |= others
        return {name: value for name, value in options.items() if name not in without}

    def fit(self, module: Any, *loaders: Any, callbacks: list[Any], datamodule: Any = None, **options: Any) -> None:
        """Train in a plain Trainer."""
        trainer = importlib.import_module(self.package).Trainer(callbacks=callbacks, **self.options(**options))
        data: dict[str, Any] = {} if datamodule is None else {"datamodule": datamodule}
        trainer.fit(module, *loaders, ckpt_path=self.checkpoint, weights_only=False, **data)


def _observers(run: Run) -> list[Any]:
    """Return a callback that stops the run and one that records its end, for the package that the library imports."""
    base: Any = importlib.import_module(run.package).Callback

    class Stop(base):  # type: ignore[misc]
        updates = 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.updates += 1
            if self.updates == run.stop and trainer.global_rank == run.processes - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    class Record(base):  # type: ignore[misc]
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if run.updates == 1:
                gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
                run.record["gradient"] = [value for gradient in gradients for value in gradient.flatten().tolist()]

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            # Later, a library may load its best checkpoint.
            run.record.update(describe(trainer, pl_module))

    return [Stop(), Record()]


def describe(trainer: Any, module: Any) -> dict[str, Any]:
    """Return the SHA-256 of weights and buffers, the number of steps and the logged means."""
    import hashlib

    import torch

    digest = hashlib.sha256()
    # Buffers may differ between ranks, as running statistics of stock DDP do.
    parameters = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        if not isinstance(value, torch.Tensor):
            digest.update(repr(value).encode())
        elif value.numel():
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for value in module.parameters():
        parameters.update(value.detach().cpu().numpy().tobytes())
    metrics = {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if getattr(value, "numel", lambda: 1)() == 1
    }
    return {
        "sha256": digest.hexdigest(),
        "parameters": parameters.hexdigest(),
        "steps": trainer.global_step,
        "metrics": {name: value for name, value in metrics.items() if "second" not in name},
    }
