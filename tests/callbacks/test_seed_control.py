import functools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.loaded_updates import draws_nothing
from callbacks.seed_control import SeedControl, seed_generators
from datamodules.images.augmentation import RandomAffine
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import CALLBACKS, TOGETHER, Tiny, equal, image_network, noisy_images, quiet_trainer


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a stock run leaves behind for the next test: its seed."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ.pop("PL_SEED_WORKERS", None)


class Noisy(pl.LightningModule):
    """Learns from noise of every origin and remembers what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[tuple[int, int], list[Any]] = {}
        self.validated: list[float] = []

    def configure_model(self) -> None:
        self.layer = nn.Linear(16, 1)

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.shift = torch.rand(()).item()
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mask = F.dropout(torch.ones(16), 0.5)
        self.drawn[self.trainer.global_step, batch_idx] = [mask, *_draw()[1:], self.shift, batch]
        return (self.layer(mask * (batch.mean() + self.shift)) ** 2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(F.dropout(torch.ones(16), 0.5).sum().item() + random.random() + np.random.rand())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Augmented(Dataset):
    """Draws from all three global generators, as users' data sets do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


def _differences(left: dict, right: dict) -> list[tuple]:
    assert left.keys() == right.keys() != set()
    return [key for key in left if not all(map(np.array_equal, left[key], right[key]))]


def _fit(seed: int = 1, val: Any = None, **settings: Any) -> Noisy:
    trainer = quiet_trainer(SeedControl(seed), max_epochs=2, **settings)
    trainer.fit(net := Noisy(), DataLoader(Augmented(), 2, shuffle=True), val)
    return net


def _draw() -> list[Any]:
    return [torch.rand(3).tolist(), np.random.rand(), random.random()]


def test_constructing_it_seeds_as_torch_manual_seed_does():
    SeedControl(seed=3)
    first, numbers = nn.Linear(4, 4).weight, _draw()[1:]
    torch.manual_seed(3)
    assert torch.equal(first, nn.Linear(4, 4).weight)
    SeedControl(seed=3)
    nn.Linear(4, 4)
    assert _draw()[1:] == numbers
    seed_generators(2**62 + 1)
    large = _draw()
    seed_generators(2**62 + 1)
    assert _draw() == large


def _drawn_on(accelerator: Callable[[], AbstractContextManager[torch.device]]) -> list[list[float]]:
    drawn = []
    with accelerator() as device:
        for _ in range(2):
            SeedControl(seed=3)
            drawn.append(torch.rand(3, device=device).tolist())
    return drawn


def test_constructing_it_seeds_the_generators_of_accelerators():
    from tests.rehearsal.stand_in import stand_in_device  # This skips the test with torch 2.9.

    (drawn,) = run_ranks(_drawn_on, 1, stand_in_device)
    assert drawn[0] == drawn[1]


def test_a_seed_determines_every_number_of_a_run():
    one, two, other = (_fit(seed) for seed in (1, 1, 2))
    assert _differences(one.drawn, two.drawn) == []
    assert torch.equal(one.layer.weight, two.layer.weight)
    assert len(_differences(one.drawn, other.drawn)) == len(one.drawn)


class Restless(Noisy):
    """Draws when an epoch starts, before the loader's iterator is made."""

    def on_train_epoch_start(self) -> None:
        _draw()


class OwnOrder(Sampler[int]):
    """Draws an order that only its iterator knows."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12).tolist()

    def __len__(self) -> int:
        return 12


def test_numbers_drawn_as_an_epoch_starts_change_no_order():
    for options in ({"shuffle": True}, {"sampler": OwnOrder()}):
        nets: list[Noisy] = []
        for kind in (Noisy, Restless):
            trainer = quiet_trainer(SeedControl(1), max_epochs=2)
            nets.append(kind())
            trainer.fit(nets[-1], DataLoader(Augmented(), 2, **options))
        assert _differences(nets[0].drawn, nets[1].drawn) == []


def test_a_second_fit_draws_as_a_new_trainer_does():
    trainer, net, drawn = quiet_trainer(SeedControl(1), max_epochs=2), Noisy(), []
    net.on_fit_start = lambda: drawn.append(_draw())  # type: ignore[method-assign]
    for _ in range(2):
        trainer.fit(net, DataLoader(Augmented(), 2))
    assert drawn[0] == drawn[1]


def test_validation_in_between_changes_nothing():
    often: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 2}
    loaders = [DataLoader(Augmented(), size, shuffle=True) for size in (3, 2)]
    ours = [_fit(1, val, **often) for val in (None, *loaders)]
    assert _differences(ours[0].drawn, ours[1].drawn) == []
    assert _differences(ours[0].drawn, ours[2].drawn) == []
    validations = [ours[1].validated[start : start + 4] for start in range(2, len(ours[1].validated), 4)]
    assert len(validations) == 6
    assert all(numbers == validations[0] for numbers in validations), "each validation draws the same numbers"


def _on_two_ranks() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    seeds = SeedControl(1)
    torch.manual_seed(100 + rank)  # what a script may do to the ranks before the fit
    net, initial = Noisy(), []
    net.on_fit_start = lambda: initial.append(net.layer.weight.detach().clone())  # type: ignore[method-assign]
    sampler = WeightedRandomSampler([1.0] * 12, 12, replacement=False)
    loader = DataLoader(Augmented(), 2, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    trainer = quiet_trainer(seeds, world_size=2, max_epochs=2, use_distributed_sampler=True)
    trainer.fit(net, loader)
    trainer.validate(net, DataLoader(torch.arange(12.0), 2), verbose=False)
    return {
        "initial": initial[0],
        "validated": net.validated,
        "masks": [drawn[0] for drawn in net.drawn.values()],
        "samples": torch.cat([drawn[-1] for drawn in net.drawn.values()]).view(2, 6, 4),
        "environment": os.environ.get("PL_GLOBAL_SEED"),
    }


def test_two_ranks_together_draw_what_one_device_draws():
    first, second = run_ranks(_on_two_ranks, 2)
    torch.manual_seed(1)
    assert torch.equal(first["initial"], nn.Linear(16, 1).weight), "it is seeded again before `configure_model`"
    assert torch.equal(first["initial"], second["initial"])
    alone = [drawn[0] for drawn in _fit().drawn.values()]
    masks = [mask for pair in zip(first["masks"], second["masks"], strict=True) for mask in pair]
    assert torch.equal(torch.stack(masks), torch.stack(alone)), "in a stock loader the ranks' batches take turns"
    assert len({str(mask.tolist()) for mask in masks}) == 12
    samples = torch.cat([first["samples"], second["samples"]], dim=1)
    assert samples.shape == (2, 12, 4), "epoch, sample on both ranks, (index, torch, Python, NumPy)"
    assert samples[..., 0].sort(1).values.tolist() == [list(range(12))] * 2, "the ranks share out each epoch's order"
    assert samples[0, :, 0].tolist() != samples[1, :, 0].tolist()
    assert all(len(column.unique()) == 24 for column in samples[..., 1:].reshape(24, 3).T), "by epoch, rank and worker"
    assert first["environment"] is None
    quiet_trainer(SeedControl(seed=1)).validate(net := Noisy(), DataLoader(torch.arange(12.0), 2), verbose=False)
    assert len(set(net.validated)) == 6
    assert [number for pair in zip(first["validated"], second["validated"]) for number in pair] == net.validated


def test_a_checkpoint_of_another_seed_is_named(caplog: pytest.LogCaptureFixture):
    SeedControl(5).load_state_dict({"seed": 7})
    assert "pass seed=7 to continue as that run" in caplog.text


class CallsTwice(torch.optim.SGD):
    """Evaluates the loss twice in a step, as SAM does."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        closure()
        return super().step(closure)  # type: ignore[return-value]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "LBFGS": lambda parameters, lr: torch.optim.LBFGS(parameters, lr, max_iter=3),
    "CallsTwice": CallsTwice,
}


class Dropping(pl.LightningModule):
    """Remembers the mask of each call of `training_step`."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.layer, self.optimizer = nn.Linear(16, 1), optimizer
        self.masks: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.masks.append(F.dropout(torch.ones(len(batch), 16)))
        return (self.layer(self.masks[-1] * batch) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=0.01)


def test_a_closure_that_is_called_again_draws_the_same_numbers():
    found = {}
    for name in OPTIMIZERS:
        net = Dropping(name)
        quiet_trainer(SeedControl(1), max_epochs=2).fit(net, DataLoader(torch.arange(12.0).view(12, 1), 6))
        found[name] = net.masks
    assert len({str(mask.tolist()) for mask in found["SGD"]}) == 4
    for name in ("LBFGS", "CallsTwice"):
        calls = len(found[name]) // 4
        assert calls > 1
        assert all(torch.equal(mask, found["SGD"][i // calls]) for i, mask in enumerate(found[name]))


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch):
    _fit(max_steps=1)
    assert "PL_GLOBAL_SEED" not in os.environ
    monkeypatch.setenv("PL_GLOBAL_SEED", "9")  # As `seed_everything` of Lightning does.
    seen: list[str | None] = []
    look = LambdaCallback(on_fit_start=lambda *_: seen.append(os.environ.get("PL_GLOBAL_SEED")))
    quiet_trainer(SeedControl(2**32 + 3), look, max_steps=1).fit(Noisy(), DataLoader(Augmented(), 2))
    assert (seen, os.environ["PL_GLOBAL_SEED"]) == (["3"], "9")


def test_a_negative_seed_is_rejected():
    with pytest.raises(ValueError, match="seed=-1: expected a whole number from 0"):
        SeedControl(-1)


class DrawsInHooks(Dropping):
    """Draws numbers in each hook between two batches, as one that samples something to look at."""

    def _draw(self, *_: Any) -> None:
        torch.randn(3)
        np.random.rand(3)
        random.random()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    on_train_batch_start = on_train_batch_end = on_before_zero_grad = on_after_backward = _draw
    on_validation_start = on_validation_end = on_save_checkpoint = on_train_epoch_start = _draw


@pytest.mark.parametrize("workers", [0, 1])
def test_hooks_that_draw_shift_no_noise_of_samples(workers: int, tmp_path: Path):
    def train(kind: type[Dropping], folder: Path, resume: Path | None = None) -> dict[str, Tensor]:
        seeds = SeedControl(1)
        net = kind("SGD")
        saves = ExactCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        context = {"multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(Shifted(), 2, shuffle=True, num_workers=workers, **context)
        trainer = quiet_trainer(seeds, saves, max_epochs=2, val_check_interval=2)
        trainer.fit(net, loader, DataLoader(torch.zeros(2, 1)), ckpt_path=resume, weights_only=True)
        return net.state_dict()

    whole = train(DrawsInHooks, tmp_path / "a")
    assert equal(whole, train(Dropping, tmp_path / "b"))
    for step in (1, 4, 9):
        assert equal(train(DrawsInHooks, tmp_path / "c", tmp_path / f"a/step={step}.ckpt"), whole)


class Shifted(Dataset):
    """Samples with noise of torch and NumPy."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Tensor:
        return row + torch.randn(1) + float(np.random.rand())


# Noise of foreign code


class SGLD(torch.optim.Optimizer):
    """Adds noise to the weights before its closure and after it (Welling and Teh, 2011)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self._add_noise()
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])
        self._add_noise()
        return loss

    def _add_noise(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.01)


HOOKS = {
    "a transfer": "on_after_batch_transfer",
    "the start of a batch": "on_train_batch_start",
    "gradients": "on_after_backward",
    "before the step": "on_before_optimizer_step",
    "clipping": "configure_gradient_clipping",
    "the end of an update": "on_train_batch_end",
    "the end of a validation": "on_validation_epoch_end",
    "the end of an epoch": "on_train_epoch_end",
}
PLACES = ("nowhere", "a step", *HOOKS)
"""Where noise is drawn: in an optimizer's step, or in a hook."""


class AddsNoise(pl.LightningModule):
    """Dropout and a linear layer, and noise at one place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.place = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 1)), place
        self.automatic_optimization = place != "a manual step"
        if place in HOOKS:
            setattr(self, HOOKS[place], self.add_noise)

    def loss(self, batch: Any) -> Tensor:
        # Smaller batches draw fewer numbers.
        return (self.layer(batch[0] + 0.1 * torch.randn_like(batch[0])) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        return optimizer.step(closure)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0]).sum() + torch.rand(len(batch[0]))

    def add_noise(self, *args: Any, **kwargs: Any) -> Any:
        """Runs as the hook of the module's place, the only one that it has."""
        values: Any = [parameter.data for parameter in self.parameters()]
        if self.place in ("gradients", "before the step", "clipping"):
            values = [parameter.grad for parameter in self.parameters()]
        elif self.place in ("a transfer", "the start of a batch"):
            (values,) = args[:1]
        if self.place == "a transfer":
            values = [value.clone() for value in values]
        for value in values:
            value.add_(torch.randn_like(value), alpha=0.1)
        return values if self.place == "a transfer" else None

    def configure_optimizers(self) -> Any:
        is_noisy = self.place in ("a step", "a manual step")
        return SGLD(self.parameters()) if is_noisy else torch.optim.SGD(self.parameters(), lr=0.05)


def _fit_with_noise(place: str, world_size: int, *callbacks: pl.Callback) -> dict[str, Tensor]:
    seeds, model = SeedControl(1), AddsNoise(place)
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 69).view(23, 3))
    trainer = quiet_trainer(seeds, *callbacks, world_size=world_size, max_epochs=2, use_distributed_sampler=True)
    # A validation is seeded at its end, just before the end of an epoch.
    validation = DataLoader(data, 3) if place == "the end of a validation" else None
    trainer.fit(model, DataLoader(data, 2, shuffle=True), validation)
    return model.state_dict()


def _with_noise(world_size: int) -> dict[str, dict[str, Tensor]]:
    """Updates of 6 micro-batches; the last one of an epoch has one sample."""
    return {place: _fit_with_noise(place, world_size, GradientAccumulation(global_batch_size=12)) for place in PLACES}


def test_noise_of_any_place_is_equal_on_any_number_of_ranks() -> None:
    alone = _with_noise(1)
    for found in (*run_ranks(_with_noise, 2, 2), *run_ranks(_with_noise, 3, 3)):
        for place in PLACES:
            assert equal(found[place], alone[place]), place
    assert not any(equal(alone[place], alone["nowhere"]) for place in PLACES[1:])


def _manually(world_size: int) -> dict[str, Tensor]:
    return _fit_with_noise("a manual step", world_size)


def test_optimizer_noise_keeps_ranks_equal_in_a_manual_step() -> None:
    one, other = run_ranks(_manually, 2, 2)
    assert equal(one, other)


class Own(DataLoader[Any]):
    """Does not number its micro-batches, so that its noise is drawn from the generators of this process."""

    def __iter__(self) -> Any:
        return super().__iter__()


class DrawsEverywhere(Augmented):
    """Draws one number in each place of a step."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def draw(self, *_: Any) -> None:
        self.drawn.append(torch.rand(()).item())

    def __getitem__(self, index: int) -> Tensor:
        self.draw()
        return torch.zeros(16)


def test_no_two_places_of_an_update_draw_the_same_numbers() -> None:
    data, seeds, model = DrawsEverywhere(), SeedControl(1), Dropping("CallsTwice")

    class Drawing(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            for _ in range(2):
                data.draw()
                closure()
            data.draw()
            return super().step()

    model.configure_optimizers = lambda: Drawing(model.parameters(), lr=0.1)  # type: ignore[method-assign]
    model.on_after_batch_transfer = lambda batch, _: (data.draw(), batch)[1]  # type: ignore[method-assign]
    model.on_after_backward = model.on_train_batch_end = data.draw  # type: ignore[method-assign]
    train_step = model.training_step
    forward: list[float] = []

    def training_step(batch: Tensor, batch_idx: int) -> Tensor:
        forward.append(torch.rand(()).item())
        return train_step(batch, batch_idx)

    model.training_step = training_step  # type: ignore[method-assign]
    quiet_trainer(seeds, max_epochs=1).fit(model, Own(data, 1))
    assert len(forward) == 24
    assert len({*forward}) == 12, "a closure that is called again draws the same"
    assert len({*data.drawn, *forward}) == len(data.drawn) + 12 == 12 * 9


class Watches(pl.Callback):
    def on_train_batch_end(self, *args: Any) -> None: ...


def test_only_foreign_code_seeds_generators_between_gradients() -> None:
    for callbacks, draws in (((), False), ((Watches(),), True)):
        found: list[Any] = []
        callbacks = (*callbacks, *(CALLBACKS[name]() for name in TOGETHER))
        trainer: Any = quiet_trainer(*callbacks)
        module = Tiny(image_network().double(), torch.optim.SGD, lr=0.1)
        trainer.fit(module, DataLoader(torch.utils.data.TensorDataset(*noisy_images(8)), 4))
        calls = trainer.fit_loop.epoch_loop.calls
        found = [calls.draws_in_transfer, calls.draws_in_step, calls.draws_after_gradients, calls.draws_at_end]
        assert found == [False, False, False, draws]


def test_a_load_is_seeded_unless_its_numbers_are_addressed() -> None:
    def loader(transform: Any) -> TrainLoader:
        return TrainLoader(torch.zeros(4, 2), torch.zeros(4), torch.arange(4), 2, 1, transform=transform)

    class Subclass(TrainLoader):
        """It may draw."""

    affine = RandomAffine.__new__(RandomAffine)
    assert [draws_nothing(loader(transform)) for transform in (None, affine, noisy_images)] == [True, True, False]
    assert not draws_nothing(Subclass(torch.zeros(4, 2), torch.zeros(4), torch.arange(4), 2, 1))


def _notes_of(caplog: pytest.LogCaptureFixture, fit: Callable[[], Any]) -> list[str]:
    caplog.clear()
    fit()
    return [record.getMessage() for record in caplog.records if "nothing was drawn" in record.getMessage()]


def test_a_module_is_built_after_the_callback_or_resumed(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    loader = DataLoader(torch.randn(4, 16))
    dropping = functools.partial(Dropping, "SGD")

    def fit(first: Callable[[], Any], second: Callable[[], Any], steps: int = 1, resume: Path | None = None) -> None:
        made = [first(), second()]
        module = next(each for each in made if isinstance(each, pl.LightningModule))
        trainer = quiet_trainer(callbacks=[each for each in made if each is not module], max_steps=steps)
        trainer.fit(module, loader, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "last.ckpt")

    seeds = functools.partial(SeedControl, 1)
    (note,) = _notes_of(caplog, lambda: fit(dropping, seeds))
    assert note == (
        "note: nothing was drawn between SeedControl(1) and the fit, so that random initial weights of Dropping do not"
        " repeat: build the callback before the module"
    )
    assert _notes_of(caplog, lambda: fit(seeds, dropping)) == []
    assert _notes_of(caplog, lambda: fit(dropping, seeds, 2, tmp_path / "last.ckpt")) == []
