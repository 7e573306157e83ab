import warnings
from typing import Any

import pytest
import torch

from callbacks.lib.targets import observe_counts
from tests.support.tables import Tiny, sentence_network, sentences


@pytest.mark.parametrize(("count", "expected"), [(None, 1), (3, 0)])
def test_labels_of_minus_100_without_a_count_are_warned_of_once(count: int | None, expected: int):
    class Module(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] if count is None else {"loss": None, "count": count}

    module, told = Module(sentence_network(), torch.optim.SGD, lr=0.1), []
    restore = observe_counts(module, told.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            module.training_step(sentences(4), 0)
    restore()
    assert told[:2] == [count or 4] * 2
    assert len([w for w in caught if "labels of -100" in str(w.message)]) == expected
