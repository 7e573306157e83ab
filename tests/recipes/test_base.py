"""What all recipes share, with real Trainers and no command line."""

import csv
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.gradient_accumulation import GradientAccumulation
from callbacks.lib.exact_sums import from_whole_numbers
from callbacks.step_metrics import TrainLoss
from datamodules.errors import UserError
from datamodules.images.mnist import MNISTDataModule
from datamodules.loading.loaders import TrainLoader
from recipes.forward import call_network
from recipes.mnist import MNISTClassifier
from recipes.optim import learning_rate_scale, parameter_groups
from recipes.resnet import ResNetFineTuner
from recipes.runner.machine import resolve_precision
from recipes.seq2seq import Seq2SeqTranslator
from tests.support.own_training import TrainedRecipe
from tests.support.ranks import run_ranks
from tests.support.tables import on_ranks, quiet_trainer

ROOT = Path(__file__).parents[2]


class Line(TrainedRecipe):
    """y = 2x by least squares; batches are (x, y)."""

    def build_network(self) -> nn.Module:
        return nn.Linear(1, 1).eval()  # As some libraries give pretrained networks.

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        assert self.network.training
        x, y = batch
        return {"loss": F.mse_loss(self(x), y), "count": len(x)}


def batches(n: int = 12, size: int = 4) -> torch.utils.data.DataLoader:
    x = torch.linspace(-1, 1, n).unsqueeze(1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=size)


@pytest.mark.parametrize("recipe", [MNISTClassifier, ResNetFineTuner, Seq2SeqTranslator])
def test_a_data_module_without_the_contract_settles_nothing(recipe):
    assert not any(recipe.settings_from_data(pl.LightningDataModule()).values())


def test_norms_or_biases_are_not_decayed():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LayerNorm(3), nn.GRU(2, 2), nn.Linear(2, 2))
    groups = {group["name"]: group for group in parameter_groups(module.parameters(), weight_decay=0.1)}
    names = {id(p): name for name, p in module.named_parameters()}
    decayed, exempt = ({names[id(p)] for p in groups[name]["params"]} for name in ("decay", "no_decay"))
    assert decayed == {"0.weight", "3.weight_ih_l0", "3.weight_hh_l0", "4.weight"}
    assert exempt == set(names.values()) - decayed
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.1, 0.0)


class Numbered(Line):
    """Micro-batch k's loss is k, with k + 1 targets."""

    def on_train_epoch_start(self):
        self.number = -1

    def training_step(self, batch, batch_idx):
        self.number += 1
        loss = self.network.weight.sum() * 0 + self.number
        return {"loss": loss, "count": self.number + 1}


class Kept(CSVLogger):
    """Remembers what was logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.losses: dict[int, float] = {}

    def log_metrics(self, metrics, step=None):
        if "train/loss" in metrics:
            self.losses[step] = metrics["train/loss"]


@pytest.mark.parametrize("accumulation", ["none", "ours"])
def test_the_training_loss_is_logged_once_per_interval(tmp_path, accumulation):
    kept = Kept(tmp_path)
    options: dict[str, Any] = {}
    if accumulation == "ours":
        options["callbacks"] = [GradientAccumulation(2)]
    every = 3 if accumulation == "none" else 1
    fit = quiet_trainer(logger=kept, max_epochs=1, log_every_n_steps=every, **options)
    fit.fit(Numbered(), batches(n=24))
    if accumulation == "none":
        expected = {2: 8 / 6, 5: (3 * 4 + 4 * 5 + 5 * 6) / 15}
    else:
        expected = {0: (0 * 1 + 1 * 2) / 3, 1: (2 * 3 + 3 * 4) / 7, 2: (4 * 5 + 5 * 6) / 11}
    assert kept.losses == pytest.approx(expected)


class Guessing(Numbered):
    """Of the k + 1 targets of micro-batch k, k are right."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) | {"correct": torch.tensor(self.number)}


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if v and "per_second" not in k} for row in csv.DictReader(file)]


def test_means_of_an_epoch_are_over_all_of_its_targets(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    # 24 batches of 4 samples make 6 updates of 4; the interval of 4 updates crosses the ends of the epochs.
    fit = quiet_trainer(logger=logger, max_epochs=2, log_every_n_steps=4, callbacks=[GradientAccumulation(4)])
    fit.fit(Guessing(), batches(n=96))
    rows = _rows(tmp_path)
    targets, right = range(1, 25), range(24)
    mean = sum(k * (k + 1) for k in right) / sum(targets)
    for epoch in (0, 1):
        (row,) = [row for row in rows if row["epoch"] == str(epoch) and "train/loss_epoch" in row]
        assert float(row["train/loss_epoch"]) == pytest.approx(mean)
        assert float(row["train/accuracy_epoch"]) == pytest.approx(sum(right) / sum(targets))
    first, crossing, *_ = [row for row in rows if "train/accuracy" in row]
    assert (first["step"], crossing["step"]) == ("3", "7")
    assert float(first["train/accuracy"]) == pytest.approx(sum(range(16)) / sum(range(1, 17)))
    of_both = sum(range(16, 24)) + sum(range(8))
    assert float(crossing["train/accuracy"]) == pytest.approx(of_both / (of_both + 16))


def test_an_infinite_loss_spoils_only_the_means_of_its_epoch(tmp_path):
    class Overflows(Numbered):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            bad = self.current_epoch == 0 and batch_idx == 5
            return output | {"loss": output["loss"] + (float("nan") if bad else 0.0)}

    logger = CSVLogger(tmp_path, name="", version="")
    # Six batches an epoch: the last two of the first are logged with those of the second.
    quiet_trainer(logger=logger, max_epochs=2, log_every_n_steps=4).fit(Overflows(), batches(n=24))
    means = [float(row["train/loss_epoch"]) for row in _rows(tmp_path) if "train/loss_epoch" in row]
    assert math.isnan(means[0])
    assert means[1] == pytest.approx(sum(k * (k + 1) for k in range(6)) / 21)


def test_steps_without_a_log_keep_a_bounded_number_of_losses(tmp_path):
    kept = Kept(tmp_path)
    module = Line()
    callback = TrainLoss()
    module.configure_callbacks = lambda: [callback]
    # Stopped before the epoch's end, at which they would be logged.
    quiet_trainer(max_steps=250, logger=kept, log_every_n_steps=10**6).fit(module, batches(n=600, size=2))
    assert len(callback.losses.batches) < 64
    assert (
        from_whole_numbers(callback.losses.sums[0, 1].tolist()) + sum(n for _, n, _ in callback.losses.batches) == 500
    )


class Shared(Line):
    """Micro-batches of unequal sizes, whose losses float32 adds up to other bits in another order."""

    def build_network(self):
        return nn.Sequential(nn.Linear(1, 1), nn.AvgPool1d(1))  # Which rejects a batch without samples.

    def configure_optimizers(self):
        self.network[0].bias.requires_grad_(False)  # DDP has wrapped it before.
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        # A surplus micro-batch has no sample.
        return {"loss": loss, "count": len(batch[0]), "correct": (batch[0] > 0.3).sum()}


def _logged_by_ranks(save: Path | None, resume: Path | None = None) -> list[dict[str, str]]:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if save and trainer.global_step == 3:
                trainer.save_checkpoint(save)

    world_size, folder = int(os.environ.get("WORLD_SIZE", "1")), tempfile.mkdtemp()
    logged = {"log_every_n_steps": 2, "logger": CSVLogger(folder, name="", version="")}
    accumulation = GradientAccumulation(global_batch_size=19)
    fit = quiet_trainer(**on_ranks(world_size), **logged, max_epochs=2, callbacks=[accumulation])
    x = torch.linspace(-3, 3, 95).exp().unsqueeze(1)
    loader = TrainLoader(x, 1e3 * x.sin(), torch.arange(95), 4, 1, fit.global_rank, world_size)
    torch.manual_seed(1)
    module = Shared(lr=0.01)
    module.configure_callbacks = lambda: [TrainLoss(), Stop()]
    fit.fit(module, loader, ckpt_path=resume, weights_only=True if resume else None)
    return _rows(Path(folder)) if fit.is_global_zero else []


def test_logged_losses_have_the_same_bits_on_any_number_of_ranks(tmp_path):
    rows = _logged_by_ranks(tmp_path / "one.ckpt")
    assert len(rows) == 6
    shared = run_ranks(_logged_by_ranks, 2, tmp_path / "two.ckpt")[0]
    assert shared == rows
    rest = [row for row in rows if int(row["step"]) >= 3]
    assert _logged_by_ranks(None, tmp_path / "two.ckpt") == rest
    assert run_ranks(_logged_by_ranks, 2, None, tmp_path / "one.ckpt")[0] == rest


def test_a_network_sees_two_samples_for_an_empty_batch():
    seen = []
    network = nn.Linear(1, 1)
    network.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert call_network(network, torch.zeros(0, 1)).shape == (0, 1)
    assert seen == [2]


@pytest.mark.parametrize("channels_last", [True, False])
def test_convolutions_are_in_the_layout_of_the_setting(channels_last):
    weights = MNISTClassifier(network="classic", channels_last=channels_last).network.parameters()
    # With one input channel the two layouts are one.
    several = [weight for weight in weights if weight.dim() == 4 and weight.shape[1] > 1]
    assert {weight.is_contiguous(memory_format=torch.channels_last) for weight in several} == {channels_last}


def test_a_view_that_needs_another_layout_says_what_to_pass():
    class Viewing(nn.Conv2d):
        def forward(self, input):
            return super().forward(input).view(len(input), -1)

    with pytest.raises(RuntimeError) as error:
        call_network(Viewing(3, 2, 3).to(memory_format=torch.channels_last), torch.zeros(2, 3, 4, 4))
    assert "pass channels_last=False" in error.value.__notes__[0]


class Rates(pl.Callback):
    """Notes the rate of each update."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_a_run_extended_by_a_resume_takes_the_longer_runs_rates(tmp_path):
    options = {"schedule": "linear", "optimizer": "sgd", "lr": 1.0, "momentum": 0.0}
    short, longer = quiet_trainer(max_epochs=2), quiet_trainer(max_epochs=4, callbacks=[noted := Rates()])
    short.fit(Line(**options), batches())
    short.save_checkpoint(tmp_path / "short.ckpt")
    longer.fit(Line(**options), batches(), ckpt_path=tmp_path / "short.ckpt", weights_only=True)
    assert noted.rates == pytest.approx([1 - k / 12 for k in range(6, 12)])


def test_a_resumed_run_takes_the_settings_it_is_given(tmp_path):
    first = quiet_trainer(max_epochs=1)
    first.fit(Line(lr=1.0, weight_decay=0.5, schedule="constant", optimizer="adamw"), batches())
    first.save_checkpoint(tmp_path / "first.ckpt")
    groups = []

    class Groups(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            steps = [state["step"].item() for state in optimizer.state.values()]
            groups.append(([(g["lr"], g["weight_decay"]) for g in optimizer.param_groups], steps))

    module = Line(lr=0.25, weight_decay=0.125, schedule="constant", optimizer="adamw")
    second = quiet_trainer(max_epochs=2, callbacks=[Groups()])
    second.fit(module, batches(), ckpt_path=tmp_path / "first.ckpt", weights_only=True)
    assert groups[0] == ([(0.25, 0.125), (0.25, 0.0)], [3, 3])


def test_a_recipe_loads_from_the_checkpoint_of_a_plain_trainer(tmp_path):
    data = MNISTDataModule(dataset="digits", batch_size=128)
    module = MNISTClassifier(lr=0.01)
    fit = quiet_trainer(max_epochs=4)
    fit.fit(module, data)
    scores = fit.test(module, data, verbose=False)[0]
    assert scores["test/accuracy"] > 0.9
    fit.save_checkpoint(tmp_path / "mnist.ckpt")
    again = MNISTClassifier.load_from_checkpoint(tmp_path / "mnist.ckpt", weights_only=True)
    assert again.hparams.lr == 0.01
    assert again.class_names == [str(i) for i in range(10)]
    assert quiet_trainer().test(again, data, verbose=False)[0] == scores


def test_of_equal_scores_the_later_checkpoint_is_the_best(tmp_path):
    class Scored(Line):
        def validation_step(self, batch, batch_idx):
            self.log("score", torch.tensor([0.5, 0.75, 0.75, 0.25][self.current_epoch]))

    best = ExactCheckpoint(tmp_path, filename="best", monitor="score", mode="max")
    quiet_trainer(callbacks=[best], enable_checkpointing=True, max_epochs=4).fit(Scored(), batches(), batches())
    assert torch.load(best.best_model_path, weights_only=True)["epoch"] == 2
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["best.ckpt"]


@pytest.mark.slow
def test_the_classes_work_in_lightnings_own_command_line(tmp_path):
    (tmp_path / "stock.py").write_text(
        "from lightning.pytorch.cli import LightningCLI\n"
        "from datamodules import MNISTDataModule\n"
        "from recipes import MNISTClassifier\n"
        "LightningCLI(MNISTClassifier, MNISTDataModule)\n"
    )
    args = ["fit", "--trainer.max_epochs=1", "--data.dataset=digits", "--model.lr=0.02", "--trainer.accelerator=cpu"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "stock.py", *args], cwd=tmp_path, env=variables, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sdg"}, "no optimizer 'sdg'; expected one of adadelta, "),
        ({"schedule": "cosin"}, "no schedule 'cosin'; expected one of one_cycle, constant, linear, cosine"),
        ({"lr": 0.0}, "lr=0.0: expected above 0"),
        ({"num_classes": 1}, "num_classes=1 leaves nothing to classify"),
    ],
)
def test_wrong_settings_are_rejected_at_once(options, message):
    with pytest.raises(UserError, match=message):
        MNISTClassifier(**options)


def test_auto_precision_is_bf16_only_where_hardware_is_fast(monkeypatch):
    for amx, avx512, expected in ((0, 1, "bf16-mixed"), (0, 0, "32-true"), (1, 0, "bf16-mixed")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx512=avx512: avx512)
        precision, reason = resolve_precision("auto", "cpu")
        assert precision == expected
        assert reason == "this CPU has AVX512-BF16" or not avx512
    reason = "16-mixed needs a GPU, and this run is on the CPU; pass precision='bf16-mixed'"
    with pytest.raises(UserError, match=reason):
        resolve_precision("16-mixed", "cpu")


def test_the_learning_rate_follows_the_batch_by_the_optimizer():
    assert learning_rate_scale("auto", "SGD") == "linear"
    assert learning_rate_scale("auto", "adamw") == "sqrt"
    assert learning_rate_scale("none", "sgd") is None


@pytest.mark.slow
def test_real_mnist_reaches_98_5_percent_in_an_epoch(shared_data):
    data = MNISTDataModule(dataset="mnist", data_dir=str(shared_data / "mnist"))
    module = MNISTClassifier()
    fit = quiet_trainer(max_epochs=1, precision=resolve_precision("auto", "cpu")[0])
    fit.fit(module, data)
    assert fit.test(module, data, verbose=False)[0]["test/accuracy"] > 0.985
