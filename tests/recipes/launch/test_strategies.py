"""DDP as the command line sets it up: the same model as stock DDP, with less communication."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import FreezeLayers, GradientAccumulation
from datamodules.errors import UserError
from recipes.launch.strategies import LeanDDPStrategy, build_strategy
from tests.support.command_lines import typed
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, Tiny, image_network, noisy_images, sentence_network, sentences, silence


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


def test_it_trains_evaluates_and_saves_the_model_of_stock_ddp_to_the_bit():
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


def relative(found: dict[str, Tensor], exact: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """The error of an update, relative to its length."""
    names = [name for name, value in before.items() if value.is_floating_point()]
    wrong = sum(float((found[n] - exact[n]).square().sum()) for n in names)
    return (wrong / sum(float((exact[n] - before[n]).square().sum()) for n in names)) ** 0.5


def one_update(compression: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    network = sentence_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    module = Tiny(network, torch.optim.SGD, lr=1.0)
    trainer = pl.Trainer(
        **QUIET,
        strategy=LeanDDPStrategy(compression),
        devices=2,
        max_epochs=1,
        callbacks=[GradientAccumulation(3)],
        enable_checkpointing=False,
    )
    mine = [part[trainer.global_rank :: 2] for part in sentences(24)]
    trainer.fit(module, DataLoader(TensorDataset(*mine), 4))  # type: ignore[arg-type]
    assert trainer.global_step == 1
    return before, {name: value.clone() for name, value in network.state_dict().items()}


def compressed() -> dict[str, Any]:
    silence()
    exact = one_update(None)[1]
    found = {}
    for compression in ("bf16", "fp16"):
        before, after = one_update(compression)
        found[compression] = relative(after, exact, before), after
    return found


def test_compressed_gradients_of_three_micro_batches_err_by_their_rounding_and_ranks_stay_equal():
    zero, one = run_ranks(compressed, 2)
    # bfloat16 has 8 bits, float16 has 11; each element is rounded before the sum and after it.
    for compression, bits in (("bf16", 8), ("fp16", 11)):
        error, state = zero[compression]
        assert 2**-bits / 20 < error < 2**-bits
        assert all(torch.equal(state[name], value) for name, value in one[compression][1].items())


def test_other_strategies_refuse_to_compress_and_one_process_has_nothing_to():
    for name in ("fsdp", "fsdp2", "deepspeed"):
        with pytest.raises(UserError, match=f"--strategy {name} reduces gradients .* pass --strategy ddp, or leave"):
            build_strategy(name, 2, compression="bf16")
    assert build_strategy("auto", 1, compression="bf16") == "auto"


def test_names_of_ddp_keep_what_they_say_of_unused_parameters():
    assert isinstance(build_strategy("auto", 2), LeanDDPStrategy)
    strategy = build_strategy("ddp_find_unused_parameters_true", 2)
    assert isinstance(strategy, LeanDDPStrategy)
    assert strategy._ddp_kwargs == {"gradient_as_bucket_view": True, "find_unused_parameters": True}
    assert build_strategy("fsdp", 2) == "fsdp"


def test_fsdp2_resumes_a_run_of_one_device_and_reductions_of_two_types_are_refused(tmp_path: Path) -> None:
    quick = "--max-epochs 1 --logger none --name one"
    trained, resumed, both = typed(
        tmp_path,
        quick,
        "--name one --resume auto --max-epochs 2 --strategy fsdp2",
        f"{quick} --auto-micro-batch --gradient-compression bf16",
    )
    assert (trained.status, resumed.status, both.status) == (0, 0, 2), resumed.err
    assert "resuming from runs/quadrants/one/checkpoints/last.ckpt, after 7 updates" in resumed.out
    assert "--auto-micro-batch" in both.err
    assert "--gradient-compression" in both.err
