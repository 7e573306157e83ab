"""A file of settings imports no module that was not named on the command line, and unpacks to no more than its size."""

import os
from pathlib import Path

import pytest

from tests.support.command_lines import typed

MODULE = """
from pathlib import Path
from lightning.pytorch.callbacks import Callback

with Path("imported").open("a") as file:
    file.write(__name__ + "\\n")


class Mine(Callback):
    pass
"""

FILES = {
    "callback.yaml": "callbacks: [{class_path: elsewhere.Mine}]",
    "short.yaml": "callbacks: [elsewhere.Mine]",
    "strategy.yaml": "strategy: {class_path: elsewhere.Mine}",
    "itself.yaml": "callbacks: [elsewhere.Mine]\ntrust_modules: elsewhere",
    "known.yaml": "callbacks: [{class_path: lightning.pytorch.callbacks.Timer}, ModelSummary]",
    "mine.yaml": "callbacks: [{class_path: trusted.Mine}]",
    "aliases.yaml": "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi"))
    + "lr: *i\n",
    "deep.yaml": "lr: " + "[" * 20_000 + "]" * 20_000,
    "large.yaml": "name: x\n#" + "x" * (1 << 20),
}
QUICK = "--fast-dev-run true"


def test_a_file_of_settings_imports_only_what_is_known_or_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name in ("elsewhere", "trusted", "given"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    refused = typed(
        tmp_path,
        *(f"--config {name}.yaml {QUICK}" for name in ("callback", "short", "strategy", "itself")),
        *(f"--config {name}.yaml {QUICK}" for name in ("aliases", "deep", "large")),
    )
    for line in refused[:4]:
        assert line.status == 2
        assert "if you trust that module, pass --trust-modules elsewhere" in line.err, line.err
    assert [line.status for line in refused[4:]] == [2, 2, 2]
    assert "aliases.yaml holds 2,345,679,021 values where its aliases are followed, more than" in refused[4].err
    assert "nested too deeply" in refused[5].err
    assert "large.yaml has 1,048,585 bytes, and a file of settings has 1,048,576 at most" in refused[6].err
    assert all(line.err.count("\n") == 1 for line in refused)
    assert not (tmp_path / "imported").exists()

    accepted = typed(
        tmp_path,
        f"--config known.yaml {QUICK}",
        f"--config mine.yaml --trust-modules trusted {QUICK}",
        f"--callbacks+=given.Mine {QUICK}",
    )
    assert [line.status for line in accepted] == [0, 0, 0], accepted
    assert sorted((tmp_path / "imported").read_text().split()) == ["given", "trusted"]
