import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.bn_recalibration import BNRecalibration, recalibrate
from callbacks.sync_bn import restore_batchnorm, sync_batchnorm
from datamodules import UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, noisy_images, silence

INPUTS, TARGETS = noisy_images(50)
SIZES = [7, 1, 12, 20, 10]


def network() -> nn.Sequential:
    """Layers of each kind, the last of them frozen; dropout would show if it were not off."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.BatchNorm2d(1, momentum=None),
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.BatchNorm1d(6),
    ).double()
    net[8].eval()
    return net


def directly(net: nn.Sequential, batches: list[Tensor]) -> list[Tensor]:
    """Mean and variance of all values that reach the two layers, each batch normalised by itself before the second."""
    first, second = torch.cat(batches), []
    for x in batches:
        normed = F.batch_norm(x, None, None, net[0].weight, net[0].bias, training=True, eps=net[0].eps)
        second.append(net[1](normed))
    found = []
    for values in (first, torch.cat(second)):
        flat = values.transpose(0, 1).flatten(1)
        found += [flat.mean(1), flat.var(1)]
    return [x.detach() for x in found]


def statistics(net: nn.Module) -> list[Tensor]:
    return [x for layer in (net[0], net[2]) for x in (layer.running_mean, layer.running_var)]


def gap(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(found, expected, strict=True))


def test_the_statistics_are_those_of_all_values_to_the_last_digits():
    # The last layer needs two samples, so the batch of one is left to the next test.
    net, batches = network(), list(INPUTS.split([8, 12, 20, 10]))
    recalibrate(net, batches)
    assert gap(statistics(net), directly(net, batches)) < 1e-12
    single = network().float()
    recalibrate(single, [x.float() for x in batches])
    assert gap(statistics(single), directly(net, batches)) < 1e-6


def test_the_first_layers_statistics_do_not_depend_on_how_batches_are_split():
    whole, cut = nn.Sequential(nn.BatchNorm2d(1)).double(), nn.Sequential(nn.BatchNorm2d(1)).double()
    recalibrate(whole, [INPUTS])
    recalibrate(cut, INPUTS.split(SIZES))
    assert gap([*cut.buffers()], [*whole.buffers()]) < 1e-12
    assert gap([cut[0].running_mean], [INPUTS.mean().view(1)]) < 1e-12
    assert gap([cut[0].running_var], [INPUTS.var().view(1)]) < 1e-12


def test_nothing_but_the_statistics_of_training_layers_changes():
    net = network()
    before, rng = copy.deepcopy(net), torch.get_rng_state()
    recalibrate(net, INPUTS.split(10))
    after, ours = net.state_dict(), {f"{i}.running_{kind}" for i in (0, 2) for kind in ("mean", "var")}
    assert {n for n, value in before.state_dict().items() if not torch.equal(value, after[n])} == ours
    assert [m.training for m in net.modules()] == [m.training for m in before.modules()]
    assert [getattr(m, "momentum", 0) for m in net] == [getattr(m, "momentum", 0) for m in before]
    assert not any(m._forward_pre_hooks for m in net.modules())
    assert torch.equal(rng, torch.get_rng_state())
    recalibrate(net, [])
    with pytest.raises(RuntimeError):
        recalibrate(net, [INPUTS, INPUTS.repeat(1, 2, 1, 1)])
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in after.items())
    assert [m.training for m in net.modules()] == [m.training for m in before.modules()]
    assert not any(m._forward_pre_hooks for m in net.modules())


def _on_ranks(sizes: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    start = sum(sum(part) for part in sizes[:rank])
    batches = INPUTS[start : start + sum(sizes[rank])].split(sizes[rank])
    alone, together = network(), network()
    recalibrate(alone, batches)
    sync_batchnorm(together)
    recalibrate(together, batches)
    restore_batchnorm(together)
    return statistics(alone), statistics(together)


def test_ranks_together_have_the_statistics_of_all_their_batches():
    sizes = [[8, 12], [20, 10]]
    first, second = run_ranks(_on_ranks, 2, sizes)
    assert all(torch.equal(a, b) for x, y in zip(first, second) for a, b in zip(x, y))
    net = network()
    assert gap(first[0], directly(net, list(INPUTS.split(sum(sizes, []))))) < 1e-12
    # Synchronised, a batch is that of both ranks.
    joint = [torch.cat((INPUTS[:8], INPUTS[20:40])), torch.cat((INPUTS[8:20], INPUTS[40:]))]
    assert gap(first[1], directly(net, joint)) < 1e-12


class Swa(WeightAveraging):
    """The plain mean of the weights over the second half of a run."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 40


class Module(pl.LightningModule):
    """A small convolutional network that moves fast, with a frozen layer; it notes each validation's loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Flatten(), nn.Linear(32, 5), nn.BatchNorm1d(5, affine=False)),
        )
        self.losses: list[Tensor] = []
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[9].eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0])
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def on_validation_epoch_start(self) -> None:
        self.total = 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.total += F.cross_entropy(self(batch[0]), batch[1], reduction="sum").item()

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.total / len(TARGETS))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> TrainLoader:
        return TrainLoader(INPUTS.float(), TARGETS, torch.arange(len(TARGETS)), batch_size=5, seed=1)


def validation() -> DataLoader:
    return DataLoader(TensorDataset(INPUTS.float(), TARGETS), batch_size=10)


def shuffled(workers: int = 0) -> DataLoader:
    data = TensorDataset(INPUTS.float(), TARGETS)
    return DataLoader(data, batch_size=5, shuffle=True, num_workers=workers, persistent_workers=bool(workers))


def fit(
    callbacks: list[pl.Callback], data: Any = None, ckpt_path: Path | None = None, dropout: float = 0.2, **options: Any
) -> tuple[Module, pl.Trainer]:
    silence()
    pl.seed_everything(3, verbose=False)
    options = {"max_epochs": 8, "devices": 1, "enable_progress_bar": False, "enable_checkpointing": False} | options
    trainer = pl.Trainer(callbacks=callbacks, **QUIET | options)
    module = Module()
    module.net[6].p = dropout
    data = data or Data()
    given = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    if isinstance(data, pl.LightningDataModule):
        data.val_dataloader = validation  # type: ignore[method-assign]
    given |= {} if "datamodule" in given else {"val_dataloaders": validation()}
    trainer.fit(module, **given, ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


def loss_of(module: Module) -> float:
    module.eval()
    with torch.no_grad():
        return F.cross_entropy(module(INPUTS.float()), TARGETS).item()


def test_averaged_weights_are_validated_with_their_statistics():
    without, _ = fit([Swa(use_buffers=False)])
    averaged, trainer = fit([Swa(use_buffers=False), BNRecalibration()])
    assert all(torch.equal(a, b) for a, b in zip(without.parameters(), averaged.parameters(), strict=True))
    assert loss_of(averaged) < 0.8 * loss_of(without)
    # So that the best checkpoint is chosen by what it will be.
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(loss_of(averaged), rel=1e-5)
    expected = copy.deepcopy(averaged).train()
    expected.net[9].eval()
    recalibrate(expected, [batch for batch, _ in Data().train_dataloader()])
    assert all(torch.equal(a, b) for a, b in zip(averaged.buffers(), expected.buffers(), strict=True))


@pytest.mark.parametrize("kind", ["data module", "shuffled loader", "persistent workers", "ordered loader"])
def test_training_is_not_affected(kind: str):
    make: dict[str, Any] = {
        "data module": lambda: Data(),
        "shuffled loader": lambda: shuffled(),
        "persistent workers": lambda: shuffled(1),
        "ordered loader": lambda: Data().train_dataloader(),
    }
    options = {"max_epochs": 2, "val_check_interval": 4}
    without, _ = fit([], make[kind](), **options)
    module, _ = fit([BNRecalibration()], make[kind](), **options)
    assert torch.equal(torch.cat(module.seen), torch.cat(without.seen))
    assert torch.equal(torch.stack(module.losses), torch.stack(without.losses)), "dropout drew other masks"
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), without.parameters(), strict=True))
    assert not torch.equal(module.net[1].running_mean, without.net[1].running_mean)
    assert torch.equal(module.net[9].running_mean, torch.zeros(5)), "a frozen layer has moved"


class Positions(pl.Callback):
    """What a checkpoint after each batch would hold of the loader."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        loader: Any = trainer.train_dataloader
        self.seen.append(loader.state_dict())


def test_the_position_of_a_loader_that_was_passed_to_fit_is_that_of_training():
    options = {"max_epochs": 2, "val_check_interval": 4}
    without, with_it = Positions(), Positions()
    fit([without], Data().train_dataloader(), **options)
    fit([BNRecalibration(), with_it], Data().train_dataloader(), **options)
    assert with_it.seen == without.seen
    assert len({str(position) for position in with_it.seen}) == 20


def test_a_number_of_batches_is_enough():
    module, _ = fit([BNRecalibration(samples=10)], max_epochs=1)
    two = [batch for batch, _ in Data().train_dataloader()][:2]
    found = module.net[1].running_mean
    expected = module.net[0](torch.cat(two)).mean((0, 2, 3))
    assert torch.allclose(found, expected, atol=1e-6)


def test_lightnings_stochastic_weight_averaging_ends_with_exact_statistics():
    module, _ = fit([StochasticWeightAveraging(swa_lrs=0.3), BNRecalibration()])
    expected = copy.deepcopy(module).train()
    expected.net[9].eval()
    recalibrate(expected, [batch for batch, _ in Data().train_dataloader()])
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), expected.buffers(), strict=True))


def test_wrong_settings_are_refused_before_training():
    with pytest.raises(UserError, match=r"BNRecalibration is before Swa; pass callbacks=\[Swa\(...\), BNRecal"):
        fit([BNRecalibration(), Swa()])
    with pytest.raises(UserError, match="samples=0"):
        BNRecalibration(samples=0)
    with pytest.raises(UserError, match="found several training loaders, and expects one"):
        fit([BNRecalibration()], [shuffled(), shuffled()])
