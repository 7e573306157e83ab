"""What an update is made of: its gradient as modules touch it, its stand-ins, its logs and its order on any ranks."""

import functools
import hashlib
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from callbacks import GradientAccumulation, SeedControl, SyncBN
from datamodules import UserError
from datamodules.loading.loaders import TrainLoader
from tests.support.ranks import run_ranks
from tests.support.tables import quiet_trainer

LR = 0.1


def samples(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 3, generator=generator).to(dtype), torch.randn(n, 1, generator=generator).to(dtype)


class Line(pl.LightningModule):
    """A linear layer, trained by SGD."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.network = network or nn.Linear(3, 1).double()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def by_hand(updates: Sequence[Sequence[int]], change: Callable[[Tensor], Tensor] = lambda gradient: gradient) -> Any:
    """Plain SGD, an update for each list of samples, with what `change` makes of its gradient."""
    model = Line()
    inputs, targets = samples(8)
    for rows in updates:
        model.zero_grad()
        model.loss((inputs[[*rows]], targets[[*rows]])).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(LR * change(parameter.grad))
    return weights(model)


def assert_close(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for mine, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def train(
    model: Line, *callbacks: pl.Callback, size: int = 2, loader: Any = None, resume: Any = None, **options: Any
) -> Line:
    loader = loader or DataLoader(TensorDataset(*samples(8)), size)
    quiet_trainer(*callbacks, **options).fit(model, loader, ckpt_path=resume)
    return model


# Gradients that a module touches


def test_after_backward_clamps_the_gradient_of_the_update() -> None:
    class Clamping(Line):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.clamp_(-0.2, 0.2)

    wanted = by_hand([range(6), range(6, 8)], lambda gradient: gradient.clamp(-0.2, 0.2))
    assert_close(weights(train(Clamping(), GradientAccumulation(3))), wanted)
    assert any(not torch.equal(a, b) for a, b in zip(wanted, by_hand([range(6), range(6, 8)]), strict=True))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_backward_of_the_modules_own_scales_the_update(steps: int) -> None:
    class Scaled(Line):
        def backward(self, loss: Tensor) -> None:
            (2 * loss).backward()

    updates = [range(start, min(start + 2 * steps, 8)) for start in range(0, 8, 2 * steps)]
    assert_close(weights(train(Scaled(), GradientAccumulation(steps))), by_hand(updates, lambda gradient: 2 * gradient))


def test_a_step_with_a_backward_of_its_own_is_rejected() -> None:
    class Backward(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.loss(batch).backward()
            return self.loss(batch)

    begins_with_none = DataLoader(Rows(), 2, collate_fn=collate_some([0, 1]))
    for loader in (None, begins_with_none):
        with pytest.raises(UserError, match=r"Backward.training_step calls backward\(\) itself"):
            train(Backward(), GradientAccumulation(3), loader=loader)


def test_hooks_see_one_update_with_its_gradient() -> None:
    class Seen(Line):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(("step", batch_idx))
            return self.loss(batch)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.seen.append("zero")

        def on_before_backward(self, loss: Tensor) -> None:
            self.seen.append("before")

        def on_after_backward(self) -> None:
            self.seen.append("after")
            grads = [parameter.grad for parameter in self.parameters()]
            inputs, targets = samples(8)
            start, stop = ((0, 6), (6, 8))[len([each for each in self.seen if each == "after"]) - 1]
            loss = self.loss((inputs[start:stop], targets[start:stop]))
            assert_close([*map(torch.clone, grads)], torch.autograd.grad(loss, [*self.parameters()]))  # type: ignore[arg-type]

    model = train(Seen(), GradientAccumulation(3))
    first = [("step", 0), "zero", "before", ("step", 0), "before", ("step", 0), "before", "after"]
    assert model.seen == [*first, ("step", 1), "zero", "before", "after"]


# Hooks of a batch


def _in_namespace(rows: Any) -> types.SimpleNamespace:
    inputs, targets = torch.utils.data.default_collate(rows)
    return types.SimpleNamespace(inputs=inputs, targets=targets)


class Rescale(pl.Callback):
    """Changes each batch in place, as the preprocessing of anomalib."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch.inputs = 3 * batch.inputs - 1


class Unpacking(Line):
    """Its batches are objects, which no transfer copies."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double())
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss((batch.inputs, batch.targets)), "count": len(batch.targets)}

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=LR)


OPTIMIZERS = (torch.optim.SGD, functools.partial(torch.optim.LBFGS, max_iter=3))


def _of_changed_batches(world_size: int, by_hook: bool, *callbacks: pl.Callback, **options: Any) -> list[list[Tensor]]:
    """The weights of each optimizer; updates of 6 and 2 samples in micro-batches of 2."""
    inputs, targets = samples(8)
    data = TensorDataset(inputs if by_hook else 3 * inputs - 1, targets)
    options |= {"use_distributed_sampler": True, "world_size": world_size}
    hooks = [Rescale()] if by_hook else []
    found = []
    for optimizer in OPTIMIZERS:
        loader = DataLoader(data, 2, collate_fn=_in_namespace)
        accumulation = GradientAccumulation(global_batch_size=6)
        found.append(weights(train(Unpacking(optimizer), accumulation, *hooks, *callbacks, loader=loader, **options)))
    return found


def _with_sync_bn(world_size: int, by_hook: bool) -> list[list[Tensor]]:
    """A rank with one micro-batch fewer computes its first one again."""
    return _of_changed_batches(world_size, by_hook, SyncBN())


def test_a_hook_that_changes_batches_changes_each_one_once() -> None:
    wanted = _of_changed_batches(1, by_hook=False)
    found = [_of_changed_batches(1, True), _of_changed_batches(1, True, profiler="simple")]
    for model in [*found, *run_ranks(_of_changed_batches, 2, 2, by_hook=True)]:
        assert all(map(torch.equal, itertools.chain(*model), itertools.chain(*wanted)))


def test_a_hook_changes_no_stand_in_twice() -> None:
    (one, _), (other, _) = (run_ranks(_with_sync_bn, 2, 2, by_hook) for by_hook in (True, False))
    assert all(map(torch.equal, itertools.chain(*one), itertools.chain(*other)))


def test_the_end_of_an_update_gets_its_last_micro_batch() -> None:
    seen: list[Any] = []
    note = LambdaCallback(
        on_train_batch_start=lambda *args: seen.append(args[2][1]),
        on_train_batch_end=lambda *args: seen.append((args[3][1], len(args[2].get("micro_batches", [None])))),
    )
    train(Line(), GradientAccumulation(3), note)
    batches = samples(8)[1].split(2)
    for found, wanted in zip(seen, [*batches[:3], (batches[2], 3), batches[3], (batches[3], 1)], strict=True):
        assert torch.equal(found[0], wanted[0])
        assert found[1:] == wanted[1:] or isinstance(found, Tensor)


class Scheduled(Line):
    """Has what a search for a learning rate changes."""

    lr = LR

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_lightnings_own_callbacks_see_one_batch_of_an_update() -> None:
    finder = LearningRateFinder(num_training_steps=4, max_lr=0.5, update_attr=False, early_stop_threshold=None)
    train(Scheduled(), GradientAccumulation(2), finder, max_epochs=2)
    assert finder.optimal_lr is not None
    rates, losses = (finder.optimal_lr.results[name] for name in ("lr", "loss"))
    assert len(rates) == len(losses) == 4


def test_an_epoch_cannot_end_within_an_update() -> None:
    class Ends(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if torch.equal(batch[1], samples(8)[1][2:4]) else None

    with pytest.raises(UserError, match="Ends.on_train_batch_start returned -1 within an update"):
        train(Ends(), GradientAccumulation(3))


# Micro-batches that are none


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.inputs, self.targets = samples(8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        return row, self.inputs[row], self.targets[row]


def collate_some(left_out: Sequence[int]) -> Callable[[Any], Any]:
    def collate(rows: Any) -> Any:
        kept = [row[1:] for row in rows if row[0] not in left_out]
        return torch.utils.data.default_collate(kept) if kept else None

    return collate


@pytest.mark.parametrize(
    ("left_out", "updates"),
    [
        ([0, 1], [[2, 3, 4, 5], [6, 7]]),
        ([4, 5], [[0, 1, 2, 3], [6, 7]]),
        ([2, 3, 6, 7], [[0, 1, 4, 5]]),
    ],
)
def test_a_micro_batch_of_nothing_leaves_the_mean_of_the_rest(left_out: list[int], updates: list[list[int]]) -> None:
    loader = DataLoader(Rows(), 2, collate_fn=collate_some(left_out))
    assert_close(weights(train(Line(), GradientAccumulation(3), loader=loader)), by_hand(updates))


def test_a_step_that_returns_nothing_makes_a_warning() -> None:
    class Nothing(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) if batch_idx else None

    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        found = train(Nothing(), SeedControl(1))
    assert_close(weights(found), by_hand([[2, 3], [4, 5], [6, 7]]))


# Several ranks


class Logging(Line):
    """Logs its loss in some way."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, **self.how)
        return loss


class Noisy(Line):
    """BatchNorm and noise, in float32."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.network(inputs + 0.1 * torch.randn_like(inputs)), targets)


class Augmented(Dataset[Any]):
    """Samples with noise of their own."""

    def __init__(self) -> None:
        self.inputs, self.targets = samples(26, torch.float32)

    def __len__(self) -> int:
        return 26

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row] + 0.1 * torch.rand(3), self.targets[row]


def _hash(world_size: int, workers: int, size: int) -> str:
    """Of weights and buffers after two epochs of a stock loader; the last update of each has 2 of `size` samples."""
    seeds = SeedControl(1)
    model = Noisy()
    loader = DataLoader(Augmented(), 2, shuffle=True, num_workers=workers)
    options: dict[str, Any] = {"use_distributed_sampler": True, "max_epochs": 2}
    train(model, seeds, GradientAccumulation(global_batch_size=size), loader=loader, world_size=world_size, **options)
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("size", [8, 12])
def test_a_stock_loader_gives_one_hash_on_any_processes(size: int) -> None:
    alone = run_ranks(_hash, 1, 1, 0, size)
    hashes = {*alone, *run_ranks(_hash, 2, 2, 1, size), *run_ranks(_hash, 4, 4, 0, size)}
    assert len(hashes) == 1


class Normalized(Line):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double())


def _normalized_together(world_size: int) -> dict[str, Tensor]:
    """Two updates of 5 micro-batches of 4 samples on two ranks, which have 3 and 2."""
    inputs, targets = samples(40)
    trainer = quiet_trainer(SyncBN(), GradientAccumulation(global_batch_size=20), world_size=world_size)
    loader = TrainLoader(inputs, targets, torch.arange(40), 4, 1, trainer.global_rank, world_size, shuffle=False)
    model = Normalized()
    trainer.fit(model, loader)
    return model.state_dict()


def test_uneven_ranks_normalize_what_they_see_at_one_step() -> None:
    model = Normalized()
    optimizer = model.configure_optimizers()
    inputs, targets = samples(40)
    for first in (0, 20):
        rows = [torch.arange(start, start + 4) for start in range(first, first + 20, 4)]
        optimizer.zero_grad()
        for together in (torch.cat((rows[0], rows[3])), torch.cat((rows[1], rows[4])), rows[2]):
            outputs = model.network(inputs[together])
            (F.mse_loss(outputs, targets[together], reduction="sum") / 20).backward()
        optimizer.step()
    for found in run_ranks(_normalized_together, 2, 2):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)
