"""The base of our callbacks, which rejects a Trainer of the other package of Lightning."""

from typing_extensions import override

from datamodules.lightning import pl
from datamodules.lightning_package import check_package, package_of


class OneLightningCallback(pl.Callback):
    """Callback whose first hook ends a run in a Trainer of the other package, in one line."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_package(package_of(trainer), self)
        super().setup(trainer, pl_module, stage)
