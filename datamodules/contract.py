"""What recipes, callbacks and the command line may ask of a data module.

A data module of ours inherits from `DataContract` and overrides what it knows. Any other LightningDataModule is asked
through `data_contract`, which answers with the defaults for what it does not have.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

__all__ = ["DataContract", "data_contract"]


class DataContract(Protocol):
    """The questions, with the answers of a data module that knows nothing about itself."""

    free_parameters: ClassVar[frozenset[str]] = frozenset({"data_dir", "num_workers", "batch_size", "eval_batch_size"})
    """Parameters of the constructor that do not make the experiment: a run may go on with other values."""

    call_parameters: ClassVar[frozenset[str]] = frozenset({"predict_inputs"})
    """Parameters of the constructor that belong to one call, and are not saved with a run."""

    tokens_parameter: ClassVar[str | None] = None
    """The parameter that, where it is given, limits a batch by tokens in place of ``batch_size``."""

    @property
    def title(self) -> str:
        """What the data set is called."""
        return type(self).__name__

    @property
    def seed(self) -> int:
        """The seed of the split, the order and the augmentation."""
        return 0

    @property
    def sizes(self) -> Mapping[str, int]:
        """Samples in each part that has been set up: "train", "val", "test"."""
        return {}

    @property
    def num_classes(self) -> int | None:
        """How many classes there are; None where the data have none or do not say."""
        return None

    @property
    def class_names(self) -> Sequence[str]:
        """The names of the classes, in the order of their labels; empty where they are not known."""
        return ()

    @property
    def image_size(self) -> int | None:
        """The side of the images, in pixels."""
        return None

    @property
    def validates(self) -> bool:
        """Whether there is a part to validate on."""
        return True

    @property
    def prediction_names(self) -> Sequence[str]:
        """The name of each sample that `predict_dataloader` yields, such as its file."""
        return ()

    def resolve(self) -> dict[str, Any]:
        """Parameters that were left open, and what they stand for here, such as ``{"dataset": "mnist"}``.

        It may read and download. The command line calls it on rank 0 before anything else is built, and passes the
        values to all ranks.
        """
        return {}


class _NoAnswers(DataContract):
    """A data module that knows nothing about itself."""


class _Foreign:
    """A data module that was written without the contract: its own attributes and hyper-parameters, or the defaults."""

    def __init__(self, data: object) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if name == "title":
            return getattr(self._data, name, type(self._data).__name__)
        hparams: Mapping[str, Any] = getattr(self._data, "hparams", {})
        default = getattr(_NoAnswers(), name)
        return getattr(self._data, name, hparams.get(name, default))


def data_contract(data: object) -> DataContract:
    """Ask a data module, which may be any LightningDataModule, or None.

    Example:
        >>> class Mine:
        ...     class_names = ("cat", "dog")
        >>> mine = data_contract(Mine())
        >>> mine.class_names, mine.validates, mine.title
        (('cat', 'dog'), True, 'Mine')
    """
    # Not isinstance: before Python 3.12 it evaluates a Protocol's properties, which may look through a folder.
    return cast("DataContract", data if DataContract in type(data).__mro__ else _Foreign(data))
