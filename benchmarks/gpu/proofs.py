"""What is proven on a GPU: the tests that need one, that no step waits, and what memory a run takes."""

import gc
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import lightning.pytorch as pl
import torch

import callbacks
from benchmarks.gpu.loops import Clock
from benchmarks.gpu.speed import Setting, fine_tuner
from benchmarks.harness.bare_trainer import bare_trainer, suppress_output
from benchmarks.harness.measurements import Column, Goal, Section, Spread
from benchmarks.harness.processes import ROOT
from benchmarks.sections.fine_tuning import SameBatch
from datamodules.errors import UserError

__all__ = ["exactness", "memory", "no_sync"]


def _run_tests(title: str, *args: str) -> Section:
    """Tests by file: how many, how many failed or were skipped, and their seconds.

    Raises:
        UserError: no test was found, as where the tests or pytest are not installed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        path = Path(scratch, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={path}", *args]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
        if not path.is_file():
            raise UserError('the tests did not start; run from a clone, after pip install -e ".[test]"')
        cases = list(ElementTree.parse(path).iter("testcase"))
    if not cases:
        raise UserError(f"no test was found: pytest {' '.join(args)}")
    counts: dict[str, list[float]] = {}
    failed = []
    for case in cases:
        file = case.get("classname", "").removeprefix("tests.")
        fails = case.find("failure") is not None or case.find("error") is not None
        row = counts.setdefault(file, [0, 0, 0, 0])
        row[:] = [
            row[0] + 1,
            row[1] + fails,
            row[2] + (case.find("skipped") is not None),
            row[3] + float(case.get("time", 0)),
        ]
        if fails:
            failed.append(f"{file}::{case.get('name')}")
    run = sum(row[0] - row[2] for row in counts.values())
    return Section(
        title=title,
        header={"command": f"pytest {' '.join(args)}", "precision": "as each test says"},
        columns=[Column("tests", ".0f"), Column("failed", ".0f"), Column("skipped", ".0f"), Column("seconds", ".1f")],
        rows={file: [Spread((value,)) for value in row] for file, row in counts.items()},
        goals=[Goal("every test passes", f"{len(failed)} of {run:.0f} failed", run > 0 and not failed)],
        notes=[f"failed: {name}" for name in failed],
    )


def exactness(setting: Setting) -> Section:
    """All tests that need a GPU but those of `no_sync`."""
    if setting.rehearse:
        return _run_tests("exactness", "-n", "0", "-m", "not slow", "-k", "cpu and masks", "tests/cuda")
    return _run_tests("exactness", "-m", "cuda", "--deselect", "tests/cuda/test_no_sync.py", "tests")


def no_sync(setting: Setting) -> Section:
    """No step waits for the device."""
    select = ("-m", "not cuda", "-k", "cpu-mnist") if setting.rehearse else ("-m", "cuda")
    return _run_tests("no step waits for the device", "-n", "0", *select, "tests/cuda/test_no_sync.py")


def _update(setting: Setting, batch_size: int, micro_batches: int, *more: pl.Callback) -> list[Spread | None]:
    """The most memory of two updates, in GiB, and the seconds of the second; memory is not counted on a CPU."""
    on_gpu, size = setting.device.type == "cuda", 32 if setting.rehearse else 224
    recipe = fine_tuner(setting, "resnet50", size, 10)()
    batches = SameBatch(batch_size, size, 2 * micro_batches)
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(1, settling=1)
    with suppress_output():
        bare_trainer(
            [callbacks.GradientAccumulation(micro_batches), *more, clock],
            accelerator="gpu" if on_gpu else "cpu",
            max_steps=2,
            max_epochs=-1,
            limit_val_batches=0,
        ).fit(recipe, batches)
    peak = Spread((torch.cuda.max_memory_allocated() / 2**30,)) if on_gpu else None
    return [peak, Spread((clock.seconds,))]


def memory(setting: Setting) -> Section:
    """Memory by the number of micro-batches, and a batch for which there is not enough."""
    batch_size = 4 if setting.rehearse else 64
    section = Section(
        title="memory of an update of a ResNet-50, and running out of it",
        header={
            "device": "CPU" if setting.rehearse else torch.cuda.get_device_name(),
            "precision": "float32",
            "network": f"ResNet-50, all layers, {batch_size} images of 224 px to a micro-batch, AdamW",
        },
        columns=[Column("most memory, GiB", ".2f"), Column("seconds an update", ".3f")],
    )
    for count in (1, 2, 8):
        section.rows[f"{count} micro-batches"] = _update(setting, batch_size, count)
        setting.save(section)
    peaks = [row[0].median if row[0] else 0.0 for row in section.rows.values()]
    section.goals.append(
        Goal(
            "8 micro-batches take the memory of 2",
            f"{peaks[2]:.2f} and {peaks[1]:.2f} GiB",
            peaks[2] <= 1.02 * peaks[1],
        )
    )
    return section
