"""The statements of CONTRIBUTING.md, SECURITY.md and the page of the architecture about the code.

`test_documents.py` checks the paths in all documents. This file checks the files, names, flags, versions and numbers of
the pages that describe the code.
"""

import ast
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from recipes.runner.hints import read_help, read_trainer_parameters
from tests.callbacks.lib.test_lightning_internals import FENCE

ROOT = Path(__file__).parents[2]
PACKAGES = ("recipes", "callbacks", "datamodules")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8")
GUIDES = {"CONTRIBUTING": CONTRIBUTING, "SECURITY": SECURITY, "architecture": ARCHITECTURE}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]

BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WRITTEN = {"config.yaml", "results.json", "checkpoints/"}
"""Files and folders of a run."""
FLAGS_OF_TOOLS = {"strict", "check", "extra", "universal", "generate-hashes", "no-header", "upgrade", "tb"}


def spans(guide: str) -> list[str]:
    """Return the texts in code marks, without the code blocks."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", GUIDES[guide]))


def names_in_code() -> set[str]:
    """Return the names and the words of strings in our code and in the settings of the project."""
    files = [ROOT / "tests" / "conftest.py"]
    files += [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    names = set(re.findall(r"[\w-]+", (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    for path in files:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME:
                names.add(token.string)
            elif token.type == tokenize.STRING:
                names.update(re.findall(r"\w+", token.string))
    return names


@pytest.mark.parametrize("guide", GUIDES)
def test_every_file_of_a_guide_exists(guide: str) -> None:
    names = {path.name for folder in (*PACKAGES, "tests", "docs") for path in (ROOT / folder).rglob("*.*")}
    missing = []
    for span in spans(guide):
        is_file = re.fullmatch(r"[\w./*-]+\.(py|pyi|md|txt|toml|json|yaml)|[\w.-]+(/[\w*.-]+)*/|\.ci/\w+", span)
        if not is_file or {"NAME", "letters"} & set(span.split("/")) or span in WRITTEN or span.startswith("runs/"):
            continue
        if span not in names and not list(ROOT.glob(span)):
            missing.append(span)
    assert missing == []


@pytest.mark.parametrize("guide", GUIDES)
def test_every_name_of_a_guide_is_a_name_of_the_code(guide: str) -> None:
    known = names_in_code()
    unknown = []
    for span in spans(guide):
        name = re.fullmatch(r"(\w+(?:\.\w+)*)(?:\[\.\.\.\]|\(.*\)|=\w+)?", span)
        if name and not re.search(r"\.(py|pyi|md|txt|toml|json|yaml|ckpt|pt|pth|npz)$", name[1]):
            unknown += [span for word in name[1].split(".") if word not in known]
    assert unknown == []


@pytest.mark.parametrize("guide", GUIDES)
def test_every_flag_of_a_guide_is_a_flag(guide: str) -> None:
    flags = {name for recipe in ("mnist", "resnet", "seq2seq") for name in read_help(f"recipes.{recipe}").names()}
    known = {name.replace("_", "-") for name in flags} | FLAGS_OF_TOOLS | {"config", "help", "help-all"}
    known |= {f"trainer.{name}" for name in read_trainer_parameters() or []}
    assert set(re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", GUIDES[guide])) <= known


def test_commands_of_pytest_use_names_that_exist() -> None:
    markers = {line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    used = re.findall(r"pytest -m (?:\"([^\"]+)\"|(\w+))", CONTRIBUTING)
    assert {word for pair in used for word in re.findall(r"\w+", "".join(pair))} - {"not", "and"} <= markers
    extras = re.findall(r"\.\[([\w,-]+)\]|--extra ([\w-]+)|extra `([\w-]+)`", CONTRIBUTING)
    assert {name for match in extras for name in "".join(match).split(",")} <= EXTRAS.keys()
    for path, words in re.findall(r"pytest (tests/\S+\.py) -k \"?(\w+)", CONTRIBUTING):
        assert f"{words}" in " ".join(re.findall(r"def (test_\w+)", (ROOT / path).read_text())), words


def test_the_table_of_dependencies_has_every_package() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (?:extra `([\w-]+)`)?", CONTRIBUTING.partition("## Package structure")[0], re.M)
    named = {(package, extra) for packages, extra in rows for package in re.findall(r"`([\w-]+)`", packages)}
    required = {(name, "") for name in map(_package, PROJECT["project"]["dependencies"])}
    required |= {(_package(line), extra) for extra, lines in EXTRAS.items() for line in lines}
    ours = {(name, extra) for name, extra in required if name != "lightning-recipes"}
    assert named == {(name, extra) for name, extra in ours if (name, extra) != ("accelerate", "test")}


def _package(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def test_the_table_of_versions_is_that_of_the_lock() -> None:
    rows = re.findall(r"^\| ([\d., ]+) \| (\S+) \| (\S+) \| `([\w-]+)` (\S+)", CONTRIBUTING, re.MULTILINE)
    lock = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    bounds = PROJECT["project"]["dependencies"] + EXTRAS["pytorch-lightning"]
    lowest = {_package(line): re.search(r">=([\d.]+)", line)[1] for line in bounds}
    assert rows[0][1:] == (
        f"{lowest['torch']}.0",
        f"{lowest['torchvision']}.0",
        "pytorch-lightning",
        lowest["lightning"],
    )
    assert {row[1:] for row in rows[1:]} == {(lock["torch"], lock["torchvision"], "lightning", lock["lightning"])}
    assert f">={rows[0][0]}" == PROJECT["project"]["requires-python"]
    assert [f"!={version}" in bounds[2] for version in ("2.6.2", "2.6.3")] == [True, True]
    assert SECURITY.count("2.6.2 and 2.6.3") == 2


def test_the_table_of_folders_names_every_module() -> None:
    structure = CONTRIBUTING.partition("## Package structure")[2].partition("### From a file")[0]
    folders = set(re.findall(r"`([\w/]+/)`", structure))
    named = set(re.findall(r"`([\w/]+\.py)`", structure))
    missing = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        of_folder = f"{path.parent.relative_to(ROOT).as_posix()}/" in folders
        is_callback = path.parent == ROOT / "callbacks"
        if not path.name.startswith("__") and not (name in named or of_folder or is_callback):
            missing.append(name)
    assert missing == []
    runner = {path.name for path in (ROOT / "recipes" / "runner").glob("*.py") if not path.name.startswith("__")}
    assert runner <= named, "the row of recipes/runner says what each of its files is for"


def test_the_guide_names_each_file_with_names_of_lightning() -> None:
    sentence = re.search(r"`update_step\.py` makes an update; (.*?) use Lightning's private names", CONTRIBUTING)
    assert sentence is not None
    named = {Path(name).name for name in ["update_step.py", *re.findall(r"`([\w/]+\.py)`", sentence[1])]}
    assert named == {path.name for path in FENCE}


def test_no_file_of_callbacks_imports_torchvision_or_recipes() -> None:
    modules = []
    for path in (ROOT / "callbacks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules.append(str(node.module))
    assert not {"recipes", "torchvision"} & {module.partition(".")[0] for module in modules}


def test_numbers_of_the_guides_are_those_of_the_code() -> None:
    assert f"above {Image.MAX_IMAGE_PIXELS:,} pixels" in SECURITY
    longest = re.search(r"`README.md`: .*?(\d+) lines at most", CONTRIBUTING)
    assert longest is not None
    readmes = [len(path.read_text().splitlines()) for path in ROOT.glob("recipes/*/README.md")]
    assert len(readmes) == 3
    assert max(readmes) <= int(longest[1])
