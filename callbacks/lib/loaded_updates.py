"""The updates that training loaders give, and their positions; beside `lightning_internals` private names."""

import copy
from typing import Any

import lightning.pytorch as pl

from callbacks.lib.updates import flattened
from datamodules.errors import UserError
from datamodules.loading.resumable import ResumableLoader
from datamodules.loading.sampling import Division
from datamodules.loading.updates import Update, join_updates


class LoadedUpdates:
    """Makes an `Update` of what a Trainer's training loaders yield, whichever these are.

    Args:
        trainer: its epoch loop is an `UpdateLoop`.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer: Any = trainer
        self.iterates_anew = False
        """Whether loaders without a position are iterated over again in the epoch in which a run resumes."""
        self.look_at(None)

    def look_at(self, loader: Any) -> None:
        """Keep what is asked of the training loader in each update."""
        loaders = [] if loader is None else flattened(loader)
        numbered = [each for each in loaders if hasattr(each, "first_number")]
        self._has_numbers = bool(loaders) and len(numbered) == len(loaders)
        self._loader = numbered[0] if numbered else loader
        divisions = {getattr(each, "division", None) for each in loaders}
        self._joins_updates = any(getattr(each, "gives_updates", False) for each in loaders)
        # Several loaders together are one micro-batch, if they are dealt alike.
        self.division: Division | None = divisions.pop() if len(divisions) == 1 else None
        """How the ranks share the updates of an epoch; None where micro-batches have no numbers."""

    def first_number(self, batch_idx: int) -> int:
        """The number of this rank's first micro-batch in the update of that number of the epoch."""
        if self._has_numbers:
            loader: Any = self._loader
            return int(loader.first_number(batch_idx))
        number: int = batch_idx * self.trainer.world_size + self.trainer.global_rank
        return number

    def as_update(self, item: Any, batch_idx: int, number: int, world_size: int) -> Update[Any]:
        """The update behind an item of the loaders.

        Args:
            number: of this rank's first micro-batch.
        """
        if type(item) is Update:
            if item.count is None:
                # A loader that goes on within an epoch counts from where it goes on.
                item.numbers = range(number, number + len(item) * world_size, world_size)
            return item
        if self._joins_updates:
            return join_updates(item)
        if self.division is None or world_size == 1:
            return Update([item], [number], None)
        share = self.division.share(batch_idx, self.trainer.global_rank)
        return Update([item], [share.first], share.total, share.is_stand_in)

    def resume(self, data_fetcher: Any, progress: Any) -> None:
        """Go on within the epoch in which a run was saved.

        Args:
            progress: Lightning's counters of its updates.

        Raises:
            UserError: the loader stands elsewhere than the counters.
        """
        fit_loop = self.trainer.fit_loop
        if fit_loop._combined_loader_states_to_load:
            # These loaders were made before the checkpoint was restored, as where `configure_optimizers` asks for
            # ``estimated_stepping_batches`` (Lightning #20550).
            fit_loop._load_combined_loader_states()
            iter(data_fetcher)
        loader: Any = self.trainer.train_dataloader
        done = progress.current.ready
        # A loader that has given an epoch's last batch is at the start of the next.
        if not isinstance(loader, ResumableLoader) or progress.is_last_batch or loader.updates_done == done:
            return
        raise UserError(
            f"the run was saved within an epoch, after {done:,} updates, and with the devices and batches of now"
            f" {loader.updates_done:,} have those samples: add GradientAccumulation, which keeps the size of an update,"
            " or resume with those of before"
        )

    def begin_anew(self, data_fetcher: Any) -> None:
        """Iterate over the loaders again, where Lightning takes the iterator of its set-up, in the order of epoch 0."""
        if self.iterates_anew and self.trainer.current_epoch > 0:
            iter(data_fetcher)
        self.iterates_anew = False

    def keep_position(self, data_fetcher: Any) -> None:
        """Have checkpoints hold the position after this update: of a loader without a length the next one is loaded."""
        if data_fetcher.length is not None:
            return
        loaders = data_fetcher.combined_loader
        states = copy.deepcopy(type(loaders)._state_dicts(loaders))
        if states:
            loaders._state_dicts = lambda: states
