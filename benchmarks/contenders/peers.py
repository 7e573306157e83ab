"""Runs the same training in other libraries, as far as they are installed."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.loops import LR, Job, Laps, gpu_search, loop_with
from benchmarks.harness.terminal import unread_terminal

__all__ = ["absent_peers", "peer_loops"]


def accelerate_loop(job: Job) -> Laps:
    """Train with Accelerate's model, optimizer and backward."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if job.precision == "bf16-mixed" else "no")
    model = job.build()
    model, optimizer = accelerator.prepare(model, job.optimizer(model))
    return loop_with(accelerator.backward, model, optimizer, job, as_lightning=False)


def ignite_loop(job: Job, bar: bool = False) -> Laps:
    """Train with ignite's engine, optionally with its progress bar and running average."""
    from ignite.engine import Engine, Events
    from ignite.handlers import ProgressBar
    from ignite.metrics import RunningAverage

    model = job.build()
    laps = job.laps(job.settling)
    optimizer = job.optimizer(model)

    def step(engine: Any, batch: tuple[Tensor, Tensor]) -> float | None:
        with job.autocast():
            loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item() if bar else None

    engine = Engine(step)
    if bar:
        RunningAverage(output_transform=lambda loss: loss).attach(engine, "loss")
        ProgressBar().attach(engine, ["loss"])
    engine.add_event_handler(Events.ITERATION_COMPLETED, laps.end_step)
    with gpu_search(as_lightning=False), unread_terminal() if bar else nullcontext():
        engine.run(job, max_epochs=1, epoch_length=job.steps)
    return laps


def fastai_loop(job: Job) -> Laps:
    """Train with fastai's Learner, with its running averages and without a progress bar."""
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    laps = job.laps(job.settling)

    class Ends(Callback):  # type: ignore[misc]
        def after_batch(self) -> None:
            laps.end_step()

    model = job.build()
    learner = Learner(
        DataLoaders(job, [], device="cpu"),
        model,
        loss_func=F.cross_entropy,
        opt_func=lambda *_, **__: OptimWrapper(opt=job.optimizer(model)),
        cbs=[Ends()],
    )
    with gpu_search(as_lightning=False), job.autocast(), learner.no_logging():
        learner.fit(1, lr=LR)
    return laps


_PEERS: dict[str, tuple[str, Callable[[Job], Laps]]] = {
    "Accelerate": ("accelerate", accelerate_loop),
    "ignite": ("ignite", ignite_loop),
    "ignite, bar and running average": ("ignite", partial(ignite_loop, bar=True)),
    "fastai": ("fastai", fastai_loop),
}


def peer_loops() -> dict[str, Callable[[Job], Laps]]:
    """Return the loops of the installed libraries, by name."""
    return {name: loop for name, (package, loop) in _PEERS.items() if find_spec(package)}


def absent_peers() -> list[str]:
    """Return the names of the libraries that are not installed."""
    return [name for name, (package, _) in _PEERS.items() if not find_spec(package) and "," not in name]
