"""The documented train.sh on a real Slurm of two nodes: however a job is interrupted, its weights are those of one that
was not.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from datamodules import bundled_digits
from tests.support.agents import shell_environment, updates_done, wait_until, weights_of
from tests.support.slurm import Slurm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FLAGS = ["--accelerator", "cpu", "--precision", "32", "--max-epochs", "20", "--batch-size", "32"]
FLAGS += ["--save-every", "10 steps", "--rendezvous-timeout", "120", "--no-enable-progress-bar"]
NUMBERS = {"nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "1", "time": "00:30:00"}


def write_digits(folder: Path) -> None:
    """Write the bundled digits as images of a user's own, for commands that name a folder of data."""
    images, labels = bundled_digits()
    folder.mkdir()
    np.savez(folder / "digits.npz", images=(images * 240).astype("uint8"), labels=labels)


def train_script(folder: Path) -> Path:
    """The documented script with other numbers, and without the line about GPUs."""
    page = (ROOT / "docs/scaling/slurm.md").read_text()
    (script,) = re.findall(r'```bash title="train.sh"\n(.*?)```', page, re.DOTALL)
    script = re.sub(r"#SBATCH --gpus.*\n", "", script)
    for name, value in NUMBERS.items():
        script, changed = re.subn(rf"(#SBATCH --{name})=.*", rf"\1={value}", script)
        assert changed == 1
    path = folder / "train.sh"
    path.write_text(script)
    return path


class Cluster:
    """A user's home folder with data and train.sh, and a Slurm to submit it to."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder, self.script = slurm, folder, train_script(folder)
        write_digits(folder / "data")
        # The nodes are names of this host that no resolver knows.
        self.env = shell_environment() | {"HOME": str(folder), "MASTER_ADDR": "127.0.0.1"}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{slurm.env['PATH']}"

    def sbatch(self, *options: str, flags: tuple[str, ...] = ()) -> str:
        """Submit train.sh; returns the number of the job."""
        name = "%A_%a.log" if "array" in str(options) else "%j.log"
        out = ["--parsable", "--chdir", str(self.folder), "--output", name]
        return self.slurm.call("sbatch", *out, *options, str(self.script), *FLAGS, *flags, env=self.env).strip()

    def last(self, job: str) -> Path:
        """The checkpoint of the run that is named after a job."""
        return self.folder / "runs" / "mnist" / f"slurm-{job}" / "checkpoints" / "last.ckpt"

    def log(self, job: str) -> str:
        """What a job has printed."""
        return (self.folder / f"{job}.log").read_text()

    def trains(self, job: str) -> None:
        """Wait until a job has saved something."""
        self._wait(job, lambda: updates_done(self.last(job)) > 0, "a first checkpoint")
        assert self.slurm.job(job)["JobState"] == "RUNNING"

    def finishes(self, job: str) -> None:
        """Wait until a job has completed."""
        self._wait(job, lambda: self.slurm.job(job)["JobState"] == "COMPLETED", "completed")

    def is_requeued(self, job: str) -> None:
        """Wait until a job has been requeued once."""
        self._wait(job, lambda: self.slurm.job(job)["Restarts"] == "1", "requeued")

    def restarts(self, job: str) -> None:
        """Start a job at once that has been requeued, and wait until it has completed."""
        self.is_requeued(job)
        self.slurm.start_now(job)
        self.finishes(job)
        assert self.slurm.job(job)["Restarts"] == "1"

    def _wait(self, job: str, condition: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            assert self.slurm.job(job)["JobState"] != "FAILED", f"job {job} has failed"
            return condition()

        try:
            wait_until(met, f"job {job} {what}", 200)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.slurm.job(job)}\n{self.log(job)}") from None


@pytest.fixture(scope="session")
def cluster(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(slurm, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster) -> str:
    """The weights of a job that nothing interrupted."""
    job = cluster.sbatch()
    cluster.finishes(job)
    assert "mnist: started by Slurm, 2 nodes x 1 device, 127.0.0.1:" in cluster.log(job)
    return weights_of(cluster.last(job))


# SIGUSR1 is that of the test of an array, below.
INTERRUPTIONS: dict[str, tuple[Callable[[Slurm, str], object], str]] = {
    "requeued from outside": (lambda slurm, job: slurm.call("scontrol", "requeue", job), "ended by SIGTERM"),
    "one of two tasks is killed": (
        lambda slurm, job: os.kill(slurm.tasks(job)[0], signal.SIGKILL),
        r"error: rank 1 lost its connection to another rank, ",
    ),
}


@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_an_interrupted_job_ends_as_an_undisturbed_one(how, cluster, undisturbed) -> None:
    interrupt, logged = INTERRUPTIONS[how]
    job = cluster.sbatch()
    cluster.trains(job)
    interrupt(cluster.slurm, job)
    cluster.restarts(job)
    assert re.search(logged, cluster.log(job)), cluster.log(job)
    assert weights_of(cluster.last(job)) == undisturbed


PROGRAM = """
import os
import signal

import torch.distributed as dist

from datamodules import MNISTDataModule
from recipes import MNISTClassifier, run

RANK, FIRST = int(os.environ["SLURM_PROCID"]), os.environ.get("SLURM_RESTART_COUNT", "0") == "0"


class Failing(MNISTClassifier):
    title = "mnist"

    def training_step(self, batch, batch_idx):
        if "HOW" == "error" and RANK == 1 and self.trainer.global_step == 30:
            raise ValueError("a bad pixel")
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        if "HOW" == "kill" and FIRST and self.trainer.global_step == 30:
            dist.barrier()  # The other rank is in the save as well.
            if RANK == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()


if __name__ == "__main__":
    run(Failing, MNISTDataModule)
"""


def _program(cluster: Cluster, how: str) -> None:
    """Make train.sh of the cluster start a program in which a rank fails."""
    (cluster.folder / f"{how}.py").write_text(PROGRAM.replace("HOW", how))
    script = train_script(cluster.folder).read_text()
    assert script.count("python -m recipes.mnist") == 1
    cluster.script.write_text(script.replace("python -m recipes.mnist", f"python {how}.py"))


def test_an_error_of_the_program_on_one_rank_ends_the_job(cluster: Cluster) -> None:
    try:
        _program(cluster, "error")
        job = cluster.sbatch()
    finally:
        train_script(cluster.folder)
    wait_until(lambda: cluster.slurm.job(job)["JobState"] == "FAILED", "failed", 200)
    assert cluster.slurm.job(job)["Restarts"] == "0"
    assert "not requeued, because of an error of the program: rank 1 failed: ValueError: a bad pixel" in cluster.log(
        job
    )


def test_a_rank_that_is_killed_in_a_save_is_requeued(cluster: Cluster, undisturbed: str) -> None:
    try:
        _program(cluster, "kill")
        job = cluster.sbatch()
        cluster.restarts(job)
    finally:
        train_script(cluster.folder)
    assert "cannot be restored" not in cluster.log(job)
    assert weights_of(cluster.last(job)) == undisturbed


def test_the_tasks_of_an_array_are_requeued_each_for_itself(cluster: Cluster, undisturbed: str) -> None:
    array = cluster.sbatch("--array=1-2")
    first, second = f"{array}_1", f"{array}_2"
    wait_until(
        lambda: cluster.slurm.job(first)["JobState"] == cluster.slurm.job(second)["JobState"] == "RUNNING", "run"
    )
    numbers = {task: cluster.slurm.job(task)["JobId"] for task in (first, second)}
    wait_until(lambda: updates_done(cluster.last(numbers[second])) > 0, "a first checkpoint")
    cluster.slurm.call("scancel", "--signal=USR1", second)
    cluster.restarts(second)
    cluster.finishes(first)
    assert cluster.slurm.job(first)["Restarts"] == "0"
    assert re.search(r"SIGUSR1 after update \d+: saved ", cluster.log(second)), cluster.log(second)
    assert {weights_of(cluster.last(number)) for number in numbers.values()} == {undisturbed}


def test_a_canceled_job_prints_the_flag_that_resumes_it(cluster: Cluster, undisturbed: str) -> None:
    job = cluster.sbatch()
    cluster.trains(job)
    cluster.slurm.call("scancel", job)
    wait_until(lambda: cluster.slurm.job(job)["JobState"] == "CANCELLED", "canceled", 200)
    assert f"ended by SIGTERM; resume in a new job with --name slurm-{job}, or with\n  srun" in cluster.log(job)
    done = updates_done(cluster.last(job))
    other = cluster.sbatch(flags=("--name", f"slurm-{job}"))
    cluster.finishes(other)
    assert f"resuming from runs/mnist/slurm-{job}/checkpoints/last.ckpt, after {done:,} updates" in cluster.log(other)
    assert weights_of(cluster.last(job)) == undisturbed


def test_a_node_that_is_lost_takes_no_update_with_it(cluster: Cluster, undisturbed: str) -> None:
    job = cluster.sbatch()
    cluster.trains(job)
    cluster.slurm.lose_node("n2")
    cluster.is_requeued(job)
    cluster.slurm.start_node("n2")
    cluster.slurm.call("scontrol", "update", "nodename=n2", "state=resume")
    cluster.restarts(job)
    assert weights_of(cluster.last(job)) == undisturbed


def test_one_process_in_an_allocation_of_several_is_rejected(cluster: Cluster) -> None:
    program = [sys.executable, "-m", "recipes.mnist", *FLAGS]
    env = cluster.slurm.env | cluster.env
    started = [
        subprocess.Popen(["salloc", *size, *program], env=env, cwd=cluster.folder, stderr=subprocess.PIPE, text=True)
        for size in (["-N2"], ["-n2"])
    ]
    errors = [process.communicate(timeout=600)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2], errors
    for error, tasks, srun in zip(errors, ("2 x 1", "1 x 2"), ("srun --nodes=2", "srun --nodes=1"), strict=True):
        assert f"this Slurm job has {tasks} tasks, and the program was started once, without srun" in error
        assert f"\n  {srun} --ntasks-per-node=" in error
