"""`--compile`: one graph without breaks for batches of every size, the same noise, names and weights, exact resumes.

Graphs are counted with the backend "eager", which runs what was traced operation by operation: so weights are equal to
the bit. Inductor's kernels round otherwise; the slow tests run them.
"""

import copy
import csv
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import recipes.compilation
from callbacks import ExactCheckpoint, FreezeLayers, GradientAccumulation, SeedControl, SyncBN, WeightAveraging
from datamodules.errors import RunFailedError, UserError
from datamodules.loading.foreign import ForeignLoader
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from recipes.compilation import CompileNetwork, compile_network, restore_network
from recipes.dropout import Dropout
from recipes.mnist import MNISTClassifier
from recipes.mnist.network import MNISTNet
from recipes.resnet import ResNetFineTuner
from recipes.resnet.network import build_resnet
from recipes.runner.settings import build_strategy
from recipes.seq2seq.network import Seq2SeqNet, target_positions
from recipes.seq2seq.transformer import TransformerNet
from tests.support.command_lines import MNIST, typed
from tests.support.own_training import TrainedClassifier
from tests.support.ranks import run_ranks
from tests.support.tables import CLASSES, noisy_images, quiet_trainer


def images(size: int, channels: int, *batch_sizes: int) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(batch, channels, size, size),) for batch in batch_sizes]


def losses_of(run: Path) -> list[float]:
    """The mean training loss of each epoch."""
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss_epoch"]) for row in csv.DictReader(file) if row["train/loss_epoch"]]


def sentences(*shapes: tuple[int, int, int]) -> list[tuple[Tensor, ...]]:
    """Sources and targets of random lengths, of the shapes (batch, source, target)."""
    batches = []
    for batch, source, target in shapes:
        lengths, target_lengths = torch.randint(1, source + 1, (batch,)), torch.randint(2, target + 1, (batch,))
        lengths[0], target_lengths[0] = source, target
        tokens, targets = torch.randint(4, 20, (batch, source)), torch.randint(4, 20, (batch, target))
        batches.append((tokens, lengths, targets, target_positions(targets, target_lengths)))
    return batches


LENGTHS = (6, 7, 8), (6, 9, 5), (4, 7, 11), (5, 12, 3)
CASES: dict[str, Any] = {
    "mnist": lambda: (MNISTNet(width=2), 1, images(28, 1, 8, 8, 5, 8, 3)),
    "resnet": lambda: (build_resnet("resnet18", 4, small_images=True), 1, images(32, 3, 4, 3, 2)),
    "translation, recurrent": lambda: (Seq2SeqNet(20, 20, 16, num_layers=2), 2, sentences(*LENGTHS)),
    "translation, transformer": lambda: (TransformerNet(20, 20, 16, 2), 2, sentences(*LENGTHS)),
}


RECURRENT = ("translation, recurrent",)
"""torch ends a graph at each recurrent layer."""


@pytest.mark.parametrize("name", CASES)
def test_a_network_is_one_graph_for_all_sizes(name: str):
    torch.manual_seed(0)
    network, dims, batches = CASES[name]()
    plain, names = copy.deepcopy(network), list(network.state_dict())
    torch._dynamo.reset()
    counters.clear()
    compile_network(network, varying_dims=dims, backend="eager")
    for step, batch in enumerate(batches):
        outputs = []
        for module in (network, plain):
            torch.manual_seed(step)
            outputs.append(module(*batch))
            outputs[-1].square().mean().backward()
        torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    for (weight, mine), parameter in zip(network.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=weight)
    if name not in RECURRENT:
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == 1
    assert list(network.state_dict()) == names
    restore_network(network)


class Noisy(TrainedClassifier):
    """Convolution, BatchNorm, dropout and a head, for images of 5 x 5."""

    def build_network(self) -> nn.Module:
        torch.manual_seed(3)
        body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), Dropout(0.3), nn.Flatten())
        return nn.Sequential(body, nn.Linear(36, CLASSES))


def train(folder: Path | None, compile: bool, epochs: int, resume: Path | None = None) -> tuple[Noisy, Any]:
    """A run with everything that holds on to parameters or names; its last checkpoint."""
    seeds = SeedControl(1)
    recipe = Noisy(num_classes=CLASSES, compile=compile, schedule="constant")
    inputs, targets = noisy_images(26)
    rows = torch.arange(26)
    loader = TrainLoader(inputs.float(), targets, rows, 4, seed=1)
    saving = ExactCheckpoint(folder, filename=f"{epochs}-{compile}", enable_version_counter=False) if folder else None
    callbacks = [GradientAccumulation(2), seeds, FreezeLayers(until="1", unfreeze={"0.0": "1 epochs"})]
    callbacks += [WeightAveraging(ema=0.9), *([saving] if saving else [])]
    trainer = quiet_trainer(*callbacks, max_epochs=epochs, limit_val_batches=2)
    validation = EvaluationLoader(inputs.float(), targets, rows[:9], 4)
    trainer.fit(recipe, loader, validation, ckpt_path=resume)
    checkpoint = torch.load(saving.best_model_path, weights_only=True) if saving else None
    return recipe, checkpoint


@pytest.fixture
def graphs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run operation by operation."""
    monkeypatch.setattr(recipes.compilation, "compile_network", partial(compile_network, backend="eager"))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("graphs_only")
def test_a_run_may_be_compiled_before_or_after_a_resume(tmp_path: Path):
    expected, plain = train(tmp_path, False, 2)
    assert not counters["stats"]["unique_graphs"]
    assert plain is not None
    found, compiled = train(tmp_path, True, 2)
    assert not counters["graph_break"]
    assert compiled is not None
    assert list(compiled["state_dict"]) == list(plain["state_dict"]) == list(found.state_dict())
    for before in (False, True):
        train(tmp_path, before, 1)
        for after in (False, True):
            resumed, _ = train(None, after, 2, tmp_path / f"1-{before}.ckpt")
            for name, value in expected.state_dict().items():
                assert torch.equal(resumed.state_dict()[name], value), (before, after, name)
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    graphs = counters["stats"]["unique_graphs"]
    found(torch.zeros(2, 1, 5, 5))
    assert counters["stats"]["unique_graphs"] == graphs, "the network is called as it is after training"


def test_what_cannot_be_compiled_is_rejected_with_the_cure():
    with pytest.raises(UserError, match=r"compile='fast' is no mode of torch.compile; pass True, default, "):
        MNISTClassifier(compile="fast")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="compile=True: with cache_features=True"):
        ResNetFineTuner(num_classes=2, cache_features=True, compile=True)
    gpu: Any = SimpleNamespace(
        train_dataloader=ForeignLoader([], size=2),
        accumulate_grad_batches=1,
        strategy=SimpleNamespace(root_device=torch.device("cuda")),
    )
    with pytest.raises(UserError, match="compile='reduce-overhead' cannot accumulate micro-batches: pass compile=True"):
        CompileNetwork().on_train_start(gpu, SimpleNamespace(hparams=SimpleNamespace(compile="reduce-overhead")))


def test_a_machine_without_a_compiler_says_so_in_one_line():
    torch._dynamo.reset()
    compile_network(network := torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    without = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    with without, pytest.raises(RunFailedError, match=r"network \(.*\); pass compile=False, or install a C\+\+ "):
        network(torch.zeros(3, 2))


def test_a_damaged_library_names_the_folder_to_remove(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/a cache")

    def load(*_: Any) -> Any:
        raise OSError("/tmp/a cache/ab/cab.so: file too short")

    torch._dynamo.reset()
    compile_network(network := torch.nn.Sequential(torch.nn.Linear(2, 2)), backend=load)  # type: ignore[arg-type]
    with pytest.raises(RunFailedError, match="file too short.*; a library in .* is damaged: type rm -r '/tmp/a cache'"):
        network(torch.zeros(3, 2))


@pytest.mark.slow
def test_a_compiled_run_repeats_itself_to_the_bit(tmp_path: Path):
    # In float64: operations that are compiled round differently, and training amplifies that.
    settings = "--dataset digits --network classic --max-epochs 2 --batch-size 64 --precision 64-true"
    eager, compiled, verified, predicted = typed(
        tmp_path,
        f"{settings} --name eager",
        f"{settings} --name compiled --compile",
        "verify runs/mnist/compiled",
        "test --ckpt runs/mnist/compiled/checkpoints/last.ckpt",
        **MNIST,
    )
    assert [one.status for one in (eager, compiled, verified, predicted)] == [0] * 4, (compiled, verified)
    assert "equal" in verified.out
    expected, found = (losses_of(tmp_path / "runs" / "mnist" / name) for name in ("eager", "compiled"))
    assert len(expected) == 2
    assert found == pytest.approx(expected, rel=1e-9)


def _two_ranks() -> dict[str, Any]:
    """Weights of a run on two ranks, eager and compiled, and the graphs and their breaks."""
    weights = []
    for compile in (False, "reduce-overhead"):
        counters.clear()
        seeds = SeedControl(1)
        recipe = Noisy(num_classes=CLASSES, compile=compile, schedule="constant", optimizer="sgd")
        callbacks = GradientAccumulation(2), seeds, SyncBN()
        trainer = quiet_trainer(*callbacks, strategy=build_strategy("ddp", 2), devices=2, max_epochs=2)
        inputs, targets = noisy_images(26)
        data = inputs.float(), targets, torch.arange(26)
        trainer.fit(recipe, TrainLoader(*data, 2, 1, trainer.global_rank, trainer.world_size))
        weights.append({name: value.clone() for name, value in recipe.state_dict().items()})
    breaks = [reason.partition("\n")[0] for reason in counters["graph_break"]]
    return {"weights": weights, "graphs": counters["stats"]["unique_graphs"], "breaks": breaks}


@pytest.mark.slow
def test_two_ranks_train_compiled_as_eager() -> None:
    """On a CPU reduce-overhead is the default mode; on a GPU it records CUDA graphs, which nothing here shows."""
    zero, one = run_ranks(_two_ranks, 2)
    for name, value in zero["weights"][0].items():
        torch.testing.assert_close(zero["weights"][1][name], value, rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(one["weights"][1][name], zero["weights"][1][name]), name
    assert zero["graphs"] == one["graphs"] == 1
    assert zero["breaks"] == one["breaks"] == ["Skip inlining `torch.compiler.disable()`d function"]
