"""What the server of `tests.support.ranks` imports and finds out once, before it forks the processes of tests."""

import logging
from importlib import import_module

import tests.support.installed  # noqa: F401  Before Lightning.
from recipes.runner.start import import_and_freeze

_MODULES = """
lightning.pytorch torchmetrics pytest hypothesis psutil jinja2 torch.utils.tensorboard torch.utils.serialization
torch.distributed.algorithms.ddp_comm_hooks
recipes.runner.run recipes.runner.report recipes.mnist.recipe recipes.resnet.recipe recipes.seq2seq.recipe
datamodules.images.mnist
"""

import_and_freeze(_MODULES.split())
# A Trainer looks up the callbacks of all installed packages. Its messages would be in the output of a test.
logging.disable()
import_module("lightning.pytorch").Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
logging.disable(logging.NOTSET)
