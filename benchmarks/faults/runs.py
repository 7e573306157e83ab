"""Small runs of a recipe in processes of their own, which a fault may break."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.cases import SAVE_EVERY
from benchmarks.harness.processes import ROOT, free_port
from benchmarks.harness.tiny_recipes import TINY_RECIPES

__all__ = ["EPOCHS", "LIMIT", "Run", "tail", "undisturbed_digest"]

LIMIT = 30.0
"""Seconds that a run may take to end once something has broken."""
EPOCHS = 2
_UPDATES = 21  # Of an epoch.
_START = 180.0


@dataclass
class Run:
    """One try: its recipe, its folder, its flags, and how it is started."""

    recipe: str
    folder: Path
    world_size: int = 1
    manual_launch: bool = False
    epochs: int = EPOCHS
    logger: str = "csv"  # Without the images in TensorBoard, which take seconds at the end of each run.

    def command(self, *more: str) -> list[str]:
        flags = {
            "--limit-train-batches": _UPDATES,
            "--limit-test-batches": 2,
            "--max-epochs": self.epochs,
            "--batch-size": 64 // self.world_size,
            "--global-batch-size": 64,
            "--save-every": f"{SAVE_EVERY} steps",
            "--name": "faulty",
            "--run-dir": self.folder / "runs",
            "--resume": "auto",
            "--accelerator": "cpu",
            "--precision": "32-true",
            "--logger": self.logger,
            "--enable-progress-bar": "false",
            "--devices": 1 if self.manual_launch else self.world_size,
        }
        given = [str(part) for name, value in flags.items() for part in (name, value)]
        program = [sys.executable, "-W", "ignore", "-m", "benchmarks.faults.faulty_run"]
        return [*program, *TINY_RECIPES[self.recipe].flags, *given, *more]

    def start(self, fault: dict[str, Any], more: Sequence[str] = (), shell: str = "") -> list["subprocess.Popen[str]"]:
        """Start its processes, in bash where a shell's line is given."""
        environment = os.environ | {
            "FAULT": json.dumps({"folder": str(self.folder), "recipe": self.recipe, **fault}),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
        }
        starter = ["bash", "-o", "pipefail", "-c", shell, "bash"] if shell else []
        commands = [self.command(*more)]
        if self.manual_launch:
            port = str(free_port())
            meeting = ("--num-nodes", str(self.world_size), "--master-addr", "127.0.0.1", "--master-port", port)
            commands = [self.command(*meeting, "--node-rank", str(n), *more) for n in range(self.world_size)]
        return [
            subprocess.Popen(
                [*starter, *command],
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command in commands
        ]

    def finish(self, processes: Sequence["subprocess.Popen[str]"], after_fault: bool = False) -> tuple[int, str, bool]:
        """The exit status and the output of the first, and whether all ended in time; what is left is killed.

        Args:
            after_fault: count the time from the fault.
        """
        deadline = time.monotonic() + _START
        outputs, in_time = [], True
        for number, process in enumerate(processes):
            if after_fault and self._wait_for_the_fault(process, deadline):
                deadline = min(deadline, time.monotonic() + LIMIT)
            # A node that was stopped cannot end; its keeper, here the system, ends it.
            patience = 0.1 if number and self._stopped(process) else max(0.1, deadline - time.monotonic())
            try:
                outputs.append(process.communicate(timeout=patience)[0])
            except subprocess.TimeoutExpired:
                in_time = in_time and self._stopped(process)
                os.killpg(process.pid, signal.SIGKILL)
                outputs.append(process.communicate()[0])
        return processes[0].returncode, outputs[0], in_time

    def _wait_for_the_fault(self, process: "subprocess.Popen[str]", deadline: float) -> bool:
        while (
            not (mark := self.folder / "injected").exists() and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return mark.exists()

    @staticmethod
    def _stopped(process: "subprocess.Popen[str]") -> bool:
        stat = Path(f"/proc/{process.pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "T"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "runs" / self.recipe / "faulty" / "checkpoints"

    def digest(self) -> str:
        """SHA-256 of the weights in last.ckpt."""
        weights = torch.load(self.checkpoints / "last.ckpt", weights_only=True)["state_dict"]
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode())
            digest.update(weights[name].contiguous().numpy().tobytes())
        return digest.hexdigest()


def tail(output: str) -> str:
    """The end of what a run has printed, in one line."""
    return " / ".join(output.strip().splitlines()[-3:])[-300:]


def undisturbed_digest(run: Run) -> str:
    """Of the weights of a run into which no fault was injected."""
    run.folder.mkdir(parents=True)
    status, output, _ = run.finish(run.start({}))
    if status:
        raise SystemExit(f"the undisturbed run failed: {tail(output)}")
    return run.digest()
