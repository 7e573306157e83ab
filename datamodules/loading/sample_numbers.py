"""Which samples the batches of an evaluation hold."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from datamodules.loading.loaders import EvaluationSampling

__all__ = ["sample_numbers"]


def sample_numbers(loader: Any) -> Tensor | None:
    """The numbers of the samples that an evaluation's loader has yielded on this rank, int64, in their order.

    Those of the batches that it did not come to follow. They are known of the loaders of this package, and of a
    `DataLoader` that takes its data set in order; None is returned for others.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sample_numbers(DataLoader(range(3))), sample_numbers(DataLoader(range(3), shuffle=True))
        (tensor([0, 1, 2]), None)
    """
    if isinstance(loader, EvaluationSampling):
        return loader.sample_numbers()
    batches: Any = getattr(loader, "batch_sampler", None)
    # Another sampler may draw another order the next time.
    if type(getattr(batches, "sampler", None)) is not SequentialSampler and type(batches) is not list:
        return None
    return torch.tensor([number for batch in batches for number in batch], dtype=torch.int64)
