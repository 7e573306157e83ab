from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from callbacks.rank_consistency import RankConsistency, checksum, checksums
from datamodules.errors import RunFailedError, UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy with one bit of its storage changed."""
    copy = tensor.clone()
    bytes_ = copy.view(-1).view(torch.uint8)
    bytes_[bit // 8] ^= 1 << bit % 8
    return copy


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.data())
def test_a_single_flipped_bit_changes_the_checksum(dtype: torch.dtype, n: int, data: st.DataObject) -> None:
    tensor = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    bit = data.draw(st.integers(0, n * tensor.element_size() * 8 - 1))
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(flipped(tensor, bit))


@given(st.sampled_from(DTYPES), st.integers(2, 5000), st.data())
def test_two_elements_that_change_places_change_the_checksum(dtype: torch.dtype, n: int, data: st.DataObject) -> None:
    # Powers of two: their bits differ high up only, where sums modulo 2**64 overflow.
    tensor = (2.0 ** (torch.arange(n) % 12)).to(dtype)
    i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    other = tensor.clone()
    other[i], other[j] = tensor[j], tensor[i]
    assert (checksum(tensor) == checksum(other)) == bool(tensor[i] == tensor[j])


def test_the_checksum_counts_places_over_blocks_and_ignores_the_memory_format() -> None:
    large = torch.zeros(3 << 20)
    large[7] = 1
    moved = large.roll(1 << 20)
    assert checksum(large) != checksum(moved)
    image = torch.randn(2, 3, 4, 4)
    assert checksum(image) == checksum(image.contiguous(memory_format=torch.channels_last))


def test_zeros_of_two_signs_differ_and_a_nan_equals_itself() -> None:
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))
    assert checksums([torch.zeros(0), torch.zeros(2)], torch.device("cpu")).tolist() == [0, 0]


class Damage(pl.Callback):
    """Changes the weights of one rank in one epoch, in a way of its own."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_rank != self.rank or trainer.current_epoch != 1 or not trainer.is_last_batch:
            return
        weight: Tensor = pl_module.network[1].weight  # type: ignore[union-attr,index,assignment]
        if self.kind == "bit":
            weight.copy_(flipped(weight.contiguous(), 0))
            pl_module.network[1].bias.add_(1)  # type: ignore[union-attr,index]
        elif self.kind == "permuted":
            weight.copy_(weight.flip(0))


def fit(world_size: int, kind: str, rank: int = 0) -> tuple[str, int, list[int]]:
    """A run of three epochs: what it raised, the epochs done, and the checksums of BN's statistics."""
    trainer = quiet_trainer(RankConsistency(), Damage(kind, rank), world_size=world_size, max_epochs=3)
    rows = torch.arange(21) if kind != "data" or trainer.global_rank != rank else torch.arange(21).flip(0)
    loader = TrainLoader(*noisy_images(21), rows, 4, 1, trainer.global_rank, world_size)
    model = Tiny(image_network().double(), torch.optim.SGD, lr=0.1)
    raised = ""
    try:
        trainer.fit(model, loader)
    except (RunFailedError, UserError, SystemExit) as error:
        raised = str(error)
    statistics = [b for layer in model.modules() if isinstance(layer, nn.BatchNorm2d) for b in layer.buffers()]
    return raised, trainer.current_epoch, checksums(statistics, torch.device("cpu")).tolist()


@pytest.mark.parametrize("kind", ["bit", "permuted"])
def test_a_run_whose_ranks_differ_stops_on_all_of_them_and_names_the_first_parameter(kind: str) -> None:
    for raised, epochs, *_ in run_ranks(fit, 3, 3, kind, rank=1):
        assert "network.1.weight" in raised
        assert "ranks 0, 2 | 1 " in raised
        assert f"the first of {2 if kind == 'bit' else 1} of 6" in raised
        assert epochs == 1, "it stopped at the end of the epoch in which the ranks went apart"


def test_a_rank_with_other_data_is_refused_before_the_first_batch() -> None:
    for raised, epochs, *_ in run_ranks(fit, 2, 2, "data", rank=1):
        assert raised.startswith("rank 1 trains on other data than rank 0: [21] samples and [21], others or in another")
        assert epochs == 0


def test_ranks_with_equal_weights_continue_though_plain_ddp_lets_their_running_statistics_differ() -> None:
    first, second = run_ranks(fit, 2, 2, "nothing")
    assert first[:2] == second[:2] == ("", 3)
    assert first[2] != second[2], "if buffers were equal they could be compared"
