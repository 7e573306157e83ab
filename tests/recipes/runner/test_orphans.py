"""Processes that a run has started end when the one that started them is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.runner.machine import declare_parent, drop_inherited_variables, parent_of_rank
from tests.support.agents import children_of, shell_environment, wait_until

ARGS = ["--accelerator", "cpu", "--precision", "32", "--dataset", "digits", "--max-epochs", "2000", "--devices", "2"]

GUARDED = """
import os, time
from recipes.runner.machine import exit_with_parent

exit_with_parent(os.environ)
open("ready", "w").close()
time.sleep(3600)
"""


PARENT = """
import os, subprocess, sys, time

env = os.environ | {"LIGHTNING_RECIPES_PARENT": str(os.getpid()), "LOCAL_RANK": "1"}
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env).pid, flush=True)
time.sleep(3600)
"""


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_parent_of_a_rank_is_the_process_that_said_so_and_not_that_process_itself():
    env: dict[str, str] = {}
    assert parent_of_rank(env) is None
    declare_parent(env)
    assert env == {"LIGHTNING_RECIPES_PARENT": str(os.getpid())}
    assert parent_of_rank(env) is None
    assert parent_of_rank(env | {"LOCAL_RANK": "0"}) is None
    assert parent_of_rank(env | {"LOCAL_RANK": "1"}) is None
    assert parent_of_rank({"LIGHTNING_RECIPES_PARENT": str(os.getppid()), "LOCAL_RANK": "1"}) == os.getppid()
    assert parent_of_rank({"TORCHELASTIC_RUN_ID": "job"}) == os.getppid()


def test_what_a_process_that_is_no_parent_has_left_in_the_environment_is_forgotten():
    left = {"LIGHTNING_RECIPES_RESUME_POINT": "{}", "LIGHTNING_RECIPES_LAUNCHER": "manual", "LOCAL_RANK": "1"}
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for pid, kept in ((os.getpid(), True), (os.getppid(), True), (stranger.pid, False)):
            own = {"LIGHTNING_RECIPES_DATA": "/data"}
            env = left | own | {"LIGHTNING_RECIPES_PARENT": str(pid)}
            drop_inherited_variables(env)
            assert ("LIGHTNING_RECIPES_RESUME_POINT" in env, "LIGHTNING_RECIPES_LAUNCHER" in env) == (kept, kept)
            assert {"LOCAL_RANK", *own} <= env.keys()
    finally:
        stranger.kill()
        stranger.wait()
    env = left | {"LIGHTNING_RECIPES_PARENT": str(stranger.pid)}
    drop_inherited_variables(env)
    assert parent_of_rank(env) == stranger.pid


def test_a_process_ends_when_its_parent_is_killed(tmp_path):
    command = [sys.executable, "-c", PARENT, GUARDED]
    parent = subprocess.Popen(command, cwd=tmp_path, env=shell_environment(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_until((tmp_path / "ready").exists, "the guarded process")
    time.sleep(1)
    assert lives(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: not lives(child), "the end of the orphan")


@pytest.mark.slow
def test_rank_0_killed_while_it_starts_the_others_leaves_none_behind(tmp_path):
    command = [sys.executable, "-m", "tests.support.plain_recipe", *ARGS]
    with (tmp_path / "log").open("w") as log:
        rank_0 = subprocess.Popen(command, cwd=tmp_path, env=shell_environment(), stdout=log, stderr=log)
    children: list[int] = []
    try:
        wait_until(lambda: bool(children.extend(children_of(rank_0.pid)) or children), "rank 1")
        rank_0.kill()
        rank_0.wait()
        wait_until(lambda: not any(map(lives, children)), "the end of rank 1")
    finally:
        for pid in [rank_0.pid, *children]:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        rank_0.wait()
