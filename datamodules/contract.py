"""What recipes, callbacks and the command line may ask of a data module.

A data module of this package inherits from `DataContract` and overrides what applies to it. Any other
LightningDataModule is asked through `data_contract`: its own attributes and hyper-parameters of these
names are used, and defaults for the rest.
"""

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, cast, get_type_hints

from torch import Tensor, nn

from datamodules.errors import UserError

_T = TypeVar("_T")

Free = Annotated[_T, "free"]
"""A parameter of a constructor that does not make the experiment: a run may be resumed with another value."""

OneCall = Annotated[_T, "one call"]
"""A parameter of a constructor that belongs to one call, such as a file to write, and is not saved with a run."""

Rare = Annotated[_T, "rare"]
"""A parameter of a constructor whose flag ``--help-all`` shows, and ``--help`` does not."""

USUALLY_FREE = frozenset({"data_dir", "num_workers", "batch_size", "eval_batch_size"})
"""Parameters of any data module that do not make the experiment; others are marked with `Free`."""


def marked_parameters(cls: type, mark: Any) -> frozenset[str]:
    """The parameters of a constructor, and of those of its bases, that are annotated with `Free`, `OneCall` or `Rare`.

    Example:
        >>> class Mine:
        ...     def __init__(self, bins: Rare[Free[int]] = 10, width: int = 4) -> None: ...
        >>> marked_parameters(Mine, Free), marked_parameters(Mine, OneCall)
        (frozenset({'bins'}), frozenset())
    """
    found = set()
    for kind in cls.__mro__:
        if "__init__" in vars(kind) and inspect.isfunction(vars(kind)["__init__"]):
            hints = get_type_hints(vars(kind)["__init__"], include_extras=True)
            found |= {name for name, hint in hints.items() if mark.__metadata__[0] in getattr(hint, "__metadata__", ())}
    return frozenset(found)


class DataContract(Protocol):
    """What may be asked of a data module, with defaults."""

    place_parameter: ClassVar[str] = "data_dir"
    """The parameter that says where the data are: `recipes.fit` passes the path that it is given."""

    tokens_parameter: ClassVar[str | None] = None
    """The parameter that, where it is given, limits a batch by tokens in place of ``batch_size``."""

    @property
    def title(self) -> str:
        """What the data set is called."""
        return type(self).__name__

    @property
    def seed(self) -> int:
        """The seed of the split, the shuffling and the augmentation."""
        return 0

    @property
    def sizes(self) -> Mapping[str, int]:
        """Samples in each part that has been set up: "train", "val", "test"."""
        return {}

    @property
    def left_out(self) -> Mapping[str, int]:
        """What was read and is not used, such as files or lines: how many, by reason."""
        return {}

    @property
    def num_classes(self) -> int | None:
        """How many classes there are; None where there are none or it is not known."""
        return None

    @property
    def class_names(self) -> Sequence[str]:
        """The name of each class, in the order of the labels; empty where they are not known."""
        return ()

    @property
    def class_weights(self) -> Tensor | None:
        """Weights of the classes in the training loss, float32 of shape (classes,); None where all weigh 1."""
        return None

    @property
    def image_size(self) -> int | None:
        """The side of the images, in pixels."""
        return None

    @property
    def photographs(self) -> bool:
        """Whether the images are photographs, as those are that published weights were trained on."""
        return True

    @property
    def validates(self) -> bool:
        """Whether there is a part to validate on."""
        return True

    @property
    def prediction_names(self) -> Sequence[str]:
        """The name of each sample that `predict_dataloader` yields, such as its file."""
        return ()

    def sample_names(self, part: str) -> Sequence[str]:
        """The names of the samples of "val" or "test", such as files, by their numbers; empty where they have none.

        Numbers are those of the loaders of `datamodules.loading`, or the places in the data set of a `DataLoader`.
        """
        return ()

    @property
    def unreadable_inputs(self) -> Mapping[int, str]:
        """Why inputs of `prediction_names` cannot be read, by their place; known once all have been predicted."""
        return {}

    @property
    def unclear_inputs(self) -> Mapping[int, str]:
        """What is unclear about inputs of `prediction_names`, by their place; some of them may have no prediction."""
        return {}

    def take_inputs(self, inputs: Any) -> None:
        """Take the inputs of `predict` from Python, in place of those of the predict command."""
        raise UserError(f"{self.title} takes no inputs to predict")

    def preprocessing(self) -> nn.Module | None:
        """What maps uint8 images of the data set's form to the network's inputs; None where the inputs are no images.

        It is known once the data set is: after `setup`, or after `load_state_dict`.
        """
        return None

    def take_samples(self, samples: Any) -> None:
        """Take samples in memory in place of files, before `setup`: those that `recipes.fit` is given.

        Raises:
            UserError: this data module takes none.
        """
        raise UserError(
            f"{type(self).__name__} takes no samples in memory, found {type(samples).__name__}; pass a path"
        )

    def resolve(self) -> dict[str, Any]:
        """Parameters that were left open, and the values that stand for them here, such as ``{"dataset": "mnist"}``.

        It may read and download, and returns the same when it is called again. The command line calls it on rank 0
        before anything else is built, and passes the values to the constructors of all ranks.
        """
        return {}


class _Defaults(DataContract):
    """A data module with nothing but defaults."""


def _fits(name: str, value: object) -> bool:
    """Whether a foreign attribute means what the contract does by its name: an `image_size` may be a pair."""
    match name:
        case "title" | "tokens_parameter" | "place_parameter":
            return isinstance(value, str)
        case "seed" | "num_classes" | "image_size":
            return isinstance(value, Integral) and not isinstance(value, bool)
        case "sizes" | "left_out" | "unreadable_inputs" | "unclear_inputs":
            return isinstance(value, Mapping)
        case "class_names" | "prediction_names":
            return isinstance(value, Sequence) and all(isinstance(item, str) for item in value)
        case "photographs" | "validates":
            return isinstance(value, bool)
        case _:  # A method of another module may take other arguments, and do something else.
            return False


class _Foreign:
    """A data module that was written without the contract."""

    def __init__(self, data: object) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if not hasattr(DataContract, name):
            raise AttributeError(f"{name} is no part of the data contract")
        hparams = getattr(self._data, "hparams", {})
        # The hyper-parameters of a class are a property.
        for value in (getattr(self._data, name, None), hparams.get(name) if isinstance(hparams, Mapping) else None):
            if _fits(name, value):
                return value
        if name == "title":
            return (self._data if isinstance(self._data, type) else type(self._data)).__name__
        if name == "num_classes":
            return len(self.class_names) or None
        return getattr(_Defaults(), name)


def data_contract(data: object) -> DataContract:
    """Ask a data module, which may be any LightningDataModule, or None.

    Of a class, the class attributes can be read: ``tokens_parameter``, ``place_parameter``.

    Example:
        >>> class Mine:
        ...     class_names = ("cat", "dog")
        >>> mine = data_contract(Mine())
        >>> mine.class_names, mine.num_classes, mine.validates, mine.title
        (('cat', 'dog'), 2, True, 'Mine')
    """
    data_class = data if isinstance(data, type) else type(data)
    # Not isinstance: before Python 3.12 it evaluates a Protocol's properties, which may look through a folder.
    return cast("DataContract", data if DataContract in data_class.__mro__ else _Foreign(data))
