"""`--strategy fsdp2` on two gloo ranks: one table of what works, by tensors, and of what is refused, by its message."""

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callbacks import (
    FiniteWeights,
    FreezeLayers,
    GradientAccumulation,
    Preemption,
    RankConsistency,
    SeedControl,
    SyncBN,
    WarmupLR,
    WeightAveraging,
)
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.checkpointing.verified_io import VerifiedCheckpointIO
from callbacks.lib.signals import Preempted
from callbacks.lib.stateless_dropout import StatelessDropout
from datamodules import MNISTDataModule, UserError
from recipes import MNISTClassifier
from recipes.launch.strategies import build_strategy
from tests.support.ranks import run_ranks
from tests.support.tables import QUIET, silence

Weights = dict[str, Tensor]


def whole(module: pl.LightningModule) -> Weights:
    """The weights in full, on every rank."""
    state = module.state_dict()
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in state.items()}


def gap(found: Weights, expected: Weights) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


class Small(MNISTClassifier):
    """A network of two layers and dropout; `network` "default" has batch normalisation between them."""

    def build_network(self) -> nn.Module:
        norm = nn.BatchNorm1d(8) if self.hparams.network == "default" else nn.Identity()
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), norm, StatelessDropout(0.3), nn.Linear(8, 10))


class Run:
    """A fit of the MNIST recipe on images of noise, 21 of them in batches of 8: the last one is uneven."""

    def __init__(
        self, folder: Path, devices: int = 2, network: str = "classic", strategy: str = "fsdp2", **settings: Any
    ) -> None:
        silence()
        self.devices, self.folder, self.strategy = devices, folder, strategy
        seeds = SeedControl(seed=3)
        self.recipe = Small(network=network, **{"optimizer": "sgd", "lr": 0.05} | settings)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(1)
        # A dark border as MNIST's: others are searched for strokes, 30 ms each.
        images = nn.functional.pad(torch.rand(21, 20, 20, generator=generator), (4, 4, 4, 4))
        labels = torch.arange(21) % 10
        self.data = MNISTDataModule.from_arrays(
            images, labels, val=(images, labels), test=(images[:11], labels[:11]), batch_size=8 // devices
        )
        self.seeds = seeds

    def fit(
        self,
        *callbacks: pl.Callback,
        resume: Path | None = None,
        max_epochs: int = 2,
        micro_batches: int = 1,
        **options: Any,
    ) -> "Run":
        self.trainer = pl.Trainer(
            **QUIET,
            strategy=build_strategy(self.strategy, 2)
            if self.devices == 2
            else SingleDeviceStrategy(torch.device("cpu")),
            devices=self.devices,
            max_epochs=max_epochs,
            callbacks=[GradientAccumulation(micro_batches), self.seeds, *callbacks],
            plugins=[VerifiedCheckpointIO()],
            enable_progress_bar=False,
            **{"enable_checkpointing": False, **options},
        )
        self.trainer.fit(self.recipe, self.data, ckpt_path=resume, weights_only=True)
        return self

    @property
    def weights(self) -> Weights:
        return whole(self.recipe)

    def saved(self) -> Path:
        """The file that a fit saves after its fourth update, in its second epoch."""
        folder = self.folder / f"saved-{self.devices}-{self.strategy}-{self.recipe.hparams.optimizer}"
        saving = ExactCheckpoint(folder, filename="{step}", every_n_train_steps=4)
        self.fit(saving, enable_checkpointing=True)
        return Path(saving.best_model_path)


def same_as_one_device(folder: Path, *make: Callable[[], pl.Callback], **options: Any) -> str:
    two = Run(folder).fit(*(callback() for callback in make), **options)
    one = Run(folder, devices=1).fit(*(callback() for callback in make), **options)
    assert any(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in two.recipe.parameters())
    error = gap(two.weights, one.weights)
    assert error < 1e-5, error
    return "works: the weights of one device up to rounding"


def clipping(folder: Path) -> str:
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    # By value, each element of the mean is cut, on one device as on two.
    same_as_one_device(folder, **by_value)
    return same_as_one_device(folder, gradient_clip_val=0.1)


def scores(folder: Path) -> str:
    results = []
    for devices in (1, 2):
        run = Run(folder, devices).fit()
        found = {name: float(value) for name, value in run.trainer.callback_metrics.items() if name[:4] == "val/"}
        tested = run.trainer.test(run.recipe, run.data, verbose=False)[0]
        results.append(found | tested)
    for name, value in results[0].items():
        assert results[1][name] == pytest.approx(value, abs=1e-4), name
    return "works: the scores of one device"


def batch_norm(folder: Path) -> str:
    run = Run(folder, network="default").fit()
    mean = run.recipe.network[2].running_mean  # type: ignore[index]
    both = [torch.empty_like(mean) for _ in range(2)]
    torch.distributed.all_gather(both, mean.contiguous())
    assert torch.equal(both[0], both[1])
    return "works: statistics of rank 0 are evaluated and saved, as under DDP"


def resume(folder: Path) -> str:
    run = Run(folder)
    path = run.saved()
    again = Run(folder).fit(resume=path)
    assert gap(again.weights, run.weights) == 0
    one = Run(folder, devices=1).fit(resume=path)
    assert gap(one.weights, run.weights) < 1e-5
    return "works: the same bits on as many devices; on another number up to rounding"


def resume_of_others(folder: Path) -> str:
    # A bias before BatchNorm has a gradient of nothing but rounding, which Adam divides by itself: hence the large eps.
    adam = {"optimizer": "adamw", "optimizer_args": {"eps": 1e-3}, "lr": 0.01}
    for settings in ({}, {"momentum": 0.0}, adam):
        for devices in (2, 1):
            # On one device each process saves its own, and the strategy takes that of rank 0.
            own = folder / str(settings) / (os.environ["RANK"] if devices == 1 else "both")
            path = Run(own, devices, "default", "ddp", **settings).saved()
            found = Run(folder, network="default", **settings).fit(resume=path)
            assert any(isinstance(p, DTensor) for p in found.recipe.parameters())
            expected = Run(folder, 2, "default", "ddp", **settings).fit(resume=path)
            assert gap(found.weights, expected.weights) < 1e-5, (settings, devices)
    return "works: of one device and of DDP, up to rounding"


class _Tell(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def preemption(folder: Path) -> str:
    uninterrupted = Run(folder).fit().weights
    run = Run(folder)
    saving = ExactCheckpoint(folder / "preempted", save_last=True)
    with pytest.raises(Preempted) as stopped:
        run.fit(Preemption(), saving, _Tell(), enable_checkpointing=True)
    assert stopped.value.code == 143
    assert gap(Run(folder).fit(resume=folder / "preempted/last.ckpt").weights, uninterrupted) == 0
    return "works: SIGTERM to one rank saves on all; the resumed run has the bits of one that was not stopped"


def checkpoint(folder: Path) -> str:
    run = Run(folder)
    path = run.saved()
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert all(type(value) is Tensor for value in saved.values())
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    loaded = Small.load_from_checkpoint(path, map_location="cpu", weights_only=True).eval()
    expected = Small(network="classic")
    expected.load_state_dict(saved)
    assert torch.equal(loaded(images), expected.eval()(images))
    traced = torch.export.export(loaded.network, (images,)).module()
    assert torch.allclose(traced(images), expected.network(images), atol=1e-6)
    return "works: one file of plain tensors, which any command loads"


def warm_start(folder: Path) -> str:
    weights = folder / "weights.pt"
    state = {name: torch.full_like(value, 0.25) for name, value in Run(folder, 1).recipe.network.state_dict().items()}
    if int(os.environ["RANK"]) == 0:
        torch.save(state, weights)
    run = Run(folder, weights=str(weights))
    torch.distributed.barrier()
    run.fit(max_epochs=0)
    assert all(bool((value == 0.25).all()) for value in run.weights.values())
    return "works: every rank splits the weights of the file"


class _Spoil(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_rank == 1:
            next(iter(module.parameters())).grad.to_local().fill_(float("nan"))


def finite_weights(folder: Path) -> str:
    with pytest.raises(UserError, match="the run has diverged"):
        Run(folder).fit(_Spoil(), FiniteWeights(), log_every_n_steps=1)
    return "works: a weight that is not finite on any rank stops all"


def rank_consistency(folder: Path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Run(folder).fit(RankConsistency())
    said = [str(warning.message) for warning in caught if "RankConsistency compares nothing" in str(warning.message)]
    assert len(said) == (int(os.environ["RANK"]) == 0)
    return "compares nothing, and says so: each weight is on one rank only"


def refused(*make: Callable[[], pl.Callback], **options: Any) -> Callable[[Path], str]:
    def row(folder: Path) -> str:
        run = Run(folder)
        with pytest.raises(UserError) as error:
            run.fit(*(callback() for callback in make), **options)
        assert run.trainer.global_step == 0
        return f"refused: {error.value}"

    return row


def compression(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        build_strategy("fsdp2", 2, compression="bf16")
    return f"refused: {error.value}"


TABLE: dict[str, Callable[[Path], str]] = {
    "accumulation": refused(micro_batches=2),
    "EMA": refused(lambda: WeightAveraging(ema=0.9)),
    "SWA": refused(lambda: WeightAveraging(swa=True)),
    "LAWA": refused(lambda: WeightAveraging(lawa=2)),
    "freezing": refused(lambda: FreezeLayers(until="3")),
    "SyncBN": refused(lambda: SyncBN()),
    "gradient compression": compression,
    "plain training, dropout, last batch": same_as_one_device,
    "clipping, by norm and by value": clipping,
    "WarmupLR": lambda folder: same_as_one_device(folder, lambda: WarmupLR("5 steps", "linear", 0.01)),
    "scores of validation and test": scores,
    "BatchNorm": batch_norm,
    "resume": resume,
    "resume of another strategy": resume_of_others,
    "preemption": preemption,
    "checkpoint: export, predict": checkpoint,
    "warm start by --weights": warm_start,
    "FiniteWeights": finite_weights,
    "RankConsistency": rank_consistency,
}


def fill(folder: Path) -> dict[str, str]:
    return {name: row(folder) for name, row in TABLE.items()}


@pytest.mark.slow
def test_each_feature_works_under_fsdp2_or_is_refused_with_what_to_use_instead(tmp_path: Path):
    zero, one = run_ranks(fill, 2, tmp_path, timeout=240.0)
    print()
    for name, found in zero.items():
        print(f"{name:<34} {found}")
    for name, found in zero.items():
        assert found.startswith(("works", "refused", "compares nothing")), (name, found)
        assert found == one[name]
