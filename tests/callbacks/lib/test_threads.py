"""A run has one number of threads in all its processes, and one hash; or a line says which number the bits belong to.

No process has OMP_NUM_THREADS, as in a user's shell; Lightning's launcher sets cores // processes where it may.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib import threads as module
from callbacks.lib.threads import RunThreads, available_cores, set_threads, threads_of_program, threads_restored
from callbacks.seed_control import SeedControl
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

MORE = available_cores() + 1
"""Threads of which two processes together have more than cores, and which are nobody's default."""


class Images(pl.LightningModule):
    """A convolutional network, whose bits depend on the number of threads; `threads` are those of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.network = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3)),
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.threads.add(torch.get_num_threads())
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Trained(NamedTuple):
    """The threads of a training, those after it, the hash of its weights, and our lines."""

    threads: int
    after: int
    sha256: str
    lines: list[str]


def _program(
    world_size: int,
    number: int | None = None,
    variable: str | None = None,
    *,
    callback: str = "both",
    folder: Path | None = None,
    resumes: bool = False,
    epochs: int = 1,
) -> Trained:
    """A program with a Trainer, which may set a number of threads before it builds its callbacks."""
    monkeypatch = pytest.MonkeyPatch()
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        number = int(variable)  # OpenMP has read the variable when the fork server has started.
    if number is not None:
        torch.set_num_threads(number)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_recipes").addHandler(handler)
    torch.manual_seed(1)
    callbacks: list[pl.Callback] = []
    if callback in ("both", "SeedControl"):
        callbacks.append(SeedControl(1))
    if callback in ("both", "GradientAccumulation"):
        callbacks.append(GradientAccumulation(global_batch_size=32))
    if folder is not None:
        callbacks.append(ExactCheckpoint(folder, filename="epoch", save_top_k=1))
    module = Images()
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(64, 3, 20, 20, generator=generator), torch.randint(10, (64,), generator=generator)
    options = {"max_epochs": epochs, "use_distributed_sampler": True}
    trainer = quiet_trainer(*callbacks, world_size=world_size, **options)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
    trainer.fit(module, loader, ckpt_path=folder / "epoch.ckpt" if resumes and folder else None, weights_only=True)
    state = b"".join(value.detach().numpy().tobytes() for value in module.parameters())
    found = [line for line in lines if "thread" in line]
    (threads,) = module.threads
    return Trained(threads, torch.get_num_threads(), hashlib.sha256(state).hexdigest(), found)


def _trained(world_size: int, *args: Any, **options: Any) -> Trained:
    """The program on some processes, all of which have to agree."""
    ranks: list[Trained] = run_ranks(_program, world_size, world_size, *args, sets_threads=False, **options)
    assert len({(rank.threads, rank.after, rank.sha256) for rank in ranks}) == 1
    assert not any(rank.lines for rank in ranks[1:]), "rank 0 prints the line"
    return ranks[0]


def _noticed(number: int | None) -> int | None:
    if number is not None:
        torch.set_num_threads(number)
    return threads_of_program()


def test_a_number_set_to_the_default_counts_as_set() -> None:
    default = run_ranks(torch.get_num_threads, 1, sets_threads=False)[0]
    noticed = [run_ranks(_noticed, 1, number, sets_threads=False)[0] for number in (None, default, MORE)]
    assert noticed == [None, default, MORE]


def _noticed_after_a_run(number: int | None) -> int | None:
    if number is not None:
        torch.set_num_threads(number)
    with threads_restored():
        set_threads(MORE)
    return threads_of_program()


def test_a_default_restored_by_a_run_counts_as_not_set() -> None:
    noticed = [run_ranks(_noticed_after_a_run, 1, number, sets_threads=False)[0] for number in (None, 1)]
    assert noticed == [None, 1]


@pytest.mark.parametrize("callback", ["both", "SeedControl", "GradientAccumulation"])
def test_threads_that_the_program_has_set_hold_in_each_process(callback: str) -> None:
    one = _trained(1, MORE, callback=callback)
    two = _trained(2, MORE, callback=callback)
    assert (one.threads, two.threads, two.after) == (MORE, MORE, MORE)
    assert one.lines == two.lines == []
    if callback != "SeedControl":  # Alone, it makes no equal updates on two processes.
        assert one.sha256 == two.sha256


def test_a_number_in_the_environment_holds_in_each_process() -> None:
    one, two = (_trained(world_size, variable=str(MORE)) for world_size in (1, 2))
    assert one == two
    assert (two.threads, two.lines) == (MORE, [])


def test_the_default_of_several_processes_says_what_to_set() -> None:
    alone, two = _trained(1), _trained(2)
    assert alone.lines == []
    assert 2 * two.threads <= max(2, available_cores())
    (line,) = two.lines
    assert f"torch.set_num_threads({two.threads}) before the callbacks are built" in line
    assert _trained(1, two.threads).sha256 == two.sha256, "what the line says"
    assert _trained(1, MORE).sha256 != two.sha256, "the bits of this network depend on the threads"


def test_a_resume_on_other_devices_keeps_the_threads(tmp_path: Path) -> None:
    whole = _trained(1, MORE, epochs=2)
    _trained(1, MORE, folder=tmp_path)
    resumed = _trained(2, folder=tmp_path, resumes=True, epochs=2)
    assert (resumed.threads, resumed.sha256) == (MORE, whole.sha256)
    assert resumed.after < MORE, "the number of the checkpoint is that of the run only"
    (line,) = resumed.lines
    assert f"{MORE} threads in each process, as in the checkpoint, more than there are cores" in line
    assert f"torch.set_num_threads({resumed.after})" in line


def test_a_resume_with_other_threads_says_that_bits_may_differ(tmp_path: Path) -> None:
    _trained(1, MORE, folder=tmp_path)
    resumed = _trained(1, 1, folder=tmp_path, resumes=True, epochs=2)
    assert resumed.threads == 1
    expected = f"bits may differ from here on: 1 thread in each process, and {MORE} in the checkpoint; set {MORE}"
    assert expected in resumed.lines[0]


@pytest.mark.parametrize(("waited", "is_noted"), [(6.0, True), (4.0, False)])
def test_threads_that_wait_for_cores_are_noted_once(
    waited: float, is_noted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = iter([(1.0, 1.0), (2.0, 2.0), (11.0, 1.0 + waited), (99.0, 99.0)])
    monkeypatch.setattr(module, "core_seconds", lambda: next(seconds))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    run = RunThreads(quiet_trainer())
    run._begun = True
    run.report()
    for _ in range(3):  # After one second it is too early, and after ten it has looked.
        run.report_waits()
        run.report()
    notes = [record.getMessage() for record in caplog.records if "other programs use the cores" in record.getMessage()]
    assert len(notes) == is_noted
    if is_noted:
        assert (
            "waited for one in 38% of its time, and its 4 threads wait for each other; a run with threads=1" in notes[0]
        )
