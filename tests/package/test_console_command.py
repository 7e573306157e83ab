"""The console command starts every recipe, as ``python -m`` does, and finds recipes by their folders."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _call(*command: str, root: Path = ROOT, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def console(tmp_path: Path) -> str:
    """The script that an installation writes."""
    path = tmp_path / "bin" / "lightning-recipes"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom recipes.__main__ import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return str(path)


def test_both_commands_list_the_recipes(console: str, tmp_path: Path) -> None:
    for command in ([console, "list"], [console], [sys.executable, "-m", "recipes"]):
        done = _call(*command, folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        for name in ("mnist", "resnet", "seq2seq"):
            assert f"\n{name}: " in done.stdout
            assert f"lightning-recipes {name} --help  or  python -m recipes.{name} --help" in done.stdout


def test_the_list_imports_no_torch() -> None:
    done = _call(sys.executable, "-c", "import recipes.__main__ as m, sys; m.main(); assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_an_unknown_recipe_is_answered_in_one_line(console: str, tmp_path: Path) -> None:
    done = _call(console, "minst", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no recipe 'minst'; expected list, goldens, mnist, resnet, seq2seq\n"


def test_a_users_folder_recipes_does_not_shadow_the_command(console: str, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("")
    assert "\nmnist: " in _call(console, "list", folder=tmp_path).stdout


@pytest.fixture
def with_letters(tmp_path: Path) -> Path:
    """A folder with the packages, and with the fourth recipe that CONTRIBUTING.md makes of MNIST's folder."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    commands = [line for line in page.splitlines() if "recipes/letters" in line and line.startswith(("cp ", "sed "))]
    assert len(commands) == 2
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    for package in ("callbacks", "datamodules"):
        (tmp_path / package).symlink_to(ROOT / package)
    subprocess.run("\n".join(commands), shell=True, check=True, cwd=tmp_path)
    return tmp_path


def test_a_copied_folder_is_a_recipe(console: str, with_letters: Path) -> None:
    assert "\nletters: " in _call(console, "list", root=with_letters).stdout
    page = _call(console, "letters", "--help", root=with_letters).stdout
    assert page.startswith("usage: lightning-recipes letters [")
    assert "--ckpt runs/letters/NAME/" in page


def test_a_copied_folder_trains_into_its_own_runs(with_letters: Path, tmp_path: Path) -> None:
    script = "from recipes.__main__ import main; from recipes.registry import recipe_class\n"
    script += "try: main()\nfinally: print(recipe_class('letters'))"
    flags = "--dataset digits --max-epochs 1 --limit-train-batches 1 --logger none --name first"
    done = _call(sys.executable, "-c", script, "letters", *flags.split(), root=with_letters, folder=tmp_path)
    assert "\nletters: 1 x " in done.stdout, done.stderr
    assert done.stdout.endswith("\n<class 'recipes.letters.recipe.LetterClassifier'>\n"), "fit('letters') finds it"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["letters"]
    assert (tmp_path / "runs" / "letters" / "first" / "checkpoints" / "best.ckpt").is_file()


def test_a_users_folder_that_hides_a_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "__init__.py").write_text("")
    started = _call(sys.executable, "-m", "recipes.mnist", "--max-epochs", "1", folder=tmp_path)
    hidden = f"{tmp_path / 'callbacks'} hides the package callbacks of lightning-recipes: rename your folder"
    assert (started.returncode, started.stderr.count("\n")) == (1, 1)
    assert started.stderr.startswith(f"error: {hidden}")
    imported = _call(sys.executable, "-c", "from recipes import fit", folder=tmp_path)
    assert imported.stderr.splitlines()[-1].startswith(f"ImportError: {hidden}")


def test_a_misspelled_flag_is_answered_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    wrong = _call(sys.executable, "-m", "recipes.mnist", "--max-epoch", "3", root=ROOT, folder=tmp_path)
    assert wrong.stderr == "error: there is no flag --max-epoch; did you mean --max-epochs?\n"
    assert wrong.returncode == 2
    version = _call(sys.executable, "-m", "recipes.mnist", "--version", folder=tmp_path)
    assert version.stdout.startswith("lightning-recipes ")
