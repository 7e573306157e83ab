"""Frozen layers stay as they are to the bit, and unfrozen ones train alike on all ranks.

Every run here is hostile to freezing: momentum, weight decay, dropout, validation between the epochs, a
`training_step` that calls ``self.train()``.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from callbacks.freezing import FreezeLayers
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.rank_consistency import RankConsistency
from callbacks.sync_bn import SyncBN
from datamodules.errors import UserError
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import CLASSES, QUIET, noisy_images, on_ranks, silence

BATCHES = 6
TRAIN, VALIDATION = noisy_images(8 * BATCHES), noisy_images(9)


class Network(nn.Module):
    """A stem and two stages with batch normalisation and dropout, and a head."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(3)

        def stage(inputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(dropout))

        self.stem = stage(1)
        self.layer1 = stage(4)
        self.layer2 = stage(4)
        self.fc = nn.Linear(4 * 5 * 5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(inputs))).flatten(1))


SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


class Rude(pl.LightningModule):
    """A module that puts everything into training mode in each step."""

    def __init__(self, network: nn.Module | None = None, optimizer: Any = torch.optim.SGD, **settings: Any) -> None:
        super().__init__()
        self.network: Any = network or Network()
        self.optimizer, self.settings = optimizer, settings or SGD
        self.make_optimizer: Callable[[], Any] | None = None
        self.rude = True

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.rude:
            self.train()
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.network(batch[0])

    def configure_optimizers(self) -> Any:
        if self.make_optimizer is not None:
            return self.make_optimizer()
        groups = [{"params": list(child.parameters()), "name": name} for name, child in self.network.named_children()]
        return self.optimizer(groups, **self.settings)


def loaders(trainer: pl.Trainer, dtype: torch.dtype, batch_size: int = 8) -> tuple[TrainLoader, EvaluationLoader]:
    """Batches whose samples do not depend on the number of ranks, where the ranks share `batch_size`."""
    ranks, rank = trainer.world_size, trainer.global_rank
    train = TrainLoader(TRAIN[0].to(dtype), TRAIN[1], torch.arange(len(TRAIN[1])), batch_size // ranks, 1, rank, ranks)
    rows = torch.arange(len(VALIDATION[1]))
    return train, EvaluationLoader(VALIDATION[0].to(dtype), VALIDATION[1], rows, 4, rank, ranks)


def fit(
    model: pl.LightningModule,
    *callbacks: Callback,
    world_size: int = 1,
    dtype: torch.dtype = torch.float32,
    ckpt_path: Any = None,
    batch_size: int = 8,
    **options: Any,
) -> pl.Trainer:
    """Train with callbacks, for two epochs if not told otherwise."""
    silence()
    options = {"max_epochs": 2, "enable_checkpointing": False, "enable_progress_bar": False, **options}
    trainer = pl.Trainer(callbacks=list(callbacks), **{**on_ranks(world_size), **QUIET, **options})
    trainer.fit(model.to(dtype), *loaders(trainer, dtype, batch_size), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def bits(module: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer as its bytes."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in module.state_dict().items()}


def changed(before: dict[str, bytes], module: nn.Module) -> set[str]:
    """The stages of a `Network` in which a bit is not what it was."""
    return {
        name.removeprefix("network.").split(".")[0] for name, value in bits(module).items() if before[name] != value
    }


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "float32": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "float16 with GradScaler": lambda: {"plugins": [MixedPrecision("16-mixed", "cpu")]},
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_layers_keep_every_bit_over_two_epochs(precision: str) -> None:
    model = Rude()
    before = bits(model)
    fit(model, FreezeLayers(until="layer2"), **PRECISIONS[precision]())
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


def test_half_an_epoch_is_counted_in_updates_and_windows_are_never_cut() -> None:
    # 4 updates to an epoch of 12 micro-batches: 0.6 epochs are 2.4 updates, so the third window is still frozen.
    watch = Watch()
    freeze = FreezeLayers(unfreeze={"stem": "0.6 epochs", "layer1": "5 steps"})
    fit(Rude(), freeze, GradientAccumulation(3), watch, batch_size=4)
    assert [place for place, _ in phases(watch)] == [(0, 0), (0, 9), (1, 3)]


class Observed(Rude):
    """Notes running statistics where a step begins, inside DDP, and where it has ended."""

    entered: list[dict[str, bytes]]
    left: list[dict[str, bytes]]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.entered.append(statistics(self))
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.left.append(statistics(self))


def statistics(module: nn.Module) -> dict[str, bytes]:
    return {name: value for name, value in bits(module).items() if "running" in name}


def synchronised_statistics(frozen_first: bool) -> tuple[list[Any], list[Any], dict[str, bytes], dict[str, Any]]:
    """A run of two ranks under SyncBN; and what became of DDP's settings."""
    callbacks: list[Callback] = [SyncBN(), FreezeLayers(unfreeze={"stem": "2 steps", "layer1": "4 steps"})]
    model = Observed()
    model.entered, model.left = [], []
    wrappers: list[Any] = []

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
    ddp = {"settings": watch.settings, "alive": watch.alive}
    return model.entered, model.left, bits(model), ddp


def test_wrapping_again_keeps_the_statistics_and_the_settings_of_ddp_in_either_order_of_callbacks() -> None:
    orders = [run_ranks(synchronised_statistics, 2, frozen_first) for frozen_first in (True, False)]
    for first, second in orders:
        for entered, left, _, ddp in (first, second):
            assert entered[1:] == left[:-1], "nobody touched them between two steps"
            assert ddp == {"settings": (True, True), "alive": [False, False, True]}
        assert first[2] == second[2]
    assert orders[0][0][2] == orders[1][0][2]


class HeadOnly(Rude):
    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network.fc.parameters(), lr=0.1)


def test_an_optimiser_that_lacks_what_is_to_train_later_is_refused() -> None:
    fit(HeadOnly(), FreezeLayers("fc"))
    with pytest.raises(UserError, match=r"left out network\.layer1\.0\.weight, .* \(4 in all\): pass self\.parameters"):
        fit(HeadOnly(), FreezeLayers("fc", unfreeze={"layer1": 5}))


def state_of(module: nn.Module) -> list[Any]:
    """All that freezing changes."""
    flags = [p.requires_grad for p in module.parameters()]
    return [flags, *((m.training, len(m._forward_pre_hooks)) for m in module.modules())]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_after_a_fit_and_after_an_exception_in_it(fails: bool) -> None:
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


def test_shared_weights_train_if_one_of_their_owners_does_and_this_is_said(caplog: pytest.LogCaptureFixture) -> None:
    network = Network()
    network.layer2[0].weight = network.layer1[0].weight
    model = Rude(network)
    model.make_optimizer = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    before = bits(model)
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        fit(model, FreezeLayers("layer2"))
    assert "network.layer1.0.weight trains: it is shared with a layer that is not frozen" in caplog.text
    after = bits(model)
    moved = {name for name in before if before[name] != after[name] and ".layer1." in name}
    assert moved == {"network.layer1.0.weight"}


def test_freezing_everything_is_refused_and_freezing_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_recipes"):
        fit(Rude(), FreezeLayers("stem"), max_epochs=1)
    assert "nothing is frozen: no parameter is defined before 'stem'" in caplog.text
    model = Rude()
    with pytest.raises(UserError, match="nothing to train at the start"):
        fit(model, FreezeLayers("fc", unfreeze={"fc": "1 epochs"}))
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(UserError, match="has nothing to freeze"):
        FreezeLayers()
    with pytest.raises(UserError, match="unfreezing 'stem' at 'soon' cannot be read"):
        FreezeLayers(unfreeze={"stem": "soon"})


def test_names_that_are_unknown_or_ambiguous_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="there is no 'layre1' in the module; did you mean .*'network.layer1'"):
        fit(Rude(), FreezeLayers("layre1"))
    with pytest.raises(UserError, match="'0' could be .*'network.layer1.0' or .*: write one of them in full"):
        fit(Rude(), FreezeLayers(unfreeze={"0": 5}))
