"""Random numbers that a rerun and a resumed run draw again, and that differ between ranks.

Lightning gives every rank the same generator state, so that dropout masks are equal on all of them, and stores no
generator state in checkpoints. Here the state is an address: before each step the generators are seeded from
``(seed, rank, update, micro-batch)``. Nothing has to be stored, and nothing drawn in between can shift what follows.
Layers of `stateless_dropout` draw by sample, whatever the rank.
"""

import os
import random
import secrets
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from callbacks.lib.batch_positions import batch_positions, refuse_dataloader_iter
from callbacks.lib.idle_hooks import drop_idle_hooks, restore_hooks
from callbacks.lib.sample_noise import begin_noise, end_noise, number_layers, repeat_noise, sample_keys
from datamodules.errors import UserError
from datamodules.loading.randomness import derive_seed, derive_seed_at

__all__ = ["SeedControl", "draw_seed", "seed_generators"]


def draw_seed() -> int:
    """A seed of 32 bits from the system's source of random numbers."""
    return secrets.randbits(32)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seeds the global generators of Python, NumPy, torch and one accelerator, in about 8 microseconds.

    Example:
        >>> seed_generators(5)
        >>> first = torch.rand(2)
        >>> seed_generators(5)
        >>> bool((first == torch.rand(2)).all())
        True
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not `torch.manual_seed`, which takes 100 microseconds, since it asks for every kind of device that there might be.
    # A CUDA generator's state lives on the host.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _set_environment(seed: int) -> Callable[[], None]:
    """Tells Lightning the seed for its `DistributedSampler` and to seed workers by rank; returns how to undo it."""
    settings = {"PL_GLOBAL_SEED": str(seed & 0xFFFFFFFF), "PL_SEED_WORKERS": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)

    def undo() -> None:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return undo


class SeedControl(pl.Callback):
    """Makes random numbers a function of the seed and the place in the run: equal on a rerun, different on each rank.

    - Constructing it seeds all generators, as ``torch.manual_seed(seed)`` does. Build it before the module and the
      initial weights repeat. It does so again before ``setup`` and ``configure_model``, alike on all ranks; and DDP
      sends rank 0's weights to every rank in any case.
    - Each training step draws from (seed, rank, update, micro-batch), the last counted within the epoch. What is
      drawn between two steps has its own address. So a rerun, or a resume at any point, draws the same numbers.
    - Layers of `stateless_dropout`, as in the networks of the recipes, draw from (seed, epoch, place of the sample in
      the epoch's order, layer) in training. So their masks are the same on any number of ranks, in micro-batches of
      any size and beside any padding. The loader has to tell the places: those of `datamodules` do, and they are known
      of one `DataLoader` with a batch size, on several ranks with torch's `DistributedSampler`. Otherwise a warning
      says so, and the layers draw as torch's. A closure that LBFGS calls again draws the same masks again.
    - Each evaluation step draws from (seed, loader, number of the batch over all ranks). Training after a validation
      draws what it would have drawn without it.
    - Before each epoch the generators are seeded alike on all ranks, so that samplers whose indices Lightning deals to
      the ranks agree on the order, whatever hooks have drawn; workers of a `DataLoader` get a seed for each epoch, rank
      and worker, unless they persist.

    It costs about 35 microseconds a step, 50 more where layers draw by sample, and never waits for the device.

    Three limits. A data set that draws from global generators depends on the number of workers. The order of a stock
    `DataLoader` is repeated on a resume with `ExactCheckpoint` only. Data that are addressed by sample (`datamodules`)
    have neither fault. In a batch transfer hook the first batch of an epoch draws alike on all ranks.

    Runs on: construction, `setup`, `on_fit_start`, `on_sanity_check_end`, `on_train_start`, `on_train_epoch_start`,
    `on_train_batch_start`, `on_after_backward`, `on_train_batch_end`, around validation, the start of each evaluation
    batch. What it set in the environment is put back in `teardown` and `on_exception`.

    Args:
        seed: 0 or greater, the same on all ranks.

    Raises:
        UserError: a negative seed.

    Example:
        >>> seeds = SeedControl(seed=1)  # before the module
        >>> model = torch.nn.Linear(2, 2)
        >>> trainer = pl.Trainer(callbacks=[seeds], logger=False, accelerator="cpu")
    """

    def __init__(self, seed: int = 1) -> None:
        if seed < 0:
            raise UserError(f"seed={seed} is negative: pass 0 or greater")
        self.seed = seed
        self._device = torch.device("cpu")
        self._steps = 0
        self._addresses_noise = False
        self._undo: list[Callable[[], None]] = []
        self._seed_initial_weights()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_dataloader_iter(self, pl_module)
        self._device = trainer.strategy.root_device
        self._restore_settings()
        self._undo = [_set_environment(self.seed), lambda: restore_hooks(self)]
        self._seed_initial_weights()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps = derive_seed(self.seed, "step", trainer.global_rank)
        self._seed("epoch", trainer.current_epoch)

    @override
    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seed("epoch", trainer.current_epoch)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._addresses_noise = number_layers(pl_module) > 0
        drop_idle_hooks(self, [] if self._addresses_noise else [SeedControl.on_after_backward])
        loop: Any = trainer.fit_loop.epoch_loop
        start = loop.on_run_start

        def on_run_start(data_fetcher: Any) -> None:
            # Here the loader's iterator is made, and drawn from. The module's hook before may have drawn, too.
            (self.seed_between_steps if trainer.fit_loop.restarted_mid_epoch else self.seed_epoch)(trainer)
            start(data_fetcher)

        loop.on_run_start = on_run_start
        self._undo.append(lambda: vars(loop).pop("on_run_start", None))

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seed_epoch(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        seed_generators(self._seed_of_step(trainer, batch_idx), self._device)
        if self._addresses_noise:
            self._address_noise(trainer, batch_idx)

    def _address_noise(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Let the layers of `stateless_dropout` draw by sample in this step."""
        positions = batch_positions(trainer.train_dataloader, batch_idx, trainer.global_rank, trainer.world_size)
        if positions is None:
            self._addresses_noise = False
            rank_zero_warn(
                "it is not known which samples a batch holds, so dropout depends on the number of devices and "
                "micro-batches; pass one loader of datamodules, or one DataLoader with a batch_size over a data set "
                "with a length, and leave its sampler to Lightning"
            )
            return
        places = torch.arange(positions.start, positions.stop, positions.step, device=self._device)
        begin_noise(sample_keys(self.seed, trainer.current_epoch, places))

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._addresses_noise and pl_module.automatic_optimization:
            # LBFGS calls its closure again, and evaluates the same function.
            repeat_noise()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        end_noise()
        self.seed_between_steps(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        end_noise()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seed_between_steps(trainer)

    def _on_evaluation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._seed("evaluate", dataloader_idx, batch_idx * trainer.world_size + trainer.global_rank)

    on_validation_batch_start = _on_evaluation_batch_start
    on_test_batch_start = _on_evaluation_batch_start
    on_predict_batch_start = _on_evaluation_batch_start

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (saved := state_dict["seed"]) != self.seed:
            rank_zero_warn(
                f"SeedControl found seed {saved} in the checkpoint and expected {self.seed}: what is drawn from now on "
                f"differs from the run that wrote it; pass seed={saved} to continue as that run"
            )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        end_noise()
        self._restore_settings()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        end_noise()
        self._restore_settings()

    def seed_epoch(self, trainer: pl.Trainer) -> None:
        """Seeds the generators as the start of the present epoch does, so that a loader repeats its order."""
        self._seed("epoch", trainer.current_epoch)

    def seed_between_steps(self, trainer: pl.Trainer) -> None:
        """Seeds the generators for loading and transferring the next batch, whatever was drawn before."""
        next_batch = trainer.fit_loop.epoch_loop.batch_idx + 1
        seed_generators(self._seed_of_step(trainer, next_batch) ^ 1, self._device)

    def _seed(self, *address: int | str) -> None:
        seed_generators(derive_seed(self.seed, *address), self._device)

    def _seed_of_step(self, trainer: pl.Trainer, batch_idx: int) -> int:
        return derive_seed_at(self._steps, trainer.global_step, batch_idx)

    def _seed_initial_weights(self) -> None:
        seed_generators(self.seed)
        torch.manual_seed(self.seed)

    def _restore_settings(self) -> None:
        while self._undo:
            self._undo.pop()()
