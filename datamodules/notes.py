"""What is said while a run goes on: lines of the logger ``lightning_recipes``, by rank 0."""

import logging

from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger("lightning_recipes")
inform, warn = rank_zero_only(log.info), rank_zero_only(log.warning)
