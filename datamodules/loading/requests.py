"""Sampler that passes arbitrary requests to the workers of a `DataLoader`."""

from collections.abc import Iterator
from typing import Generic, TypeVar

Request = TypeVar("Request")


class Requests(Generic[Request]):
    """Sampler of the batches to load. Its owner sets `pending` before each epoch, so that workers can persist."""

    def __init__(self) -> None:
        self.pending: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)
