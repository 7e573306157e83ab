"""What the workers of a `DataLoader` are asked for in an epoch."""

from collections.abc import Iterator
from typing import Generic, TypeVar

Request = TypeVar("Request")


class Requests(Generic[Request]):
    """The batches that are loaded next: a sampler of a `DataLoader`, which is refilled for each epoch."""

    def __init__(self) -> None:
        self.pending: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)
