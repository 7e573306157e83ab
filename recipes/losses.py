"""The losses of a classifier, as sums over targets: divided by a number of targets, they are equal on any split.

torch's weighted mean divides by the weights of the batch, so that a rare class weighs less in the batches that hold it,
and a batch cut in two has another mean.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["focal_loss"]


def focal_loss(
    logits: Tensor, targets: Tensor, gamma: float, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """The sum of -weight * target * (1 - p)^gamma * log p over samples and classes (Lin et al., 2017).

    The more certain a prediction is, the less it counts. With ``gamma=0`` it is the cross-entropy, as of
    ``F.cross_entropy(..., reduction="sum")``. Half precision is computed in float32.

    Args:
        logits: of shape (batch, classes).
        targets: classes, int64 of shape (batch,), of which -100 does not count; or probabilities of shape (batch,
            classes).
        gamma: 0 or more; the paper's is 2.
        weight: of each class, of shape (classes,).
        label_smoothing: share of each target that is spread over all classes.

    Example:
        >>> logits, targets = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0])
        >>> [round(focal_loss(logits[i : i + 1], targets[i : i + 1], gamma=2).item(), 4) for i in (0, 1)]
        [0.1733, 0.0001]
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weight = None if weight is None else weight.to(logits)
    if not gamma:
        targets = targets.to(logits) if targets.is_floating_point() else targets
        return F.cross_entropy(logits, targets, weight, reduction="sum", label_smoothing=label_smoothing)
    classes = logits.shape[1]
    if targets.is_floating_point():
        shares = targets.to(logits) * (1 - label_smoothing) + label_smoothing / classes
    else:
        shares = F.one_hot(targets.clamp(min=0), classes) * (1 - label_smoothing) + label_smoothing / classes
        shares = shares * (targets >= 0).unsqueeze(1)
    log_p = logits.log_softmax(1)
    # 1 - p without cancellation. At 0 the gradient of a root is infinite.
    rest = (-torch.expm1(log_p)).clamp(min=torch.finfo(logits.dtype).tiny)
    terms = shares * rest.pow(gamma) * log_p
    return -(terms if weight is None else terms * weight).sum()
