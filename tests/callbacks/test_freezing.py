"""Frozen layers stay as they are to the bit, and unfrozen ones train alike on all ranks.

Every run here is hostile to freezing: momentum, weight decay, dropout, validation between the epochs, a
`training_step` that calls ``self.train()``.
"""

import logging
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from callbacks.freezing import FreezeLayers, init_momentum_buffers
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.rank_consistency import RankConsistency
from callbacks.sync_bn import SyncBN
from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.support.devices import precision_on
from tests.support.ranks import run_ranks
from tests.support.tables import CLASSES, Tiny, noisy_images, quiet_trainer

BATCHES = 6
TRAIN, VALIDATION = ((inputs.float(), targets) for inputs, targets in map(noisy_images, (8 * BATCHES, 9)))


class Network(nn.Module):
    """A stem and two stages with batch normalization and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name, inputs in (("stem", 1), ("layer1", 4), ("layer2", 4)):
            layers = nn.Conv2d(inputs, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.3)
            self.add_module(name, nn.Sequential(*layers))
        self.fc = nn.Linear(4 * 5 * 5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(inputs))).flatten(1))


class Rude(Tiny):
    """A module that puts everything into training mode in each step."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__(network or Network(), torch.optim.SGD)
        self.rude = True

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.rude:
            self.train()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(child.parameters()), "name": name} for name, child in self.network.named_children()]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)


def fit(model: Any, *callbacks: Callback, world_size: int = 1, batch_size: int = 8, **options: Any) -> None:
    """Train with callbacks, for two epochs if not told otherwise; the ranks share `batch_size`."""
    trainer = quiet_trainer(*callbacks, world_size=world_size, **{"max_epochs": 2} | options)
    place = trainer.global_rank, world_size
    train = TrainLoader(*TRAIN, torch.arange(len(TRAIN[1])), batch_size // world_size, 1, *place)
    trainer.fit(model, train, EvaluationLoader(*VALIDATION, torch.arange(len(VALIDATION[1])), 4, *place))


def bits(module: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer as its bytes."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in module.state_dict().items()}


def changed(before: dict[str, bytes], module: nn.Module) -> set[str]:
    """The stages of a `Network` in which a bit is not what it was."""
    return {
        name.removeprefix("network.").split(".")[0] for name, value in bits(module).items() if before[name] != value
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_frozen_layers_keep_every_bit_over_two_epochs(precision: str) -> None:
    model = Rude()
    before = bits(model)
    fit(model, FreezeLayers(until="layer2"), **precision_on("cpu", precision))
    assert changed(before, model) == {"layer2", "fc"}


class Watch(Callback):
    """Notes at each micro-batch what trains, and what the modules that do not train give for a training step."""

    def __init__(self) -> None:
        self.trains: dict[tuple[int, int], tuple[str, ...]] = {}
        self.in_eval: dict[tuple[int, int], tuple[str, ...]] = {}

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        # After training_step, so after its train().
        place = trainer.current_epoch, trainer.fit_loop.batch_idx
        model: Any = pl_module
        stages = list(model.network.named_children())
        self.trains[place] = tuple(n for n, stage in stages if all(p.requires_grad for p in stage.parameters()))
        self.in_eval[place] = tuple(n for n, stage in stages if not any(m.training for m in stage.modules()))


def phases(watch: Watch) -> list[tuple[tuple[int, int], tuple[str, ...]]]:
    """The micro-batches at which the training stages change, and to what."""
    found: list[tuple[tuple[int, int], tuple[str, ...]]] = []
    for place, trains in watch.trains.items():
        if not found or found[-1][1] != trains:
            found.append((place, trains))
    return found


def test_layers_train_from_the_moment_that_is_named() -> None:
    watch = Watch()
    freeze = FreezeLayers(until="fc", unfreeze={"layer2": "1 epochs", "layer1": "8 steps", "*": "75%"})
    fit(Rude(), freeze, watch, max_epochs=4)
    assert phases(watch) == [
        ((0, 0), ("fc",)),
        ((1, 0), ("layer2", "fc")),
        ((1, 2), ("layer1", "layer2", "fc")),
        ((3, 0), ("stem", "layer1", "layer2", "fc")),
    ]
    everything = {"stem", "layer1", "layer2", "fc"}
    assert all(set(watch.in_eval[place]) == everything - set(trains) for place, trains in watch.trains.items())


def test_half_an_epoch_is_counted_in_updates() -> None:
    # 4 updates to an epoch of 12 micro-batches: 0.6 epochs are 2.4 updates, so the third is still frozen.
    watch = Watch()
    freeze = FreezeLayers(unfreeze={"stem": "0.6 epochs", "layer1": "5 steps"})
    fit(Rude(), freeze, GradientAccumulation(3), watch, batch_size=4)
    assert [place for place, _ in phases(watch)] == [(0, 0), (0, 3), (1, 1)]


class Observed(Rude):
    """Notes running statistics where a step begins, inside DDP, and where it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[dict[str, bytes]] = []
        self.left: list[dict[str, bytes]] = []

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.entered.append(statistics(self))
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.left.append(statistics(self))


def statistics(module: nn.Module) -> dict[str, bytes]:
    return {name: value for name, value in bits(module).items() if "running" in name}


def synchronized_statistics(frozen_first: bool) -> tuple[list[Any], list[Any], dict[str, bytes], Any]:
    """A run of two ranks under SyncBN; and what became of DDP's settings."""
    callbacks: list[Callback] = [SyncBN(), FreezeLayers(unfreeze={"stem": "2 steps", "layer1": "4 steps"})]
    model, wrappers = Observed(), []

    class Wrappers(Callback):
        @override
        def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
            if not wrappers or wrappers[-1]() is not trainer.strategy.model:
                wrappers.append(weakref.ref(trainer.strategy.model))
                self.settings = wrappers[-1]().find_unused_parameters, wrappers[-1]().gradient_as_bucket_view

        @override
        def on_train_end(self, *_: Any) -> None:
            self.alive = [wrapper() is not None for wrapper in wrappers]

    watch = Wrappers()
    strategy = DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True)
    callbacks = callbacks[::-1] if frozen_first else callbacks
    fit(model, *callbacks, RankConsistency(), watch, world_size=2, max_epochs=1, strategy=strategy)
    return model.entered, model.left, bits(model), (watch.settings, watch.alive)


def test_ddp_keeps_its_state_in_either_order_of_callbacks() -> None:
    orders = [run_ranks(synchronized_statistics, 2, frozen_first) for frozen_first in (True, False)]
    for first, second in orders:
        for entered, left, _, ddp in (first, second):
            assert entered[1:] == left[:-1], "nobody touched them between two steps"
            assert ddp == ((True, True), [False, False, True])
        assert first[2] == second[2]
    assert orders[0][0][2] == orders[1][0][2]


class HeadOnly(Rude):
    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network.fc.parameters(), lr=0.1)


class Lazy(Rude):
    def __init__(self) -> None:
        super().__init__()
        self.later = nn.LazyLinear(2)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Lazy, ("fc",), "later.weight is built with the first batch"),
        (
            HeadOnly,
            ("fc", {"layer1": 5}),
            r"left out network\.layer1\.0\.weight, .* \(4 in all\): pass self\.parameters",
        ),
        (Rude, ("fc", {"fc": "1 epochs"}), "nothing to train at the start"),
        (Rude, (), "has nothing to freeze"),
        (Rude, (None, {"stem": "soon"}), "unfreezing 'stem' at 'soon' cannot be read"),
        (Rude, ("layre1",), "there is no 'layre1' in the module; did you mean .*'network.layer1'"),
        (Rude, (None, {"0": 5}), "'0' could be .*'network.layer1.0' or .*: write one of them in full"),
    ],
)
def test_what_cannot_be_frozen_is_rejected(kind: type[Rude], arguments: tuple[Any, ...], message: str) -> None:
    model = kind()
    with pytest.raises(UserError, match=message):
        fit(model, FreezeLayers(*arguments))
    assert all(p.requires_grad for p in model.parameters())


def test_an_optimizer_of_what_trains_from_the_start_is_enough() -> None:
    fit(HeadOnly(), FreezeLayers("fc"))


def state_of(module: nn.Module) -> list[Any]:
    """All that freezing changes."""
    flags = [p.requires_grad for p in module.parameters()]
    return [flags, *((m.training, len(m._forward_pre_hooks)) for m in module.modules())]


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_as_before_after_a_fit_or_an_exception(fails: bool) -> None:
    model = Rude()
    model.network.layer2[0].requires_grad_(False)
    model.rude = False
    model.network.stem[1].eval()
    before = state_of(model)

    class Fail(Callback):
        @override
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if fails and trainer.global_step == 5:
                raise ZeroDivisionError

    frozen = bits(model.network.layer2[0])
    freeze = FreezeLayers("fc", unfreeze={"layer2": "4 steps"}, train_bn=False)
    try:
        fit(model, freeze, Fail())
    except ZeroDivisionError:
        assert fails
    assert state_of(model) == before
    assert bits(model.network.layer2[0]) == frozen, "what its owner froze never trains"


def test_a_shared_weight_trains_if_one_owner_does(caplog: pytest.LogCaptureFixture) -> None:
    network = Network()
    network.layer2[0].weight = network.layer1[0].weight
    model = Rude(network)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    before = bits(model)
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        fit(model, FreezeLayers("layer2"))
    assert "network.layer1.0.weight trains: it is shared with a layer that is not frozen" in caplog.text
    after = bits(model)
    moved = {name for name in before if before[name] != after[name] and ".layer1." in name}
    assert moved == {"network.layer1.0.weight"}


def test_a_fused_sgd_trains_what_is_unfrozen_later_as_another() -> None:
    ends = []
    for fused in (False, True):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=fused)
        for trains in (False, False, True, True):
            network[0].requires_grad_(trains)
            init_momentum_buffers([optimizer])
            optimizer.zero_grad()
            network(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in network.parameters()]))
    assert torch.allclose(*ends)


def test_freezing_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        fit(Rude(), FreezeLayers("stem"), max_epochs=1)
    assert "nothing is frozen: no parameter is defined before 'stem'" in caplog.text
