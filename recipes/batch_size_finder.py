"""The largest batch per device that fits into memory: a few training steps of growing batches, before the run.

Lightning's Tuner doubles the batch of the run itself until it fails, on one device: it hangs where one rank of several
fails, and on a CPU the kernel ends the process. Here copies are trained, each rank by itself, and what they have taken
says how far the next step may go.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from typing_extensions import override

from callbacks.freezing import FreezeLayers
from callbacks.lib.accumulation import is_replicated
from callbacks.lib.consensus import FlagAllReduce
from callbacks.lib.global_batch import accumulation_factor, loader_batch_size
from callbacks.lib.memory import MemoryPeak, available_memory, is_limited_by_ulimit
from callbacks.lib.trainer_attributes import callbacks_of, datamodule_of
from datamodules.contract import data_contract
from datamodules.errors import UserError, is_out_of_memory
from recipes.copied_fit import fit_copies
from recipes.results.texts import with_unit

__all__ = [
    "BatchSizeSearch",
    "BatchSizeTest",
    "Trial",
    "find_batch_size",
    "next_size",
    "search_batch_size",
    "set_batch_size",
    "sizes_of",
]

_TRIALS = 8  # And one step before them.
_FIRST = 8  # Below it batch normalisation may refuse a batch, and a step is mostly overhead.
# Of the memory that is there. A GPU's is ours alone, but fragments; a host's is shared with workers and other programs.
_SHARE = {"cuda": 0.92, "cpu": 0.8}
_GAIN = 0.05


@dataclass(frozen=True)
class Trial:
    """One training step, and what it says of larger ones; equal on all ranks.

    Args:
        batch_size: samples on each device.
        fits: on every rank, with a margin.
        room: the largest size that should fit on every rank, by what the steps so far have taken.
        rate: samples per second on all devices.
        share: of the memory that was available before the search, on the rank where it was most.
    """

    batch_size: int
    fits: bool
    room: float
    rate: float
    share: float


def sizes_of(largest: int | None, divided: int | None = None) -> list[int]:
    """The batch sizes to choose from, in ascending order.

    Args:
        largest: of them; None where nothing but memory limits them.
        divided: the samples of a device in an update, where that is given: they divide it.

    Example:
        >>> sizes_of(30), sizes_of(None, 12)
        ([1, 2, 3, 4, 5, 6, 7, 8, 16, 24], [1, 2, 3, 4, 6, 12])
    """
    if divided is not None:
        return [size for size in range(1, min(divided, largest or divided) + 1) if divided % size == 0]
    return [*range(1, 1 + min(7, largest or 7)), *range(8, 1 + (largest or 2**20), 8)]


def _gains(trial: Trial, larger: Trial, min_gain: float) -> bool:
    """Whether a larger batch is faster by `min_gain` for each doubling."""
    return bool(larger.rate >= trial.rate * (1 + min_gain) ** math.log2(larger.batch_size / trial.batch_size))


def fast_enough(tried: Sequence[Trial], min_gain: float = _GAIN) -> Trial | None:
    """The smallest step that larger ones hardly beat; None before two of these have been made.

    Example:
        >>> steps = [Trial(size, True, 1e9, rate, 0.1) for size, rate in [(8, 1), (16, 90), (32, 170), (64, 172)]]
        >>> fast_enough(steps), fast_enough([*steps, Trial(128, True, 1e9, 173.0, 0.1)]).batch_size
        (None, 32)
    """
    steps = sorted((trial for trial in tried if trial.fits), key=lambda trial: trial.batch_size)
    for place, step in enumerate(steps[:-2]):
        if not any(_gains(step, larger, min_gain) for larger in steps[place + 1 :]):
            return step
    return None


def next_size(sizes: Sequence[int], tried: Sequence[Trial], factor: int = 2, min_gain: float = _GAIN) -> int | None:
    """The batch size to try next; None where the search is over.

    Sizes grow by `factor`, as far as the steps so far say that there is room, until one does not fit; then the interval
    is halved. Less than a tenth more is not worth a step.

    Example:
        >>> fits = Trial(16, True, 1000.0, 1.0, 0.1)
        >>> next_size(sizes_of(None), [fits]), next_size(sizes_of(None), [fits, Trial(32, False, 30.0, 0.0, 1.0)])
        (32, 24)
    """
    low = max((trial.batch_size for trial in tried if trial.fits), default=0)
    high = min((trial.batch_size for trial in tried if not trial.fits), default=math.inf)
    possible = [size for size in sizes if low < size < high]
    if len(tried) >= _TRIALS or not possible:
        return None
    if not low:
        return max([size for size in possible if size <= high // 4], default=possible[0])
    if high == math.inf and min_gain and fast_enough(tried, min_gain):
        return None
    wanted = min(factor * low if high == math.inf else (low + high) // 2, tried[-1].room)
    # The interval may have nothing below its middle.
    size = max([size for size in possible if size <= wanted], default=possible[0])
    return size if size <= tried[-1].room and size >= 1.1 * low else None


@dataclass(frozen=True)
class BatchSizeTest:
    """What a search found.

    Args:
        batch_size: samples on each device.
        trials: in the order in which they were made.
        available: bytes that a device had left before the search, on the rank with the fewest.
        limit: the largest size that could have been chosen, and why.
    """

    batch_size: int
    trials: list[Trial]
    available: int
    limit: tuple[int, str]

    @property
    def chosen(self) -> Trial:
        """The trial of `batch_size`."""
        return next(trial for trial in self.trials if trial.batch_size == self.batch_size)

    def _why(self) -> str:
        largest = max((trial for trial in self.trials if trial.fits), key=lambda trial: trial.batch_size)
        if largest is not self.chosen:
            rates = f"{self.chosen.rate:,.0f} samples/s, {largest.rate:,.0f} with {largest.batch_size}"
            return f"larger ones are hardly faster ({rates})"
        if self.batch_size == self.limit[0]:
            return self.limit[1]
        if len(self.trials) == _TRIALS and all(trial.fits for trial in self.trials):
            return f"the largest of {_TRIALS} trials"
        return "the largest that fits"

    def line(self) -> str:
        """The choice in one line."""
        tried = ", ".join(f"{trial.batch_size}{'' if trial.fits else ' (too large)'}" for trial in self.trials)
        taken = with_unit(self.chosen.share * self.available, "B")
        memory = f"takes {taken} of {with_unit(self.available, 'B')}"
        return f"batch size {self.batch_size} on each device: {self._why()}; {memory}; tried {tried}"


def set_batch_size(data: Any, size: int) -> None:
    """Change the batch size of a data module, where Lightning's documentation keeps it."""
    if hasattr(data, "batch_size"):
        data.batch_size = size
    if "batch_size" in (hparams := getattr(data, "hparams", {})):
        hparams["batch_size"] = size


def _elements(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def repeated(batch: Any, size: int) -> Any:
    """A batch with so many samples, repeated or left out; None where its tensors do not say how many it has.

    Example:
        >>> repeated((torch.zeros(2, 5), torch.tensor([3, 4])), 3)[1].tolist()
        [3, 4, 3]
        >>> repeated((torch.zeros(0, 5),), 3) is None  # A rank may have nothing to validate.
        True
    """
    counts = {len(part) if part.dim() else -1 for part in _elements(batch)}
    if len(counts) != 1 or min(counts) < 1:
        return None
    places = torch.arange(size) % counts.pop()
    return apply_to_collection(batch, Tensor, lambda part: part[places.to(part.device)])


class _Batches:
    """Batches of any size, for which few samples are read.

    Args:
        data: a copy, whose batch size may be changed.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._samples: dict[str, Any] = {}

    def loader(self, part: str, batch_size: int) -> Any:
        """The loader of a part with that batch size."""
        set_batch_size(self.data, batch_size)
        loader = self.data.train_dataloader() if part == "train" else self.data.val_dataloader()
        return loader[0] if isinstance(loader, list) and loader else loader

    def train(self, batch_size: int) -> Any:
        """A batch to train on."""
        largest = data_contract(self.data).largest_batch("train", batch_size)
        if largest is not None:
            return largest
        if "train" not in self._samples:
            # The largest of a few: sentences differ in length.
            drawn = [batch for _, batch in zip(range(4), self.loader("train", _FIRST))]
            self._samples["train"] = max(drawn, key=lambda batch: sum(part.numel() for part in _elements(batch)))
        return self._sized("train", batch_size, batch_size)

    def _sized(self, part: str, size: int, batch_size: int) -> Any:
        batch = repeated(self._samples[part], size)
        return next(iter(self.loader(part, batch_size))) if batch is None else batch

    def val_size(self, batch_size: int) -> int | None:
        """Samples in a batch to validate beside batches of that size; None where the loader does not say."""
        try:
            return loader_batch_size(self.loader("val", batch_size))
        except UserError:
            return None

    def val(self, size: int | None, batch_size: int) -> Any:
        """A batch to validate, of that size."""
        largest = data_contract(self.data).largest_batch("val", size) if size else None
        if largest is not None:
            return largest
        if size is None or "val" not in self._samples:
            self._samples["val"] = next(iter(self.loader("val", batch_size)), None)
        return self._samples["val"] if size is None else self._sized("val", size, batch_size)


def training_samples(data: Any, loader: Any) -> int | None:
    """How many samples there are to train on, on all devices; None where it is not known."""
    if size := data_contract(data).sizes.get("train"):
        return size
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of `log`."""


class BatchSizeSearch(pl.Callback):
    """Tries batch sizes where training would begin, and ends the run before its first batch.

    Runs on: `on_fit_start`, on a copy of the module whose weights it changes. Each rank steps by itself: its gradients
    are not reduced, so one that runs out of memory does not leave the others waiting. A `training_step` with collective
    calls of its own would.

    Args:
        global_batch_size: samples of an update on all devices, which sizes are to divide.
        max_batch_size: on each device.
        min_gain: sizes grow until they are no faster by this share, for each doubling; 0 goes to the limit of memory.
    """

    def __init__(
        self, global_batch_size: int | None = None, max_batch_size: int | None = None, min_gain: float = _GAIN
    ) -> None:
        self.global_batch_size, self.max_batch_size, self.min_gain = global_batch_size, max_batch_size, min_gain
        self.found: BatchSizeTest | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not is_replicated(trainer.strategy):
            name = type(trainer.strategy).__name__
            raise UserError(f"batch_size='auto' is for one device and for DDP, and this is {name}; pass a number")
        if not pl_module.automatic_optimization:
            raise UserError("batch_size='auto' cannot try a module that makes its own updates; pass a number")
        device = trainer.strategy.root_device
        data = datamodule_of(trainer)
        batches = _Batches(data)
        count = training_samples(data, batches.loader("train", _FIRST))
        limits = [(self.max_batch_size, "the largest that is allowed")] if self.max_batch_size else []
        if count:
            limits.append((max(1, count // trainer.world_size), "the whole training set"))
        divided = None
        if self.global_batch_size:
            divided = accumulation_factor(self.global_batch_size, 1, trainer.world_size)
            limits.append((divided, "the whole global batch"))
        limit = min(limits, default=(2**20, "the largest that is tried"))
        sizes = sizes_of(limit[0], divided)
        limit = (sizes[-1], limit[1])
        here = trainer.world_size // trainer.num_nodes
        ranks = FlagAllReduce(trainer.world_size)
        peak, available = MemoryPeak(device), available_memory(device, here)
        usable = _SHARE.get(device.type, 0.8) * available
        with torch.compiler.set_stance("force_eager"):
            step = _Step(trainer, pl_module, batches, peak, usable)
            first, factor = self._plan(step, sizes, usable, ranks)
            points: list[tuple[int, float]] = []

            def trial(size: int) -> Trial:
                train, evaluation = step.train(size), step.evaluate(size)
                if math.isfinite(train):
                    points.append((size, train))
                taken, room = max(train, evaluation), _room(points, 0.95 * usable)
                if step.may_fail and len(points) == 1:
                    room = max(room, 2.0 * size)  # What does not grow with the batch is most of a small step.
                missing, seconds, share, room = ranks.maximum(
                    taken > usable, step.seconds, min(1.0, taken / max(1, available)), -room
                )
                return Trial(size, not missing, -room, trainer.world_size * size / seconds, share)

            # Loads kernels, and makes the optimiser's state, which later steps have from their start.
            step.train(first)
            trials: list[Trial] = []
            size: int | None = first
            while size is not None:
                trials.append(trial(size))
                size = next_size(sizes, trials, factor, self.min_gain)
        fitting = max((trial for trial in trials if trial.fits), key=lambda trial: trial.batch_size, default=None)
        chosen = (fast_enough(trials, self.min_gain) if self.min_gain else None) or fitting
        least = int(-ranks.maximum(-available)[0])
        if chosen is None:
            what = f"a batch of {trials[-1].batch_size} to train on"
            if step.validated and not math.isfinite(step.evaluate(trials[-1].batch_size)):
                what = f"a batch of {step.validated} to validate"
            raise UserError(
                f"{what} does not fit into {with_unit(least, 'B')} of memory; pass a smaller `eval_batch_size` or"
                " network, or precision='bf16-mixed'"
            )
        peak.reset()
        self.found = BatchSizeTest(chosen.batch_size, trials, least, limit)
        trainer.limit_train_batches = 0  # The run ends here.

    def _plan(self, step: "_Step", sizes: list[int], usable: float, ranks: FlagAllReduce) -> tuple[int, int]:
        """The first size and by how much sizes grow, from an estimate of the memory of a step, where there is one."""
        start = max(size for size in sizes if size <= _FIRST)
        # The estimate loads modules of 150 MB, which a tight limit may not have.
        one, fixed = (0, 0) if step.may_fail else step.estimate()
        # Where nothing is known a small batch is the safest.
        room = (usable - fixed) / one if one else 4.0
        unknown, room = ranks.maximum(not one, -room)
        one, room = 0 if unknown else one, -room
        if one and room < 0.5:
            raise UserError(
                f"a batch of one sample needs about {with_unit(fixed + one, 'B')}, and {with_unit(usable, 'B')} of"
                " memory may be taken; pass a smaller network or precision='bf16-mixed'"
            )
        start = max([size for size in sizes if size <= min(start, room / 2)], default=sizes[0])
        largest = min(sizes[-1], room) if one else sizes[-1]
        # Doubling would reach the largest size in more steps than there are, with two to find the edge.
        return start, 2 if largest <= start * 2 ** (_TRIALS - 3) else 4


def _room(points: Sequence[tuple[int, float]], usable: float) -> float:
    """The size of a step that takes `usable` bytes, on the line through the last two of (size, bytes taken).

    Of one step nothing is known but that a larger one takes no more in proportion.

    Example:
        >>> _room([(10, 300)], 1200), _room([(10, 300), (20, 400)], 1200)
        (40.0, 100.0)
    """
    if not points:
        return 0.0
    (a, low), (b, high) = [(0, 0), *sorted(set(points))][-2:]
    slope = (high - low) / (b - a)
    return b + (usable - high) / slope if slope > 0 else math.inf


class _Step:
    """Training steps of one rank by itself, with the memory that those of a run take.

    Gradients are kept from step to step, as in accumulation, and the optimiser has its state from the first one on.

    Args:
        module: a copy, that is trained.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, batches: _Batches, peak: MemoryPeak, usable: float
    ) -> None:
        self.trainer, self.module, self.batches = trainer, module, batches
        self.peak, self.usable = peak, usable
        self.may_fail = is_limited_by_ulimit(peak.device)
        """Whether a step that is too large raises an exception, where else the kernel would kill processes."""
        self.validates = is_overridden("validation_step", module) and is_overridden("val_dataloader", batches.data)
        self.validates = self.validates and data_contract(batches.data).validates
        self.validated: int | None = None
        """Samples in the last batch that was validated."""
        self._taken: dict[int | None, float] = {}
        self.seconds = math.inf
        """Of the last update, without its batch."""
        untyped: Any = module
        untyped.log = untyped.log_dict = _do_nothing
        if any(isinstance(callback, FreezeLayers) and callback.unfreeze for callback in callbacks_of(trainer)):
            module.requires_grad_(True)  # As in the last phase of the run, which takes most.
        self._set_mode(training=True)

    def _set_mode(self, training: bool) -> None:
        self.module.train(training)
        for layer in self.module.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                layer.eval()  # Else it would wait for the other ranks.

    def estimate(self) -> tuple[int, int]:
        """Bytes of the activations of one sample, and of what a step adds to the weights; 0 where it is not known."""
        return 0, 0

    def _on_device(self, batch: Any) -> Any:
        return self.trainer.strategy.batch_to_device(self.trainer.precision_plugin.convert_input(batch))

    def _measured(self, step: Callable[..., None], *sizes: int | None) -> float:
        """Bytes that a step takes; infinite where there are too few, or more than may be used."""
        self.peak.reset()
        try:
            step(*sizes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return math.inf
        taken = self.peak.taken()
        return taken if taken <= self.usable else math.inf

    def train(self, size: int) -> float:
        """Bytes that a training step of that size takes; infinite where they are not there."""
        return self._measured(self._train, size)

    def evaluate(self, batch_size: int) -> float:
        """Bytes that a batch to validate takes, beside batches of that size to train on."""
        if not self.validates:
            return 0.0
        size = self.batches.val_size(batch_size)
        if size is None or size not in self._taken:
            self._taken[size] = self._grow(size, batch_size)
        return self._taken[size]

    def _grow(self, size: int | None, batch_size: int) -> float:
        """Validate batches up to that size, each after one of half of it: a host's memory must not be exceeded."""
        part = size
        if size and self.trainer.strategy.root_device.type == "cpu":
            part = min(_FIRST, size)
            while part < size:
                taken = self._measured(self._validate, part, batch_size)
                if taken * min(2.0, size / part) > self.usable:
                    self.validated = size
                    return math.inf
                part = min(2 * part, size)
        return self._measured(self._validate, part, batch_size)

    def _train(self, size: int) -> None:
        batch = self._on_device(self.batches.train(size))
        optimizer = self.trainer.optimizers[0]
        self._set_mode(training=True)

        def closure() -> Any:
            with torch.enable_grad():
                with self.trainer.precision_plugin.train_step_context():
                    output: Any = self.module.training_step(batch, 0)
                loss = output["loss"] if isinstance(output, dict) else output
                if loss is not None:
                    loss.backward()
            return loss

        began = time.monotonic()
        optimizer.step(closure)
        if self.trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.monotonic() - began

    def _validate(self, size: int | None, batch_size: int) -> None:
        batch = self._on_device(self.batches.val(size, batch_size))
        if batch is None:
            return
        self.validated = size
        self._set_mode(training=False)
        with torch.no_grad(), self.trainer.precision_plugin.val_step_context():
            self.module.validation_step(batch, 0)


def search_batch_size(
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    search: BatchSizeSearch,
    build_trainer: Callable[[BatchSizeSearch], pl.Trainer],
) -> BatchSizeTest:
    """Search on copies.

    Args:
        build_trainer: makes a Trainer with that callback as its last one, without validation.

    Raises:
        UserError: module or data cannot be copied, their batch size cannot be changed, or no size fits.
    """
    if not hasattr(data, "batch_size") and "batch_size" not in getattr(data, "hparams", {}):
        raise UserError(
            f"{type(data).__name__} has neither an attribute nor a hyper-parameter `batch_size`, which the search for a"
            " batch size sets; pass a number"
        )
    fit_copies(module, data, search, build_trainer, "a number", prepare=lambda copied: set_batch_size(copied, 1))
    assert search.found is not None
    return search.found


def find_batch_size(
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    global_batch_size: int | None = None,
    max_batch_size: int | None = None,
    min_gain: float = _GAIN,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> BatchSizeTest:
    """Find the largest batch per device that fits into memory, in less than ten training steps.

    The module, the data and all generators stay as they are; set ``data.batch_size`` to what is returned. Sizes double
    until memory is used up to a margin (92 % of what a GPU has left, 80 % of a host), the training set or the global
    batch is reached, or larger ones are no faster. A host's memory is not filled: what small steps take is
    extrapolated, against the limits of cgroups and ``ulimit``, too. Ranks try the same sizes at the same time, and take
    what fits on all.

    Args:
        module: as it is to be trained; a copy is.
        data: a data module with an attribute ``batch_size``, or a hyper-parameter of that name.
        global_batch_size: samples of an update on all devices, which the result divides, so that accumulation makes the
            same update of any size.
        max_batch_size: on each device.
        min_gain: sizes grow until they are no faster by this share, for each doubling; 0 goes to the limit of memory.
        callbacks: that take memory, such as `WeightAveraging`.
        options: of the Trainer, such as ``devices`` and ``precision``.

    Returns:
        The size as ``batch_size``, and the trials.

    Raises:
        UserError: no size fits.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule
        >>> data = BoringDataModule()
        >>> data.batch_size = 1
        >>> find_batch_size(BoringModel(), data, max_batch_size=16, min_gain=0, accelerator="cpu").batch_size
        16
    """
    fixed = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    fixed |= {"enable_model_summary": False, "limit_val_batches": 0}

    def build_trainer(search: BatchSizeSearch) -> pl.Trainer:
        return pl.Trainer(**{"max_epochs": 1, **options, **fixed}, callbacks=[*copy.deepcopy(list(callbacks)), search])

    return search_batch_size(module, data, BatchSizeSearch(global_batch_size, max_batch_size, min_gain), build_trainer)
