"""A batch in pieces along its samples, and what a step returned for each piece as if for the batch."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from callbacks.lib.accumulation import at_least_one

__all__ = ["cut_batch", "join_outputs", "number_of_samples", "piece_slices"]


def _children(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def number_of_samples(batch: Any) -> int | None:
    """The length of the first tensor that has a dimension; None without one.

    Example:
        >>> number_of_samples({"scale": torch.tensor(2.0), "inputs": torch.zeros(3, 10)})
        3
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    return next((size for size in map(number_of_samples, _children(batch)) if size is not None), None)


def piece_slices(samples: int, most: int | None) -> list[slice]:
    """The fewest pieces of at most `most` samples, whose sizes differ by one at most.

    Example:
        >>> piece_slices(7, 3)
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    pieces = max(1, -(-samples // most)) if most is not None else 1
    size, larger = divmod(samples, pieces)
    starts = [number * size + min(number, larger) for number in range(pieces + 1)]
    return [slice(*ends) for ends in pairwise(starts)]


def cut_batch(batch: Any, samples: int, piece: slice) -> Any:
    """Some samples of a batch: of its tensors, and lists of strings or numbers, that have as many items as samples.

    Everything else belongs to all pieces. Goes into mappings, tuples, lists and dataclasses.

    Example:
        >>> cut_batch({"inputs": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 2.0}, 4, slice(1, 3))
        {'inputs': tensor([1, 2]), 'names': ['b', 'c'], 'scale': 2.0}
    """

    def cut(value: Any) -> Any:
        return cut_batch(value, samples, piece)

    if isinstance(batch, Tensor):
        return batch[piece] if batch.dim() and len(batch) == samples else batch
    if isinstance(batch, Mapping):
        cut_items = {key: cut(value) for key, value in batch.items()}
        return cut_items if type(batch) is dict else type(batch)(cut_items)  # type: ignore[call-arg]
    if isinstance(batch, (tuple, list)):
        if len(batch) == samples and all(isinstance(value, (str, bytes, int, float)) for value in batch):
            return batch[piece]
        parts = [cut(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: cut(getattr(batch, field.name)) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **fields)
    return batch


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], counts: Sequence[int | Tensor]) -> Any:
    """What a step would have returned for the batch.

    Tensors with a row for each sample are joined, counts (whole numbers) are summed, and other numbers averaged over
    the targets. Of anything else the last counts. Goes into mappings, tuples and lists.

    Args:
        outputs: what it returned for each piece.
        sizes: samples of each piece.
        counts: targets of each piece.

    Example:
        >>> join_outputs([{"loss": 1.0, "right": 2}, {"loss": 4.0, "right": 0}], [2, 1], [2, 1])
        {'loss': 2.0, 'right': 2}
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: join_outputs([output[key] for output in outputs], sizes, counts) for key in first}
    if isinstance(first, (tuple, list)):
        parts = [join_outputs(values, sizes, counts) for values in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, Tensor) and first.dim():
        by_sample = all(len(output) == size for output, size in zip(outputs, sizes, strict=True))
        return torch.cat(list(outputs)) if by_sample else outputs[-1]
    if isinstance(first, bool) or not isinstance(first, (Tensor, int, float)):
        return outputs[-1]
    if isinstance(first, int) or (isinstance(first, Tensor) and not first.is_floating_point()):
        return sum(outputs)
    total = at_least_one(sum(counts))
    # A mean over no target may be NaN.
    parts = [
        torch.where(count > 0, output * count, 0.0) if isinstance(count, Tensor) else output * count if count else 0.0
        for output, count in zip(outputs, counts, strict=True)
    ]
    return sum(parts) / total
