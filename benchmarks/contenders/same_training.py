"""One training in five programs: our callbacks, stock Lightning, Fabric, Accelerate and the Trainer of transformers.

All have the same data, network, initial weights, optimizer and updates: 128 samples, in four micro-batches of 32 on all
processes. The training set is a multiple of 128, so no program drops or repeats a sample. Each program uses the
settings that its documentation has for reproducible runs, and its own way to save and resume:

- Lightning: https://lightning.ai/docs/pytorch/stable/common/trainer.html#reproducibility
- Fabric: https://lightning.ai/docs/fabric/stable/api/fabric_methods.html#seed-everything
- Accelerate: https://huggingface.co/docs/accelerate/concept_guides/performance and ``usage_guides/checkpoint``
- transformers: https://huggingface.co/docs/transformers/main_classes/trainer, ``full_determinism`` and ``data_seed``
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from datamodules import bundled_digits

__all__ = ["LAUNCHED_BY_TORCHRUN", "OURS", "PROGRAMS", "STOCK", "STOP", "UPDATES", "Job", "Outcome"]

SEED = 1
MICRO_BATCH = 32
MICRO_BATCHES = 4
UPDATES_PER_EPOCH = 10
UPDATES = 100
STOP = 45
"""Number of updates after which a stopped run ends, within an epoch."""

_SAMPLES = UPDATES_PER_EPOCH * MICRO_BATCHES * MICRO_BATCH


@dataclass(frozen=True)
class Job:
    """One training, or its part before or after the stop.

    Args:
        processes: number of processes.
        workers: number of worker processes of each loader.
        threads: number of threads, which are set before the program builds anything.
        folder: folder of the checkpoint.
        stop: whether to stop after `STOP` updates, with a checkpoint.
        resume: whether to resume from that checkpoint.
    """

    processes: int
    workers: int
    threads: int
    folder: Path
    stop: bool = False
    resume: bool = False

    @property
    def accumulate(self) -> int:
        """Number of micro-batches of an update on each process."""
        return MICRO_BATCHES // self.processes

    def loader(self) -> Any:
        """Return the stock loader of the training set."""
        images, labels = _digits()
        data = TensorDataset(images[:_SAMPLES], labels[:_SAMPLES])
        return DataLoader(data, batch_size=MICRO_BATCH, shuffle=True, num_workers=self.workers)


@dataclass
class Outcome:
    """Held-out loss after each update of this process's run, with the network that is trained.

    Args:
        network: network without the wrappers of a program.
        losses: mean cross-entropy of the held-out digits after each update.
        rank: rank of this process.
    """

    network: nn.Module
    losses: list[float] = field(default_factory=list)
    rank: int = 0

    def measure(self) -> None:
        """Evaluate the network after an update. Evaluation draws no random numbers."""
        images, labels = _digits()
        self.network.eval()
        with torch.no_grad():
            self.losses.append(float(F.cross_entropy(self.network(images[_SAMPLES:]), labels[_SAMPLES:])))
        self.network.train()

    def sha256(self) -> str:
        """Return the SHA-256 of all weights and buffers."""
        values = b"".join(value.numpy().tobytes() for value in self.network.state_dict().values())
        return hashlib.sha256(values).hexdigest()


def _digits() -> tuple[Tensor, Tensor]:
    images, labels = map(torch.from_numpy, bundled_digits())
    return images.float().unsqueeze(1), labels


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.25), nn.Linear(576, 10)
    )


def _optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=0.01)


def ours(job: Job) -> Outcome:
    """Train in a Trainer with our callbacks."""
    from callbacks import ExactCheckpoint, GradientAccumulation, SeedControl

    callbacks = [SeedControl(seed=SEED), GradientAccumulation(global_batch_size=MICRO_BATCH * MICRO_BATCHES)]
    return _in_lightning(job, callbacks, ExactCheckpoint(job.folder, every_n_train_steps=STOP))


def stock_lightning(job: Job) -> Outcome:
    """Train in a Trainer as Lightning has it."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    pl.seed_everything(SEED, workers=True, verbose=False)
    saving = ModelCheckpoint(job.folder, every_n_train_steps=STOP)
    return _in_lightning(job, [], saving, deterministic=True, accumulate_grad_batches=job.accumulate)


def _in_lightning(job: Job, callbacks: list[Any], saving: Any, **options: Any) -> Outcome:
    import lightning.pytorch as pl

    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()
            self.outcome = Outcome(self.network)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            return F.cross_entropy(self.network(images), labels)

        def on_train_batch_end(self, *_: Any) -> None:
            # Lightning calls this after each micro-batch, the update loop after each update.
            if self.global_step == len(self.outcome.losses) + STOP * job.resume:
                return
            self.outcome.measure()
            if job.stop and self.global_step == STOP:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self)

    model = Digits()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job.processes,
        strategy="ddp" if job.processes > 1 else "auto",
        max_steps=UPDATES,
        callbacks=[*callbacks, *([saving] if job.stop else [])],
        logger=False,
        enable_checkpointing=job.stop,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    saved = next(job.folder.glob("*.ckpt")) if job.resume else None
    trainer.fit(model, job.loader(), ckpt_path=saved, weights_only=True)
    model.outcome.rank = trainer.global_rank
    return model.outcome


def fabric(job: Job) -> Outcome:
    """Train in a loop with Fabric."""
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=job.processes, strategy="ddp" if job.processes > 1 else "auto")
    runner.launch()
    torch.set_num_threads(job.threads)  # Again: the launch has set another number.
    runner.seed_everything(SEED, workers=True, verbose=False)
    torch.use_deterministic_algorithms(True)
    network = _network()
    outcome = Outcome(network, rank=runner.global_rank)
    model, optimizer = runner.setup(network, _optimizer(network))
    loader = runner.setup_dataloaders(job.loader())
    state = {"model": model, "optimizer": optimizer, "update": 0}
    if job.resume:
        runner.load(job.folder / "fabric.ckpt", state)
    while state["update"] < UPDATES:
        # A resumed run leaves out the batches of this epoch that it has trained on.
        position = state["update"] % UPDATES_PER_EPOCH * job.accumulate
        for number, (images, labels) in enumerate(islice(loader, position, None), 1):
            is_last = number % job.accumulate == 0
            with runner.no_backward_sync(model, enabled=not is_last):
                runner.backward(F.cross_entropy(model(images), labels) / job.accumulate)
            if not is_last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            state["update"] += 1
            outcome.measure()
            if job.stop and state["update"] == STOP:
                runner.save(job.folder / "fabric.ckpt", state)
                return outcome
    return outcome


def accelerate(job: Job) -> Outcome:
    """Train in a loop with Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulate, dataloader_config=loading)
    set_seed(SEED, deterministic=True)
    network = _network()
    outcome = Outcome(network, rank=accelerator.process_index)
    model, optimizer, loader = accelerator.prepare(network, _optimizer(network), job.loader())
    update = 0
    if job.resume:
        accelerator.load_state(str(job.folder))
        update = STOP
    while update < UPDATES:
        epoch, done = divmod(update, UPDATES_PER_EPOCH)
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, done * job.accumulate) if done else loader
        for images, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            update += 1
            outcome.measure()
            if job.stop and update == STOP:
                accelerator.save_state(str(job.folder))
                return outcome
    return outcome


class _WithLoss(nn.Module):
    """The network in the form that the Trainer of transformers trains: its forward pass returns the loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss of images ``(batch, 1, 8, 8)`` and the logits ``(batch, 10)``."""
        logits = self.network(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _named(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    images, labels = zip(*samples)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def transformers_trainer(job: Job) -> Outcome:
    """Train in the Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, enable_full_determinism

    enable_full_determinism(SEED)
    network = _network()
    outcome = Outcome(network)

    class AfterUpdate(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            outcome.measure()
            control.should_training_stop = job.stop and state.global_step == STOP

    arguments = TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=True,
        seed=SEED,
        data_seed=SEED,
        full_determinism=True,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=job.accumulate,
        max_steps=UPDATES,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        dataloader_num_workers=job.workers,
        dataloader_pin_memory=False,
        save_strategy="steps" if job.stop else "no",
        save_steps=STOP,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=_WithLoss(network),
        args=arguments,
        train_dataset=job.loader().dataset,
        data_collator=_named,
        optimizers=(_optimizer(network), None),
        callbacks=[AfterUpdate()],
    )
    trainer.train(resume_from_checkpoint=job.resume)
    outcome.rank = trainer.args.process_index
    return outcome


STOCK = "stock Lightning"
OURS = "lightning-recipes"
PROGRAMS: dict[str, Callable[[Job], Outcome]] = {
    STOCK: stock_lightning,
    OURS: ours,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "HF Trainer": transformers_trainer,
}
"""The training in each program, by name."""

LAUNCHED_BY_TORCHRUN = ("Accelerate", "HF Trainer")
"""Programs that do not start their processes themselves."""
