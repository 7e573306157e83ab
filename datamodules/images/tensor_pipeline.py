"""Pipeline of small gray images in memory, in the form of MNIST: 28 x 28 pixels, light on dark, centered.

Photographs and drawings of digits are converted to this form when they are read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from typing_extensions import override

from datamodules.base import Process
from datamodules.errors import UserError, spelled
from datamodules.images.arrays import InputImages
from datamodules.images.augmentation import Normalize, RandomAffine
from datamodules.images.builtin_datasets import DATASETS
from datamodules.images.decoding import open_image, unreadable, without_alpha
from datamodules.images.image_data import Order, Part, Pipeline, Statistics
from datamodules.images.source import ArrayImages, Images, Samples
from datamodules.loading.file_table import FileTable
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from datamodules.notes import warn
from datamodules.ranges import Range, check_ranges

_SIDE = 28
# An image with a smaller range of brightness is blank.
_SHADES = 16
# Short side, in pixels, to which larger images are reduced first: twice MNIST's.
_READ_AT = 56


def gray_image(source: str | bytes | Image.Image, name: str = "", invert: bool = False) -> Tensor:
    """Load an image of any mode as gray, upright and on white: uint8 (height, width), short side up to 56 pixels.

    Args:
        source: path of a file, content of a file, or an image in memory.
        name: name of the image, for messages; by default the name of the file.
        invert: whether to invert the brightness.

    Raises:
        UnreadableImage: the file is missing, damaged, not an image, or has more than 8 bits.
    """
    with open_image(source, name or str(source)) as (image, _):
        gray = without_alpha(ImageOps.exif_transpose(image)).convert("L")
    factor = _READ_AT / min(gray.size)
    if factor < 1:
        size = [max(1, round(length * factor)) for length in gray.size]
        gray = gray.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    pixels = torch.frombuffer(bytearray(gray.tobytes()), dtype=torch.uint8).view(gray.height, gray.width)
    return 255 - pixels if invert else pixels


def border_levels(images: Tensor) -> Tensor:
    """Return the mean brightness of the border of each image, from 0 to 255.

    Args:
        images: uint8 of shape (n, height, width).

    Returns:
        float32 of shape (n,).
    """
    borders = torch.cat((images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]), -1)
    return borders.float().mean(-1)


def _is_blank(image: Tensor) -> bool:
    """Return whether an image has a single brightness, approximately."""
    return int(image.max()) < int(image.min()) + _SHADES


def as_mnist(light: Tensor) -> Tensor:
    """Convert a gray image, light on dark, to MNIST's form: the digit 20 pixels high or wide, centered by mass.

    An image of 28 x 28 pixels is unchanged. A smaller image is enlarged to 20 pixels.

    Args:
        light: uint8 of shape (height, width).

    Returns:
        uint8 of shape (28, 28); all 0 if a larger or smaller image is blank.
    """
    if light.shape == (_SIDE, _SIDE):
        return light
    if _is_blank(light):
        return torch.zeros(_SIDE, _SIDE, dtype=torch.uint8)
    if max(light.shape) < _SIDE:
        digit = _resized(light.float())
        return _on_black(digit, [(_SIDE - length) // 2 for length in digit.shape])
    digit = _resized(_foreground(light.float()))
    digit = digit * (255 / digit.max())
    return _on_black(digit, [_begin(digit.sum(1 - axis)) for axis in (0, 1)])


def _resized(image: Tensor) -> Tensor:
    """Resize an image to a longer side of 20 pixels."""
    size = [max(1, round(length * 20 / max(image.shape))) for length in image.shape]
    return F.interpolate(image[None, None], size=size, mode="bilinear", antialias=True)[0, 0]


def _on_black(digit: Tensor, corner: Sequence[int]) -> Tensor:
    """Place a digit on 28 x 28 black pixels, with its top left corner at `corner`."""
    canvas = torch.zeros(_SIDE, _SIDE, dtype=torch.uint8)
    top, left = corner
    height, width = digit.shape
    canvas[top : top + height, left : left + width] = digit.round().to(torch.uint8)
    return canvas


def _foreground(light: Tensor) -> Tensor:
    """Crop an image to the strokes that are lighter than their surroundings, as values from 0 to 1."""
    # The window is odd, so that the averages have the size of the image.
    window = min(light.shape) // 4 * 2 + 3
    around = F.pad(light[None, None], (window // 2,) * 4, mode="replicate")
    ink = (light - F.avg_pool2d(around, window, stride=1)[0, 0]).clamp(min=0)
    # The threshold removes the texture of paper.
    ink = (ink / ink.max() - 0.2).clamp(min=0) / 0.8
    rows = (ink > 0.5).any(1).nonzero().flatten()
    columns = (ink > 0.5).any(0).nonzero().flatten()
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _begin(along: Tensor) -> int:
    """Return the start of a digit along an axis, for a center of mass at 14 as in MNIST (LeCun et al., 1998)."""
    center = float((along * torch.arange(len(along))).sum() / along.sum())
    return min(max(0, round(_SIDE / 2 - center)), _SIDE - len(along))


class Digits(NamedTuple):
    """Images of one digit each in MNIST's form, and the errors of unreadable images."""

    pixels: Tensor
    """uint8 of shape (n, 28, 28)."""
    numbers: Tensor
    """Index of each image in the input, int64 of shape (n,)."""
    borders: Tensor
    """Brightness of the border of each image before the conversion, float32 of shape (n,), see `border_levels`."""
    unreadable: dict[int, UserError]
    """Errors of the unreadable images, by index."""

    @property
    def blank(self) -> Tensor:
        """Whether each image is blank, bool of shape (n,)."""
        low, high = self.pixels.flatten(1).aminmax(dim=1)
        return high.int() < low.int() + _SHADES


def read_digits(images: Images, invert: bool = False) -> Digits:
    """Read images of one digit each, and convert them with `as_mnist`.

    Args:
        images: the images.
        invert: whether to invert the images, because they are dark on light.
    """
    if isinstance(images, ArrayImages) and images.pixels.shape[1:] == (_SIDE, _SIDE):
        pixels = torch.tensor(images.pixels)
        pixels = 255 - pixels if invert else pixels
        return Digits(pixels, torch.arange(len(pixels)), border_levels(pixels), {})
    converted = {}
    borders = []
    errors: dict[int, UserError] = {}
    for row in range(len(images)):
        try:
            gray = gray_image(images.read(row), images[row], invert)
        except UserError as error:
            errors[row] = error
        except OSError as error:
            errors[row] = unreadable(images[row], error.strerror or str(error))
        else:
            converted[row] = as_mnist(gray)
            borders.append(border_levels(gray[None]))
    # torch.stack needs at least one tensor, so the first one is a placeholder.
    digits = torch.stack([torch.zeros(_SIDE, _SIDE, dtype=torch.uint8), *converted.values()])[1:]
    numbers = torch.tensor(list(converted), dtype=torch.int64)
    return Digits(digits, numbers, torch.cat([torch.empty(0), *borders]), errors)


class TensorPipeline(Pipeline):
    """Pipeline of small gray images: one uint8 tensor in MNIST's form, on the device if it fits, and affine maps.

    Args:
        shift: largest translation, in pixels.
        rotation: largest rotation, in degrees; None: the data set's default.
        scale: largest change of scale, as in 0.1 for 0.9 to 1.1; None: the data set's default.
        flip: whether to mirror half of the images, and the other half in the next epoch; None: as for the data set.
        invert: whether to invert the user's images, which are dark on light; None: as in the checkpoint, else False.
    """

    sets: ClassVar = DATASETS
    own: ClassVar = "custom"
    image_size = _SIDE

    def __init__(
        self,
        shift: float = 2.0,
        rotation: float | None = None,
        scale: float | None = None,
        flip: bool | None = None,
        invert: bool | None = None,
    ) -> None:
        check_ranges(
            shift=(shift, Range(0, _SIDE)),
            rotation=(rotation, Range(0, 180)),
            scale=(scale, Range(0, 1, below=True)),
        )
        super().__init__(shift=shift, rotation=rotation, scale=scale, flip=flip, invert=invert)
        self._tensors: dict[str, tuple[Tensor, Tensor]] = {}
        self._borders: list[float] | None = None
        self._saved_inversion = False

    @property
    @override
    def statistics(self) -> Statistics:
        return self.data_set.info.mean, self.data_set.info.std

    @property
    def _inverts(self) -> bool:
        """Whether the user's images are inverted: the setting, else the value in the checkpoint."""
        invert = self.settings["invert"]
        return self._saved_inversion if invert is None else bool(invert)

    @override
    def resolve(self) -> dict[str, Any]:
        """Return rotation, scale and flip. Defaults are taken from the data set."""
        info = self.data_set.info
        given = {name: self.settings[name] for name in ("rotation", "scale", "flip")}
        return {name: getattr(info, name) if value is None else value for name, value in given.items()}

    @override
    def open(self, part: str, published: str, rows: Tensor | None, process: Process) -> Part:
        """Return a part: all samples of the published part, or its samples `rows`, which share tensors with it."""
        samples = self.data_set.source.parts[published]
        if published not in self._tensors:
            self._tensors[published] = self._read(published, samples, process.device)
        images, labels = self._tensors[published]
        if rows is None:
            rows = torch.arange(len(labels))
        return Part(images, labels, rows, samples.images if isinstance(samples.images, FileTable) else ())

    def _read(self, part: str, samples: Samples, device: torch.device) -> tuple[Tensor, Tensor]:
        """Read images, uint8 of shape (n, 1, 28, 28), and labels, and move them to the device if they fit."""
        is_own = self.data_set.is_own
        if not is_own and self.settings["invert"]:
            raise UserError(
                f"{self.data_set.info.title} is light on dark, as the network needs it",
                setting="invert",
                value=True,
                to_type=f"leave {spelled('invert')} out, and pass it to predict for images that are dark on light",
            )
        digits = read_digits(samples.images, is_own and self._inverts)
        faults = list(map(str, digits.unreadable.values()))
        if faults:
            more = f"; and {len(faults) - 5:,} more" * (len(faults) > 5)
            raise UserError(
                f"{len(faults):,} of {len(samples.images):,} images cannot be used: {'; '.join(faults[:5])}{more};"
                " correct or delete them"
            )
        if part == "train":
            self._borders = [round(float(digits.borders.min()), 1), round(float(digits.borders.max()), 1)]
            level = float(digits.borders.median())
            if is_own and level > 127:
                self._note_inversion(f"the border of most train images is light, {level:.0f} of 255")
        blank = (digits.pixels.flatten(1).amax(1) == 0).nonzero().flatten().tolist()
        if blank and is_own:
            count = f"{len(blank):,} of {len(digits.pixels):,} {part} images"
            warn(f"note: {count} are blank, such as {samples.images[blank[0]]}")
        images = digits.pixels.unsqueeze(1)
        # At most a quarter of the free memory: the network needs the rest.
        if device.type != "cuda" or images.nbytes <= torch.cuda.mem_get_info(device)[0] // 4:
            return images.to(device), samples.labels.to(device)
        return images, samples.labels

    def _note_inversion(self, found: str) -> None:
        """Log that light and dark may be exchanged, and what to pass."""
        warn(f"note: {found}; pass {spelled('invert', not self._inverts)} if light and dark are exchanged")

    @override
    def train(self, part: Part, order: Order, process: Process) -> TrainLoader:
        """Return the loader of augmented batches: float32 of shape (batch, 1, 28, 28) and labels, on the device."""
        augmentation = {"shift": self.settings["shift"], **self.resolve()}
        # Repeated draws of a weighted order have numbers above the number of samples.
        count = len(part.labels) if order.weights is None else 0
        augment = RandomAffine(order.seed, **augmentation, count=count)
        normalize = Normalize(*self.statistics)

        def transform(images: Tensor, rows: Tensor, epoch: int) -> Tensor:
            # Before the normalization: the affine map fills the borders with 0, the value of the background.
            if augment and len(images):
                images = augment(images.float(), rows, epoch)
            normalized: Tensor = normalize(images)
            return normalized

        ranks = {"rank": process.rank, "world_size": process.world_size}
        options = {"transform": transform, "device": process.device, **order._asdict(), **ranks}
        loader = TrainLoader(part.images, part.labels, part.rows, **options)
        # After the constructor of the loader, which may raise an error.
        listed = ", ".join(f"{name}={value}" for name, value in augmentation.items())
        self.note(f"{self.data_set.info.title}: augmented by {listed}")
        return loader

    @override
    def evaluate(self, part: Part, batch_size: int, process: Process) -> EvaluationLoader:
        """Return a loader that yields each sample of a part once."""
        normalize = Normalize(*self.statistics)

        def transform(images: Tensor, rows: Tensor, epoch: int) -> Tensor:
            normalized: Tensor = normalize(images)
            return normalized

        ranks = (process.rank, process.world_size)
        return EvaluationLoader(part.images, part.labels, part.rows, batch_size, *ranks, transform, process.device)

    @override
    def predict(self, images: InputImages, batch_size: int, process: Process) -> EvaluationLoader:
        """Return a loader of images to predict and their indices, without blank images."""
        digits = read_digits(images, self._inverts)
        blank = digits.blank
        self._note_borders(digits.borders[~blank])
        self.unreadable = digits.unreadable
        self.unclear = dict.fromkeys(digits.numbers[blank].tolist(), "unclear: the image is blank")
        if len(digits.unreadable) == len(images):
            raise next(iter(digits.unreadable.values()))
        pixels = digits.pixels[~blank].unsqueeze(1).to(process.device)
        numbers = digits.numbers[~blank].to(process.device)
        return self.evaluate(Part(pixels, numbers, torch.arange(len(numbers))), batch_size, process)

    def _note_borders(self, borders: Tensor) -> None:
        """Log how many images to predict have a border that fits the training images only if it is inverted."""
        if self._borders is None:
            return
        darkest, lightest = self._borders

        def distance(levels: Tensor) -> Tensor:
            return (levels - levels.clamp(darkest, lightest)).abs()

        exchanged = borders[distance(borders) > distance(255 - borders)]
        if len(exchanged):
            self._note_inversion(
                f"{len(exchanged):,} of {len(borders):,} images have a border of brightness {exchanged.min():.0f} to"
                f" {exchanged.max():.0f} (training images: {darkest:.0f} to {lightest:.0f})"
            )

    @property
    @override
    def state(self) -> dict[str, Any]:
        """State for a checkpoint: whether images are inverted, and the brightness range of the training borders."""
        borders = {} if self._borders is None else {"borders": self._borders}
        return {"invert": self._inverts, **borders}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self._tensors.clear()
        self._saved_inversion = bool(state.get("invert"))
        self._borders = state.get("borders", self._borders)
