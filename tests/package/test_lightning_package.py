"""Our callbacks are those of the package of Lightning that the program uses, with the same bits under both."""

import ast
import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from callbacks.lib.lightning_internals import OneLightningCallback
from datamodules.errors import UserError
from datamodules.lightning_package import VARIABLE, lightning_package
from tests.support.nodes import Program

ROOT = Path(__file__).parents[2]
PACKAGES = ("lightning.pytorch", "pytorch_lightning")

# Not importorskip: imported here, it would be the package of this process.
if find_spec("pytorch_lightning") is None:
    pytest.skip("pip install pytorch-lightning: the tests compare both packages", allow_module_level=True)

RUNS = """
import hashlib, json, runpy, signal, sys
from multiprocessing import get_context
from pathlib import Path
import lightning.pytorch as pl
import torch
import callbacks
from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint
from datamodules.loading.loaders import EvaluationLoader, TrainLoader
from recipes.runner.start import start_fork_server, start_method
from tables import CALLBACKS, TOGETHER, Tiny, image_network, noisy_images, quiet_trainer

torch.set_num_threads(1)
images, targets = noisy_images(50)

def run(names, *more, ckpt_path=None):
    seeds = [] if "SeedControl" in names else [callbacks.SeedControl(1)]
    used = [*seeds, *(CALLBACKS[name]() for name in names), *more]
    module = Tiny(image_network(dropout=0.3).double(), torch.optim.AdamW)
    trainer = quiet_trainer(*used, max_epochs=2)
    rows = torch.arange(50)
    train, validation = TrainLoader(images, targets, rows, 4, 1), EvaluationLoader(images, targets, rows, 4)
    trainer.fit(module, train, validation, ckpt_path=ckpt_path, weights_only=False)
    assert isinstance(module, pl.LightningModule) and all(isinstance(callback, pl.Callback) for callback in used)
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in module.state_dict().values())).hexdigest()

class Stop(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 4
if __name__ == "__main__":
    found = {name: run((name,)) for name in CALLBACKS}
    folder = sys.argv[1]
    found["together"] = run(TOGETHER)
    found["stopped"] = run(TOGETHER, ExactCheckpoint(folder, last_every="1 steps"), Stop())
    found["resumed"] = run(TOGETHER, ExactCheckpoint(folder, last_every="1 steps"), ckpt_path=f"{folder}/last.ckpt")
    loaded = {name.partition(".")[0] for name in sys.modules}
    loaded &= {"lightning", "lightning_fabric", "pytorch_lightning"}
    worker = []
    if "pytorch_lightning" in loaded:
        start_fork_server([])
        pool = get_context(start_method()).Pool(1)
        worker.append(pool.apply(eval, ("__import__('datamodules.lightning').lightning.pl.__name__",)))
        worker.append(pool.apply(signal.getsignal, (signal.SIGTERM,)) is signal.SIG_DFL)
    print(json.dumps({"hashes": found, "loaded": sorted(loaded), "worker": worker}))
    for file in sys.argv[2:]:
        runpy.run_path(file)
"""


MIXED = """
import json, tempfile
from callbacks import ExactCheckpoint
from datamodules import MNISTDataModule, bundled_digits
from recipes import MNISTClassifier, fit
from tables import CALLBACKS
import lightning.pytorch as pl
import torch

class Tiny(pl.LightningModule):
    layer = torch.nn.Linear(25, 5)
    def training_step(self, batch, _):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

class Theirs(pl.Callback):
    pass

def trainer(*callbacks):
    return pl.Trainer(max_steps=1, callbacks=[*callbacks], logger=False, enable_checkpointing=False)

loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 25)))
folder = tempfile.mkdtemp()
makers = {**CALLBACKS, "ExactCheckpoint": lambda: ExactCheckpoint(folder, "1 steps")}
runs = {name: lambda make=make: trainer(make()).fit(Tiny(), loader) for name, make in makers.items()}
runs["MNISTClassifier"] = lambda: trainer().fit(MNISTClassifier())
runs["MNISTDataModule"] = lambda: trainer().fit(Tiny(), datamodule=MNISTDataModule(dataset="digits"))
runs["Theirs"] = lambda: fit("mnist", bundled_digits(), callbacks=Theirs(), run_dir=folder)
found = {}
for name, run in runs.items():
    try:
        run()
        found[name] = "no error"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def as_users_of(package: str, source: str) -> str:
    """A program that names `lightning.pytorch`, as users of a package write it."""
    return source if package == "lightning.pytorch" else source.replace("lightning.pytorch", package)


def python(*args: object, path: Path = ROOT) -> str:
    """What a program prints in a new process."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{path}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, args)], env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def forked(file: Path, *args: object, path: Path) -> str:
    """What a program prints in a process that has imported `lightning` and our packages, as its users begin."""
    ended = Program(path, "forked", [str(file), *map(str, args)]).wait()
    assert ended.status == 0, ended.err
    return ended.out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what each package ends with, what a worker of its fork server says, and what `MIXED` finds after that."""
    found = {}
    for package, other in (PACKAGES, PACKAGES[::-1]):
        folder = tmp_path_factory.mktemp(package)
        tables = (ROOT / "tests/support/tables.py").read_text()
        (folder / "tables.py").write_text(as_users_of(package, tables))
        (folder / "runs.py").write_text(as_users_of(package, RUNS))
        (folder / "mixed.py").write_text(as_users_of(other, MIXED))
        start = python if package == "pytorch_lightning" else forked
        runs, mixed = start(folder / "runs.py", folder, folder / "mixed.py", path=folder).splitlines()[-2:]
        found[package] = json.loads(runs) | {"mixed": json.loads(mixed)}
    return found


def test_every_callback_trains_alike_under_both_packages(trained: dict[str, Any]) -> None:
    hashes = trained["lightning.pytorch"]["hashes"]
    assert trained["pytorch_lightning"]["hashes"] == hashes
    assert hashes["resumed"] == hashes["together"] != hashes["stopped"]
    # Neither package brings the other one.
    assert trained["lightning.pytorch"]["loaded"] == ["lightning"]
    assert trained["pytorch_lightning"]["loaded"] == ["lightning_fabric", "pytorch_lightning"]


def test_workers_are_given_the_package_of_their_program(trained: dict[str, Any]) -> None:
    assert trained["pytorch_lightning"]["worker"][0] == "pytorch_lightning"


def test_sigterm_ends_a_worker_of_the_fork_server(trained: dict[str, Any]) -> None:
    """The server itself ignores it, and a pool or a loader ends its workers by it."""
    assert trained["pytorch_lightning"]["worker"][1] is True


@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("import ours", "lightning"),
        ("import pytorch_lightning\nimport ours", "pytorch_lightning"),
        ("import lightning\nimport ours", "lightning"),
        ("import lightning, pytorch_lightning\nimport ours", "lightning"),
        ("try:\n    import lightning\nexcept ImportError:\n    import pytorch_lightning\nimport ours", "lightning"),
        ("import os\nos.environ[NAME] = 'pytorch_lightning'\nimport lightning\nimport ours", "pytorch_lightning"),
        ("import os\nos.environ[NAME] = 'lightning'\nimport pytorch_lightning\nimport ours", "lightning"),
    ],
)
def test_the_package_is_the_one_that_the_program_uses(program: str, package: str, tmp_path: Path) -> None:
    # Packages that hold nothing, which are imported in no time.
    for name in ("lightning", "pytorch_lightning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    ours = "from datamodules.lightning_package import lightning_package\nprint(lightning_package())"
    (tmp_path / "ours.py").write_text(ours)
    (tmp_path / "program.py").write_text(program.replace("NAME", repr(VARIABLE)))
    assert python(tmp_path / "program.py", path=tmp_path).strip() == package


def test_a_package_of_another_name_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "pytorch-lightning")
    with pytest.raises(UserError, match=f"{VARIABLE}=pytorch-lightning: expected lightning or pytorch_lightning"):
        lightning_package.__wrapped__()


@pytest.mark.parametrize(("package", "of_trainer"), [PACKAGES, PACKAGES[::-1]])
def test_a_trainer_of_the_other_package_is_one_line(package: str, of_trainer: str, trained: dict[str, Any]) -> None:
    ours, theirs = package.partition(".")[0], of_trainer.partition(".")[0]
    errors = trained[package]["mixed"]
    assert "ExactCheckpoint" in errors
    ways = f"set {VARIABLE}={theirs}, or import {theirs} before callbacks, datamodules and recipes, and before whatever"
    for name, error in errors.items():
        # Our own run has a Trainer of our package: there, the callback is the one of the other package.
        trainer, value = (ours, theirs) if name == "Theirs" else (theirs, ours)
        kind = name.partition(",")[0]
        expected = f"UserError: a Trainer of {trainer} got {kind}, which is of {value}: {ways} imports {ours}"
        assert error == expected


def test_every_callback_knows_its_lightning() -> None:
    module = import_module("callbacks")
    classes = [value for value in (getattr(module, name) for name in dir(module)) if isinstance(value, type)]
    callbacks = [value for value in classes if any(base.__name__ == "Callback" for base in value.__mro__)]
    assert callbacks != []
    assert [value for value in callbacks if not issubclass(value, OneLightningCallback)] == []


def test_our_modules_name_lightning_in_one_place_only() -> None:
    packages = [ROOT / package for package in ("callbacks", "datamodules", "recipes")]
    for path in (path for package in packages for path in package.rglob("*.py") if path.name != "lightning.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str | None] = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                first = (name or "").partition(".")[0]
                assert first not in ("lightning", "pytorch_lightning", "lightning_fabric"), (
                    f"{path}:{node.lineno}: {name}"
                )


def test_every_name_is_listed_for_both_packages() -> None:
    module = ast.parse((ROOT / "datamodules/lightning.py").read_text())
    (choice,) = (node for node in module.body if isinstance(node, ast.If))
    first, second = ("\n".join(map(ast.unparse, lines)) for lines in (choice.body, choice.orelse))
    for package, name in (("lightning.pytorch", "pytorch_lightning"), ("lightning.fabric", "lightning_fabric")):
        first = first.replace(package, name)
    assert sorted(first.splitlines()) == sorted(second.splitlines()) != []
