"""What `benchmarks.memory` trains."""

import math
from typing import Any

import pytest
import torch

from benchmarks import memory


@pytest.mark.parametrize("contender", [memory.STOCK, memory.OURS])
def test_both_contenders_make_the_same_number_of_updates(contender: str, monkeypatch: Any) -> None:
    steps: list[int] = []

    class Counting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            return super().step(closure)

    monkeypatch.setattr(memory, "WIDTH", 16)
    monkeypatch.setattr(torch.optim, "AdamW", Counting)
    assert math.isfinite(memory.measure(contender, 2))
    assert len(steps) == memory.UPDATES
