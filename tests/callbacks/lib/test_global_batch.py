import pytest

from callbacks.lib.global_batch import accumulation_factor
from datamodules.errors import UserError


@pytest.mark.parametrize("size", [0, -1, -(2**63)])
def test_an_update_without_samples_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=rf"global_batch_size={size} leaves no sample in an update; pass 1 or more"):
        accumulation_factor(size, batch_size=64, world_size=2)


@pytest.mark.timeout(20)
def test_a_batch_size_that_divides_a_huge_global_batch_is_found_at_once() -> None:
    with pytest.raises(UserError, match="or batch_size=7$"):
        accumulation_factor(7 * (2**61 - 1), batch_size=8, world_size=1)
