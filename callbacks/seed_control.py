"""Random numbers that a rerun, a resumed run and a run on another number of devices draw again.

Lightning gives every rank the same generator state, so that dropout masks are equal on all of them, and stores no
generator state in checkpoints. Here the state is an address: before each step the generators are seeded from
``(seed, epoch, number of the micro-batch in the epoch)``. Nothing has to be stored, nothing drawn in between can shift
what follows, and it does not matter which rank computes the micro-batch.
"""

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from typing_extensions import override

from callbacks.lib.hooks import refuse_dataloader_iter
from datamodules.errors import UserError
from datamodules.loading.randomness import derive_seed, derive_seed_at
from datamodules.notes import warn


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


@functools.cache
def _key_of_steps(seed: int) -> int:
    return derive_seed(seed, "step")


@functools.lru_cache(maxsize=4)  # A step is asked for twice: before its batch is loaded, and when it begins.
def micro_batch_seed(seed: int, epoch: int, number: int) -> int:
    """The seed from which `SeedControl` draws the noise of a micro-batch, for loops without a Trainer.

    Args:
        number: of the micro-batch in its epoch, counted over all ranks.
    """
    return derive_seed_at(_key_of_steps(seed), epoch, number)


def _calls_closure_once(optimizer: Any) -> bool:
    """Whether an optimiser is known to evaluate the loss once in a step."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def _set_environment(seed: int) -> Callable[[], None]:
    """Tells Lightning the seed for its `DistributedSampler` and to seed workers by rank; returns how to undo it."""
    settings = {"PL_GLOBAL_SEED": str(seed & 0xFFFFFFFF), "PL_SEED_WORKERS": "1"}
    before = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ.update(settings)

    def undo() -> None:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(before)

    return undo


class SeedControl(pl.Callback):
    """Makes random numbers a function of the seed and the place in the run: equal on a rerun and on other devices.

    - Constructing it seeds all generators: build it before the module and the initial weights repeat. It does so again
      before ``setup`` and ``configure_model``, alike on all ranks.
    - Each training step draws from (seed, epoch, number of the micro-batch in the epoch), for layers and functions of
      torch, NumPy and Python; on other numbers of devices, too, where the loader says the numbers of its micro-batches,
      as those of `datamodules` do. A closure that an optimiser calls again in the step draws the same numbers again.
    - Each evaluation step draws from (seed, loader, number of the batch over all ranks), and changes nothing of what
      training draws.
    - Before each epoch the generators are seeded alike on all ranks, for samplers; workers of a `DataLoader` get a seed
      for each epoch, rank and worker, unless they persist.

    Runs on: construction, `setup`, the starts of fit, training and epochs, the start and end of each batch, and around
    validation. What it set in the environment is put back in `teardown` and `on_exception`.

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
        self._closures_repeat = False
        self._undo: list[Callable[[], None]] = []
        self._seed_initial_weights()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_dataloader_iter(self, pl_module)
        self._device = trainer.strategy.root_device
        self._restore_settings()
        self._undo = [_set_environment(self.seed)]
        self._seed_initial_weights()

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seed("epoch", 0)  # A Trainer that has trained before still counts the epochs of then.

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        once = all(_calls_closure_once(optimizer) for optimizer in trainer.optimizers)
        self._closures_repeat = pl_module.automatic_optimization and not once
        loop: Any = trainer.fit_loop.epoch_loop
        start = loop.on_run_start

        def on_run_start(data_fetcher: Any) -> None:
            # Here the loader's iterator is made, and drawn from. The module's hook before may have drawn, too.
            resumed = trainer.fit_loop.restarted_mid_epoch
            # A loader that numbers its micro-batches draws no order from the generators.
            numbered = hasattr(trainer.train_dataloader, "micro_batch_number")
            (self.seed_between_steps if resumed or numbered else self.seed_epoch)(trainer)
            start(data_fetcher)

        loop.on_run_start = on_run_start
        self._undo.append(lambda: vars(loop).pop("on_run_start", None))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        seed_generators(self._seed_of_step(trainer, batch_idx), self._device)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._closures_repeat:
            seed_generators(self._seed_of_step(trainer, trainer.fit_loop.batch_idx), self._device)

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
            warn(
                f"warning: SeedControl found seed {saved} in the checkpoint and expected {self.seed}: what is drawn"
                f" from now on differs from the run that wrote it; pass seed={saved} to continue as that run"
            )

    def seed_epoch(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Seeds the generators as the start of the present epoch does, so that a loader repeats its order."""
        self._seed("epoch", trainer.current_epoch)

    def seed_between_steps(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Seeds the generators for loading and transferring the next batch, whatever was drawn before."""
        seed_generators(self._seed_of_step(trainer, trainer.fit_loop.batch_idx + 1) ^ 1, self._device)

    on_sanity_check_end = on_train_epoch_start = seed_epoch
    on_train_batch_end = on_validation_end = seed_between_steps

    def _seed(self, *address: int | str) -> None:
        seed_generators(derive_seed(self.seed, *address), self._device)

    def _seed_of_step(self, trainer: pl.Trainer, batch_idx: int) -> int:
        loader: Any = trainer.train_dataloader
        if hasattr(loader, "micro_batch_number"):  # Of `datamodules`: the same on any number of ranks.
            number = loader.micro_batch_number(batch_idx)
        else:  # Others are taken to deal one batch to each rank in turn.
            number = batch_idx * trainer.world_size + trainer.global_rank
        return micro_batch_seed(self.seed, trainer.current_epoch, number)

    def _seed_initial_weights(self) -> None:
        seed_generators(self.seed)
        torch.manual_seed(self.seed)

    def _restore_settings(self, *args: Any, **kwargs: Any) -> None:
        while self._undo:
            self._undo.pop()()

    on_exception = teardown = _restore_settings
