"""Updates from the items of any training loader, and the loaders' positions for checkpoints.

Like `lightning_internals`, this file uses private names of Lightning.
"""

import copy
from typing import Any

from callbacks.lib.training_loaders import update_loaders
from datamodules.errors import UserError
from datamodules.lightning import pl
from datamodules.loading.sampling import Division
from datamodules.loading.updates import Update, UpdateLoader, join_updates


class LoadedUpdates:
    """Converter from the items of a Trainer's training loaders, of any kind, to `Update` objects.

    Args:
        trainer: a Trainer whose epoch loop is an `UpdateLoop`.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer: Any = trainer
        self.members: list[UpdateLoader] = []
        """The wrapped training loaders."""
        self.restarts_iterators = False
        """Whether loaders without a position get new iterators in the epoch in which a run resumes."""
        self.inspect_loaders(None)

    def inspect_loaders(self, loaders: Any) -> None:
        """Read once per epoch the properties of the training loaders that each update needs."""
        self.members = update_loaders(loaders)
        divisions = {member.division for member in self.members}
        # The batches of several loaders form one micro-batch, which needs one division of the updates for all of them.
        self.division: Division | None = divisions.pop() if len(divisions) == 1 else None
        """Division of the epoch's updates among the ranks; None if micro-batches have no numbers."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the loaders which epoch begins."""
        for member in self.members:
            member.set_epoch(epoch)

    def first_number(self, batch_idx: int) -> int:
        """Return the number of this rank's first micro-batch in an update of the epoch."""
        return self.members[0].first_number(batch_idx)

    def as_update(self, item: Any, number: int, world_size: int) -> Update[Any]:
        """Return an item of the loaders as an `Update`.

        Args:
            number: number of this rank's first micro-batch in the epoch.
        """
        update = item if type(item) is Update else join_updates(item)
        if update.count is None:
            # A stateful loader that resumes within an epoch counts from its position, not from the epoch's start.
            update.numbers = range(number, number + len(update) * world_size, world_size)
        return update

    def resume(self, data_fetcher: Any, progress: Any) -> None:
        """Resume within an epoch: check that the loader's position agrees with Lightning's counters.

        Args:
            progress: Lightning's counters of the epoch's updates.

        Raises:
            UserError: the loader is at another update than the counters.
        """
        fit_loop = self.trainer.fit_loop
        if fit_loop._combined_loader_states_to_load:
            # Lightning restores positions only as it makes the loaders. If `configure_optimizers` reads
            # ``estimated_stepping_batches``, they are made before the checkpoint is restored (Lightning #20550).
            fit_loop._load_combined_loader_states()
            iter(data_fetcher)
        loader: Any = self.trainer.train_dataloader
        counted = progress.current.ready
        # After an epoch's last batch a loader is at the start of the next epoch, where the counters are not yet.
        if self.division is None or len(self.members) > 1 or progress.is_last_batch or loader.updates_done == counted:
            return
        raise UserError(
            f"the run was saved within an epoch, after {counted:,} updates, and with the devices and batches of now"
            f" {loader.updates_done:,} have those samples: add GradientAccumulation, which keeps the size of an update,"
            " or resume with those of before"
        )

    def restart_iterators(self, data_fetcher: Any) -> None:
        """Make new iterators of the loaders if `restarts_iterators` is set.

        In the first epoch after a resume Lightning uses the iterators of its set-up, whose order is that of epoch 0.
        """
        if self.restarts_iterators and self.trainer.current_epoch > 0:
            iter(data_fetcher)
        self.restarts_iterators = False

    def keep_position(self, data_fetcher: Any) -> None:
        """Copy the loaders' positions before the next item is prefetched, for the checkpoints of this update."""
        # Only of a loader without a length does Lightning fetch one item ahead, to find the epoch's last one.
        if data_fetcher.length is not None:
            return
        loaders = data_fetcher.combined_loader
        states = copy.deepcopy(type(loaders)._state_dicts(loaders))
        if states:
            loaders._state_dicts = lambda: states
