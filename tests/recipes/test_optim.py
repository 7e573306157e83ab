"""The schedule in closed form is `LambdaLR`, to the bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from recipes.optim import Schedule


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_schedule_steps_as_lambda_lr_to_the_bit(as_tensor: bool) -> None:
    def rates(kind: type[LambdaLR]) -> tuple[list[list[float]], dict[str, Any]]:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.03)]
        if as_tensor:
            groups = [group | {"lr": torch.tensor(group["lr"])} for group in groups]
        optimizer = torch.optim.AdamW(groups)
        scheduler = kind(optimizer, lambda step: 1 / (1 + step / 7))
        found = []
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            found.append([float(group["lr"]) for group in optimizer.param_groups])
            assert [float(rate) for rate in scheduler.get_last_lr()] == found[-1]
        return found, copy.deepcopy(scheduler.state_dict())

    (ours, our_state), (expected, state) = rates(Schedule), rates(LambdaLR)
    assert ours == expected
    assert {key: our_state[key] for key in ("last_epoch", "_step_count")} == {"last_epoch": 5, "_step_count": 6}
    assert our_state.keys() - {"_stale"} == state.keys()
