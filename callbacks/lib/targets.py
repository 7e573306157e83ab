"""Number of targets behind a mean loss, by which micro-batches and ranks are weighted.

The first of these that is known: a function of the batch that the user passed, the ``count`` that `training_step`
returned, and the samples that the loader dealt.
"""

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.lightning import MisconfigurationException, extract_batch_size
from datamodules.notes import warn

Count = float | Tensor
"""Number of targets: a number, or a scalar tensor on an accelerator, which is never read back."""


def as_count(value: Any) -> Count:
    """Return a number of targets, given as a number or as a tensor or array of any shape that holds one number.

    Raises:
        UserError: it is not a number, or negative.

    Example:
        >>> as_count(7), as_count(torch.tensor([3]))
        (7.0, 3.0)
    """
    number = value
    if isinstance(value, Tensor):
        number = value.detach()
        if number.numel() == 1 and not number.is_complex():
            if number.device.type != "cpu":
                return number.reshape(())
            number = number.item()
    elif not isinstance(value, numbers.Number) and getattr(value, "size", None) == 1 and hasattr(value, "item"):
        number = value.item()  # An array of NumPy.
    if isinstance(number, numbers.Real) and float(number) >= 0:
        return float(number)
    found = (
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.numel() != 1 else repr(value)
    )
    raise UserError(
        f"the `count` of a micro-batch is {found}: expected one number, 0 or more, of the targets behind the mean loss,"
        " such as mask.sum()"
    )


class TargetCounter:
    """Counter of the targets behind a mean loss.

    Args:
        function: function of the batch that returns their number; None if the user passed none.
        guesses: whether a micro-batch of which nothing tells the number of samples counts as 1 if also Lightning cannot
            tell its size. Otherwise it raises an error.
    """

    def __init__(self, function: Callable[[Any], Any] | None = None, guesses: bool = True) -> None:
        self.function = function
        self.guesses = guesses
        self._has_checked = False
        self._has_guessed = False

    def count(self, output: Any, batch: Any, samples: int | None, loss: Tensor | None = None) -> Count:
        """Return the number of targets behind a mean loss.

        The first call may wait for the device, to look for labels that the loss ignores.

        Args:
            output: what `training_step` returned.
            samples: number of samples that the loader dealt; None if it is unknown.
            loss: the mean loss with its graph, which shows some means that are not over samples.

        Raises:
            UserError: the count is not a number, or nothing tells how many targets there are.
        """
        if self.function is not None:
            return as_count(self.function(batch))
        if isinstance(output, dict) and output.get("count") is not None:
            count = output["count"]
            return float(count) if type(count) is int and count >= 0 else as_count(count)
        if samples is None:
            samples = self._guess(batch)
        if not self._has_checked:
            self._has_checked = True
            warn_of_ignored_targets(batch)
            warn_of_other_lengths(batch, samples)
            warn_of_other_means(loss)
        return float(samples)

    def _guess(self, batch: Any) -> int:
        """Return the batch size as Lightning finds it, where no loader tells it."""
        advice = "pass GradientAccumulation(count=function of the batch), or return `count` from training_step"
        try:
            samples = extract_batch_size(batch)
        except MisconfigurationException as error:
            if not self.guesses:
                kind = type(batch).__name__
                raise UserError(
                    f"cannot tell how many samples a batch of type {kind} holds, which weighs its loss: {advice}"
                ) from error
            samples = 1
        if not self._has_guessed:
            self._has_guessed = True
            warn(
                "note: the training loader does not tell how many samples it deals: a micro-batch counts as %d, the"
                " length of its first tensor; %s, to weigh the mean",
                samples,
                advice,
            )
        return samples


def _tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch that is a tensor or a plain collection of some; foreign classes are not read."""
    values: list[Any] = [batch]
    if type(batch) is dict:
        values = list(batch.values())
    elif type(batch) in (tuple, list):
        values = list(batch)
    return [value for value in values if isinstance(value, Tensor)]


def warn_of_ignored_targets(batch: Any) -> None:
    """Warn if a step without ``count`` has labels of -100, torch's `ignore_index`; waits for the device."""
    labels = [tensor for tensor in _tensors(batch) if tensor.dtype == torch.int64]
    if any(bool((tensor == -100).any()) for tensor in labels):
        warn(
            "warning: the first batch holds labels of -100, which cross_entropy leaves out of its mean: return"
            ' {"loss": loss, "count": (labels != -100).sum()} from training_step, to weigh as a mean over the others'
        )


def warn_of_other_lengths(batch: Any, samples: int) -> None:
    """Note that no tensor of a batch is as long as the number of samples that the loader dealt."""
    lengths = {len(tensor) for tensor in _tensors(batch) if tensor.ndim}
    if lengths and samples not in lengths:
        listed = ", ".join(map(str, sorted(lengths)))
        warn(
            f"note: the loader dealt {samples} samples, and the batch has tensors of length {listed}: it counts as"
            f" {samples}; if the loss is a mean over something else,"
            ' return {"loss": loss, "count": number_of_targets} from training_step'
        )


_SUM = 2
"""torch's number of ``reduction="sum"``."""


def warn_of_other_means(loss: Tensor | None) -> None:
    """Warn if the graph of a loss shows that it is a sum, or a mean that is weighted by class."""
    node: Any = None if loss is None else loss.grad_fn
    if getattr(node, "_saved_reduction", None) == _SUM:
        warn(
            'warning: the loss is a sum (reduction="sum"), and an update is the mean over its targets: return the mean'
            " from training_step"
        )
    elif "NllLoss" in type(node).__name__ and node._saved_weight is not None:
        warn(
            "warning: the loss is weighted by class, so that its mean is not over the samples: return"
            ' {"loss": loss, "count": weight[labels].sum()} from training_step, or pass'
            " GradientAccumulation(count=function of the batch)"
        )


def micro_batch_outputs(outputs: Any) -> list[dict[str, Any]]:
    """Return the outputs of `training_step` for each micro-batch of this rank.

    Args:
        outputs: argument of `on_train_batch_end`. With one micro-batch it is the output itself.
    """
    if not isinstance(outputs, dict):
        return []
    micro_batches: list[dict[str, Any]] = outputs.get("micro_batches", [outputs])
    return micro_batches


def _weighted(loss: Tensor, count: Count) -> Tensor:
    """Return a mean loss times its count. A mean over no target may be NaN, which a product with 0 would keep."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, loss * count, 0.0)
    return loss * count if count else torch.zeros_like(loss)


def joined_outputs(outputs: list[dict[str, Any]], is_dummy: bool) -> dict[str, Any]:
    """Join the outputs of several micro-batches, with the mean loss over their targets.

    Args:
        is_dummy: whether the only micro-batch is a stand-in, which does not count.
    """
    trained = [output for output in outputs if output["loss"] is not None]
    loss = None
    if trained:
        total = sum(output.get("count", 1.0) for output in trained)
        loss = sum(_weighted(output["loss"], output.get("count", 1.0)) for output in trained) / total
    return {**outputs[-1], "loss": loss, "micro_batches": [] if is_dummy else outputs}
