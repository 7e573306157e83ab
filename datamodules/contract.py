"""Defines the attributes and methods that recipes, callbacks and the command line use of a data module.

A data module that inherits from `DataContract` overrides what applies to it. `data_contract` returns the defaults for
any other LightningDataModule, whatever its attributes are called.
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
"""Marks a constructor parameter that does not affect results: a run may be resumed with another value."""

Transient = Annotated[_T, "transient"]
"""Marks a constructor parameter of a single call, such as an output file. It is not saved with a run."""

Advanced = Annotated[_T, "advanced"]
"""Marks a constructor parameter whose flag is listed by ``--help-all`` only."""

USUALLY_CHANGEABLE = frozenset({"data_dir", "num_workers", "batch_size", "eval_batch_size"})
"""Parameters of any data module that do not affect results. Others are marked with `Changeable`."""


def marked_parameters(cls: type, mark: Any) -> frozenset[str]:
    """Return the constructor parameters that have a mark, such as `Changeable`; those of base classes are included.

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
    """Name of the parameter that limits a batch by tokens and replaces ``batch_size``, if there is one."""

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
        """Number of files or lines that were read and not used, by reason."""
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
        """Whether the images are photographs, as those that published weights were trained on."""
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
        """Return the names, such as files, of the samples of "val" or "test" by sample number, or an empty sequence.

        Sample numbers are those of the loaders of `datamodules.loading`, or indices into the data set of a
        `DataLoader`.
        """
        return ()

    def numbered(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an evaluation with the position of each sample, from 0, in place of its target.

        Predictions for these batches name their samples, whose numbers and names `recipes.predict` looks up.
        """
        position = 0
        for inputs, *_ in batches:
            yield inputs, torch.arange(position, position + len(inputs))
            position += len(inputs)

    def numbered_batches(
        self, part: str, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return an iterator of (inputs, targets, sample numbers) of a part, on the device, equal in every epoch.

        The ranks together get each sample once. The numbers are those of the part's loader, whose ``use_features`` puts
        features in place of the samples.

        Raises:
            UserError: training samples differ from epoch to epoch, or the samples have no numbers.
        """
        raise UserError(f"{self.title} does not number its samples", to_type="pass an ImageFolderDataModule")

    def chosen_batches(
        self, part: str, numbers: Tensor, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return an iterator of (inputs, targets, sample numbers) of some samples of a part, on the device.

        The samples are prepared without augmentation, and unreadable ones are left out. The ranks together get each
        sample once, in batches that do not depend on the number of ranks.

        Args:
            part: a part that has been set up, such as "train".
            numbers: the numbers of the samples, int64 of shape (n,).

        Raises:
            UserError: the samples have no numbers.
        """
        raise UserError(f"{self.title} does not number its samples", to_type="pass an ImageFolderDataModule")

    @property
    def unreadable_inputs(self) -> Mapping[int, UserError]:
        """Errors of inputs that cannot be read, by index in `prediction_names`. Complete after prediction.

        The subject of an error is the name of its input, so that a table with the name needs the problem only.
        """
        return {}

    @property
    def unclear_inputs(self) -> Mapping[int, str]:
        """Remarks on doubtful inputs, by index in `prediction_names`. Some of these inputs may have no prediction."""
        return {}

    def set_inputs(self, inputs: Any) -> None:
        """Set the inputs of `predict` from Python. They replace those of the predict command."""
        raise UserError(f"{self.title} takes no inputs to predict")

    def preprocessing(self) -> nn.Module | None:
        """Return the module that maps uint8 images to the network's inputs, or None if the inputs are not images.

        It may depend on the data set, so call it after `setup` or `load_state_dict`.
        """
        return None

    def set_samples(self, samples: Any) -> None:
        """Use samples in memory instead of files. `recipes.fit` calls this before `setup`.

        Raises:
            UserError: this data module has no support for samples in memory.
        """
        raise UserError(
            f"{type(self).__name__} takes no samples in memory, found {type(samples).__name__}; pass a path"
        )

    def resolve(self) -> dict[str, Any]:
        """Return values for the parameters that are None or "auto", such as ``{"dataset": "mnist"}``.

        This may read and download. Further calls return the same values. The command line calls this method on rank 0
        before anything else is built, and passes the values to the constructors of all ranks.
        """
        return {}


class _Defaults(DataContract):
    """Contract with all defaults, of a data module that does not inherit from it."""

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
