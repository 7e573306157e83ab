"""What a run leaves behind for people: the table at its end, and results.json."""

import json
import platform
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

__all__ = ["count_parameters", "flops_per_sample", "format_count", "hardware", "results_table", "write_json"]


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """All parameters, and those that train."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)


def flops_per_sample(module: pl.LightningModule) -> int | None:
    """Floating-point operations of one forward pass of one sample, a multiply-add counted as two.

    None where the module has no ``example_input_array``.
    """
    from torch.utils.flop_counter import FlopCounterMode

    example = module.example_input_array
    if not isinstance(example, torch.Tensor):
        return None
    if example.is_floating_point():
        # precision 64-true and 16-true change the weights' type.
        example = example.to(next(module.parameters()).dtype)
        module.example_input_array = example
    training = module.training
    module.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(example[:1].to(module.device))
    module.train(training)
    return counter.get_total_flops()


def format_count(number: float) -> str:
    """A large number for people: 1.23 M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g}"


def hardware(trainer: pl.Trainer) -> str:
    """The kind and number of the devices."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()} {device.type}, {torch.get_num_threads()} threads"
    return f"{trainer.world_size} x {name}"


def results_table(title: str, rows: dict[str, str]) -> None:
    """Print two columns: what, and its value. Long paths and commands wrap and are never cut."""
    table = Table(title=title, show_header=False, title_justify="left", pad_edge=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file that is either the old one or the whole new one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(values, indent=2, default=str) + "\n")
    part.replace(path)
