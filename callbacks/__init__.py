"""Callbacks for any Lightning Trainer and any LightningModule. Names are imported when they are used."""

from lazy_loader import attach_stub

from callbacks.lib.shadowing import check_not_shadowed

check_not_shadowed("datamodules")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
