"""A file of settings imports no module that was not named on the command line, and unpacks to no more than its size."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

MODULE = """
from pathlib import Path
from lightning.pytorch.callbacks import Callback

with Path("imported").open("a") as file:
    file.write(__name__ + "\\n")


class Mine(Callback):
    pass
"""

PROGRAM = """
callbacks:
- class_path: RichProgressBar
  init_args:
    console_kwargs:
      x:
        class_path: torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler
        init_args: {entrypoint: touch, args: [imported], env: {}, stdout: null, stderr: null, local_rank_id: 0}
"""
FILES = {
    "callback.yaml": "callbacks: [{class_path: elsewhere.Mine}]",
    "short.yaml": "callbacks: [elsewhere.Mine]",
    "strategy.yaml": "strategy: {class_path: elsewhere.Mine}",
    "optimizer.yaml": "optimizer: elsewhere.Mine",
    "itself.yaml": "callbacks: [elsewhere.Mine]\ntrust_modules: elsewhere",
    "known.yaml": "callbacks: [{class_path: lightning.pytorch.callbacks.LearningRateMonitor}, ModelSummary]",
    "mine.yaml": "callbacks: [{class_path: trusted.Mine}]",
    "aliases.yaml": "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi"))
    + "lr: *i\n",
    "deep.yaml": "lr: " + "[" * 2_000 + "]" * 2_000,
    "large.yaml": "name: x\n#" + "x" * (1 << 20),
    "any.yaml": PROGRAM,
    "mine_too.yaml": "optimizer: trusted.Mine",
    "known_too.yaml": "optimizer: torch.optim.AdamW",
}
PARSE = """
import json, sys
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from recipes.cli.flags import FlagGroup, FlagParser

class Options:
    def __init__(
        self,
        callbacks: list[Callback] | None = None,
        strategy: str | Strategy = "auto",
        trust_modules: str | None = None,
        lr: float = 1.0,
        optimizer: str = "adamw",
    ):
        pass

parser = FlagParser([FlagGroup("Options", Options)])
said = []
for args in json.loads(sys.argv[1]):
    try:
        namespace = parser.parse(args)
        parser.import_optimizer(namespace, args)
        said.append(str(parser.instantiate_classes(namespace).callbacks))
    except ValueError as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
"""


def parsed(folder: Path, *lines: str) -> list[str]:
    """What a process says of command lines, in a folder with modules of the user's; the callbacks, or the error."""
    command = [sys.executable, "-c", PARSE, json.dumps([line.split() for line in lines])]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said: list[str] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_a_file_of_settings_imports_only_what_is_known_or_was_typed(tmp_path: Path) -> None:
    for name in ("elsewhere", "trusted", "given"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    said = parsed(tmp_path, *(f"--config {name}" for name in FILES if not name.startswith("mine")))
    refused, known, (aliases, deep, large, of_any, optimizer) = said[:5], said[5], said[6:]
    for line in refused:
        assert line.startswith("UserError: a setting names the class elsewhere.Mine")
        assert line.endswith("if you trust that module, pass --trust-modules elsewhere")
    assert "LearningRateMonitor" in known
    assert aliases.startswith("UserError: aliases.yaml holds 2,345,679,021 values where its aliases are followed")
    assert "nested too deeply" in deep
    assert "large.yaml has 1,048,585 bytes, and a file of settings has 1,048,576 at most" in large
    assert "RichProgressBar" in of_any, "what its parameter of type Any holds stays a dict"
    assert optimizer == "None"
    assert not (tmp_path / "imported").exists()

    said = parsed(
        tmp_path,
        "--config mine.yaml --trust-modules trusted",
        "--callbacks+=given.Mine",
        f"--config {'x' * 300}",
        "--config mine_too.yaml --trust-modules trusted",
        "--optimizer given.Mine",
        "--optimizer=given.other.Mine",
    )
    assert "trusted.Mine" in said[0]
    assert "given.Mine" in said[1]
    assert said[2].startswith("UserError: there is no file xxx")
    assert said[3:5] == ["None", "None"]
    assert "given.other.Mine cannot be imported" in said[5]
    assert sorted((tmp_path / "imported").read_text().split()) == ["given", "trusted"]
