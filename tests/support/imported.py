"""What the server of `tests.support.ranks` imports and finds out once, before it forks the processes of tests."""

import atexit
import gc
import logging
import os
from importlib import import_module

import tests.support.installed  # noqa: F401  Before Lightning.

_MODULES = """
lightning.pytorch torchmetrics pytest hypothesis psutil jinja2 torch.utils.tensorboard torch.utils.serialization
torch.distributed.algorithms.ddp_comm_hooks
recipes.runner.run recipes.runner.report recipes.mnist.recipe recipes.resnet.recipe recipes.seq2seq.recipe
datamodules.images.mnist
"""

atexit.register(os._exit, 0)  # A regular exit would take a second for clean-up, and print warnings.
# Collections during the imports would free nothing, and frozen objects stay on pages that all processes share.
gc.disable()
for _name in _MODULES.split():
    import_module(_name)
# A Trainer asks all installed packages for their callbacks. What it says would be the output of a test.
logging.disable()
import_module("lightning.pytorch").Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
logging.disable(logging.NOTSET)
gc.freeze()
gc.enable()
