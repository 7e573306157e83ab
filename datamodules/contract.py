"""Interface of a data module: the attributes and methods that recipes, callbacks and the command line use.

A data module that inherits from `DataContract` overrides the members that apply to it. For any other
LightningDataModule, `data_contract` returns the defaults, even if it has attributes of the same names.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn
from typing_extensions import override

from datamodules.errors import UserError

_T = TypeVar("_T")

Changeable = Annotated[_T, "changeable"]
"""Mark of a constructor parameter that does not affect results: a resumed run may have another value."""

Transient = Annotated[_T, "transient"]
"""Mark of a constructor parameter of a single call, such as an output file. It is not saved with a run."""

Advanced = Annotated[_T, "advanced"]
"""Mark of a constructor parameter whose flag is listed by ``--help-all`` only."""

USUALLY_CHANGEABLE = frozenset({"data_dir", "num_workers", "batch_size", "eval_batch_size"})
"""Parameters that do not affect results in any data module, even without the mark `Changeable`."""


def marked_parameters(cls: type, mark: Any) -> frozenset[str]:
    """Return the constructor parameters with a mark, such as `Changeable`. Base classes are included.

    Example:
        >>> class Mine:
        ...     def __init__(self, bins: Advanced[Changeable[int]] = 10, width: int = 4) -> None: ...
        >>> marked_parameters(Mine, Changeable), marked_parameters(Mine, Transient)
        (frozenset({'bins'}), frozenset())
    """
    label = mark.__metadata__[0]
    parameters = set()
    for base in cls.__mro__:
        constructor = vars(base).get("__init__")
        if not inspect.isfunction(constructor):
            continue
        hints = get_type_hints(constructor, include_extras=True)
        for name, hint in hints.items():
            if label in getattr(hint, "__metadata__", ()):
                parameters.add(name)
    return frozenset(parameters)


class DataContract(Protocol):
    """Interface of a data module, with defaults for every member."""

    path_parameter: ClassVar[str] = "data_dir"
    """Name of the parameter for the path of the data, which `recipes.fit` sets."""

    tokens_parameter: ClassVar[str | None] = None
    """Name of the parameter that limits a batch by tokens and replaces ``batch_size``; None if there is none."""

    @property
    def title(self) -> str:
        """Name of the data set, for messages."""
        return type(self).__name__

    @property
    def seed(self) -> int:
        """Seed of the split, the shuffling and the augmentation."""
        return 0

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of samples in each part that has been set up: "train", "val", "test"."""
        return {}

    @property
    def left_out(self) -> Mapping[str, int]:
        """Number of unused files or lines, by reason."""
        return {}

    @property
    def num_classes(self) -> int | None:
        """Number of classes, or None if there are none or the number is not known."""
        return None

    @property
    def class_names(self) -> Sequence[str]:
        """Names of the classes in the order of the labels. Empty if they are not known."""
        return ()

    @property
    def class_weights(self) -> Tensor | None:
        """Class weights of the training loss, float32 of shape (classes,), or None if all are 1."""
        return None

    @property
    def image_size(self) -> int | None:
        """Side length of the images in pixels."""
        return None

    @property
    def natural_images(self) -> bool:
        """Whether weights pretrained on ImageNet suit the images: photographs, not digits or drawings."""
        return True

    @property
    def validates(self) -> bool:
        """Whether there is a validation part."""
        return True

    @property
    def prediction_names(self) -> Sequence[str]:
        """Name of each sample of `predict_dataloader`, such as its file."""
        return ()

    def sample_names(self, part: str) -> Sequence[str]:
        """Return the name of each sample of "val" or "test", such as its file, by sample number; may be empty.

        The loaders of `datamodules.loading` yield the sample numbers; in a `DataLoader` they are indices of the data
        set.
        """
        return ()

    def numbered(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield evaluation batches in which each target is replaced by the position of its sample, counted from 0.

        `recipes.predict` looks up the name of each sample by its position.
        """
        position = 0
        for inputs, *_ in batches:
            yield inputs, torch.arange(position, position + len(inputs))
            position += len(inputs)

    def numbered_batches(
        self, part: str, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return an iterator of (inputs, targets, sample numbers) of a part, on the device. All epochs are equal.

        Each sample is visited once, by one of the ranks. The part's loader has the same numbers, and its
        ``use_features`` replaces samples by features.

        Raises:
            UserError: training samples change from epoch to epoch, or the samples have no numbers.
        """
        raise UserError(f"{self.title} does not number its samples", to_type="pass an ImageFolderDataModule")

    def chosen_batches(
        self, part: str, numbers: Tensor, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return an iterator of (inputs, targets, sample numbers) of some samples of a part, on the device.

        Samples are not augmented, and unreadable samples are left out. Each sample is visited once, by one of the
        ranks, in batches that do not depend on the number of ranks.

        Args:
            part: a part that has been set up, such as "train".
            numbers: sample numbers, int64 of shape (n,).

        Raises:
            UserError: the samples have no numbers.
        """
        raise UserError(f"{self.title} does not number its samples", to_type="pass an ImageFolderDataModule")

    @property
    def unreadable_inputs(self) -> Mapping[int, UserError]:
        """Errors of inputs that cannot be read, by index in `prediction_names`. Complete after prediction.

        The subject of an error is the name of the input, so a table with a column of names shows the problem only.
        """
        return {}

    @property
    def unclear_inputs(self) -> Mapping[int, str]:
        """Remarks on doubtful inputs, by index in `prediction_names`. Some of these inputs may have no prediction."""
        return {}

    def set_inputs(self, inputs: Any) -> None:
        """Set the inputs of `predict` from Python, in place of the arguments of the predict command."""
        raise UserError(f"{self.title} takes no inputs to predict")

    def preprocessing(self) -> nn.Module | None:
        """Return the module that maps uint8 images to the network's inputs; None if the inputs are not images.

        It may depend on the data set, so call it after `setup` or `load_state_dict`.
        """
        return None

    def set_samples(self, samples: Any) -> None:
        """Set samples in memory, which replace files. `recipes.fit` calls this before `setup`.

        Raises:
            UserError: this data module does not support samples in memory.
        """
        raise UserError(
            f"{type(self).__name__} takes no samples in memory, found {type(samples).__name__}; pass a path"
        )

    def resolve(self) -> dict[str, Any]:
        """Return values for the parameters that are None or "auto", such as ``{"dataset": "mnist"}``.

        This may read and download files. Later calls return the same values. The command line calls this method on
        rank 0, before it builds anything else, and passes the values to the constructors on all ranks.
        """
        return {}


class _Defaults(DataContract):
    """Default contract of a data module that does not inherit from `DataContract`."""

    def __init__(self, title: str) -> None:
        self._title = title

    @property
    @override
    def title(self) -> str:
        return self._title


def data_contract(data: object) -> DataContract:
    """Return the `DataContract` of any LightningDataModule, or of None.

    A data module class may be passed to read class attributes: ``tokens_parameter``, ``path_parameter``.

    Example:
        >>> class Mine(DataContract):
        ...     class_names = ("cat", "dog")
        >>> class Stock:
        ...     class_names = ("cat", "dog")
        >>> data_contract(Mine()).class_names, data_contract(Stock()).class_names, data_contract(Stock()).title
        (('cat', 'dog'), (), 'Stock')
    """
    data_class = data if isinstance(data, type) else type(data)
    # Not isinstance: before Python 3.12 it evaluates a Protocol's properties, which may list a folder.
    if DataContract in data_class.__mro__:
        return cast("DataContract", data)
    return _Defaults("the data" if data is None else data_class.__name__)
