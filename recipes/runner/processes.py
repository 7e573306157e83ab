"""Plan the processes of a command, and check that they can share an update."""

import os
from dataclasses import replace
from typing import Any

from datamodules.errors import UserError
from recipes.runner.command import Command
from recipes.runner.launch import Launch, LaunchSettings, plan_launch
from recipes.runner.limits import micro_batches_of_update
from recipes.runner.machine import detect_machine, devices_of
from recipes.runner.settings import TrainerSettings
from recipes.runner.strategies import check_strategy


def plan_processes(command: str, trainer: TrainerSettings, options: LaunchSettings, typed: Command) -> Launch:
    """Determine which process of its run this one is.

    Args:
        command: fit, validate, test, predict or export.
        trainer: the settings with the requested devices.
        options: the settings of the launch.
        typed: what the user typed, for the corrected command.

    Raises:
        UserError: the run could not start, or would wait for ever.
    """
    if command in ("predict", "export"):
        return Launch("local", 1, 1)
    launch = plan_launch(os.environ, options, trainer.devices, detect_machine(trainer.accelerator), typed)
    check_strategy(trainer.strategy)
    return launch


def on_devices_of(launch: Launch, trainer: TrainerSettings) -> TrainerSettings:
    """Return the Trainer's settings with the devices that the launch has on this node."""
    if launch.address is None or launch.starts_agent:
        return trainer
    devices = devices_of(launch.devices, trainer.devices, detect_machine(trainer.accelerator))
    return replace(trainer, devices=devices)


def check_shared_update(launch: Launch, samples: int | None, batch_size: Any) -> None:
    """Refuse an update that the devices cannot share, before a process starts and reads data.

    Args:
        samples: samples of an update on all devices; None where the number of devices determines them.
        batch_size: samples of a micro-batch; None where it is not known.

    Raises:
        UserError: a device would have nothing to do, or the global batch would change with the nodes.
    """
    if launch.is_elastic and samples is None:
        raise UserError(
            f"num_nodes={launch.min_nodes}:{launch.num_nodes} lets the number of devices change, and the global batch"
            " would change with it: pass `global_batch_size`, the samples of an update on all devices"
        )
    micro_batches = micro_batches_of_update(1, samples, batch_size, launch.world_size)
    if micro_batches is not None and micro_batches < launch.world_size:
        raise UserError(
            f"a global batch of {samples} has {micro_batches} micro-batches of {batch_size}, and there are"
            f" {launch.world_size} devices: pass fewer devices, or a `batch_size` of"
            f" {max(1, (samples or 1) // launch.world_size)} or less"
        )
