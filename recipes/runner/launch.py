"""How this process was started, and which rank of the run it is: a function of environment, flags and devices.

Every way to start a run is resolved here, before any process waits for another. A launch that cannot succeed is refused
with the command to type instead. Lightning's environment classes do not serve here: they read ``os.environ`` one value
at a time when a strategy asks, and do not compare the values with each other, the flags and the devices;
`SLURMEnvironment` finds "rack1" for the first host of "rack[1-2]n[7,8]", and gives all steps of a job the same port.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from datamodules.errors import UserError
from datamodules.ranges import NATURAL, SECONDS, Range, check_ranges
from recipes.runner.machine import LOOPBACK, Machine, number_of_devices

__all__ = [
    "LAUNCHER_VARIABLE",
    "Command",
    "Launch",
    "LaunchSettings",
    "check_precision",
    "first_host",
    "flag_of",
    "is_rank_zero",
    "plan_launch",
    "print_error",
    "rank_zero_print",
    "slurm_step",
]

DEFAULT_PORT = 29500


def flag_of(name: str) -> str:
    """The flag of a parameter.

    Example:
        >>> flag_of("max_epochs")
        '--max-epochs'
    """
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class LaunchSettings:
    """How the processes of a run find each other.

    Args:
        node_rank: number of this node, from 0, where the run is started manually on each node; also NODE_RANK.
        master_addr: host name or address of node 0; also MASTER_ADDR.
        master_port: free TCP port of node 0, 29500 where none is given; also MASTER_PORT.
        rendezvous_timeout: seconds to wait at the start for node 0 and for the other nodes.
        collective_timeout: seconds that a rank waits for the others in a collective call before it fails.
    """

    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rendezvous_timeout: float = 60.0
    collective_timeout: float = 1800.0

    def __post_init__(self) -> None:
        check_ranges(
            node_rank=(self.node_rank, NATURAL),
            master_port=(self.master_port, Range(1, 65535, whole=True)),
            rendezvous_timeout=(self.rendezvous_timeout, SECONDS),
            collective_timeout=(self.collective_timeout, SECONDS),
        )


@dataclass(frozen=True)
class Command:
    """What the user typed, to be printed with other flags.

    Args:
        program: without what starts it on several devices.
        launcher: torchrun or slurm, where one of them starts the processes: `nodes` times `devices`.

    Example:
        >>> typed = Command("python -m recipes.mnist", ["--num_nodes=2", "--lr", "0.1"])
        >>> typed.using(num_nodes=4, node_rank="I")
        'python -m recipes.mnist --lr 0.1 --num-nodes 4 --node-rank I'
        >>> typed.started_by("slurm", 2, 8).using(master_port=1234)
        'srun --nodes=2 --ntasks-per-node=8 python -m recipes.mnist --lr 0.1 --master-port 1234'
    """

    program: str
    args: Sequence[str] = ()
    launcher: str = ""
    nodes: int = 1
    devices: int = 1

    def started_by(self, launcher: str, nodes: int, devices: int) -> "Command":
        """The same for processes that a launcher has started; others are started by the program itself."""
        return replace(self, launcher=launcher, nodes=nodes, devices=devices)

    def using(self, **flags: Any) -> str:
        """The command with these flags replaced; None removes a flag."""
        start = self._start()
        if start != self.program:
            flags = {"devices": None, "num_nodes": None} | flags
        kept: list[str] = []
        skip = False
        for i, arg in enumerate(self.args):
            name, equals, _ = arg.removeprefix("--").partition("=")
            if skip:
                skip = False
            elif arg.startswith("--") and name.replace("-", "_") in flags:
                skip = not equals and i + 1 < len(self.args) and not self.args[i + 1].startswith("--")
            else:
                kept.append(shlex.quote(arg))
        for name, value in flags.items():
            if value is not None:
                kept += [flag_of(name), shlex.quote(str(value))]
        return " ".join([start, *kept])

    def _start(self) -> str:
        if self.launcher == "slurm":
            return f"srun --nodes={self.nodes} --ntasks-per-node={self.devices} {self.program}"
        if self.launcher != "torchrun":
            return self.program
        several = f"--nnodes {self.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:{DEFAULT_PORT}"
        where = "--standalone" if self.nodes == 1 else several
        return f"torchrun {where} --nproc-per-node {self.devices} {self.program.removeprefix('python ')}"

    def split(self, nodes: int, devices: int) -> str:
        """The command for other numbers of nodes and devices."""
        if self.launcher in ("slurm", "torchrun"):
            return self.started_by(self.launcher, nodes, devices).using()
        return self.using(devices=devices, **({} if nodes == self.nodes else {"num_nodes": nodes}))

    def torchrun(self, nodes: int, devices: int) -> str:
        """The command that starts the same run through torchrun."""
        return self.started_by("torchrun", nodes, devices).using()

    def srun(self, nodes: int, devices: int) -> str:
        """The command that starts the same run through Slurm."""
        return self.started_by("slurm", nodes, devices).using()


def is_rank_zero() -> bool:
    """Whether this process is rank 0 of its run.

    `recipes.runner.join.join_run` sets Lightning's ``rank_zero_only.rank``, which this reads. Before that the
    variables of the launchers decide.
    """
    return not getattr(rank_zero_only, "rank", 0) and os.environ.get("NODE_RANK", "0") == "0"


def rank_zero_print(message: str) -> None:
    """Print a line on rank 0."""
    if is_rank_zero():
        print(message, flush=True)  # noqa: T201


def print_error(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


# Below the range of ephemeral ports.
_FIRST_PORT, _PORTS = 15000, 17000
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # From here on: the batch script, the shell of salloc, processes that ssh has started.


@dataclass(frozen=True)
class SlurmStep:
    """The processes that one srun has started, and the place of this one.

    Args:
        node: number of this node in the step.
        local: number of this process on its node.
        port: a TCP port computed from the numbers of the job and the step, so that all processes agree.
    """

    nodes: int
    tasks: int
    node: int
    local: int
    first_host: str
    port: int


@dataclass(frozen=True)
class SlurmAllocation:
    """What a Slurm job has been given: nodes, and on each the tasks and GPUs that were asked for."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int = 0


def _number(env: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is a number, or 0."""
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), 0)


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation.

    Example:
        >>> [first_host(text) for text in ("tux03", "tux[03-05,9],gpu1", "rack[1-2]n[7,8]", "a,b")]
        ['tux03', 'tux03', 'rack1n7', 'a']
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0] if first else "")


def slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """The job step of this process; None where srun has not started it, as in a batch script or a shell of salloc."""
    step = _number(env, "SLURM_STEP_ID")
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= env.keys() or step >= _FIRST_SPECIAL_STEP:
        return None
    hosts = next((env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if env.get(n)), "")
    nodes = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    return SlurmStep(
        nodes,
        _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1,
        _number(env, "SLURM_NODEID"),
        _number(env, "SLURM_LOCALID"),
        first_host(hosts) if nodes > 1 and hosts else "127.0.0.1",
        _FIRST_PORT + (7 * _number(env, "SLURM_JOB_ID") + step) % _PORTS,
    )


def slurm_allocation(env: Mapping[str, str]) -> SlurmAllocation | None:
    """The nodes and tasks of this Slurm job; None outside of one.

    Example:
        >>> slurm_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8"})
        SlurmAllocation(nodes=2, tasks_per_node=4, gpus_per_node=0)
        >>> slurm_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})  # salloc -N2 sets no tasks.
        SlurmAllocation(nodes=2, tasks_per_node=1, gpus_per_node=0)
    """
    if "SLURM_JOB_ID" not in env:
        return None
    nodes = _number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    tasks = _number(env, "SLURM_NTASKS_PER_NODE") or -(-_number(env, "SLURM_NTASKS") // nodes)
    return SlurmAllocation(nodes, tasks or 1, _number(env, "SLURM_GPUS_PER_NODE"))


def shell_of_srun(env: Mapping[str, str]) -> bool:
    """Whether this program was typed in the shell of ``srun --pty bash``: then the tasks of the step are shells.

    A step within that shell inherits its SLURM_PTY_PORT, but not its terminal.
    """
    typed = env.get("SLURM_TASK_PID") != str(os.getpid()) and sys.stdin is not None and sys.stdin.isatty()
    return "SLURM_PTY_PORT" in env and typed


LAUNCHER_VARIABLE = "LIGHTNING_RECIPES_LAUNCHER"
"""For the processes that the first one of their node starts. MASTER_ADDR and MASTER_PORT tell them where to join."""


@dataclass(frozen=True)
class Launch:
    """Which process of the run this one is.

    Args:
        launcher: what started the processes: local (this program), manual (the user, on each node), torchrun or slurm.
        devices: processes on each node, one for each device.
        address: of node 0; None where the run is one process.
        port: of node 0; None where node 0 chooses a free one.
        spawns: this process starts the other processes of its node.
        joins: another process of the node started this one, after the rendezvous of the nodes.
        elastic: torchrun may start the processes again, and with another number of nodes.
    """

    launcher: str
    num_nodes: int
    devices: int
    node_rank: int = 0
    local_rank: int = 0
    address: str | None = None
    port: int | None = None
    spawns: bool = False
    joins: bool = False
    elastic: bool = False

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.num_nodes * self.devices

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.node_rank * self.devices + self.local_rank

    @property
    def first_ranks(self) -> list[int]:
        """The ranks of the rendezvous: the first of each node where these start the others, else all."""
        return list(range(0, self.world_size, self.devices if self.spawns else 1))

    def describe(self) -> str:
        """The launcher and the rendezvous address: the start of a run's first line."""
        who = {"local": "started here", "manual": "started manually", "slurm": "started by Slurm"}
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''} x {self.devices}"
        text = f"{who.get(self.launcher, f'started by {self.launcher}')}, {nodes} device{'s' * (self.devices > 1)}"
        return text if self.address is None else f"{text}, {self.address}:{self.port}"


def _check_devices(launch: Launch, here: Machine, command: Command) -> None:
    if here.count is None or launch.devices <= here.count:
        return
    command = command.started_by(launch.launcher, launch.num_nodes, launch.devices)
    if here.count == 0:
        raise UserError(f"there is no {here.kind} device here: {command.using(accelerator='cpu')}")
    per_task = launch.launcher == "slurm"
    hint = " (does the job ask for --gpus-per-task? --gpus-per-node shows each task all of them)" if per_task else ""
    raise UserError(
        f"{launch.devices} devices were requested and this machine has {here.count} ({here.kind}){hint}:"
        f" {command.split(launch.num_nodes, here.count)}"
    )


def _integer(env: Mapping[str, str], name: str) -> int | None:
    """An integer from an environment variable."""
    if not (text := env.get(name, "").strip()):
        return None
    if not text.isdigit():
        raise UserError(f"the environment says {name}={text}, which is not a whole number; unset or correct it")
    return int(text)


def _port(settings: LaunchSettings, env: Mapping[str, str]) -> int | None:
    """The port of node 0: the flag, whose range is checked where it is read, or MASTER_PORT."""
    if settings.master_port is not None:
        return settings.master_port
    value = _integer(env, "MASTER_PORT")
    if value is not None and not 1 <= value <= 65535:
        raise UserError(f"MASTER_PORT {value} is not a TCP port; expected 1 to 65535, such as {DEFAULT_PORT}")
    return value


def _check_agreement(found: tuple[int, int], asked: tuple[Any, int], here: Machine, who: str, command: Command) -> None:
    """Refuse flags that contradict the processes that exist; the defaults contradict nothing."""
    nodes, devices = found
    devices_given = str(asked[0]) not in ("auto", "-1")
    count = number_of_devices(asked[0], here)
    if (devices_given and count != devices) or (asked[1] > 1 and asked[1] != nodes):
        raise UserError(
            f"{who} has started {nodes} x {devices} = {nodes * devices} processes, and --num-nodes {asked[1]} --devices"
            f" {count} are {asked[1] * count}; {who} decides: {command.split(nodes, devices)}"
        )


def _by_torchrun(
    env: Mapping[str, str], settings: LaunchSettings, asked: tuple[Any, int], here: Machine, command: Command
) -> Launch:
    world, local = _integer(env, "WORLD_SIZE") or 1, _integer(env, "LOCAL_WORLD_SIZE") or 1
    nodes = _integer(env, "GROUP_WORLD_SIZE") or world // local
    elastic = bool(_integer(env, "TORCHELASTIC_MAX_RESTARTS") or _integer(env, "TORCHELASTIC_RESTART_COUNT"))
    if nodes * local != world:
        raise UserError(
            f"torchrun has started {world} processes on {nodes} nodes, {local} of them on this one; expected as many"
            f" on each: {command.torchrun(nodes, local)}"
        )
    command = command.started_by("torchrun", nodes, local)
    if not elastic:
        _check_agreement((nodes, local), asked, here, "torchrun", command)
    given = {name: value for name in ("master_addr", "master_port") if (value := getattr(settings, name)) is not None}
    if given:
        flags = " ".join(f"{flag_of(name)} {value}" for name, value in given.items())
        raise UserError(
            f"torchrun decides where the processes meet; pass {flags} to torchrun itself, or leave it out:"
            f" {command.using(**dict.fromkeys(given))}"
        )
    return Launch(
        "torchrun",
        nodes,
        local,
        _integer(env, "GROUP_RANK") or 0,
        _integer(env, "LOCAL_RANK") or 0,
        env.get("MASTER_ADDR", "127.0.0.1") if world > 1 else None,
        _integer(env, "MASTER_PORT") if world > 1 else None,
        elastic=elastic,
    )


def _by_slurm(
    step: SlurmStep,
    env: Mapping[str, str],
    settings: LaunchSettings,
    asked: tuple[Any, int],
    here: Machine,
    command: Command,
) -> Launch:
    if step.tasks % step.nodes:
        raise UserError(
            f"Slurm has started {step.tasks} processes on {step.nodes} nodes; expected as many on each:"
            f" {command.srun(step.nodes, -(-step.tasks // step.nodes))}"
        )
    devices = step.tasks // step.nodes
    if "," in (each := env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        raise UserError(
            f"Slurm has started {each} processes on the nodes, one number for each; expected as many on each:"
            f" {command.srun(step.nodes, devices)}"
        )
    command = command.started_by("slurm", step.nodes, devices)
    _check_agreement((step.nodes, devices), asked, here, "Slurm", command)
    address = settings.master_addr or env.get("MASTER_ADDR") or step.first_host
    port = _port(settings, env)
    return Launch("slurm", step.nodes, devices, step.node, step.local, address, port or step.port)


def _refuse_one_process_of_many(env: Mapping[str, str], devices: int, command: Command) -> None:
    """Refuse a program that was started once, without srun, in a Slurm job that has more for it."""
    job = slurm_allocation(env)
    if job is None or (job.nodes == 1 and (job.tasks_per_node == 1 or devices > 1)):
        return
    tasks = job.nodes * job.tasks_per_node
    what = f"{job.nodes} node{'s' * (job.nodes > 1)}" + (f" and {tasks} tasks" if tasks > job.nodes else "")
    of_node = devices if devices > 1 else max(job.tasks_per_node, job.gpus_per_node)
    lines = f"{command.srun(job.nodes, of_node)} or as one process: {command.srun(1, 1)}"
    if "SLURM_PTY_PORT" in env:
        # The shell of srun is a step that holds the processors of the job.
        lines = lines.replace("srun --nodes", "srun --overlap --nodes")
    raise UserError(f"this Slurm job has {what}, and the program was started once, without srun: {lines}")


def _by_parent(env: Mapping[str, str], asked: tuple[Any, int], here: Machine) -> Launch:
    """For the processes that the first one of their node has started."""
    node, local = _integer(env, "NODE_RANK") or 0, _integer(env, "LOCAL_RANK") or 0
    nodes, devices = asked[1], number_of_devices(asked[0], here)
    address, port = env["MASTER_ADDR"], _integer(env, "MASTER_PORT")
    return Launch(env[LAUNCHER_VARIABLE], nodes, devices, node, local, address, port, joins=True)


def _by_environment(
    env: Mapping[str, str], settings: LaunchSettings, asked: tuple[Any, int], here: Machine, command: Command
) -> Launch:
    """For processes that mpirun or a script has started, with their ranks in the environment."""
    address, world = settings.master_addr or env.get("MASTER_ADDR"), _integer(env, "WORLD_SIZE") or 1
    local, rank = _integer(env, "LOCAL_RANK"), _integer(env, "RANK")
    missing = [name for name, value in (("LOCAL_RANK", local), ("MASTER_ADDR", address)) if value is None]
    if address is None or local is None:
        if "PET_NNODES" in env:
            raise UserError(
                "the variables of this PyTorchJob are for torchrun, which starts the processes of a pod: type torchrun"
                " -m in place of python -m"
            )
        raise UserError(
            f"RANK and WORLD_SIZE say that this is one of {world} processes; set {' and '.join(missing)} too, or unset"
            " them to start the processes of this machine from here"
        )
    given = str(asked[0]) not in ("auto", "-1") or here.count is not None
    of_node = number_of_devices(asked[0], here) if given else world // asked[1]
    devices = _integer(env, "LOCAL_WORLD_SIZE") or of_node
    nodes = asked[1] if asked[1] > 1 else max(1, world // max(1, devices))
    if world != nodes * devices:
        raise UserError(
            f"WORLD_SIZE={world} is not {nodes} node{'s' * (nodes > 1)} x {devices} processes; every node needs as many"
            f" processes as the others: {command.using(num_nodes=nodes, devices=max(1, world // nodes))}"
        )
    _check_agreement((nodes, devices), asked, here, "LOCAL_WORLD_SIZE", command)
    told = (_integer(env, name) for name in ("NODE_RANK", "GROUP_RANK"))
    node = next((number for number in told if number is not None), (rank or 0) // devices)
    if rank is not None and rank != node * devices + local:
        raise UserError(
            f"RANK={rank} is not process {local} (LOCAL_RANK) of node {node} where each of {nodes} has {devices};"
            " number them node by node, and set LOCAL_WORLD_SIZE to the number of processes on each node"
        )
    port = _port(settings, env) or DEFAULT_PORT
    return Launch("manual", nodes, devices, node, local, address, port)


def _manual(
    env: Mapping[str, str], settings: LaunchSettings, nodes: int, devices: int, command: Command
) -> Launch | None:
    """Started by the user on each node; None where neither flags nor environment say so."""
    node = settings.node_rank if settings.node_rank is not None else _integer(env, "NODE_RANK")
    address = settings.master_addr or env.get("MASTER_ADDR")
    port = _port(settings, env) or DEFAULT_PORT
    if node is not None and node >= nodes:
        raise UserError(
            f"node {node} of {nodes}: nodes are counted from 0, so expected were 0 to {nodes - 1}:"
            f" {command.using(num_nodes=nodes, node_rank=nodes - 1)} or {command.using(num_nodes=node + 1)}"
        )
    if nodes == 1:
        return None
    if node is None or address is None:
        missing: dict[str, Any] = {
            "node_rank": "I" if node is None else node,
            "master_addr": address or "HOST",
            "master_port": port,
        }
        numbers = "0 or 1" if nodes == 2 else f"0 to {nodes - 1}"
        raise UserError(
            f"--num-nodes {nodes} does not tell how the nodes find each other. Type on each node, I being {numbers} and"
            f" HOST the address of node 0: {command.using(**missing)} or use torchrun:"
            f" {command.torchrun(nodes, devices)} or Slurm: {command.srun(nodes, devices)}"
        )
    return Launch("manual", nodes, devices, node, 0, address, port, spawns=True)


def plan_launch(
    env: Mapping[str, str],
    settings: LaunchSettings,
    asked: tuple[Any, int],
    here: Machine,
    command: Command,
) -> Launch:
    """Find out which process of which run this one is.

    Args:
        env: the environment variables of this process.
        asked: ``--devices`` and ``--num-nodes``.
        here: the devices of this machine.
        command: what the user typed, for the corrected command.

    Raises:
        UserError: the run could not start, or would wait for ever.
    """
    launch = _plan(env, settings, asked, here, command)
    _check_devices(launch, here, command)
    return launch


def _plan(
    env: Mapping[str, str], settings: LaunchSettings, asked: tuple[Any, int], here: Machine, command: Command
) -> Launch:
    nodes, devices = asked[1], number_of_devices(asked[0], here)
    if LAUNCHER_VARIABLE in env and "LOCAL_RANK" in env:
        return _by_parent(env, asked, here)
    if "TORCHELASTIC_RUN_ID" in env:
        return _by_torchrun(env, settings, asked, here, command)
    step = None if shell_of_srun(env) else slurm_step(env)
    if step is not None and step.tasks > 1:
        return _by_slurm(step, env, settings, asked, here, command)
    several = (_integer(env, "WORLD_SIZE") or 1) > 1
    if several and (env.keys() & {"RANK", "LOCAL_RANK"}):
        return _by_environment(env, settings, asked, here, command)
    if (launch := _manual(env, settings, nodes, devices, command)) is not None:
        return launch
    if step is None:
        _refuse_one_process_of_many(env, devices, command)
    if devices == 1:
        return Launch("local", 1, 1)
    return Launch("local", 1, devices, address=LOOPBACK, spawns=True)


def check_precision(precision: str, here: Machine, command: Command) -> None:
    """Refuse a precision that the device does not have.

    Raises:
        UserError: 16-mixed on a CPU.
    """
    if precision == "16-mixed" and here.kind == "cpu":
        raise UserError(
            "16-mixed needs a GPU, and this run is on the CPU; pass --precision bf16-mixed:"
            f" {command.using(precision='bf16-mixed')}"
        )
