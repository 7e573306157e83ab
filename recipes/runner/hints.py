"""Suggest a setting for an unknown name: another library's name for it, or a misspelled one.

This module imports neither torch nor Lightning, so that a misspelled flag is reported at once.
"""

import difflib
from collections.abc import Collection, Iterable

from datamodules.errors import spelled, spelling_as_flags
from recipes.finding import find_recipes
from recipes.runner.constructor_sources import read_help

FURTHER = "trainer"
"""The flag with the parameters of the Trainer that have no flag of their own."""

_CLOSE = 0.75
"""The similarity of two names, from 0 to 1, from which one is taken for a misspelling of the other."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "accumulate_grad_batches": ("accumulate",),
    "amp": ("precision bf16-mixed",),
    "base_lr": ("lr",),
    "bf16": ("precision bf16-mixed",),
    "bn_momentum": (),
    "bs": ("batch_size",),
    "checkpoint": ("ckpt",),
    "ckpt_path": ("ckpt", "resume"),
    "data": ("data_dir", "data_file"),
    "data_path": ("data_dir", "data_file"),
    "data_seed": ("seed",),
    "device": ("accelerator",),
    "dry_run": ("fast_dev_run",),
    "early_stopping": ("patience",),
    "ema_decay": ("ema",),
    "epoch": ("max_epochs",),
    "epochs": ("max_epochs",),
    "eval_only": (),
    "eval_strategy": ("check_val_every_n_epoch",),
    "evaluate": (),
    "exp_name": ("name",),
    "fp16": ("precision 16-mixed",),
    "freeze": ("freeze_until",),
    "gpus": ("devices",),
    "grad_accum_steps": ("accumulate",),
    "grad_checkpointing": (),
    "grad_clip": ("gradient_clip_val",),
    "gradient_accumulation_steps": ("accumulate",),
    "gradient_checkpointing": (),
    "img_size": ("image_size",),
    "imgsz": ("image_size",),
    "label_smooth": ("label_smoothing",),
    "learning_rate": ("lr",),
    "log_interval": ("log_every_n_steps",),
    "loss_scale": (),
    "lr_scheduler": ("schedule",),
    "lrf": ("schedule_args",),
    "max_grad_norm": ("gradient_clip_val",),
    "min_lr": ("schedule_args",),
    "mixed_precision": ("precision bf16-mixed",),
    "model": ("arch", "network"),
    "model_ema": ("ema",),
    "nnodes": ("num_nodes",),
    "nodes": ("num_nodes",),
    "nproc_per_node": ("devices",),
    "num_epochs": ("max_epochs",),
    "num_gpus": ("devices",),
    "num_processes": ("devices",),
    "num_train_epochs": ("max_epochs",),
    "nw": ("num_workers",),
    "opt": ("optimizer",),
    "optim": ("optimizer",),
    "optimizer_name": ("optimizer",),
    "output_dir": ("run_dir",),
    "per_device_train_batch_size": ("batch_size",),
    "pretrained": ("weights",),
    "project": ("run_dir",),
    "random_seed": ("seed",),
    "ratio": (),
    "resume_from_checkpoint": ("resume",),
    "run_name": ("name",),
    "save_dir": ("run_dir",),
    "save_steps": ("save_every",),
    "save_strategy": ("save_every",),
    "sched": ("schedule",),
    "scheduler": ("schedule",),
    "smoothing": ("label_smoothing",),
    "sync_batchnorm": ("sync_bn",),
    "tensorboard": ("logger tensorboard",),
    "track_grad_norm": (),
    "train_batch_size": ("batch_size",),
    "train_dir": ("data_dir",),
    "train_src": ("source_file",),
    "val_batch_size": ("eval_batch_size",),
    "validation_split": ("val_fraction",),
    "vflip": (),
    "wandb": ("logger wandb",),
    "warmup_epochs": ('warmup "5 epochs"',),
    "warmup_lr": (),
    "warmup_ratio": ("warmup 5%",),
    "warmup_steps": ('warmup "500 steps"',),
    "wd": ("weight_decay",),
    "workers": ("num_workers",),
    "world_size": ("devices",),
}
"""Settings of Lightning, timm, fastai, Hugging Face and torchrun, and our settings with the same effect.

The first of ours that the recipe has is suggested. A name without a counterpart is listed so that no setting that
merely looks like it is suggested.
"""


def _is_flag_of_a_recipe(name: str) -> bool:
    pages = (read_help(f"recipes.{recipe}") for recipe in find_recipes())
    return any(page is not None and name in page.names() for page in pages)


def meant(name: str, names: Iterable[str]) -> str | None:
    """Return the setting that a name stands for, or None.

    It may have a value, as in ``precision bf16-mixed``.

    Example:
        >>> ours = ["lr", "max_epochs", "precision", "num_nodes"]
        >>> [meant(name, ours) for name in ("learning_rate", "max_epoch", "fp16", "model")]
        ['lr', 'max_epochs', 'precision 16-mixed', None]
    """
    candidates = list(names)
    normalised = name.lower().replace("-", "_")
    if normalised in OTHER_NAMES:
        for suggestion in OTHER_NAMES[normalised]:
            if suggestion.partition(" ")[0] in candidates:
                return suggestion
        return None
    if _is_flag_of_a_recipe(normalised):  # A flag of another recipe is not misspelled.
        return None
    # These look alike and mean the contrary.
    opposites = (normalised.replace("min_", "max_"), normalised.replace("max_", "min_"), f"un{normalised}")
    comparable = [candidate for candidate in candidates if candidate not in opposites]
    close = difflib.get_close_matches(normalised, comparable, n=1, cutoff=_CLOSE)
    return close[0] if close else None


def other_places() -> dict[str, str]:
    """Return the parameters of the Trainer that a run sets itself, and what serves in their place."""
    logs_nothing = spelled("logger", "none")
    return {
        "accumulate_grad_batches": f"pass {spelled('accumulate')}, whose updates are the mean over all targets",
        "barebones": "a run has a progress line, checkpoints and loggers; leave them out one by one, as in"
        f" {logs_nothing}",
        "callbacks": "a program passes them to run() or fit()",
        "default_root_dir": f"pass {spelled('run_dir')}",
        "deterministic": f"pass {spelled('deterministic')}",
        "enable_autolog_hparams": f"a run logs its settings itself; {logs_nothing} logs nothing",
        "enable_model_summary": "the closing table has the number of parameters",
        "logger": f"pass {spelled('logger')}",
        "num_nodes": f"pass {spelled('num_nodes')}",
        "plugins": "they are objects; build a Trainer with these callbacks yourself",
        "precision": f"pass {spelled('precision')}",
        "sync_batchnorm": f"pass {spelled('sync_bn')}, which works on CPUs and with unequal batches",
    }


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a question about the name that was meant, such as "; did you mean lr?", or an empty text."""
    suggestion = meant(name, names)
    return f"; did you mean {suggestion}?" if suggestion else ""


def flag_meant(name: str, names: Iterable[str]) -> str:
    """Return a question such as "; did you mean --max-epochs?"; an empty text where no flag is close.

    Example:
        >>> flag_meant("max_epoch", ["lr", "max_epochs"])
        '; did you mean --max-epochs?'
    """
    suggestion = meant(name, names)
    if not suggestion:
        return ""
    flag, blank, value = suggestion.partition(" ")
    dashed = flag if "." in flag else flag.replace("_", "-")
    return f"; did you mean --{dashed}{blank}{value}?"


def valid_names(flags: Collection[str], trainer_parameters: Iterable[str]) -> list[str]:
    """Return the flags, and ``trainer.NAME`` for each parameter of the Trainer that has no flag.

    Args:
        trainer_parameters: all parameters of Lightning's Trainer.
    """
    if FURTHER not in flags:
        return list(flags)
    excluded = {*flags, *other_places()}
    return [*flags, *(f"{FURTHER}.{name}" for name in trainer_parameters if name not in excluded)]


def unknown_flag(flag: str, name: str, flags: Collection[str], trainer_parameters: Iterable[str]) -> str:
    """Return the error for a flag that does not exist, and what to type in its place.

    Args:
        flag: the flag as it was typed, without the dashes before it.
        name: the name of the parameter that it would have.
        flags: the names of all flags.
        trainer_parameters: all parameters of Lightning's Trainer.

    Example:
        >>> unknown_flag("max-epoch", "max_epoch", ["lr", "max_epochs"], [])
        'there is no flag --max-epoch; did you mean --max-epochs?'
    """
    with spelling_as_flags(flags):
        instead = other_places().get(name)
    if FURTHER in flags and instead and name not in OTHER_NAMES:
        return f"there is no flag --{flag}: {instead}"
    names = valid_names(flags, trainer_parameters)
    hint = flag_meant(name, [*names, "help", "help_all"])
    further = f"{FURTHER}.{name}"
    if further in names:
        hint = f"; did you mean --{further}?"
    return f"there is no flag --{flag}{hint or '; --help-all lists the flags'}"
