"""What a name means that is no setting here: another library's name, or a misspelled one.

It imports neither torch nor Lightning, so that a mistake in a flag is answered at once.
"""

import difflib
from collections.abc import Iterable

_CLOSE = 0.8
"""How alike two names have to be, from 0 to 1, for one to be a misspelling of the other."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "accum_iter": ("accumulate",),
    "accumulate_grad_batches": ("accumulate",),
    "amp": ("precision bf16-mixed",),
    "amp_dtype": ("precision bf16-mixed",),
    "b": ("batch_size",),
    "bf16": ("precision bf16-mixed",),
    "bs": ("batch_size",),
    "callbacks": (),
    "checkpoint": ("ckpt",),
    "ckpt_path": ("ckpt", "resume"),
    "clip_grad": ("gradient_clip_val",),
    "clip_grad_norm": ("gradient_clip_val",),
    "data": ("data_dir", "data_file"),
    "data_path": ("data_dir", "data_file"),
    "dataset_path": ("data_dir", "data_file"),
    "default_root_dir": ("run_dir",),
    "device": ("accelerator",),
    "drop": ("dropout",),
    "ema_decay": ("ema",),
    "early_stopping": ("patience",),
    "epoch": ("max_epochs",),
    "epochs": ("max_epochs",),
    "eval_only": (),
    "evaluate": (),
    "experiment": ("name",),
    "exp_name": ("name",),
    "fp16": ("precision 16-mixed",),
    "gamma": ("schedule_args",),
    "gpus": ("devices",),
    "grad_accum_steps": ("accumulate",),
    "gradient_accumulation_steps": ("accumulate",),
    "grad_clip": ("gradient_clip_val",),
    "img_size": ("image_size",),
    "initial_checkpoint": ("weights",),
    "label_smooth": ("label_smoothing",),
    "layer_decay": ("layer_lr_decay",),
    "learning_rate": ("lr",),
    "log_dir": ("run_dir",),
    "log_interval": ("log_every_n_steps",),
    "logging_steps": ("log_every_n_steps",),
    "loss_scale": (),
    "lr_base": ("lr",),
    "lr_base_size": ("lr_scale",),
    "lr_scheduler": ("schedule",),
    "lr_scheduler_type": ("schedule",),
    "max_grad_norm": ("gradient_clip_val",),
    "milestones": ("schedule_args",),
    "min_lr": ("schedule_args",),
    "mixed_precision": ("precision bf16-mixed",),
    "model": ("arch", "network"),
    "model_ema": ("ema",),
    "model_ema_decay": ("ema",),
    "nnodes": ("num_nodes",),
    "nodes": ("num_nodes",),
    "nproc_per_node": ("devices",),
    "num_beams": ("beam",),
    "num_epochs": ("max_epochs",),
    "num_gpus": ("devices",),
    "num_train_epochs": ("max_epochs",),
    "opt": ("optimizer",),
    "optim": ("optimizer",),
    "output_dir": ("run_dir",),
    "per_device_eval_batch_size": ("eval_batch_size",),
    "per_device_train_batch_size": ("batch_size",),
    "pretrained": ("weights",),
    "project": ("run_dir",),
    "random_seed": ("seed",),
    "report_to": ("logger",),
    "resume_from_checkpoint": ("resume",),
    "run_name": ("name",),
    "save_steps": ("save_every",),
    "save_total_limit": ("save_top_k",),
    "sched": ("schedule",),
    "scheduler": ("schedule",),
    "smoothing": ("label_smoothing",),
    "sync_batchnorm": ("sync_bn",),
    "tensorboard": ("logger tensorboard",),
    "torch_compile": ("compile",),
    "train_file": ("data_file",),
    "torchcompile": ("compile",),
    "train_batch_size": ("batch_size",),
    "val_batch_size": ("eval_batch_size",),
    "validation_split": ("val_fraction",),
    "wandb": ("logger wandb",),
    "warmup_epochs": ('warmup "5 epochs"',),
    "warmup_ratio": ("warmup 5%",),
    "warmup_steps": ('warmup "500 steps"',),
    "wd": ("weight_decay",),
    "workers": ("num_workers",),
    "world_size": ("devices",),
}
"""Settings of Lightning, timm, fastai, Hugging Face and torchrun, and ours that do the same: the first that there is.

A name without one of ours is here so that no name that merely looks like it is suggested.
"""


def meant(name: str, names: Iterable[str]) -> str | None:
    """The setting that is meant by a name, perhaps with a value, as in ``precision bf16-mixed``; None where none is.

    Example:
        >>> ours = ["lr", "max_epochs", "precision", "num_nodes"]
        >>> [meant(name, ours) for name in ("learning_rate", "max_epoch", "fp16", "model")]
        ['lr', 'max_epochs', 'precision 16-mixed', None]
    """
    known = list(names)
    others = {
        other: next((text for text in ours if text.partition(" ")[0] in known), None)
        for other, ours in OTHER_NAMES.items()
    }
    wanted = name.lower().replace("-", "_")
    if wanted in others:
        return others[wanted]
    close = difflib.get_close_matches(wanted, [*known, *others], n=1, cutoff=_CLOSE)
    return others.get(close[0], close[0]) if close else None


def nearest(name: str, names: Iterable[str]) -> str:
    """A question about the name that was meant, such as "; did you mean lr?"; nothing where none is close."""
    found = meant(name, names)
    return f"; did you mean {found}?" if found else ""


def flag_meant(name: str, names: Iterable[str]) -> str:
    """A question about the flag that was meant, such as "; did you mean --max-epochs?"; nothing where none is close.

    Example:
        >>> flag_meant("max_epoch", ["lr", "max_epochs"])
        '; did you mean --max-epochs?'
    """
    found = meant(name, names)
    if not found:
        return ""
    flag, blank, value = found.partition(" ")
    spelled = flag if "." in flag else flag.replace("_", "-")
    return f"; did you mean --{spelled}{blank}{value}?"
