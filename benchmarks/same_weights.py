"""The picture on the first page: one training on 1, 2 and 4 processes, by stock Lightning and with our callbacks.

    python -m benchmarks.same_weights              # trains and prints a hash for each run; writes nothing
    python -m benchmarks.same_weights --threads 2  # the same on two threads in each process
    python -m benchmarks.same_weights --write      # also writes results/same-weights.json and docs/same-weights.svg
    python -m benchmarks.same_weights --draw       # draws the measured figures again

Each program trains a small convolutional network with BatchNorm and dropout on the bundled digits, in updates of 128
samples: four micro-batches of 32. The fourth run of each is stopped in mid-epoch on 2 processes and resumed on 4. The
data set, the network, its initial weights, the optimizer, the stock `DataLoader` and the Trainer are the same in both.
Stock Lightning has what it offers: `seed_everything(1, workers=True)`, `accumulate_grad_batches`, `ModelCheckpoint`.

Lightning starts the processes, and OMP_NUM_THREADS is not set: both programs call `torch.set_num_threads`, and
Lightning's launcher then sets cores // processes in each process.
"""

import argparse
import datetime
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.loss_picture import picture
from benchmarks.harness.processes import ROOT, answer_of

RESULTS = ROOT / "benchmarks" / "results" / "same-weights.json"
PICTURE = ROOT / "docs" / "same-weights.svg"

EPOCHS = 6
MICRO_BATCH = 32
MICRO_BATCHES = 4
STOP = 30
"""Number of updates after which the fourth run is stopped, within an epoch."""

RUNS = {"1 process": (1, None), "2 processes": (2, None), "4 processes": (4, None), "2, stopped, then 4": (2, 4)}
"""Number of processes of each run, and of its resumption."""


def train(ours: bool, processes: int, threads: int, folder: Path, stop: bool, resume: bool) -> dict[str, Any]:
    """Train on this rank, and return the held-out loss after each update and the SHA-256 of weights and buffers.

    Args:
        ours: whether to use our callbacks instead of stock Lightning.
        processes: number of processes.
        threads: number of threads that the program sets.
        folder: folder of the checkpoint.
        stop: whether to stop after `STOP` updates, with a checkpoint.
        resume: whether to resume from that checkpoint.
    """
    import lightning.pytorch as pl
    import torch
    import torch.nn.functional as F
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from callbacks import ExactCheckpoint, GradientAccumulation, SeedControl
    from datamodules import bundled_digits

    images, labels = map(torch.from_numpy, bundled_digits())
    images = images.float().unsqueeze(1)
    held_out = images[1400:], labels[1400:]

    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(
                nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.25), nn.Linear(576, 10)
            )
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, targets = batch
            return F.cross_entropy(self.network(inputs), targets)

        def on_train_batch_end(self, *_: Any) -> None:
            # Lightning calls this after each micro-batch, the update loop after each update.
            if self.global_step == len(self.losses) + STOP * resume:
                return
            self.network.eval()
            with torch.no_grad():
                self.losses.append(float(F.cross_entropy(self.network(held_out[0]), held_out[1])))
            self.network.train()
            if stop and self.global_step == STOP:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.set_num_threads(threads)
    options: dict[str, Any] = {}
    callbacks: list[pl.Callback] = []
    saving: pl.Callback
    if ours:
        batch = MICRO_BATCH * MICRO_BATCHES
        callbacks = [SeedControl(seed=1), GradientAccumulation(global_batch_size=batch)]
        saving = ExactCheckpoint(folder, every_n_train_steps=STOP)
    else:
        pl.seed_everything(1, workers=True, verbose=False)
        options["accumulate_grad_batches"] = MICRO_BATCHES // processes
        saving = ModelCheckpoint(folder, every_n_train_steps=STOP)
    if stop:
        callbacks.append(saving)
    model = Digits()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_epochs=EPOCHS,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=stop,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=MICRO_BATCH, shuffle=True)
    saved = next(folder.glob("*.ckpt")) if resume else None
    trainer.fit(model, loader, ckpt_path=saved, weights_only=True)
    weights = b"".join(value.numpy().tobytes() for value in model.network.state_dict().values())
    return {"losses": model.losses, "sha256": hashlib.sha256(weights).hexdigest(), "rank": trainer.global_rank}


def _launched(ours: bool, processes: int, threads: int, folder: Path, *options: str) -> dict[str, Any]:
    """Run the training on several processes, and return the output of rank 0."""
    program = ["-m", "benchmarks.same_weights", "--train", str(processes), "--threads", str(threads)]
    result: dict[str, Any] = answer_of(*program, "--folder", str(folder), *options, *(["--ours"] if ours else []))
    return result


def measure(threads: int) -> dict[str, Any]:
    """Train all runs of both programs, and return losses and hashes."""
    import lightning.pytorch as pl
    import torch

    measured: dict[str, Any] = {}
    for program, ours in (("stock Lightning", False), ("lightning-recipes", True)):
        measured[program] = {}
        for name, (processes, then) in RUNS.items():
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                run = _launched(ours, processes, threads, folder, *(["--stop"] if then else []))
                if then:
                    resumed = _launched(ours, then, threads, folder, "--resume")
                    run = {"losses": run["losses"][:STOP] + resumed["losses"], "sha256": resumed["sha256"]}
            measured[program][name] = {"sha256": run["sha256"], "losses": [round(loss, 5) for loss in run["losses"]]}
            print(f"{program:18}{name:20}{run['sha256'][:12]}  loss {run['losses'][-1]:.4f}", flush=True)
    text = "one thread" if threads == 1 else f"{threads} threads"
    machine = f"torch {torch.__version__.partition('+')[0]}, lightning {pl.__version__}, {text} in each process"
    return {"date": datetime.date.today().isoformat(), "machine": machine, "stop": STOP, "programs": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch in each process")
    parser.add_argument("--write", action="store_true", help="write the figures and the picture of the first page")
    parser.add_argument("--draw", action="store_true", help="draw the measured figures again")
    parser.add_argument("--train", type=int, metavar="PROCESSES", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    for flag in ("--ours", "--stop", "--resume"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        result = train(args.ours, args.train, args.threads, args.folder, args.stop, args.resume)
        if result.pop("rank") == 0:
            sys.stdout.write(json.dumps(result) + "\n")
        return
    if not args.draw:
        measured = measure(args.threads)
    if args.write:
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n")
    if args.write or args.draw:
        PICTURE.write_text(picture(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
