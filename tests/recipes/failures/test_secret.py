"""Where the processes of a run get their secret, and when it is none."""

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from datamodules import UserError
from recipes.failures.secret import Secret, find_secret, new_secret

posix = pytest.mark.skipif(os.name != "posix", reason="files have no owner and mode")


def found_in(folder: Path) -> Secret:
    return find_secret({}, folder)


def test_the_environment_comes_before_the_file(tmp_path: Path) -> None:
    env = {"LIGHTNING_RECIPES_SECRET": "of the environment"}
    assert find_secret(env, tmp_path / "runs").key == b"of the environment"
    assert not (tmp_path / "runs").exists()
    assert len(find_secret({}, tmp_path / "runs").key) == len(new_secret()) == 64


@posix
def test_processes_that_race_for_the_shared_file_agree_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        for i in range(5):
            with ProcessPoolExecutor(4) as pool:
                keys = {secret.key for secret in pool.map(found_in, [tmp_path / f"{i}"] * 8)}
            (file,) = (tmp_path / f"{i}").iterdir()
            assert keys == {file.read_bytes()}
            assert file.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(old)
    assert file.name == f".secret-{os.getuid()}"


@posix
@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_file_that_others_may_read_or_write_is_refused_with_the_command(tmp_path: Path, mode: int) -> None:
    secret = found_in(tmp_path)
    (file,) = tmp_path.iterdir()
    file.chmod(mode)
    with pytest.raises(UserError, match=f"others may read or write {file}.*chmod 600 {file}"):
        found_in(tmp_path)
    file.chmod(0o400)
    assert found_in(tmp_path) == secret


def test_a_secret_of_several_lines_is_taken_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    assert find_secret({"LIGHTNING_RECIPES_SECRET": "two lines\nof base64"}, tmp_path).key == b"two lines\nof base64"
    for text in ("sixteen or more \udcff", "sixteen or more \0 in a file"):
        with pytest.raises(UserError, match="is no text"):
            find_secret({"LIGHTNING_RECIPES_SECRET": text}, tmp_path)


def test_a_short_secret_and_a_folder_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LIGHTNING_RECIPES_SECRET has 5 characters.*expected 16 or more"):
        find_secret({"LIGHTNING_RECIPES_SECRET": " short\n"}, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made .*pass a `run_dir` that can be written, or set LIGHTNING_"):
        found_in(tmp_path / "file" / "runs")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
