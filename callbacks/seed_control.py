"""Random numbers that are equal in a rerun, a resumed run and a run on another number of devices.

Lightning gives every rank the same generator state, so dropout masks are equal on all ranks (#16166), and stores no
generator state in checkpoints. `SeedControl` seeds the generators before each micro-batch from ``(seed, epoch, number
of the micro-batch in the epoch)``. So checkpoints need no generator state, numbers drawn elsewhere change nothing, and
any rank may compute the micro-batch.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from callbacks.lib.lightning_internals import OneLightningCallback
from callbacks.lib.results import share_evaluations
from callbacks.lib.threads import ThreadsBeforeLaunch
from callbacks.lib.update_step import UpdateStep
from callbacks.update_loop import install_update_loop
from datamodules.errors import spelled
from datamodules.lightning import pl
from datamodules.loading.randomness import derive_seed, derive_seed_at
from datamodules.loading.randomness import seed_generators as seed_generators
from datamodules.notes import warn
from datamodules.ranges import Range, check_ranges


@functools.cache
def _key(seed: int, purpose: str) -> int:
    return derive_seed(seed, purpose)


@functools.lru_cache(maxsize=4)  # Each seed is used twice: to load a batch, and to compute it.
def micro_batch_seed(seed: int, epoch: int, number: int) -> int:
    """Return the seed with which `SeedControl` seeds a micro-batch, for loops without a Trainer.

    Args:
        number: number of the micro-batch in its epoch, counted over all ranks.
    """
    return derive_seed_at(_key(seed, "step"), epoch, number)


def _set_environment(seed: int) -> Callable[[], None]:
    """Set the variables by which Lightning seeds its `DistributedSampler` and workers; return a function to undo it."""
    settings = {"PL_GLOBAL_SEED": str(seed & 0xFFFFFFFF), "PL_SEED_WORKERS": "1"}
    previous_settings = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ.update(settings)

    def undo() -> None:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(previous_settings)

    return undo


def _seed_updates(step: UpdateStep, seeds: "SeedControl") -> Callable[[], None]:
    """Let `UpdateLoop` seed the updates; return a function to undo it for a later fit without the callback."""
    step.seeds = seeds

    def undo() -> None:
        step.seeds = None

    return undo


class SeedControl(OneLightningCallback):
    """Callback that makes random numbers a function of the seed and the position in the run.

    So they are equal in a rerun and on other devices.

    - The constructor seeds all generators. Build the callback before the module, and the initial weights repeat. It
      seeds them again in ``setup``, before ``configure_model``, with the same seed on all ranks.
    - The seed of each micro-batch is a function of (seed, epoch, number of the micro-batch in the epoch). It holds for
      loading it, for moving it to the device and for computing it, and for the generators of torch, NumPy and Python.
      The numbers are the same on any number of devices with a `DataLoader` over a data set with a length and a sampler
      of torch, and with the loaders of `datamodules`. If an optimizer calls its closure again, the same numbers are
      drawn again.
    - The seed of what follows the gradients is a function of (seed, epoch, number of the update), equal on all ranks.
      It holds for hooks that change gradients, optimizers that are not torch's, and the ends of updates and epochs.
    - The seed of each evaluation batch is a function of (seed, loader, number of the batch over all ranks). Evaluation
      does not change the numbers of training.
    - At the start of each epoch the generators have the same seed on all ranks, for samplers of loaders without
      numbers. The workers of such loaders get a seed for each epoch, rank and worker, unless they persist.

    Runs on: construction, `setup`, the starts of fit and epochs, the end of epochs, the start of each evaluation batch,
    and before `UpdateLoop` loads and computes a micro-batch. It seeds transfers, hooks and optimizers only where code
    runs that may draw: neither torch's, nor Lightning's, nor of this project. `teardown` and `on_exception` restore the
    environment.

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
        check_ranges(seed=(seed, Range(0, 2**63 - 1, whole=True)))
        self.seed = seed
        self._device = torch.device("cpu")
        self._threads = ThreadsBeforeLaunch()
        self._undo: list[Callable[[], None]] = []
        self._weights_are_older = False
        """Whether the module had its weights before the constructor has seeded them."""
        self._seed_initial_weights()
        self._before_module: torch.Tensor | None = torch.get_rng_state()
        """State of torch's generator after the seed; None once `setup` has compared it."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._device = trainer.strategy.root_device
        self._restore_settings()
        if stage == "fit":
            loop = install_update_loop(trainer)
            loop.threads.begin(self._threads)
            self._weights_are_older = self._nothing_was_drawn(pl_module)
            self._undo.append(_seed_updates(loop.step, self))
        else:
            share_evaluations(trainer)
        self._undo.append(_set_environment(self.seed))
        self._seed_initial_weights()

    def _nothing_was_drawn(self, pl_module: pl.LightningModule) -> bool:
        """Whether the module has weights, and nothing was drawn since the constructor has seeded them."""
        before = self._before_module
        self._before_module = None
        has_weights = any(parameter.requires_grad for parameter in pl_module.parameters())
        return before is not None and has_weights and torch.equal(before, torch.get_rng_state())

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in `setup`, where Lightning does not know yet that the run resumes: a checkpoint has the weights.
        if self._weights_are_older and trainer.ckpt_path is None:
            warn(
                f"note: nothing was drawn between SeedControl({self.seed}) and the fit, so that random initial weights"
                f" of {type(pl_module).__name__} do not repeat: build the callback before the module"
            )
        # Not the present epoch: in a second fit `current_epoch` is still the last epoch of the first.
        self._seed("epoch", 0)

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
        saved = state_dict["seed"]
        if saved != self.seed:
            warn(
                f"warning: SeedControl found seed {saved} in the checkpoint and expected {self.seed}: what is drawn"
                f" from now on differs from the run that wrote it; pass {spelled('seed', saved)} to continue as that"
                " run"
            )

    def seed_epoch(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Seed the generators as at the start of the present epoch, so that a loader repeats its order."""
        self._seed("epoch", trainer.current_epoch)

    def seed_iterator(self, trainer: pl.Trainer) -> None:
        """Seed the generators for the iterator of the training loader, which may draw the order of the epoch."""
        loop = trainer.fit_loop
        # A resumed epoch keeps the order that was drawn at its start, and a loader with numbers draws none.
        loaded = install_update_loop(trainer).loaded
        if loop.restarted_mid_epoch or loaded.division is not None:
            self.seed_loading(trainer, loaded.first_number(loop.batch_idx + 1))
        else:
            self.seed_epoch(trainer)

    # Loading, moving and computing a micro-batch have three seeds: equal noise of samples and layers would correlate.

    def seed_loading(self, trainer: pl.Trainer, number: int) -> None:
        """Seed the generators for loading a micro-batch."""
        seed_generators(micro_batch_seed(self.seed, trainer.current_epoch, number) ^ 1, self._device)

    def seed_transfer(self, trainer: pl.Trainer, number: int) -> None:
        """Seed the generators for moving a micro-batch to the device, and for its `on_train_batch_start`."""
        seed_generators(micro_batch_seed(self.seed, trainer.current_epoch, number) ^ 2, self._device)

    def seed_micro_batch(self, trainer: pl.Trainer, number: int, use: int = 0) -> None:
        """Seed the generators for computing a micro-batch.

        Args:
            use: number of times that they were seeded for it before, as between two steps of a manual optimization.
        """
        seed = micro_batch_seed(self.seed, trainer.current_epoch, number)
        seed_generators(derive_seed_at(seed, use) if use else seed, self._device)

    def seed_update(self, trainer: pl.Trainer, purpose: str, *numbers: int) -> None:
        """Seed the generators on all ranks alike, for what an update does after its gradients are summed.

        Args:
            numbers: number of the update in the epoch, and how often its generators were seeded for the purpose.
        """
        seed_generators(derive_seed_at(_key(self.seed, purpose), trainer.current_epoch, *numbers), self._device)

    # The last batch, of training or of validation, was another on each rank, and with it the state of the generators.

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seed("epoch end", trainer.current_epoch)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seed("validation end", trainer.global_step)

    on_sanity_check_end = on_train_epoch_start = seed_epoch

    def _seed(self, *address: int | str) -> None:
        seed_generators(derive_seed(self.seed, *address), self._device)

    def _seed_initial_weights(self) -> None:
        seed_generators(self.seed)
        torch.manual_seed(self.seed)

    def _restore_settings(self, *args: Any, **kwargs: Any) -> None:
        while self._undo:
            self._undo.pop()()

    on_exception = teardown = _restore_settings
