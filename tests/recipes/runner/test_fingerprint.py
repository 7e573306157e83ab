"""What ranks compare before they train together."""

from pathlib import Path

from recipes.runner.worker import code_version


def package(root: Path) -> list[Path]:
    """Files of which two have the same name in folders of the same name."""
    files = [root / "recipes" / "mnist" / "__init__.py", root / "datamodules" / "mnist" / "__init__.py"]
    for i, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_text(f"number = {i}\n")
    return files


def test_the_version_of_the_code_changes_with_each_file(tmp_path):
    here, there = package(tmp_path / "here"), package(tmp_path / "there")
    assert code_version(here) == code_version(here[::-1]) == code_version(there)
    versions = {code_version(here)}
    for file in here:
        file.write_text(file.read_text() + "# changed\n")
        versions.add(code_version(here))
    assert len(versions) == 3
