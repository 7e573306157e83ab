"""Completion in a real bash, with the script that `lightning-recipes completion bash` prints."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _script(shell: str) -> str:
    code = f"import sys; sys.argv[1:] = ['completion', '{shell}']; from recipes.__main__ import main; main()"
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(_script("bash"))
    return path


def _complete(script: Path, line: str) -> list[str]:
    """What bash offers where the cursor is at the end of `line`."""
    words = line.split(" ")
    code = f"""
        source {script}
        [[ $(complete -p lightning-recipes) =~ -F\\ ([^ ]+) ]]
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)}) COMP_CWORD={len(words) - 1}
        ${{BASH_REMATCH[1]}}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "--norc", "-c", code], cwd=script.parent, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_recipes_commands_flags_and_values_are_completed(script: Path) -> None:
    assert {"list", "verify", "mnist", "resnet", "seq2seq"} <= {*_complete(script, "lightning-recipes ")}
    assert _complete(script, "lightning-recipes se") == ["seq2seq"]
    assert _complete(script, "lightning-recipes mnist ex") == ["export"]
    assert _complete(script, "lightning-recipes mnist --max-ep") == ["--max-epochs"]
    assert _complete(script, "lightning-recipes mnist test --dataset kmnist --dat") == ["--dataset", "--data-dir"]
    assert _complete(script, "lightning-recipes mnist --dataset k") == ["kmnist"]
    assert _complete(script, "lightning-recipes mnist --no-sync") == ["--no-sync-bn"]


def test_a_recipe_has_its_own_flags_only(script: Path) -> None:
    assert _complete(script, "lightning-recipes resnet --unfr") == ["--unfreeze"]
    assert _complete(script, "lightning-recipes mnist --unfr") == []


def test_values_that_name_files_are_completed_from_the_disk(script: Path) -> None:
    assert _complete(script, "lightning-recipes mnist --config scr") == ["script"]
    assert _complete(script, "lightning-recipes mnist --max-epochs scr") == []


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_accepts_its_script() -> None:
    subprocess.run(["zsh", "-n"], input=_script("zsh"), text=True, timeout=60, check=True)


def test_another_shell_is_refused_in_one_line() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "recipes", "completion", "fish"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: completion needs a shell, bash or zsh; got fish\n")
