from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from callbacks.lib.ranks import checksum, checksums
from callbacks.rank_consistency import Evidence, RankConsistency, describe_cause
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


def test_a_checksum_counts_places_across_blocks() -> None:
    large = torch.zeros(3 << 20)
    large[7] = 1
    moved = large.roll(1 << 20)
    assert checksum(large) != checksum(moved)


def test_a_checksum_ignores_the_memory_format() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert checksum(image) == checksum(image.contiguous(memory_format=torch.channels_last))


def test_zeros_of_two_signs_have_different_checksums() -> None:
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))


def test_equal_nans_have_equal_checksums() -> None:
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


def test_zeros_have_the_checksum_of_an_empty_tensor() -> None:
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
def test_differing_ranks_stop_with_the_first_parameter_named(kind: str) -> None:
    for raised, epochs, *_ in run_ranks(fit, 3, 3, kind, rank=1):
        assert "network.1.weight" in raised
        assert "ranks 0, 2 | 1 " in raised
        assert f"the first of {2 if kind == 'bit' else 1} of 6" in raised
        assert epochs == 1, "it stopped at the end of the epoch in which the ranks went apart"


def test_a_rank_with_other_data_is_rejected_before_training() -> None:
    for raised, epochs, *_ in run_ranks(fit, 2, 2, "data", rank=1):
        assert raised.startswith("rank 1 trains on other data than rank 0: [21] samples and [21], others or in another")
        assert epochs == 0


def test_ranks_may_differ_in_the_running_statistics_of_plain_ddp() -> None:
    first, second = run_ranks(fit, 2, 2, "nothing")
    assert first[:2] == second[:2] == ("", 3)
    assert first[2] != second[2], "if buffers were equal they could be compared"


class Drift(pl.Callback):
    """Lets the weights of the ranks differ, as a run with this mistake does."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @override
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        weight = pl_module.network[1].weight
        if self.kind == "unfrozen":
            weight.requires_grad_(False)
        elif self.kind == "teacher":
            make = pl_module.make_optimizer
            others = [parameter for parameter in pl_module.parameters() if parameter is not weight]
            pl_module.make_optimizer = lambda: type(make())(others, lr=0.1)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.kind == "unfrozen":
            pl_module.network[1].weight.requires_grad_(True)  # DDP has not registered it.

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        weight = pl_module.network[1].weight
        if self.kind == "rates" and trainer.global_rank == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.05
        elif self.kind == "frozen" and trainer.global_rank == 1 and trainer.is_last_batch:
            weight.requires_grad_(False)
            weight.mul_(2)
        elif self.kind in ("teacher", "written"):
            weight.add_(trainer.global_rank)


CAUSES = {
    "rates": "The learning rate is 0.1 on rank 0 and 0.05 on rank 1: a schedule has decided by a value of one rank;",
    "frozen": "It is frozen on rank 1 and not on rank 0: freeze and unfreeze layers on all ranks in the same update",
    "teacher": "No optimizer has it, so other code writes to it: write the same values on each rank, once per update",
    "unfrozen": "Its gradient was not reduced over the ranks: look for layers unfrozen without FreezeLayers",
    "written": "Its last gradient is the same on all ranks, so the optimizer or other code has changed it otherwise",
}


def _drift(world_size: int, kind: str) -> str:
    trainer = quiet_trainer(RankConsistency(), Drift(kind), world_size=world_size)
    loader = TrainLoader(*noisy_images(16), torch.arange(16), 4, 1, trainer.global_rank, world_size)
    with pytest.raises(RunFailedError) as raised:
        trainer.fit(Tiny(image_network().double(), torch.optim.SGD, lr=0.1), loader)
    return str(raised.value)


@pytest.mark.parametrize("kind", CAUSES)
def test_the_line_names_the_cause_that_fits(kind: str) -> None:
    for raised in run_ranks(_drift, 2, 2, kind):
        assert f"agree among themselves. {CAUSES[kind]}" in raised


def test_rates_that_differ_name_the_metric_that_decides() -> None:
    ranks = [Evidence([0.1], {"a": "1", "loss": value}, True, True, 7) for value in ("0.5", "0.25")]
    ranks[1] = ranks[1]._replace(rates=[0.01], metrics={"a": "2", "loss": "0.25"})
    assert "as loss is 0.5 on rank 0 and 0.25 on rank 1; log what it reads" in describe_cause(ranks, ["loss"])
    assert "as a is 1 on rank 0 and 2 on rank 1; log what it reads" in describe_cause(ranks)
