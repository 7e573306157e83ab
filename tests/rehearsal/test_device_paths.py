"""Code that chooses by device, through both choices: the CPU's, and an accelerator's on the stand-in device.

Each test runs the same on both and compares numbers; `test_the_table_of_paths` prints what was driven, how, and what
that does not show. What asks for ``cuda`` by name (memory counters, `torch.cuda.mem_get_info`, the
versions of CUDA, NCCL) cannot be driven here, and stands there as such.
"""

from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from callbacks.lib.batch_norm import sync_batchnorm
from callbacks.lib.consensus import DeferredFlags, FlagAllReduce
from callbacks.lib.stateless_dropout import stateless_dropout
from callbacks.seed_control import SeedControl, seed_torch
from datamodules import ImageFolderDataModule, MNISTDataModule
from datamodules.loading.worker_loaders import LoadedBatch, _Packed
from recipes import MNISTClassifier
from recipes.labels import LabelCheck
from tests.rehearsal.runs import fit, fit_on_both, largest_difference
from tests.rehearsal.stand_in import DeviceTensor, StandInAccelerator, Wait, stand_in_device
from tests.rehearsal.test_no_synchronisation import _images, _loaders, refused
from tests.support.ranks import run_ranks
from tests.support.tables import CALLBACKS, QUIET, TOGETHER, Tiny, image_network, noisy_images, on_ranks

QUIET_RUN = {"enable_progress_bar": False}


def _optimisers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in (("AdamW", torch.optim.AdamW), ("SGD", torch.optim.SGD)):
        for fused in (False, True):

            def make(kind: Any = kind, fused: bool = fused) -> Any:
                module = Tiny(image_network().float(), kind, lr=0.01, fused=fused)
                inputs, targets = noisy_images(22)
                return module, _loaders((inputs.float(), targets)), []

            on_cpu, on_device = fit_on_both(make, **QUIET_RUN)
            found[f"{name}, fused={fused}"] = largest_difference(on_cpu, on_device), refused(on_device.waits)
    return found


def test_a_fused_optimiser_takes_the_steps_of_the_cpu_and_waits_for_nothing() -> None:
    for name, (difference, waits) in run_ranks(_optimisers, 1)[0].items():
        assert difference == 0, name
        assert not waits, waits


def _flags() -> dict[str, Any]:
    found: dict[str, Any] = {}
    on_cpu, flags = DeferredFlags(), torch.tensor([0.0, 1.0, 0.0])
    found["cpu"] = [(on_cpu.push(flag), on_cpu.pop())[1] for flag in flags]
    with stand_in_device() as device:
        on_device = DeferredFlags()
        Wait.seen.clear()
        sums = flags.to(device, non_blocking=True).unbind()
        found["device"] = [(on_device.push(flag), on_device.pop())[1] for flag in sums]
        found["waits"] = [repr(wait) for wait in Wait.seen]
        # What is read too early has not arrived.
        early = sums[1].to("cpu", non_blocking=True)
        found["early"] = float(early)
        torch.get_device_module(device).synchronize()
        found["late"] = float(early)
        found["alone"] = FlagAllReduce(1).start(True)
    return found


def test_a_flag_is_read_at_once_on_the_cpu_and_one_update_later_elsewhere() -> None:
    found = run_ranks(_flags, 1)[0]
    assert found["cpu"] == [False, True, False]
    assert found["device"] == [False, False, True]
    assert not found["waits"]
    assert found["early"] != found["early"]
    assert found["late"] == 1
    assert found["alone"]


def _labels() -> dict[str, Any]:
    found: dict[str, Any] = {}
    good, bad = torch.tensor([0, 1, -100]), torch.tensor([0, 7, 1])

    def check(device: Any, at_once: bool | None) -> list[str]:
        seen, checker = [], LabelCheck(3, "training")
        checker.at_once = at_once
        for step, labels in (("good", good), ("bad", bad), ("end", None)):
            try:
                if labels is None:
                    checker.raise_found()
                else:
                    checker(labels if device is None else labels.to(device, non_blocking=True))
            except Exception as error:
                seen.append(f"{step}: {error}")
        return seen

    found["cpu"] = check(None, None)
    with stand_in_device() as device:
        Wait.seen.clear()
        found["device"] = check(device, None)
        found["waits"] = [wait.operation for wait in Wait.seen]
    return found


def test_a_label_that_is_no_class_is_found_at_once_on_the_cpu_and_without_waiting_elsewhere() -> None:
    found = run_ranks(_labels, 1)[0]
    assert [text.partition(":")[0] for text in found["cpu"]] == ["bad"]
    assert [text.partition(":")[0] for text in found["device"]] == ["end"]
    assert "0 to 7" in found["device"][0]
    assert found["waits"] == ["to the host"]


class _OnGPU(ImageFolderDataModule):
    """As on a machine with a GPU, of which only the name is asked for."""

    _device = torch.device("cuda")  # type: ignore[assignment]


def _pinned() -> dict[str, Any]:
    batch = LoadedBatch(torch.randn(4, 3), torch.arange(4), torch.arange(4, 8), ())
    with stand_in_device() as device:
        pinned = _Packed(bytes(ForkingPickler.dumps(batch))).pin_memory()
        found: dict[str, Any] = {"waits": [], "equal": []}
        for given in (pinned, batch):
            for non_blocking in (True, False):
                Wait.seen.clear()
                moved = [getattr(given, name).to(device, non_blocking=non_blocking) for name in _SENT]
                found["waits"].append(len(Wait.seen))
                found["equal"].append(all(torch.equal(m.raw, getattr(batch, n)) for m, n in zip(moved, _SENT)))
        found["pinned"] = [getattr(given, name).is_pinned() for given in (pinned, batch) for name in _SENT]
    return found


_SENT = ("inputs", "targets", "rows")


def test_batches_of_workers_are_pinned_for_a_gpu_only_and_copied_without_waiting() -> None:
    found = run_ranks(_pinned, 1)[0]
    assert found["pinned"] == [True] * 3 + [False] * 3
    assert found["waits"] == [0, 3, 0, 3], "only a copy that is not `non_blocking` waits"
    assert all(found["equal"])
    for kind, expected in ((_OnGPU, True), (ImageFolderDataModule, False)):
        data = kind("digits", batch_size=4, augment="standard")
        data.setup("fit")
        assert data.train_dataloader().pin_memory == expected


def _seeds() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with stand_in_device() as device:
        host, drawn = torch.random.get_rng_state(), []
        for _ in range(2):
            seed_torch(3, device)
            drawn.append((torch.rand(4, device=device).raw, torch.rand(4)))
        seed_torch(3)
        drawn.append((torch.rand(4, device=device).raw, torch.rand(4)))
        found["drawn"] = drawn
        torch.random.set_rng_state(host)
        places = torch.arange(4, device=device)
        layer = stateless_dropout(nn.Sequential(nn.Dropout(0.5)))
        found["places"] = isinstance(places, DeviceTensor) and isinstance(
            layer(torch.ones(4, 3, device=device)), Tensor
        )
    return found


def test_the_generator_of_the_device_is_seeded_beside_that_of_the_cpu() -> None:
    found = run_ranks(_seeds, 1)[0]
    (one, on_cpu), (again, on_cpu_again), (later, on_cpu_later) = found["drawn"]
    assert torch.equal(one, again)
    assert torch.equal(on_cpu, on_cpu_again)
    assert torch.equal(on_cpu, on_cpu_later)
    assert not torch.equal(one, later)
    assert found["places"]


def _life(device: Any, folder: Path, resume: Path | None = None) -> dict[str, Tensor]:
    SeedControl(seed=1)
    module, data, callbacks = _images(sorted(set(TOGETHER) - {"RunProgress"}))
    where: dict[str, Any] = {"accelerator": "cpu"}
    if device is not None:
        where = {"strategy": SingleDeviceStrategy(device=device, accelerator=StandInAccelerator())}
    trainer = pl.Trainer(
        **{**QUIET, "accelerator": "auto", **where, **QUIET_RUN},
        max_epochs=3,
        callbacks=[SeedControl(seed=1), *callbacks, ExactCheckpoint(folder, "{epoch}", save_top_k=-1)],
    )
    trainer.fit(module, **data, ckpt_path=resume, weights_only=True)
    return {k: (v.raw if isinstance(v, DeviceTensor) else v).detach().clone() for k, v in module.state_dict().items()}


def _resumed(folder: str) -> dict[str, float]:
    """Weights of runs that were saved on one device and went on on the other, against one that never stopped."""
    found = {}
    with stand_in_device() as device:
        for first, second in ((None, device), (device, None)):
            here = Path(folder, f"from-{first}")
            whole = _life(first, here)
            resumed = _life(second, here / "again", here / "epoch=0.ckpt")
            differences = [
                float((whole[name].double() - value.double()).abs().max()) for name, value in resumed.items()
            ]
            found[f"{first} to {second}"] = max(differences)
    return found


def test_a_checkpoint_of_one_device_goes_on_on_the_other_to_the_bit(tmp_path: Path) -> None:
    for name, difference in run_ranks(_resumed, 1, str(tmp_path))[0].items():
        assert difference == 0, name


def _normalised() -> Any:
    """Two gloo ranks with 7 and 4 samples: outputs, gradients and statistics on the CPU and on the device."""
    dist.init_process_group("gloo")
    mine = slice(0, 7) if dist.get_rank() == 0 else slice(7, 11)

    def run(device: Any) -> list[Tensor]:
        torch.manual_seed(0)
        part = torch.randn(11, 3, 4, 4)[mine]
        layer = nn.BatchNorm2d(3)
        sync_batchnorm(layer)
        if device is not None:
            layer, part = layer.to(device), part.to(device)
        part = part.detach().requires_grad_()
        out = layer(part)
        (out**3).sum().backward()
        found = (out, part.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var)
        return [value.detach().cpu() for value in found if value is not None]

    on_cpu = run(None)
    with stand_in_device() as device:
        return [float((one - other).abs().max()) for one, other in zip(on_cpu, run(device), strict=True)]


def test_synchronised_batch_normalisation_of_torch_and_ours_agree() -> None:
    for differences in run_ranks(_normalised, 2):
        assert len(differences) == 6
        assert max(differences) < 1e-4, differences


class _DDP(DDPStrategy):
    """DDP for devices that are neither the CPU nor CUDA, whose streams Lightning would make."""

    def determine_ddp_device_ids(self) -> None:
        return None


def _two_ranks() -> Any:
    def make() -> Any:
        inputs, targets = noisy_images(22)
        module = Tiny(image_network(0.2).float(), torch.optim.SGD, lr=0.05)
        names = ("GradientAccumulation", "SyncBN", "TrainLoss", "Preemption")
        return module, _loaders((inputs.float(), targets)), [CALLBACKS[name]() for name in names]

    on_cpu = fit(make, **QUIET_RUN, **on_ranks(2))
    with stand_in_device() as device:
        accelerator = StandInAccelerator()
        strategy = _DDP(accelerator=accelerator, parallel_devices=[device] * 2, process_group_backend="gloo")
        on_device = fit(make, device, strategy=strategy, **QUIET_RUN)
    return largest_difference(on_cpu, on_device), refused(on_device.waits)


OF_TORCH = ("batch_norm.py:forward", "core/module.py:backward", "strategies/strategy.py:__call__")
"""torch's SyncBatchNorm leaves out ranks without samples by a mask, in each layer; DDP copies what gloo has reduced,
and counts its buckets once."""


def test_two_ranks_with_ddp_learn_the_same_on_both_devices_and_wait_in_torch_only() -> None:
    """Without Preemption, Lightning reads in each batch whether rank 0 has seen SIGTERM."""
    for difference, waits in run_ranks(_two_ranks, 2):
        assert difference < 1e-5
        others = [wait for wait in waits if not any(site in wait for site in OF_TORCH)]
        assert not others, "\n".join(others)
        assert any(OF_TORCH[0] in wait for wait in waits)


def _layouts() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for channels_last in (True, False):
        recipes: list[Any] = []

        def make(channels_last: bool = channels_last, recipes: list[Any] = recipes) -> Any:
            data = MNISTDataModule("digits", batch_size=16, eval_batch_size=16)
            recipe = MNISTClassifier(network="classic", channels_last=channels_last, fused=None)
            recipes.append(recipe)
            return recipe, data, []

        settings = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0, **QUIET_RUN}
        on_cpu = fit(make, **settings)
        with stand_in_device() as device:
            on_device = fit(make, device, **settings)
        fused = [recipe.trainer.optimizers[0].defaults["fused"] for recipe in recipes]
        found[str(channels_last)] = largest_difference(on_cpu, on_device), fused
    return found


def test_both_layouts_and_both_kernels_of_the_optimiser_give_the_same_weights() -> None:
    """A recipe takes the fused kernel where the device is known to have it: the CPU and CUDA, not the stand-in."""
    for name, (difference, fused) in run_ranks(_layouts, 1)[0].items():
        assert difference < 1e-5, name
        assert fused == [True, False]


PATHS = [
    # path, CPU, accelerator, not shown
    ("fused optimiser", "real", "stand-in, bit-equal", "CUDA's kernels"),
    ("optimiser of a recipe: fused or not", "real", "stand-in: not fused", "the choice for cuda"),
    ("autocast bf16", "real", "stand-in", "cuda's list of operations, Tensor Cores"),
    ("fp16 and loss scaler", "CPU GradScaler", "GradScaler on the stand-in", "overflow of CUDA's kernels"),
    ("scaler with fused optimiser", "real", "stand-in: skips on the device", "-"),
    ("SyncBN", "ours over gloo", "torch's layer over gloo, its 5 kernels by formula", "NCCL, CUDA's kernels"),
    ("DDP, accumulation", "gloo", "stand-in over gloo", "NCCL, streams, overlap"),
    ("flags: at once or an update later", "real", "stand-in: copies arrive at their event", "torch's own events"),
    ("label check: at once or later", "real", "stand-in", "-"),
    ("seeds", "real", "stand-in's generator", "Philox of CUDA"),
    ("transfers, non_blocking", "real", "stand-in: blocking ones are found", "pinned sources, overlap"),
    ("channels_last", "real", "stand-in", "speed"),
    ("saved on one, resumed on the other", "real", "stand-in, to the bit", "-"),
    ("recurrent layers", "CPU's GRU", "fused cell by formula", "cuDNN, LSTM"),
    ("TrainLoss's rate", "host's clock", "the same", "-"),
    ("pinned memory", "not pinned", "stand-in: pinned, then copied", "overlap, the DataLoader's thread"),
    ("memory counters", "-", "asks for cuda by name: not driven", "all"),
    ("MNIST beside full memory (mem_get_info)", "-", "asks for cuda by name: not driven", "all"),
    ("precision=auto, devices, versions", "real", "asks torch.cuda: not driven", "all"),
]


def test_the_table_of_paths() -> None:
    print("\n" + "".join(f"{head:<44}{cpu:<18}{device:<50}{rest}\n" for head, cpu, device, rest in PATHS))
    assert len({path for path, *_ in PATHS}) == len(PATHS)
