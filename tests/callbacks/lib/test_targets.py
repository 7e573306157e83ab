import pytest
import torch

from callbacks.lib.targets import count_targets, warn_of_ignored_targets
from tests.support.tables import sentences


@pytest.mark.parametrize(("count", "expected"), [(None, 1), (3, 0)])
def test_labels_of_minus_100_without_a_count_are_warned_of(count, expected, caplog):
    output = torch.zeros(()) if count is None else {"loss": torch.zeros(()), "count": count}
    warn_of_ignored_targets(output, sentences(4))
    assert caplog.text.count("labels of -100") == expected
    assert count_targets(output, sentences(4)) == (count or 4)
