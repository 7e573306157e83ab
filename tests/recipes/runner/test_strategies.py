"""DDP as the command line sets it up: the same model as stock DDP, with less communication."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import FreezeLayers
from datamodules.errors import UserError
from recipes.runner.settings import LeanDDPStrategy, build_strategy, check_strategy
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, silence


class Counted(nn.Module):
    """A network with a buffer of its own, which each rank changes in its way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = image_network().float()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.calls.item()
        self.calls += inputs.sum()
        return self.body(inputs) + seen / 1e3


def train(
    strategy: DDPStrategy, network: nn.Module, data: tuple[Tensor, Tensor], *callbacks: pl.Callback, batch_size: int = 4
) -> dict[str, Any]:
    module = Tiny(network, torch.optim.AdamW, lr=0.01)
    trainer = pl.Trainer(
        **QUIET, strategy=strategy, devices=2, max_epochs=2, callbacks=[*callbacks], enable_checkpointing=False
    )
    mine = [part[trainer.global_rank :: 2] for part in data]
    loader: Any = DataLoader(TensorDataset(*mine), batch_size)
    scores: list[float] = []
    module.on_validation_end = lambda: scores.append(float(trainer.callback_metrics["val_loss"]))  # type: ignore[method-assign]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.fit(module, loader, loader)
    calls = {event.key: event.count for event in profile.key_averages()}
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "scores": scores,
        "broadcasts": calls.get("c10d::broadcast_", 0),
        "updates": trainer.global_step,
    }


def both_ways() -> list[dict[str, Any]]:
    silence()
    inputs, targets = noisy_images(48)
    found = []
    for network in (lambda: image_network().float(), Counted):
        for strategy in (DDPStrategy(), LeanDDPStrategy()):
            freeze = FreezeLayers(until="1", unfreeze={"*": "1 epochs"})
            found.append(train(strategy, network(), (inputs.float(), targets), freeze))
    return found


def test_it_trains_the_model_of_stock_ddp_to_the_bit():
    ranks = run_ranks(both_ways, 2)
    for stock, ours in ((0, 1), (2, 3)):
        for result in ranks:
            assert result[ours]["scores"] == result[stock]["scores"]
        saved = ranks[0][stock]["state"]
        for name, value in saved.items():
            assert torch.equal(ranks[0][ours]["state"][name], value), name
        # Stock leaves the statistics of its own last batch on the other ranks.
        for name, value in ranks[1][ours]["state"].items():
            assert torch.equal(saved[name], value) or name == "network.calls", name
    stock, ours = ranks[0][:2]
    assert stock["updates"] == ours["updates"] == 12
    # Of floats and of counters: stock before each update and each validation, ours before validation and at the end.
    assert stock["broadcasts"] - ours["broadcasts"] == 2 * (12 + 2) - 2 * (2 + 1)


def test_ddp_keeps_the_option_for_unused_parameters():
    assert isinstance(build_strategy("auto", 2), LeanDDPStrategy)
    strategy = build_strategy("ddp_find_unused_parameters_true", 2)
    assert isinstance(strategy, LeanDDPStrategy)
    assert strategy._ddp_kwargs == {"gradient_as_bucket_view": True, "find_unused_parameters": True}


def test_a_strategy_other_than_ddp_is_rejected():
    for name in ("fsdp", "fsdp2", "deepspeed", "ddp_spawn"):
        with pytest.raises(UserError, match=f"strategy='{name}': runs train on one device or with DDP; pass"):
            check_strategy(name)
