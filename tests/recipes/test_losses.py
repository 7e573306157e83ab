import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import sigmoid_focal_loss

from recipes.losses import focal_loss

GENERATOR = torch.Generator().manual_seed(1)
LOGITS = 3 * torch.randn(40, 4, generator=GENERATOR)
TARGETS = torch.randint(-1, 4, (40,), generator=GENERATOR)
TARGETS[TARGETS < 0] = -100
SOFT = torch.randn(40, 4, generator=GENERATOR).softmax(1)
WEIGHT = torch.tensor([0.2, 0.0, 2.0, 1.0])


def test_two_classes_give_torchvisions_binary_focal_loss():
    x, targets = LOGITS[:, 0], (LOGITS[:, 1] > 0).long()
    for gamma in (0.5, 1.0, 2.0):
        expected = sigmoid_focal_loss(x, targets.float(), alpha=-1, gamma=gamma, reduction="sum")
        assert torch.allclose(focal_loss(torch.stack((torch.zeros(40), x), 1), targets, gamma), expected)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("targets", [TARGETS, SOFT], ids=["classes", "probabilities"])
def test_the_loss_is_the_sum_of_its_definition(gamma: float, smoothing: float, targets: torch.Tensor):
    shares = targets if targets.is_floating_point() else F.one_hot(targets.clamp(min=0), 4) * (targets >= 0)[:, None]
    expected = torch.zeros((), dtype=torch.float64)
    for row, share in zip(LOGITS.double(), shares.double()):
        if share.sum():
            p = row.softmax(0)
            smooth = share * (1 - smoothing) + smoothing / 4
            expected -= sum(WEIGHT[c].double() * smooth[c] * (1 - p[c]) ** gamma * p[c].log() for c in range(4))
    assert focal_loss(LOGITS, targets, gamma, WEIGHT, smoothing).double() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0])
def test_gradients_are_finite_at_extreme_logits(dtype: torch.dtype, gamma: float):
    logits = torch.tensor([[6e4, -6e4], [-6e4, 6e4], [0.0, 0.0], [20.0, 0.0]], dtype=dtype).requires_grad_()
    loss = focal_loss(logits, torch.zeros(4, dtype=torch.int64), gamma)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    # What is certain has no gradient, and what is wrong has that of the cross-entropy.
    assert logits.grad[0].eq(0).all()
    assert logits.grad[1].tolist() == [-1.0, 1.0]


def test_no_targets_give_a_loss_of_0():
    for gamma in (0.0, 2.0):
        assert focal_loss(LOGITS, torch.full((40,), -100), gamma, WEIGHT) == 0
        assert focal_loss(LOGITS[:0], TARGETS[:0], gamma) == 0
