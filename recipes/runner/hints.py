"""Flags of a recipe from its sources, and suggestions for unknown flags.

Importing torch would take seconds, so names, types, defaults and texts are read from the sources of the constructors.
They are the same as jsonargparse reads from the imported classes. An annotation or a default is evaluated with the
names in it, which are read from the sources in the same way. A value that cannot be read so, such as a type of another
package, raises `NotInSourceError`, and the parser answers in place of this file.
"""

import ast
import difflib
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import Any

from datamodules.errors import spelled, spelling_as_flags
from datamodules.lightning_package import TRAINERS, lightning_package
from recipes.registry import find_recipes
from recipes.runner.command import PREDICT_INPUTS, HelpEntry, HelpPage, summary_of

_OURS = ("recipes", "callbacks", "datamodules")


class NotInSourceError(Exception):
    """Error if the flags of a recipe cannot be read from the sources."""


class _Module(dict[str, Any]):
    """Names of a module with their values, which are read from its source on first use."""

    def __init__(self, name: str) -> None:
        path = _path(name)
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        super().__init__(__name__=name)
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self._definitions: dict[str, ast.expr | ast.ClassDef | tuple[str, str]] = {}
        for node in _statements(self.tree.body):
            if isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                module = f"{base}.{node.module or ''}".strip(".")
                self._definitions |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                self._definitions[node.name] = node
            else:
                self._definitions |= _assigned(node)

    def __missing__(self, name: str) -> Any:
        definition = self._definitions[name]  # After a KeyError, Python looks for a built-in name.
        if isinstance(definition, tuple):
            value = _imported(*definition)
        elif isinstance(definition, ast.ClassDef):
            value = _Class(self, definition)
        else:
            value = self.evaluate(definition)
        self[name] = value
        return value

    def evaluate(self, node: ast.expr) -> Any:
        """Return the value of an expression in this module."""
        return eval(compile(ast.Expression(node), self["__name__"], "eval"), {}, self)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, and the statements in ``with quick_imports():`` and ``if TYPE_CHECKING:``."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and ast.unparse(statement.test) != "TYPE_CHECKING":
            continue
        if isinstance(statement, (ast.With, ast.If)):
            yield from _statements(statement.body)


def _assigned(node: ast.stmt) -> dict[str, ast.expr]:
    """Return the name and the expression of an assignment; for another statement, an empty dict."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return {node.targets[0].id: node.value}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        return {node.target.id: node.value}
    return {}


def _imported(module: str, name: str) -> Any:
    """Return a name of another module: our modules are read, and only Python's library is imported."""
    package = module.partition(".")[0]
    if package in _OURS:
        return _module(module)[name]
    if package in sys.stdlib_module_names or package == "typing_extensions":
        return getattr(import_module(module), name)
    raise NotInSourceError(f"{module}.{name}")


@cache
def _module(name: str) -> _Module:
    return _Module(name)


def _path(module: str) -> Path:
    """Return the source of a module; for a package with lazy imports, its stub."""
    package, *names = module.split(".")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise NotInSourceError(module)
    path = Path(spec.submodule_search_locations[0], *names)
    candidates = (path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py"))
    return next(candidate for candidate in candidates if candidate.is_file())


@dataclass(frozen=True, eq=False)
class _Class:
    """Class in a source file."""

    module: _Module
    node: ast.ClassDef

    def bases(self) -> "list[_Class]":
        """Return this class and its base classes, nearest first, without Lightning's."""
        order = [self]
        for node in self.node.bases:
            base = None if ast.unparse(node).startswith("pl.") else self.module.evaluate(node)
            if isinstance(base, _Class):
                order += base.bases()
        # A shared base class of two bases comes after both.
        return list(dict.fromkeys(reversed(order)))[::-1]

    def attribute(self, name: str) -> Any:
        """Return the value of a class attribute."""
        for cls in self.bases():
            for statement in cls.node.body:
                if name in _assigned(statement):
                    return cls.module.evaluate(_assigned(statement)[name])
        raise NotInSourceError(name)

    def constructor(self) -> ast.FunctionDef | None:
        """Return the class's own ``__init__``."""
        functions = (node for node in self.node.body if isinstance(node, ast.FunctionDef))
        return next((node for node in functions if node.name == "__init__"), None)

    def own_parameters(self) -> list[Parameter]:
        """Return the parameters of this class without its bases: of its constructor, or the fields of a dataclass."""
        constructor = self.constructor()
        if constructor is None and not self.node.decorator_list:
            return []
        if constructor is None:
            if self.node.bases or "dataclass" not in ast.unparse(self.node.decorator_list[0]):
                raise NotInSourceError(self.node.name)
            fields = [node for node in self.node.body if isinstance(node, ast.AnnAssign)]
            return [self._parameter(ast.unparse(node.target), node.annotation, node.value) for node in fields]
        if constructor.decorator_list:
            raise NotInSourceError(self.node.name)
        arguments = constructor.args
        nodes = [*arguments.posonlyargs, *arguments.args][1:]  # Without `self`.
        without_default = [None] * (len(nodes) - len(arguments.defaults))
        nodes += arguments.kwonlyargs
        defaults = [*without_default, *arguments.defaults, *arguments.kw_defaults]
        return [self._parameter(node.arg, node.annotation, default) for node, default in zip(nodes, defaults)]

    def _parameter(self, name: str, annotation: ast.expr | None, default: ast.expr | None) -> Parameter:
        kind = self.module.evaluate(annotation) if annotation else None
        if kind is None or isinstance(kind, (str, _Class)):
            raise NotInSourceError(name)
        value = self.module.evaluate(default) if default else None
        return Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=kind)

    def parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the constructor, and the base classes' parameters in its ``**kwargs``."""
        parameters: dict[str, Parameter] = {}
        settled: set[str] = set()
        for cls in self.bases():
            own_parameters = cls.own_parameters()
            for parameter in own_parameters:
                if parameter.name not in settled:
                    parameters.setdefault(parameter.name, parameter)
            constructor = cls.constructor()
            if constructor is not None and constructor.args.kwarg:
                settled |= _settled_for_base(constructor, constructor.args.kwarg.arg)
            elif constructor is not None or own_parameters:
                return parameters
        raise NotInSourceError(self.node.name)

    def rare(self) -> set[str]:
        """Return the parameters that are marked `Advanced`, also of base classes that get them in ``**kwargs``."""
        (label,) = _module("datamodules.contract")["Advanced"].__metadata__
        parameters: list[Parameter] = []
        for cls in self.bases():
            parameters += cls.own_parameters()
            constructor = cls.constructor()
            if constructor is not None and not constructor.args.kwarg:
                break
        return {p.name for p in parameters if label in getattr(p.annotation, "__metadata__", ())}

    def texts(self) -> dict[str, str]:
        """Return the texts of the parameters in the docstrings of this class and its base classes."""
        texts: dict[str, str] = {}
        for cls in self.bases():
            constructor = cls.constructor()
            docstrings = [ast.get_docstring(cls.node)]
            if constructor:
                docstrings.append(ast.get_docstring(constructor))
            for docstring in docstrings:
                texts = _arguments_in(docstring or "") | texts
        return texts


def _settled_for_base(constructor: ast.FunctionDef, kwargs: str) -> set[str]:
    """Return the arguments that a constructor passes by name to its base class's constructor, besides its ``**kwargs``.

    Raises:
        NotInSourceError: it uses its ``**kwargs`` otherwise, so these may have other parameters.
    """
    calls = [node for node in ast.walk(constructor) if isinstance(node, ast.Call)]
    passed_to = [ast.unparse(call.func) for call in calls for k in call.keywords if ast.unparse(k) == f"**{kwargs}"]
    with_default = [call for call in calls if ast.unparse(call.func) == f"{kwargs}.get" and len(call.args) > 1]
    if passed_to != ["super().__init__"] or with_default or f"{kwargs}.pop" in map(ast.unparse, ast.walk(constructor)):
        raise NotInSourceError(f"**{kwargs}")
    to_base = next(call for call in calls if ast.unparse(call.func) == "super().__init__")
    return {keyword.arg for keyword in to_base.keywords if keyword.arg}


def _arguments_in(docstring: str) -> dict[str, str]:
    """Return the entries of the section ``Args``.

    Example:
        >>> _arguments_in("A claim.\\n\\nArgs:\\n    lr: the rate,\\n        at its peak.\\n\\nRaises: no.")
        {'lr': 'the rate,\\n        at its peak.'}
    """
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", section[1] if section else "", re.MULTILINE | re.DOTALL)
    return {name: text.strip() for name, text in entries}


@cache
def read_help(package: str) -> HelpPage | None:
    """Read the help of a recipe: the classes in the call of ``run`` in its ``__main__.py``, and the settings of a run.

    Args:
        package: the recipe's package, such as ``recipes.mnist``.

    Returns:
        The help; None if it cannot be read from the sources.
    """
    try:
        return _help_page(package)
    except Exception:  # The expressions of a source may raise any exception; the parser reports it.
        return None


def _help_page(package: str) -> HelpPage:
    main = _module(f"{package}.__main__")
    calls = [node for node in ast.walk(main.tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "run"]
    recipe, data = [main.evaluate(argument) for argument in calls[0].args[:2]]
    settings = _module("recipes.runner.settings")
    classes = {
        "Run": settings["RunSettings"],
        "Data": data,
        "Recipe": recipe,
        "Trainer": settings["TrainerSettings"],
        "Launch": _module("recipes.runner.launch")["LaunchSettings"],
    }
    defaults = recipe.attribute("trainer_defaults")
    names_so_far = {PREDICT_INPUTS}
    groups = {}
    for title, cls in classes.items():
        texts = cls.texts()
        rare = cls.rare()
        groups[title] = [
            HelpEntry(
                name, parameter.annotation, defaults.get(name, parameter.default), texts.get(name, ""), name in rare
            )
            for name, parameter in cls.parameters().items()
            if name not in names_so_far
        ]
        names_so_far |= cls.parameters().keys()
    docstring = ast.get_docstring(recipe.node) or recipe.node.name
    return HelpPage(summary_of(docstring), recipe.attribute("title"), groups)


def read_trainer_parameters() -> list[str] | None:
    """Read the names of the parameters of Lightning's Trainer; None if they cannot be read from its source."""
    try:
        trainer = _module(f"{TRAINERS[lightning_package()]}.trainer.trainer")["Trainer"]
        return [argument.arg for argument in trainer.constructor().args.kwonlyargs]
    except Exception:  # Another version of Lightning may have moved it.
        return None


TRAINER_FLAG = "trainer"
"""The flag for the parameters of the Trainer without a separate flag."""

_CLOSE = 0.75
"""The minimum similarity of a name and its misspelling, from 0 to 1."""

ALIASES: dict[str, tuple[str, ...]] = {
    "accumulate_grad_batches": ("accumulate",),
    "amp": ("precision bf16-mixed",),
    "base_lr": ("lr",),
    "bf16": ("precision bf16-mixed",),
    "bs": ("batch_size",),
    "checkpoint": ("ckpt",),
    "ckpt_path": ("ckpt", "resume"),
    "clip_grad_norm": ("gradient_clip_val",),
    "cpu": ("accelerator cpu",),
    "cuda": ("accelerator cuda",),
    "data": ("data_dir", "data_file"),
    "data_path": ("data_dir", "data_file"),
    "data_seed": ("seed",),
    "device": ("accelerator",),
    "dist_url": ("master_addr",),
    "dry_run": ("fast_dev_run",),
    "early_stopping": ("patience",),
    "ema_decay": ("ema",),
    "epoch": ("max_epochs",),
    "epochs": ("max_epochs",),
    "eval_strategy": ("check_val_every_n_epoch",),
    "exp_name": ("name",),
    "fp16": ("precision 16-mixed",),
    "freeze": ("freeze_until",),
    "gamma": ("schedule_args",),
    "gpu": ("devices",),
    "gpus": ("devices",),
    "grad_accum_steps": ("accumulate",),
    "grad_clip": ("gradient_clip_val",),
    "gradient_accumulation_steps": ("accumulate",),
    "img_size": ("image_size",),
    "imgsz": ("image_size",),
    "label_smooth": ("label_smoothing",),
    "learning_rate": ("lr",),
    "log_interval": ("log_every_n_steps",),
    "lr_gamma": ("schedule_args",),
    "lr_scheduler": ("schedule",),
    "lr_step_size": ("schedule_args",),
    "lr_warmup_epochs": ('warmup "5 epochs"',),
    "lrf": ("schedule_args",),
    "max_grad_norm": ("gradient_clip_val",),
    "min_lr": ("schedule_args",),
    "mixed_precision": ("precision bf16-mixed",),
    "model": ("arch", "network"),
    "model_ema": ("ema",),
    "nnodes": ("num_nodes",),
    "no_accel": ("accelerator cpu",),
    "no_cuda": ("accelerator cpu",),
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
    "print_freq": ("log_every_n_steps",),
    "project": ("run_dir",),
    "random_seed": ("seed",),
    "resume_from_checkpoint": ("resume",),
    "run_name": ("name",),
    "save_dir": ("run_dir",),
    "save_steps": ("save_every",),
    "save_strategy": ("save_every",),
    "sched": ("schedule",),
    "scheduler": ("schedule",),
    "smoothing": ("label_smoothing",),
    "start_epoch": ("resume",),
    "sync_batchnorm": ("sync_bn",),
    "tensorboard": ("logger tensorboard",),
    "test_batch_size": ("eval_batch_size",),
    "train_batch_size": ("batch_size",),
    "train_dir": ("data_dir",),
    "train_src": ("source_file",),
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
"""Settings of Lightning, timm, fastai, Hugging Face and torchrun, and our settings with the same effect.

The first of our settings that the recipe has is suggested.
"""


def _recipes_with(name: str) -> list[str]:
    """Return the recipes that have a flag."""
    pages = {recipe: read_help(f"recipes.{recipe}") for recipe in find_recipes()}
    return [recipe for recipe, page in pages.items() if page is not None and name in page.names()]


def meant(name: str, names: Iterable[str]) -> str | None:
    """Return the setting for another program's or a misspelled name, or None.

    The setting may have a value, as in ``precision bf16-mixed``.

    Example:
        >>> ours = ["lr", "max_epochs", "precision", "num_nodes"]
        >>> [meant(name, ours) for name in ("learning_rate", "max_epoch", "fp16", "model")]
        ['lr', 'max_epochs', 'precision 16-mixed', None]
    """
    candidates = list(names)
    normalized = name.lower().replace("-", "_")
    if normalized in ALIASES:
        for suggestion in ALIASES[normalized]:
            if suggestion.partition(" ")[0] in candidates:
                return suggestion
        return None
    if normalized in unsupported_settings() or _recipes_with(normalized):  # A flag of another recipe is not misspelled.
        return None
    # These look similar and mean the opposite.
    opposites = (normalized.replace("min_", "max_"), normalized.replace("max_", "min_"), f"un{normalized}")
    comparable = [candidate for candidate in candidates if candidate not in opposites]
    close = difflib.get_close_matches(normalized, comparable, n=1, cutoff=_CLOSE)
    return close[0] if close else None


def unsupported_settings() -> dict[str, str]:
    """Return the names of other programs' settings without an equivalent here, with the reason."""
    return {
        "bn_momentum": "a network of yours sets it where it is built",
        "drop_last": "the last micro-batch of an epoch may be smaller, and counts by its samples",
        **dict.fromkeys(("eval_only", "evaluate", "test_only"), "test and validate are commands, which come first"),
        **dict.fromkeys(
            ("grad_checkpointing", "gradient_checkpointing"), f"a smaller {spelled('batch_size')} needs less memory too"
        ),
        "loss_scale": f"{spelled('precision', '16-mixed')} finds it while it trains",
        "monitor": "the recipe names the score that chooses the best checkpoint, its attribute monitor",
        "pin_memory": "loaders pin their batches where the run is on a GPU",
        "quiet": f"{spelled('enable_progress_bar', False)} leaves out the progress",
        "ratio": "crops of training have the shapes of Szegedy et al. (2015)",
        "save_model": "each run saves its checkpoints",
        "shuffle": f"each epoch has its own order, by {spelled('seed')}",
        "track_grad_norm": "each run logs monitor/gradient_norm",
        "verbose": "a run prints all that it has to say, and logs the rest into its folder",
        "vflip": "a data module of yours flips them",
        "warmup_lr": "the warm-up begins at a hundredth of the rate",
    }


def managed_parameters() -> dict[str, str]:
    """Return the parameters of the Trainer that a run sets itself, with their replacements."""
    logs_nothing = spelled("logger", "none")
    return {
        "accumulate_grad_batches": f"pass {spelled('accumulate')}, whose updates are the mean over all targets",
        "barebones": "a run has a progress line, checkpoints and loggers; leave them out one by one, as in"
        f" {logs_nothing}",
        "callbacks": "a program passes them to run() or fit()",
        "default_root_dir": f"pass {spelled('run_dir')}",
        "deterministic": f"pass {spelled('deterministic')}",
        "enable_autolog_hparams": f"a run logs its settings itself; {logs_nothing} logs nothing",
        "enable_model_summary": f"pass {spelled('summary')}",
        "logger": f"pass {spelled('logger')}",
        "num_nodes": f"pass {spelled('num_nodes')}",
        "plugins": "they are objects; build a Trainer with these callbacks yourself",
        "precision": f"pass {spelled('precision')}",
        "sync_batchnorm": f"pass {spelled('sync_bn')}, which works on CPUs and with unequal batches",
    }


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a suggestion such as "; did you mean lr?", or ""."""
    suggestion = meant(name, names)
    return f"; did you mean {suggestion}?" if suggestion else ""


def flag_meant(name: str, names: Iterable[str]) -> str:
    """Return a suggestion such as "; did you mean --max-epochs?", or "" if no flag is similar.

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
    """Return the flags, and ``trainer.NAME`` for each parameter of the Trainer without a flag.

    Args:
        trainer_parameters: all parameters of Lightning's Trainer.
    """
    if TRAINER_FLAG not in flags:
        return list(flags)
    excluded = {*flags, *managed_parameters()}
    return [*flags, *(f"{TRAINER_FLAG}.{name}" for name in trainer_parameters if name not in excluded)]


def unknown_flag(flag: str, name: str, flags: Collection[str], trainer_parameters: Iterable[str]) -> str:
    """Return the error for a flag that does not exist, with the correct flag.

    Args:
        flag: the typed flag, without the leading dashes.
        name: the corresponding name of a parameter.
        flags: the names of all flags.
        trainer_parameters: all parameters of Lightning's Trainer.

    Example:
        >>> unknown_flag("max-epoch", "max_epoch", ["lr", "max_epochs"], [])
        'there is no flag --max-epoch; did you mean --max-epochs?'
    """
    as_typed = flag.replace("-", "_").lower()
    if as_typed in ALIASES:  # Such as no_cuda, which is not the negation of a switch.
        name = as_typed
    with spelling_as_flags(flags):
        instead = managed_parameters().get(name)
        reason = unsupported_settings().get(name)
    if TRAINER_FLAG in flags and instead and name not in ALIASES:
        return f"there is no flag --{flag}: {instead}"
    names = valid_names(flags, trainer_parameters)
    hint = flag_meant(name, [*names, "help", "help_all"])
    trainer_flag = f"{TRAINER_FLAG}.{name}"
    if trainer_flag in names:
        hint = f"; did you mean --{trainer_flag}?"
    elif reason:
        hint = f": {reason}"
    elif not hint:
        owners = _recipes_with(name)
        hint = f"; it is a flag of {', '.join(owners)}" if owners else ""
    return f"there is no flag --{flag}{hint or '; --help-all lists the flags'}"
