"""The search for the largest batch: what it chooses, and that nothing notices that it was there."""

import gc
import hashlib
import os
import random
import re
import shlex
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.lib.memory import cgroup_memory
from datamodules import TranslationDataModule
from datamodules.errors import UserError
from recipes import batch_size_finder
from recipes.batch_size_finder import Trial, fast_enough, find_batch_size, next_size, sizes_of
from recipes.launch.strategies import build_strategy
from tests.support.command_lines import type_line, typed
from tests.support.out_of_memory import PHASES, Phase, data_limit, planted_out_of_memory
from tests.support.ranks import run_ranks
from tests.support.stock_data import Points, Quadrants
from tests.support.tables import on_ranks


def _search(sizes: list[int], first: int, edge: float, known: float, factor: int = 2) -> list[int]:
    """The sizes tried where those above `edge` fail, and `known` seem to have room."""
    tried: list[Trial] = []
    size: int | None = first
    while size is not None:
        tried.append(Trial(size, size <= edge, known, float(size), 0.5))
        size = next_size(sizes, tried, factor)
    return [trial.batch_size for trial in tried]


@pytest.mark.parametrize("edge", [1, 2, 3, 5, 8, 9, 30, 100, 777, 3000, 60_000])
@pytest.mark.parametrize("known", [False, True])
def test_less_than_ten_steps_come_near_the_edge(edge: int, known: bool):
    largest = 4 * edge
    tried = _search(sizes_of(largest), min(8, largest), edge, edge if known else 1e9, 4 if edge > 500 else 2)
    best = max(size for size in tried if size <= edge)
    assert len(tried) < 9  # One comes before them.
    assert best > (0.85 if known else 0.5) * (edge - 8 if edge > 8 else edge)
    assert max(tried) <= edge or not known or edge < 8


@pytest.mark.parametrize("edge", [1, 7, 30, 48, 96])
def test_sizes_divide_the_global_batch(edge: int):
    tried = _search(sizes_of(None, 96), 8, edge, 1e9)
    assert all(96 % size == 0 for size in tried)
    assert max(size for size in tried if size <= edge) == max(size for size in sizes_of(None, 96) if size <= edge)


def test_the_search_ends_where_larger_batches_are_no_faster():
    rates = {8: 9.0, 16: 100.0, 32: 190.0, 64: 195.0, 128: 199.0, 256: 201.0}
    steps = [Trial(size, True, 1e9, rate, 0.1) for size, rate in rates.items()]
    assert next_size(sizes_of(None), steps[:4]) == 128
    assert next_size(sizes_of(None), steps[:5]) is None
    assert next_size(sizes_of(None), steps[:5], min_gain=0) == 256
    assert fast_enough(steps[:5]).batch_size == 32


def _digest(module: nn.Module, data: Any) -> str:
    """Of the module's tensors, of the data module's attributes, and of all generators."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    digest.update(repr([parameter.grad is None for parameter in module.parameters()]).encode())
    digest.update(repr((sorted(vars(data)), data.batch_size, module.training)).encode())
    digest.update(repr((random.getstate(), np.random.get_state())).encode() + torch.get_rng_state().numpy().tobytes())
    if hasattr(data, "generator"):
        digest.update(data.generator.get_state().numpy().tobytes())
    return digest.hexdigest()


class Shuffled(Points):
    """With a generator of its own, of which shuffling draws."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__(batch_size)
        self.generator = torch.Generator().manual_seed(5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.points, self.batch_size, shuffle=True, generator=self.generator)


class Noisy(Quadrants):
    """With running statistics, dropout and an optimiser with state."""

    def build_network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))


@pytest.mark.parametrize("phase", [None, *PHASES])
def test_module_data_and_generators_are_as_before_wherever_a_step_fails(phase: Phase | None):
    torch.manual_seed(1)
    module, data = Noisy(num_classes=2), Shuffled()
    before = _digest(module, data)
    # Points are validated in batches of the same size.
    with planted_out_of_memory(module.network, phase or "forward", 27 if phase else 10**6) as failed:
        found = find_batch_size(module, data, min_gain=0, accelerator="cpu")
    assert _digest(module, data) == before
    assert found.batch_size == (24 if phase else 96)
    assert bool(failed) == bool(phase)
    assert len(found.trials) < 9
    assert module._trainer is None
    assert [each for each in gc.get_objects() if type(each) is Noisy] == [module], "the copy is gone"


def _smallest_of_ranks(fits: list[int], phase: Phase, global_batch_size: int | None) -> tuple[int, list[int]]:
    module, rank = Noisy(num_classes=2), int(os.environ.get("RANK", 0))
    with planted_out_of_memory(module.network, phase, fits[rank]):
        options = on_ranks(len(fits)) | {"accelerator": "cpu", "min_gain": 0.0}
        if phase == "backward":
            options["strategy"] = build_strategy("auto", len(fits))  # The command line's.
        found = find_batch_size(module, Points(), global_batch_size, **options)
    return found.batch_size, [trial.batch_size for trial in found.trials]


@pytest.mark.parametrize(
    ("phase", "fits", "global_batch_size", "chosen"),
    [("backward", [1000, 19], None, 16), ("optimizer", [9, 40], 72, 9)],
)
def test_ranks_of_different_limits_agree_and_none_waits_for_one_that_failed(
    phase: Phase, fits: list[int], global_batch_size: int | None, chosen: int
):
    results = run_ranks(_smallest_of_ranks, 2, fits, phase, global_batch_size, timeout=60)
    assert results[0] == results[1]
    assert results[0][0] == chosen


class Wide(pl.LightningModule):
    """Keeps a known number of bytes of each sample for the backward pass."""

    def __init__(self, megabytes: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 250_000 * megabytes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0][:, :1]).sigmoid().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Many(pl.LightningDataModule):
    batch_size = 4

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(2000, 2), torch.zeros(2000)), self.batch_size)


def _within(limit: int) -> tuple[int, list[tuple[int, bool]], float]:
    with data_limit(limit):
        found = find_batch_size(Wide(), Many(), min_gain=0, accelerator="cpu")
    return found.batch_size, [(trial.batch_size, trial.fits) for trial in found.trials], found.chosen.share


def test_what_small_steps_have_taken_says_how_far_a_limit_of_the_process_allows_to_go():
    # Three tensors of 4 MB for each sample at the peak, beside gradients and optimiser.
    (chosen, tried, share), *_ = run_ranks(_within, 1, 1_000_000_000)
    assert 32 <= chosen <= 80
    assert 0.4 < share <= 0.8
    assert all(fits for _, fits in tried), "a step ran out of memory that could have been foreseen"


class Greedy(Wide):
    """Takes more for a batch to validate than may be taken, while a small one fits."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        assert len(batch[0]) < 32, "this would have been too large"
        torch.ones(len(batch[0]), 6_000_000).sum()


class Validated(Many):
    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(64, 2), torch.zeros(64)), 64)


def _evaluation_refused() -> str:
    with data_limit(1_000_000_000), pytest.raises(UserError) as caught:
        find_batch_size(Greedy(), Validated(), accelerator="cpu")
    return str(caught.value)


def test_a_batch_to_validate_that_cannot_fit_is_refused_before_it_is_tried():
    assert run_ranks(_evaluation_refused, 1)[0].startswith("a batch of 64 to validate does not fit into ")


def _refused(estimates: bool) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as caught:
        if estimates:
            patch.setattr(
                batch_size_finder, "available_memory", lambda *_: 100_000_000
            )  # As a cgroup of few bytes does.
            find_batch_size(Wide(20), Many(), accelerator="cpu")
        with data_limit(300_000_000):
            find_batch_size(Wide(20), Many(), accelerator="cpu")
    return str(caught.value)


@pytest.mark.parametrize("estimates", [False, True])
def test_a_network_of_which_no_sample_fits_is_refused(estimates: bool):
    what = "a batch of one sample needs about" if estimates else "a batch of 1 to train on does not fit into"
    assert run_ranks(_refused, 1, estimates)[0].startswith(what)


def _searched_and_run(folder: str) -> list[tuple[int, str, str]]:
    line = "--dataset digits --image-size 160 --weights none --freeze-until none --batch-size auto --eval-batch-size 8"
    line += (
        " --max-epochs 1 --limit-train-batches 3 --limit-val-batches 1 --accelerator cpu --precision 32 --logger none"
    )
    line += " --num-workers 0 --enable-progress-bar false"
    with data_limit(800_000_000):
        return [type_line("recipes:ResNetFineTuner", "datamodules:ImageFolderDataModule", shlex.split(line), folder)]


@pytest.mark.slow
def test_the_size_found_under_a_limit_of_the_process_is_one_with_which_the_run_ends_well(tmp_path: Path):
    ((status, out, err),) = run_ranks(_searched_and_run, 1, str(tmp_path))[0]
    assert status == 0, err
    (size,) = re.findall(r"batch size (\d+) on each device: the largest that fits", out)
    assert int(size) >= 4


@pytest.mark.parametrize(("version", "names"), [(1, "limit_in_bytes usage_in_bytes"), (2, "max current")])
def test_cgroups_of_both_versions_count_down_to_the_root_and_not_their_cached_files(
    tmp_path: Path, version: int, names: str
):
    top = tmp_path / ("memory" if version == 1 else "")
    inner = top / "slice/job"
    inner.mkdir(parents=True)
    for folder, limit in (
        (top, "max" if version == 2 else str(2**63 - 4096)),
        (top / "slice", "5000"),
        (inner, "9000"),
    ):
        for name, value in zip(names.split(), (limit, "4500")):
            (folder / f"memory.{name}").write_text(f"{value}\n")
        (folder / "memory.stat").write_text("cache 900\ninactive_file 300\ntotal_inactive_file 300\n")
    proc = tmp_path / "cgroup"
    proc.write_text("4:memory:/slice/job\n0::/\n" if version == 1 else "0::/slice/job\n")
    assert sorted(cgroup_memory(proc, tmp_path))[:2] == [800, 4800]
    assert cgroup_memory(tmp_path / "none", tmp_path) == []


def test_translation_is_tried_with_the_longest_sentences():
    data = TranslationDataModule()
    data.setup("fit")
    batch = data.largest_batch("train", 5000)
    longest = max(len(batch.source[0]) for batch in data.train_dataloader())
    assert batch.source.shape == (5000, longest)
    assert batch.source_lengths[0] == longest


def test_a_data_module_without_a_batch_size_is_refused():
    with pytest.raises(UserError, match="neither an attribute nor a hyper-parameter `batch_size`"):
        find_batch_size(Wide(), pl.LightningDataModule(), accelerator="cpu")


def test_a_run_that_finds_its_batch_size_is_the_run_with_that_size_and_a_resume_does_not_search_again(tmp_path: Path):
    quick, more = "--max-epochs 2 --logger none --global-batch-size 48", "--warmup 3 --ema 0.9 --sync-bn"
    found, resumed, invalid, scored = typed(
        tmp_path,
        f"{quick} --name found --batch-size auto {more}",
        "--name found --resume auto --max-epochs 3 --batch-size auto",
        f"{quick} --batch-size automatic",
        "validate --ckpt runs/quadrants/found/checkpoints/last.ckpt --batch-size auto",
    )
    assert found.status == resumed.status == scored.status == 0, found.err + resumed.err + scored.err
    run = tmp_path / "runs/quadrants/found"
    size = yaml.safe_load((run / "config.yaml").read_text())["batch_size"]
    assert 48 % size == 0
    assert f"batch size {size} on each device: " in found.out
    assert f"pass --batch-size {size}" in found.out
    assert "batch size" not in resumed.out
    assert invalid.status == 2
    assert "--batch-size automatic is not a whole number or auto" in invalid.err
    (given,) = typed(tmp_path, f"{quick} --name given --batch-size {size} {more}")
    assert given.status == 0
    lines = [(tmp_path / f"runs/quadrants/{name}/weights.jsonl").read_text() for name in ("found", "given")]
    assert lines[0].splitlines()[0] == lines[1].splitlines()[0]
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["config"]["batch_size"] == size


class Exhausted(Quadrants):
    """Runs out of memory with more than 4 samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
        return super().training_step(batch, batch_idx)


def test_a_run_that_is_out_of_memory_says_in_one_line_what_to_pass(tmp_path: Path):
    names = {"recipe": f"{__name__}:Exhausted", "data": "tests.support.stock_data:Points"}
    quick = "--max-epochs 1 --logger none"
    plain, accumulated, smaller = typed(
        tmp_path,
        f"{quick} --batch-size 10",
        f"{quick} --batch-size 10 --accumulate 3 --precision bf16-mixed",
        f"{quick} --batch-size 4 --global-batch-size 20",
        **names,
    )
    assert plain.status == accumulated.status == 1
    assert "Traceback" not in plain.err
    (line,) = [line for line in plain.err.splitlines() if line.startswith("error")]
    assert line.startswith("error: out of memory with 10 samples on each device (tried to allocate 2.00 GiB; ")
    assert "GB left): pass --batch-size 5 with --global-batch-size 10, which make the same updates, or " in line
    assert "pass --batch-size 5 with --accumulate 6, which" in accumulated.err
    assert smaller.status == 0, smaller.err
